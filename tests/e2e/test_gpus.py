"""GPUs in the whole daemon: rows with its real rights, ranks on them, a driver that hangs; by the double of NVML."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from doubles.nvml_double import NvmlDouble, build_nvml, recorded
from e2e_support import Daemon
from long import long
from ports import free_port
from waiting import until

MODULE = "probing.daemon.confined.nvml"
# It imports torch so that it is taken for a trainer.
JOB = """
import sys
import torch
print("ready", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def double(base: Path) -> NvmlDouble:
    folder = base / "nvml"
    folder.mkdir(mode=0o755)
    return NvmlDouble(build_nvml(folder), recorded(8))


@pytest.fixture
def gpu_daemon(double: NvmlDouble, base: Path, make_daemon: Callable[..., Daemon]) -> Daemon:
    options = (f"--gpu.library={double.library}", f"--gpu.sysfs={base}/sys", "--gpu.call_timeout_s=2")
    return make_daemon("n1", *options, "--gpu.interval_s=0.2").start()


def source(daemon: Daemon) -> dict[str, Any]:
    found: dict[str, Any] = next(s for s in daemon.json("status")["sources"] if s["name"] == "nvml")
    return found


def test_gpus_and_the_ranks_on_them(
    gpu_daemon: Daemon, double: NvmlDouble, run_job: Callable[..., subprocess.Popen[Any]]
) -> None:
    daemon = gpu_daemon
    env = {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
    job = run_job(sys.executable, "-c", JOB, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert job.stdout is not None
    assert job.stdout.readline() == "ready\n"
    double.set({"gpu5.compute.count": 1, "gpu5.compute.0": f"{job.pid},1009000000"})
    sql = f"SELECT rank, device_id, used_bytes FROM gpu.processes WHERE pid = {job.pid} AND rank IS NOT NULL LIMIT 1"
    found = until(lambda: daemon.rows(sql), what=lambda: f"the rank on its GPU: {daemon.tail()}")
    assert found == [{"rank": 0, "device_id": 5, "used_bytes": 1009000000}]
    rows = daemon.rows("SELECT device_id, any_value(power_w) AS w FROM gpu.utilization GROUP BY device_id ORDER BY 1")
    assert [row["w"] for row in rows] == [double.values[f"gpu{n}.power_mw"] / 1000 for n in range(8)]  # type: ignore[operator]
    assert len(daemon.rows("SELECT * FROM gpu.devices")) == 8
    assert "rank 0" in daemon.ctl("topo").stdout
    assert daemon.json("gpu")[5]["processes"][0]["rank"] == 0
    (pid,) = daemon.children()[MODULE]
    status = dict(line.split(":\t") for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":\t" in line)
    assert {int(status[name], 16) for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")} == {0}
    assert (status["NoNewPrivs"], status["Seccomp"]) == ("1", "2")
    assert status["Uid"].split()[0] != "0"


@long
def test_a_driver_that_hangs_shows_and_nothing_else_waits(gpu_daemon: Daemon, double: NvmlDouble) -> None:
    daemon = gpu_daemon
    until(lambda: daemon.rows("SELECT 1 FROM gpu.utilization LIMIT 1"), what=daemon.tail)
    double.write(hang="nvmlDeviceGetFieldValues")
    until(lambda: source(daemon)["state"] == "degraded", what=lambda: str(source(daemon)))
    sql = "SELECT event, detail FROM gpu.events WHERE event = 'call_hung'"
    (row, *_) = until(lambda: daemon.rows(sql), what=daemon.tail)
    assert "nvmlDeviceGetFieldValues" in row["detail"]
    assert "nvmlDeviceGetFieldValues" in daemon.json("status")["reason"]
    double.set({}, drop=("hang",))
    until(lambda: source(daemon)["state"] == "running", what=lambda: str(source(daemon)))
    until(lambda: daemon.rows("SELECT 1 FROM gpu.events WHERE event = 'driver_back'"), what=daemon.tail)
    assert daemon.stop() == 0


def test_a_node_without_gpus_has_no_such_process(daemon: Daemon) -> None:
    if Path("/dev/nvidiactl").exists():
        pytest.skip("this machine has a driver of NVIDIA")
    assert MODULE not in daemon.children()
    # A machine with a GPU and without its driver is another matter.
    assert source(daemon)["state"] in ("running", "degraded")
    assert daemon.json("gpu") == []
