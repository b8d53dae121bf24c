"""What goes wrong is one `error:` line, one `hint:` line, the right exit code, and never a traceback."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from e2e_support import BIN, Daemon
from waiting import until

MakeDaemon = Callable[..., Daemon]


def assert_error(done: subprocess.CompletedProcess[str], code: int, *words: str) -> None:
    lines = done.stderr.strip().splitlines()
    assert done.returncode == code, done.stderr
    errors = [line for line in lines if line.startswith("error: ")]
    hints = [line for line in lines if line.startswith("hint: ")]
    assert len(errors) == len(hints) == 1, done.stderr
    assert "Traceback" not in done.stderr
    for word in words:
        assert word in errors[0] + hints[0], done.stderr


def run_daemon(daemon: Daemon, *prefix: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*prefix, *daemon.argv], capture_output=True, text=True, timeout=60, env={**os.environ, **(env or {})}
    )


def test_socket_taken(daemon: Daemon, base: Path) -> None:
    other = Daemon(base, "n2")
    other.socket = daemon.socket
    assert_error(run_daemon(other), 1, str(daemon.socket))
    assert daemon.rows("SELECT count(*) AS n FROM probing.losses")


def test_state_directory_locked(daemon: Daemon, base: Path) -> None:
    other = Daemon(base, "n2")
    other.state = daemon.state
    assert_error(run_daemon(other), 1, str(daemon.state), "--state-dir")
    assert daemon.json("status")["state"] == "running"


def test_stale_socket_is_replaced(make_daemon: MakeDaemon) -> None:
    daemon = make_daemon()
    with socket.socket(socket.AF_UNIX) as s:
        s.bind(str(daemon.socket))
    daemon.start()


def test_state_directory_not_writable(base: Path) -> None:
    daemon = Daemon(base, "n1")
    daemon.state = Path("/proc/nowhere")
    assert_error(run_daemon(daemon), 1, "/proc/nowhere")


def test_state_directory_full(make_daemon: MakeDaemon, run_job: Callable[..., Any]) -> None:
    """It starts, says so, waits with what it has, and goes on by itself once there is space."""
    daemon = make_daemon("n1", "--store.keep_free_bytes=0")
    daemon.state.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m,mode=755", "none", str(daemon.state)], check=True)
    filler = daemon.state / "filler"
    try:
        done = subprocess.run(["dd", "if=/dev/zero", f"of={filler}", "bs=4096"], capture_output=True, text=True)
        assert "No space" in done.stderr
        daemon.start()
        env = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29998"}
        job = run_job(sys.executable, "-c", "input()", env=env, stdin=subprocess.PIPE)
        status = until(
            lambda: (s := daemon.json("status"))["state"] == "degraded" and s, what="the report of the lack of space"
        )
        assert "full" in status["reason"] or "No space" in status["reason"]
        filler.unlink()
        until(lambda: daemon.json("status")["state"] == "running", what=lambda: daemon.json("status"))
        # What happened while nothing could be written is there.
        started = f"SELECT pid FROM process.events WHERE event = 'start' AND pid = {job.pid}"
        until(lambda: daemon.rows(started), what="the start of the process")
    finally:
        daemon.stop()
        subprocess.run(["umount", str(daemon.state)], check=True)


def test_unknown_key(base: Path) -> None:
    daemon = Daemon(base, "n1")
    daemon.config.write_text("[store]\nmax_byte = 5\n")
    assert_error(run_daemon(daemon), 2, "store.max_byte", "store.max_bytes")


def test_broken_config(base: Path) -> None:
    daemon = Daemon(base, "n1")
    daemon.config.write_text("[store\n")
    assert_error(run_daemon(daemon), 2, str(daemon.config))


@pytest.mark.parametrize("lacking", ["bpf", "perfmon", "sys_ptrace", "dac_read_search"])
def test_capability_missing(base: Path, lacking: str) -> None:
    daemon = Daemon(base, "n1")
    done = run_daemon(daemon, "setpriv", "--bounding-set", f"-{lacking}", "--inh-caps", f"-{lacking}")
    assert_error(done, 1, f"CAP_{lacking.upper()}")


def test_no_btf(base: Path) -> None:
    daemon = Daemon(base, "n1")
    # A mount namespace of its own in which the kernel shows no BTF.
    done = run_daemon(
        daemon, "unshare", "--mount", "sh", "-c", 'mount -t tmpfs none /sys/kernel/btf && exec "$@"', "sh"
    )
    assert_error(done, 1, "BTF")


def test_kernel_too_old(base: Path) -> None:
    daemon = Daemon(base, "n1")
    # The kernel itself tells an old program an old version: 2.6.78.
    assert_error(run_daemon(daemon, "setarch", "--uname-2.6"), 1, "kernel")


def test_libbpf_missing(base: Path) -> None:
    daemon = Daemon(base, "n1")
    hide = "for f in /usr/lib/*/libbpf.so* /lib/*/libbpf.so*; do [ -e $f ] && mount --bind /dev/null $f; done"
    done = run_daemon(daemon, "unshare", "--mount", "sh", "-c", f'{hide}; exec "$@"', "sh")
    assert_error(done, 1, "libbpf")


def test_target_not_reachable(base: Path) -> None:
    for target in (f"unix:{base}/nobody.sock", "127.0.0.1:1"):
        done = subprocess.run([str(BIN / "probingctl"), "-t", target, "ps"], capture_output=True, text=True, timeout=60)
        assert_error(done, 1, target.removeprefix("unix:"))


@pytest.mark.parametrize(
    ("argv", "code", "word"),
    [
        (["stacks", "--job", "no-such-job"], 1, "no-such-job"),
        (["stacks", "999999999"], 1, "999999999"),
        (["stacks", "1"], 1, "1"),
        (["nccl", "--job", "no-such-job"], 1, "no-such-job"),
        (["query", "SELEC 1"], 1, ""),
        (["query", "SELECT * FROM comm.opps"], 1, "comm.ops"),
        (["query", "SELECT raank FROM comm.ops"], 1, "rank"),
        (["query", "SELECT * FROM read_text('/etc/passwd')"], 1, ""),
        (["query", "SELECT * FROM '/etc/passwd'"], 1, ""),
        (["query", "DROP TABLE comm.ops"], 1, ""),
        (["query", "SELECT 1; SELECT 2"], 1, ""),
        (["query", "SELECT repeat('x', 4000000000) FROM comm.ops"], 1, ""),
        (["query"], 2, ""),
        (["no-such-command"], 2, "no-such-command"),
        (["ps", "--no-such-option"], 2, "no-such-option"),
        (["-f", "yaml", "ps"], 2, "yaml"),
    ],
)
def test_bad_requests(shared_daemon: Daemon, argv: list[str], code: int, word: str) -> None:
    assert_error(shared_daemon.ctl(*argv, check=None), code, word)
    assert shared_daemon.rows("SELECT count(*) AS n FROM comm.ops")


def test_a_process_that_exits_while_it_is_read(daemon: Daemon, run_job: Callable[..., Any]) -> None:
    env = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29999"}
    for _ in range(23):
        run_job(sys.executable, "-c", "pass", env=env)
        done = daemon.ctl("stacks", "--job", "n1/127.0.0.1:29999", check=None)
        assert done.returncode in (0, 1), done.stderr
        assert "Traceback" not in done.stdout + done.stderr
    assert daemon.json("status")["state"] == "running"
    assert "Traceback" not in daemon.log.read_text()
