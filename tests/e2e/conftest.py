"""Fixtures: a real daemon, with its real rights, and real jobs."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from double_jobs import Job
from doubles.doubles import Doubles, build
from e2e_support import BIN, EXAMPLE, Daemon, directory_for_daemons, remove
from ports import free_port
from process_tree import family

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
shared_base = pytest.fixture(directory_for_daemons, scope="module", name="shared_base")


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


@pytest.fixture(scope="module")
def shared_daemon(shared_base: Path) -> Iterator[Daemon]:
    """One daemon for all tests of a module that only ask."""
    daemon = Daemon(shared_base, "shared")
    daemon.start()
    yield daemon
    remove(daemon)


@pytest.fixture
def daemon(make_daemon: Callable[..., Daemon]) -> Daemon:
    return make_daemon().start()


@pytest.fixture
def processes() -> Iterator[list[subprocess.Popen[Any]]]:
    """Kills the added processes and their descendants when the test ends."""
    started: list[subprocess.Popen[Any]] = []
    yield started
    for process in started:
        for pid in family(process.pid) if process.poll() is None else ():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()
        for stream in (process.stdin, process.stdout, process.stderr):
            if stream is not None:
                stream.close()


@pytest.fixture
def run_job(processes: list[subprocess.Popen[Any]]) -> Callable[..., subprocess.Popen[Any]]:
    """Start a command as a job of its own, in its own process group."""

    def run(*argv: str | Path, env: dict[str, str] | None = None, **options: Any) -> subprocess.Popen[Any]:
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "TORCHELASTIC_", "MASTER_"))}
        process = subprocess.Popen(
            [str(a) for a in argv],
            env={**clean, "OMP_NUM_THREADS": "1", **(env or {})},
            start_new_session=True,
            **options,
        )
        processes.append(process)
        return process

    return run


@pytest.fixture
def torchrun_job(run_job: Callable[..., subprocess.Popen[Any]], tmp_path: Path) -> Callable[..., subprocess.Popen[Any]]:
    """A script under torchrun with two ranks; its output goes to ``torchrun.log`` in ``tmp_path``."""

    def run(*script: object, ranks: int = 2, port: int | None = None) -> subprocess.Popen[Any]:
        with (tmp_path / "torchrun.log").open("ab") as log:
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


@pytest.fixture
def train(torchrun: Callable[..., subprocess.Popen[Any]], tmp_path: Path) -> Callable[..., None]:
    """Runs the example job for so many steps, to its end.

    Not to its exit code: torch 2.13 can abort at exit, after the last line, when a thread of gloo still frees a tensor.
    """

    def run(steps: int, **options: Any) -> None:
        torchrun("--steps", str(steps), **options).wait(60)
        assert f"trained {steps} steps on 2 ranks" in (tmp_path / "torchrun.log").read_text()

    return run


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
