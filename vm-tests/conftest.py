"""Guests for the tests: one for each kernel of ``--kernels``, with the packages and a job at /payload.

A test that fails shows the journal of its guest.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from debian_root import disk_of, root_image
from doubles.doubles import build
from figures import Figures
from guest import Guest, GuestFailed
from host import Host
from kernels import SUITES, kernel

HERE = Path(__file__).resolve().parent
# Whether QEMU ended a guest's kernel, and the exit status of failed tests then.
ENDED_BY_QEMU = pytest.StashKey[bool]()
ENDED_BY_QEMU_STATUS = 86
BUILT = HERE.parent / ".build"
# A loop of Python, timed in the guest; a host needs 0.03 to 0.05 s. Where it takes 0.6 to 0.9 s, the tests of a job
# take 17 to 24 minutes a kernel.
LOOP = "import timeit; print(min(timeit.repeat('for i in range(1000000): s += i', 's = 0', repeat=3, number=1)))"
SLOW_S = 0.5
JOURNAL = "journalctl --no-pager -o short-monotonic -n 400 | grep -v qemu-ga | tail -n 150"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--kernels", default=",".join(SUITES), help=f"some of {', '.join(SUITES)}")
    parser.addoption("--deb", type=Path, help="the package to test")
    parser.addoption("--before", type=Path, help="the package to upgrade from, the release before")
    parser.addoption("--cuts", type=int, default=1, help="how often the power is cut")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "long: takes minutes; not in CI")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "guest" in metafunc.fixturenames:
        kernels = metafunc.config.getoption("kernels").replace(",", " ").split()
        metafunc.parametrize("guest", kernels, indirect=True, scope="session")


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    # `make vm-test` runs such a kernel once more.
    if session.testsfailed and ENDED_BY_QEMU in session.config.stash:
        session.exitstatus = ENDED_BY_QEMU_STATUS


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    guest = getattr(item, "funcargs", {}).get("guest")
    if report.failed and guest is not None:
        try:
            report.sections.append(("the guest's journal", guest.result(JOURNAL, 60)[1]))
        except GuestFailed as e:
            report.sections.append(("the guest's journal", f"not read: {e}"))
    return report


@pytest.fixture(scope="session")
def cache() -> Path:
    """Where images are kept between runs."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "probingd/vm"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@pytest.fixture(scope="session")
def place() -> Iterator[Path]:
    """A directory for the disks of this run."""
    folder = Path(tempfile.mkdtemp(prefix="probingd-vm-"))
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="session")
def payload(request: pytest.FixtureRequest, place: Path) -> Path:
    """The disk at /payload: new.deb, old.deb, the double of NCCL and the job."""
    tree = place / "payload"
    (tree / "doubles").mkdir(parents=True)
    for option, name in (("deb", "new.deb"), ("before", "old.deb")):
        shutil.copy(request.config.getoption(option), tree / name)
    doubles = place / "doubles"
    doubles.mkdir()
    made = build(doubles)
    for library in (made.nccl, made.cudart):
        shutil.copy(library, tree / "doubles")
    shutil.copy(HERE / "train.py", tree)
    disk_of(tree, place / "payload.ext4", "512M")
    return place / "payload.ext4"


@pytest.fixture(scope="session")
def guest(request: pytest.FixtureRequest, cache: Path, place: Path, payload: Path) -> Iterator[Guest]:
    """A guest that has booted, without probingd."""
    made = Guest(place / request.param, kernel(request.param, cache), root_image(cache), payload)
    try:
        made.boot()
        yield made
    finally:
        made.close()
        if made.ended_by_qemu:
            request.session.config.stash[ENDED_BY_QEMU] = True


@pytest.fixture(scope="session")
def fast_guest(guest: Guest) -> Guest:
    """The guest; in CI skips where QEMU translates so slowly, as on a busy host, that the tests take too long."""
    seconds = float(guest.run(f'python3 -c "{LOOP}"'))
    if os.environ.get("CI") and seconds > SLOW_S:
        pytest.skip(f"slow guest: its loop takes {seconds:.2f} s, more than {SLOW_S:g}, and tests of a job too long")
    return guest


@pytest.fixture(scope="session")
def figures(guest: Guest) -> Iterator[Figures]:
    """Figures of this kernel for docs/benchmarks.md, kept in .build/vm-tests."""
    kept = Figures(guest.kernel.series)
    yield kept
    kept.save(BUILT / "vm-tests")


@pytest.fixture
def counted(guest: Guest) -> Path:
    """Where the verifier's counts of this kernel are kept."""
    (BUILT / "vm-tests").mkdir(parents=True, exist_ok=True)
    return BUILT / f"vm-tests/verifier-{guest.kernel.series}.json"


@pytest.fixture(scope="session")
def host(guest: Guest, figures: Figures) -> Host:
    """The guest after `apt install` of the release before, and nothing started."""
    return Host(guest, figures)
