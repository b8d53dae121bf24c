"""Fixtures: a real daemon, with its real rights, and real jobs."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from double_jobs import Job
from doubles.doubles import Doubles, build
from e2e_support import BIN, EXAMPLE, Daemon, directory_for_daemons, end_process, remove, start_process, start_ranks
from ports import free_port
from waiting import until

# How much of a log a failed test shows, bytes.
SHOWN_BYTES = 4_096


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Function) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A test that failed shows the end of each log of its jobs and of its daemon."""
    report = yield
    if report.failed:
        folders = {item.funcargs[name] for name in ("tmp_path", "base") if name in item.funcargs}
        for log in sorted(log for folder in folders for log in folder.glob("*.log")):
            report.sections.append((log.name, log.read_text(errors="replace")[-SHOWN_BYTES:]))
    return report


base = pytest.fixture(directory_for_daemons, name="base")
module_base = pytest.fixture(directory_for_daemons, scope="module", name="module_base")
session_base = pytest.fixture(directory_for_daemons, scope="session", name="session_base")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Runs tests of the shared daemon last, so that it does not watch the jobs of the others.

    Of them those are last that need the steps of its job: a while passes before they are recognised.
    """

    def turn(item: pytest.Item) -> tuple[bool, bool]:
        names = getattr(item, "fixturenames", ())
        return "shared_daemon" in names, "stepping" in names

    items.sort(key=turn)


@pytest.fixture
def make_daemon(base: Path) -> Iterator[Callable[..., Daemon]]:
    made: list[Daemon] = []

    def make(name: str = "n1", *extra: str) -> Daemon:
        daemon = Daemon(base, name, *extra)
        made.append(daemon)
        return daemon

    yield make
    for daemon in made:
        remove(daemon)


@pytest.fixture(scope="session")
def shared_daemon(session_base: Path) -> Iterator[Daemon]:
    """The daemon of all tests that only ask, or that change settings of their own job. It also listens on TCP."""
    token = session_base / "token"
    token.write_text("0123456789abcdef-e2e")
    token.chmod(0o600)
    shutil.chown(token, "probing-service")
    listen = ("--listen", f"127.0.0.1:{free_port()}", "--token-file", str(token))
    daemon = Daemon(session_base, "n1", *listen, instance="shared")
    daemon.start()
    yield daemon
    remove(daemon)


@pytest.fixture
def daemon(shared_daemon: Daemon) -> Daemon:
    return shared_daemon


@pytest.fixture
def own_daemon(make_daemon: Callable[..., Daemon]) -> Daemon:
    """A daemon for one test, which says why it needs its own."""
    return make_daemon().start()


@pytest.fixture(scope="session")
def training_log(session_base: Path) -> Path:
    """What ``training`` prints: the loss of each step."""
    return session_base / "training.log"


@pytest.fixture(scope="session")
def training(training_log: Path) -> Iterator[str]:
    """The name at the shared daemon of a job of two ranks that trains without end, EXAMPLE."""
    port = free_port()
    with training_log.open("ab") as log:
        job = start_process(
            BIN / "torchrun",
            *("--nproc-per-node", "2", "--master-port", str(port)),
            *(EXAMPLE, "--steps", "1000000", "--delay-ms", "40", "--report-every", "1"),
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    yield f"n1/127.0.0.1:{port}"
    end_process(job)


@pytest.fixture(scope="session")
def stepping(shared_daemon: Daemon, training: str) -> str:
    """``training``, once the steps of both ranks are recognised."""
    sql = f"SELECT count(DISTINCT rank) AS n FROM train.steps WHERE job = '{training}'"
    until(lambda: shared_daemon.rows(sql)[0]["n"] == 2, what="steps of both ranks")
    return training


@pytest.fixture
def processes() -> Iterator[list[subprocess.Popen[Any]]]:
    """Kills the added processes and their descendants when the test ends."""
    started: list[subprocess.Popen[Any]] = []
    yield started
    for process in started:
        end_process(process)


@pytest.fixture
def run_job(processes: list[subprocess.Popen[Any]]) -> Callable[..., subprocess.Popen[Any]]:
    """Start a command as a job of its own, in its own process group."""

    def run(*argv: str | Path, env: dict[str, str] | None = None, **options: Any) -> subprocess.Popen[Any]:
        processes.append(start_process(*argv, env=env, **options))
        return processes[-1]

    return run


@pytest.fixture
def ranks_job(processes: list[subprocess.Popen[Any]], tmp_path: Path) -> Callable[..., subprocess.Popen[Any]]:
    """Starts a script on two ranks, as ``start_ranks``; their output goes to ``job.log`` in ``tmp_path``."""

    def run(*script: object, port: int | None = None) -> subprocess.Popen[Any]:
        processes.append(start_ranks(tmp_path / "job.log", *script, port=port))
        return processes[-1]

    return run


@pytest.fixture
def torchrun_job(run_job: Callable[..., subprocess.Popen[Any]], tmp_path: Path) -> Callable[..., subprocess.Popen[Any]]:
    """A script under torchrun with two ranks; its output goes to ``job.log`` in ``tmp_path``."""

    def run(*script: object, ranks: int = 2, port: int | None = None) -> subprocess.Popen[Any]:
        with (tmp_path / "job.log").open("ab") as log:
            return run_job(
                BIN / "torchrun",
                "--nproc-per-node",
                str(ranks),
                "--master-port",
                str(port or free_port()),
                *map(str, script),
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    return run


@pytest.fixture
def torchrun(torchrun_job: Callable[..., subprocess.Popen[Any]]) -> Callable[..., subprocess.Popen[Any]]:
    """The example job under torchrun with two ranks."""
    return lambda *script_args, **options: torchrun_job(EXAMPLE, *script_args, **options)


@pytest.fixture(scope="module")
def doubles() -> Iterator[Doubles]:
    folder = Path(f"/var/tmp/probingd-doubles-{os.getpid()}")
    folder.mkdir(mode=0o755)
    built = build(folder)
    yield built
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()


@pytest.fixture
def start_job(doubles: Doubles, tmp_path: Path) -> Iterator[Callable[..., Job]]:
    jobs: list[Job] = []

    def start(**environ: str) -> Job:
        jobs.append(Job(doubles, tmp_path, **environ))
        return jobs[-1]

    yield start
    for job in jobs:
        job.ranks.close()
