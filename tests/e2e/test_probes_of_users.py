"""A probe that a user puts down beside the daemon: its rows are asked for like any other, here and of all nodes."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from e2e_support import ROOT, Daemon
from ports import free_port
from waiting import until

EXAMPLES = ROOT / "examples" / "probes"
# It imports torch so that it is taken for a trainer; each line of stdin has a library loaded 23 times.
JOB = """
import ctypes
import sys
import torch
print("ready", flush=True)
for line in sys.stdin:
    for _ in range(23):
        ctypes.CDLL("libm.so.6")
    print("done", flush=True)
"""
COUNT = "SELECT node, rank, count(*) AS n FROM user.library_loads WHERE path = 'libm.so.6' GROUP BY node, rank"


@pytest.fixture
def probes(tmp_path: Path) -> Path:
    folder = tmp_path / "probes.d"
    folder.mkdir(mode=0o755)
    return folder


def put_down(name: str, folder: Path) -> None:
    for suffix in (".c", ".toml"):
        shutil.copyfile(EXAMPLES / f"{name}{suffix}", folder / f"{name}{suffix}")


def state_of(daemon: Daemon, name: str) -> dict[str, Any]:
    return next((s for s in daemon.json("status")["sources"] if s["name"] == name), {})


def test_a_probe_from_the_file_to_all_nodes(
    make_daemon: Callable[..., Daemon], probes: Path, run_job: Callable[..., subprocess.Popen[Any]]
) -> None:
    port = free_port()
    env = {"RANK": "3", "LOCAL_RANK": "0", "WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    job = run_job(sys.executable, "-c", JOB, env=env, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert job.stdin
    assert job.stdout
    assert job.stdout.readline() == "ready\n"
    daemon = make_daemon("n1", f"--probes.user-dir={probes}").start()
    put_down("library_loads", probes)
    until(lambda: state_of(daemon, "user:library_loads").get("state") == "running", what="the probe")
    until(lambda: "in 1 process" in state_of(daemon, "user:library_loads")["detail"], what="the trainer to be probed")
    job.stdin.write("go\n")
    job.stdin.flush()
    assert job.stdout.readline() == "done\n"
    wanted = [{"node": "n1", "rank": 3, "n": 23}]
    until(lambda: daemon.rows(COUNT) == wanted, what="its rows")
    assert daemon.json("query", COUNT, "--nodes", daemon.target) == wanted
    assert "user.library_loads" in daemon.ctl("tables").stdout
    what = "DISTINCT pid, failed, duration_ns > 0 AS took"
    (row,) = daemon.rows(f"SELECT {what} FROM user.library_loads WHERE path = 'libm.so.6'")
    assert row == {"pid": job.pid, "failed": 0, "took": True}
    # What is wrong with a probe is said of that probe, and the others go on.
    (probes / "broken.toml").write_text((EXAMPLES / "library_loads.toml").read_text())
    (probes / "broken.c").write_text("static int dlopen_called(struct pt_regs *ctx) { return nothing; }\n")
    until(lambda: "nothing" in state_of(daemon, "user:broken").get("reason", ""), what="the reason")
    assert state_of(daemon, "user:library_loads")["state"] == "running"
    # Rows outlive the probe and the daemon.
    for path in probes.iterdir():
        path.unlink()
    until(lambda: not state_of(daemon, "user:library_loads"), what="both to be gone")
    daemon.stop()
    assert daemon.start().rows(COUNT) == wanted
