"""A real daemon with its real rights, and what tests of it share."""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from client_in_process import probingctl
from costs import spent
from ports import free_port
from process_tree import arguments, family
from waiting import DEADLINE_S, asking

from probing.client.cluster import Cluster
from probing.daemon.bpf import pins

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "train_ddp.py"
JOBS = ROOT / "tests" / "jobs"
BIN = Path(sys.executable).parent
PATIENCE = DEADLINE_S


class Daemon:
    """``probingd run`` with its own instance, socket and state directory. ``before``: words before its command."""

    def __init__(self, base: Path, name: str, *extra: str, instance: str = "") -> None:
        self.name = name
        self.base = base
        self.socket = base / f"{name}.sock"
        self.state = base / f"{name}.state"
        self.config = base / f"{name}.toml"
        self.instance = f"e2e-{os.getpid()}-{instance or name}"
        self.extra = extra
        self.before: tuple[str, ...] = ()
        self.log = base / f"{name}.log"
        self.process: subprocess.Popen[str] | None = None
        if not self.config.exists():
            self.config.write_text(f'instance = "{self.instance}"\n')

    @property
    def target(self) -> str:
        return f"unix:{self.socket}"

    @property
    def argv(self) -> list[str]:
        return [
            *self.before,
            str(BIN / "probingd"),
            "run",
            "--config",
            str(self.config),
            "--state-dir",
            str(self.state),
            "--socket",
            str(self.socket),
            "--node-name",
            self.name,
            *self.extra,
        ]

    def spawn(self) -> None:
        with self.log.open("a") as log:
            self.process = subprocess.Popen(
                self.argv, stdout=subprocess.PIPE, stderr=log, stdin=subprocess.DEVNULL, text=True
            )

    def start(self) -> Daemon:
        self.spawn()
        self.wait_ready()
        return self

    def wait_ready(self) -> None:
        with spent("start of a daemon"):
            self._wait_ready()

    def _wait_ready(self) -> None:
        assert self.process is not None
        assert self.process.stdout is not None
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            readable, _, _ = select.select([self.process.stdout], [], [], 0.5)
            if readable:
                line = self.process.stdout.readline()
                if line == "ready\n":
                    return
                if not line:
                    break
        pytest.fail(f"the daemon did not become ready:\n{self.log.read_text()[-4000:]}")

    def stop(self, signal_number: int = signal.SIGTERM) -> int:
        with spent("stop of a daemon"):
            return 0 if self.process is None else self._stop(self.process, signal_number)

    def _stop(self, process: subprocess.Popen[str], signal_number: int) -> int:
        if process.poll() is None:
            process.send_signal(signal_number)
        try:
            return process.wait(PATIENCE)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
            if process.stdout is not None:
                process.stdout.close()
            self.process = None

    def children(self) -> dict[str, list[int]]:
        """Pids of the daemon's own processes by module name."""
        assert self.process is not None
        found: dict[str, list[int]] = {}
        for pid in family(self.process.pid):
            argv = arguments(pid)
            if "-m" in argv:
                found.setdefault(argv[argv.index("-m") + 1], []).append(pid)
        return found

    def ctl(self, *args: str, check: int | None = 0) -> subprocess.CompletedProcess[str]:
        """Runs ``probingctl`` within this process; it must end with ``check``."""
        done = probingctl("-t", self.target, *args)
        if check is not None:
            assert done.returncode == check, (
                f"{args}: exit {done.returncode}\n{done.stdout}\n{done.stderr}\n{self.tail()}"
            )
        return done

    def json(self, *args: str) -> Any:
        return json.loads(self.ctl("-f", "json", *args).stdout)

    def rows(self, sql: str) -> list[dict[str, Any]]:
        """Returns the rows of a SELECT by the Python client, which takes a tenth of the CPU time of the command.

        Times are text, since those of Python have no nanoseconds.
        """
        with asking(), Cluster(self.target) as cluster:
            table = cluster.query(sql)
        fields = [f.with_type(pa.string()) if pa.types.is_timestamp(f.type) else f for f in table.schema]
        rows: list[dict[str, Any]] = table.cast(pa.schema(fields)).to_pylist()
        return rows

    def tail(self) -> str:
        return self.log.read_text()[-3000:]


def is_replaced(daemon: Daemon, pid: int) -> bool:
    """Returns whether another collector than ``pid`` runs now."""
    now = daemon.children().get("probing.daemon.collector", [pid])
    done = daemon.ctl("-f", "json", "status", check=None)
    return now != [pid] and done.returncode == 0 and json.loads(done.stdout)["state"] == "running"


def start_process(*argv: str | Path, env: dict[str, str] | None = None, **options: Any) -> subprocess.Popen[Any]:
    """Starts a command in a session of its own; no scheduler of this machine names its job."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "TORCHELASTIC_", "MASTER_"))}
    return subprocess.Popen(
        [str(a) for a in argv],
        env={**clean, "OMP_NUM_THREADS": "1", **(env or {})},
        start_new_session=True,
        **options,
    )


def start_ranks(log: Path, *script: object, port: int | None = None) -> subprocess.Popen[Any]:
    """Starts a script on two ranks, in half of torchrun's time, and returns their parent, which ends after them."""
    env = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port or free_port())}
    each = 'for rank in 0 1; do RANK=$rank LOCAL_RANK=$rank "$@" & done; wait'
    with log.open("ab") as file:
        words = ("sh", "-c", each, "sh", sys.executable, "-u", *map(str, script))
        return start_process(*words, env=env, stdout=file, stderr=subprocess.STDOUT)


def kill_family(process: subprocess.Popen[Any]) -> None:
    """Kills a process and its descendants, and does not wait for their ends."""
    for pid in family(process.pid) if process.poll() is None else ():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def end_process(process: subprocess.Popen[Any]) -> None:
    """Kills a process and its descendants, and closes its pipes."""
    kill_family(process)
    process.wait()
    for stream in (process.stdin, process.stdout, process.stderr):
        if stream is not None:
            # What was not read yet is flushed to a pipe without a reader.
            with contextlib.suppress(BrokenPipeError):
                stream.close()


def directory_for_daemons() -> Iterator[Path]:
    """A directory that the daemon's users may enter, with a path short enough for Unix sockets."""
    path = Path(tempfile.mkdtemp(prefix="probingd-e2e-"))
    path.chmod(0o755)
    yield path
    shutil.rmtree(path, ignore_errors=True)


def remove(daemon: Daemon) -> None:
    """Stops the daemon, and removes the probes that it left if it was killed."""
    daemon.stop()
    pins.cleanup(daemon.instance)
