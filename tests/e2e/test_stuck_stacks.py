"""Ranks that block whoever reads them, or cannot be interrupted: they, and all others, are answered for at once."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from e2e_support import JOBS, Daemon
from hostile import silent_fuse
from long import long_unless
from ports import free_port
from test_stacks import stacks_rpc_of_job
from waiting import until

Launch = Callable[..., Any]
LINE_OF_VFORK = 1 + next(
    n for n, text in enumerate((JOBS / "hard_to_read.py").read_text().splitlines()) if "os.posix_spawn(" in text
)
IDLE = "import sys, time\n\ndef idle():\n    open(sys.argv[1], 'w').close()\n    time.sleep(9999)\n\nidle()\n"


@pytest.fixture
def silent_file(tmp_path: Path) -> Iterator[Path]:
    """A file of which no read ever ends."""
    where = tmp_path / "silent"
    where.mkdir()
    server = subprocess.Popen([sys.executable, Path(silent_fuse.__file__), where], stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    assert server.stdout.readline() == "ready\n"
    yield where / "file"
    # Its end ends every read that waits for it.
    server.kill()
    server.wait()
    server.stdout.close()
    subprocess.run(["umount", "-l", where], check=False, capture_output=True)


def start_ranks(run_job: Launch, tmp_path: Path, state: str, *more: str | Path) -> tuple[str, list[Any]]:
    """A job of three ranks: 0 and 2 are idle, 1 is in ``state``."""
    port = str(free_port())
    idle = tmp_path / "idle.py"
    idle.write_text(IDLE)
    ranks = []
    for rank in range(3):
        env = {"RANK": str(rank), "WORLD_SIZE": "3", "LOCAL_RANK": str(rank)}
        env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        flag = tmp_path / f"flag{rank}"
        command = [JOBS / "hard_to_read.py", state, flag, *more] if rank == 1 else [idle, flag]
        ranks.append(run_job(sys.executable, *command, env=env))
        until(flag.exists, what=f"rank {rank} to be where it should be")
    return f"n1/127.0.0.1:{port}", ranks


def known(daemon: Daemon, job: str) -> bool:
    return len([r for r in daemon.json("ps") if r["job"] == job and r["role"] == "trainer"]) == 3


@pytest.mark.parametrize("state", ["userfault", long_unless(False, "mapped")])
def test_one_that_blocks_its_reader(
    own_daemon: Daemon, run_job: Launch, tmp_path: Path, silent_file: Path, state: str
) -> None:
    """Its own daemon: its readers are blocked."""
    job, ranks = start_ranks(run_job, tmp_path, state, *([silent_file] if state == "mapped" else []))
    until(lambda: known(own_daemon, job), what="the ranks to be known")
    seconds = []
    for _ in range(5):
        reply, took = stacks_rpc_of_job(own_daemon, job)
        seconds.append(took)
        told = {t.rank: [f.func for f in t.frames] for t in reply.threads if t.tid == t.pid}
        assert told == {0: ["idle", "<module>"], 2: ["idle", "<module>"]}
        (failure,) = reply.failures
        assert (failure.pid, failure.rank, failure.error.kind) == (ranks[1].pid, 1, "TargetTimeout")
        assert failure.error.message
    # The fastest of five: what is asked is what the daemon can do, not what else this machine does meanwhile.
    assert min(seconds) < 0.1
    done = own_daemon.ctl("stacks", "--job", job)
    assert f"pid {ranks[1].pid} (rank 1)" in done.stderr
    assert own_daemon.json("status")["state"] == "running"


def test_one_that_cannot_be_interrupted(daemon: Daemon, run_job: Launch, tmp_path: Path) -> None:
    job, ranks = start_ranks(run_job, tmp_path, "vfork")
    until(lambda: known(daemon, job), what="the ranks to be known")
    stat = Path(f"/proc/{ranks[1].pid}/stat")
    until(lambda: stat.read_text().rpartition(")")[2].split()[0] == "D", what="the parent to wait")
    stacks_rpc_of_job(daemon, job)
    answers = [stacks_rpc_of_job(daemon, job) for _ in range(5)]
    assert min(took for _, took in answers) < 0.1
    for reply, _ in answers:
        assert not reply.failures
        main = next(t for t in reply.threads if t.tid == ranks[1].pid)
        assert (main.state, main.frames[0].func, main.frames[0].lineno) == ("blocked", "vfork", LINE_OF_VFORK)
