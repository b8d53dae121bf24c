"""Guests for the tests: one for each kernel of ``--kernels``, with the packages and a job at /payload.

A test that fails shows the journal of its guest. A skipped test fails: on a slow guest limits grow instead. When all
tests have passed on a kernel, passed.py notes it.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path

import passed
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
# The guest that booted last, its figures, and whether some tests were left out.
GUEST = pytest.StashKey[Guest]()
FIGURES = pytest.StashKey[Figures]()
PARTIAL = pytest.StashKey[bool]()
JOURNAL = "journalctl --no-pager -o short-monotonic -n 400 | grep -v qemu-ga | tail -n 150"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--kernels", default=",".join(SUITES), help=f"some of {', '.join(SUITES)}")
    parser.addoption(
        "--before", type=Path, help="the package to install; for the test of an upgrade, of the release before"
    )
    parser.addoption("--deb", type=Path, help="the package to upgrade to")
    parser.addoption("--cuts", type=int, default=1, help="how often the power is cut")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "long: takes minutes")
    config.addinivalue_line("markers", "smoke: .ci/run runs it on one kernel, as `make test` cannot replace it")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "guest" in metafunc.fixturenames:
        metafunc.parametrize("guest", _kernels(metafunc.config), indirect=True, scope="session")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("cuts"):
        # `make vm-test` cuts the power on one kernel only, so the other kernels do not lack this test.
        items[:] = [item for item in items if item.path.name != "test_power_cut.py"]


def pytest_deselected(items: list[pytest.Item]) -> None:
    if items:
        items[0].config.stash[PARTIAL] = True


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    # pytest-timeout takes the limit of a test from its mark; without the fixtures, in which each command has one.
    mark = item.get_closest_marker("timeout")
    seconds = mark.args[0] if mark else item.config.getoption("timeout")
    if seconds and GUEST in item.config.stash:
        item.add_marker(pytest.mark.timeout(seconds * item.config.stash[GUEST].slowness), append=False)
    return (yield)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    # `make` runs such a kernel once more.
    if session.testsfailed and ENDED_BY_QEMU in session.config.stash:
        session.exitstatus = ENDED_BY_QEMU_STATUS


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, exitstatus: int, config: pytest.Config) -> None:
    if FIGURES in config.stash:
        kernel, figures = config.stash[GUEST].kernel, config.stash[FIGURES]
        terminalreporter.line(f"Linux {kernel.release}: {'; '.join(f'{name}: {figures[name]:g}' for name in figures)}")
        if not exitstatus and _is_whole(config):
            terminalreporter.line(passed.keep(passed.ROOT, kernel.series, kernel.release, SUITES))


def _kernels(config: pytest.Config) -> list[str]:
    return list(config.getoption("kernels").replace(",", " ").split())


def _is_whole(config: pytest.Config) -> bool:
    """Whether this run had all tests for its one kernel. The last kernel of SUITES needs a cut of power, too."""
    kernels, last = _kernels(config), list(SUITES)[-1]
    folders = [config.invocation_params.dir / word for word in config.args]
    cut = bool(config.getoption("cuts")) or kernels != [last]
    return folders == [HERE] and len(kernels) == 1 and cut and PARTIAL not in config.stash


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.skipped and not hasattr(report, "wasxfail"):
        report.outcome = "failed"
        report.longrepr = f"no test may be skipped here: {report.longrepr}"
    guest = getattr(item, "funcargs", {}).get("guest")
    if report.failed and item.path.name != "arm64_tests.py":
        for series in _kernels(item.config):
            passed.take_back(passed.ROOT, series)
    if report.failed and guest is not None:
        try:
            report.sections.append(("the guest's journal", guest.result(JOURNAL, 60)[1]))
        except GuestFailed as e:
            report.sections.append(("the guest's journal", f"not read: {e}"))
    return report


@pytest.fixture(scope="session")
def cache() -> Path:
    """The directory in which images are kept between runs."""
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
    """The disk at /payload: old.deb, new.deb if there is one, the double of NCCL and the job."""
    tree = place / "payload"
    (tree / "doubles").mkdir(parents=True)
    for option, name in (("before", "old.deb"), ("deb", "new.deb")):
        if path := request.config.getoption(option):
            shutil.copy(path, tree / name)
    doubles = place / "doubles"
    doubles.mkdir()
    made = build(doubles)
    for library in (made.nccl, made.cudart):
        shutil.copy(library, tree / "doubles")
    shutil.copy(HERE / "train.py", tree)
    disk_of(tree, place / "payload.ext4", "1G")
    return place / "payload.ext4"


@pytest.fixture(scope="session")
def guest(request: pytest.FixtureRequest, cache: Path, place: Path, payload: Path) -> Iterator[Guest]:
    """A guest that has booted, without probingd."""
    made = Guest(place / request.param, kernel(request.param, cache), root_image(cache), payload)
    try:
        made.boot()
        request.config.stash[GUEST] = made
        yield made
    finally:
        made.close()
        if made.ended_by_qemu:
            request.session.config.stash[ENDED_BY_QEMU] = True


@pytest.fixture(scope="session")
def figures(request: pytest.FixtureRequest, guest: Guest) -> Iterator[Figures]:
    """Figures of this kernel for docs/benchmarks.md, kept in .build/vm-tests."""
    kept = request.config.stash[FIGURES] = Figures(guest.kernel.series)
    kept["a loop of Python, s"] = round(guest.loop_s, 2)
    kept["boot, s"] = round(guest.boot_s, 1)
    yield kept
    kept.save(BUILT / "vm-tests")


@pytest.fixture
def counted(guest: Guest) -> Path:
    """The file for the verifier's counts of this kernel."""
    (BUILT / "vm-tests").mkdir(parents=True, exist_ok=True)
    return BUILT / f"vm-tests/verifier-{guest.kernel.series}.json"


@pytest.fixture(scope="session")
def host(guest: Guest, figures: Figures) -> Host:
    """The guest after `apt install` of the release before, and nothing started."""
    return Host(guest, figures)
