"""Starts the jobs of tests/jobs/faults, each rank as a process, in the surroundings that a case needs."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO

from cgroup_support import cpu_group, memory_group
from e2e_support import BIN, JOBS, kill_family, start_process
from hostile import silent_fuse
from ports import free_port

__all__ = ("FAULTS", "Ranks", "folder_of_job", "join_elastic", "place", "start_by_slurm")

FAULTS = JOBS / "faults"
DRIVER = JOBS.parent / "doubles" / "driver.c"
MB = 1 << 20
SMALL_SHM = ("unshare", "--mount", "sh", "-c", 'mount -t tmpfs -o size=4m tmpfs /dev/shm && exec "$@"', "sh")


class Ranks:
    """The ranks of one job and other processes beside them. ``job``: its name at the daemon of ``node``.

    ``engine``: one process starts them, and has no rank.
    """

    engine = False

    def __init__(self, node: str, folder: Path, script: str, case: str, size: int, **env: str) -> None:
        self.folder = folder
        self.port = free_port()
        self.job = f"{node}/127.0.0.1:{self.port}"
        self.processes: list[subprocess.Popen[bytes]] = []
        self.command = [sys.executable, str(FAULTS / script), case, str(folder)]
        self._size = size
        self.env = env

    def job_at(self, node: str) -> str:
        """Returns the name of the job at the daemon of ``node``."""
        return self.job if self.engine else f"{node}/127.0.0.1:{self.port}"

    def start(self, before: Sequence[str] = ()) -> None:
        if self.engine:
            self.job = f"pid:{self.run([*before, *self.command]).pid}"
            return
        for rank in range(self._size):
            env = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(self._size)}
            env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(self.port)}
            self.run([*before, *self.command], env)

    def run(self, command: Sequence[str], env: Mapping[str, str] | None = None) -> subprocess.Popen[bytes]:
        """Starts a process whose output goes to FOLDER/output and whose stdin stays open."""
        with (self.folder / "output").open("ab") as output:
            pipes = {"stdin": subprocess.PIPE, "stdout": output, "stderr": subprocess.STDOUT}
            process = start_process(*command, env={**self.env, **(env or {})}, **pipes)
        self.processes.append(process)
        return process

    def go(self) -> None:
        """Lets the fault begin, or a healthy job end."""
        (self.folder / "go").touch()

    def faults(self) -> dict[int, int]:
        """Returns by rank when its fault began, UTC ns."""
        notes = self.folder.glob("fault-[0-9]*")
        return {int(note.name[6:]): int(note.read_text()) for note in notes if note.suffix != ".draft"}

    def output(self) -> str:
        return (self.folder / "output").read_text(errors="replace")[-3000:]

    def kill(self) -> None:
        """Kills all processes. ``wait`` waits for their ends, which a blocked file system can delay."""
        for process in self.processes:
            kill_family(process)

    def wait(self) -> list[int]:
        codes = []
        for process in self.processes:
            codes.append(process.wait())
            if process.stdin is not None:
                process.stdin.close()
        return codes


@contextlib.contextmanager
def folder_of_job() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="probingd-fault-"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def place(kind: str, folder: Path) -> Iterator[Sequence[str]]:
    """Makes the surroundings of a case; yields the command line that its ranks' commands are appended to.

    ``kind``: mount (FOLDER/mount is a file system that blocks), memory:MB or cpu:SHARE (a cgroup, whose directory
    FOLDER/group names), shm (a /dev/shm of 4 MB), driver (FOLDER/driver.so is a double of CUDA's driver) or nothing.
    """
    what, _, size = kind.partition(":")
    name = f"{folder.name}-place"
    if what == "mount":
        with _blocking_mount(folder / "mount"):
            yield ()
    elif what == "driver":
        words = ("cc", "-g", "-O1", "-shared", "-fPIC", "-pthread", "-o", str(folder / "driver.so"), str(DRIVER))
        subprocess.run(words, check=True)
        yield ()
    elif what in ("memory", "cpu"):
        with memory_group(name, int(size) * MB) if what == "memory" else cpu_group(name, float(size)) as group:
            (folder / "group").write_text(str(group))
            yield ()
    else:
        yield SMALL_SHM if what == "shm" else ()


@contextlib.contextmanager
def _blocking_mount(where: Path) -> Iterator[None]:
    where.mkdir()
    server = subprocess.Popen([sys.executable, str(silent_fuse.__file__), str(where)], stdout=subprocess.PIPE)
    output: IO[bytes] | None = server.stdout
    assert output is not None
    try:
        assert output.readline() == b"ready\n"
        yield
    finally:
        # Its end fails every request that waits for it.
        server.kill()
        server.wait()
        output.close()
        subprocess.run(["umount", "-l", str(where)], check=False, capture_output=True)


def join_elastic(ranks: Ranks, script: str, case: str, size: int) -> None:
    """Starts a torchrun with ``size`` ranks for an elastic job of one or two nodes. A torchrun of the job that runs
    already starts its ranks again, together with the new ones.

    The id of the rendezvous names the job. The new ranks get a store of their own: in the store of the rendezvous
    torchrun waits for keys that the other one never writes, and gives up.
    """
    ranks.job = f"elastic-{ranks.port}"
    meets = ("--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{ranks.port}", "--rdzv-id", ranks.job)
    words = ("--nnodes", "1:2", "--nproc-per-node", str(size), *meets, "--rdzv-conf", "last_call_timeout=1")
    command = [str(BIN / "torchrun"), *words, str(FAULTS / script), case, str(ranks.folder)]
    ranks.run(command, {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"})


def start_by_slurm(ranks: Ranks, again: bool) -> None:
    """Starts the ranks as Slurm does; ``again``: it ends them first, as it requeues the job."""
    for process in ranks.processes:
        process.terminate()
    ranks.wait()
    ranks.processes.clear()
    ranks.job = f"{ranks.port}.0"
    ranks.env |= {"SLURM_JOB_ID": str(ranks.port), "SLURM_STEP_ID": "0", "SLURM_RESTART_COUNT": str(int(again))}
    ranks.start()
