"""Diagnosis with hardware: real jobs on GPUs of the double of NVML, a full /dev/shm, and `probingctl health`."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from diagnosis_corpus import watching
from diagnosis_jobs import Ranks, folder_of_job
from doubles.nvml_double import NvmlDouble, build_nvml, recorded
from e2e_support import Daemon
from long import long
from waiting import until

XID_EVENT = 0x8
# NVML_ERROR_GPU_IS_LOST
GPU_IS_LOST = 15
HW_THERMAL_NS = "field.270"


@pytest.fixture
def double(base: Path) -> NvmlDouble:
    folder = base / "nvml"
    folder.mkdir(mode=0o755)
    # Of the recorded values some count rows that were remapped after errors: so many are a fault.
    return NvmlDouble(build_nvml(folder), {**recorded(2), "gpu0.field.143": "u0", "gpu1.field.143": "u0"})


@pytest.fixture
def daemon(double: NvmlDouble, base: Path, make_daemon: Callable[..., Daemon]) -> Daemon:
    options = (f"--gpu.library={double.library}", f"--gpu.sysfs={base}/sys", "--gpu.interval_s=0.2")
    return watching(make_daemon("n1", *options)).start()


@contextmanager
def job(daemon: Daemon, double: NvmlDouble, case: str) -> Iterator[Ranks]:
    """Two ranks of slow.py; the driver lists rank N on GPU N."""
    with folder_of_job() as folder:
        ranks = Ranks(daemon.name, folder, "slow.py", case, 2)
        try:
            ranks.start()
            for number, process in enumerate(ranks.processes):
                double.set({f"gpu{number}.compute.count": 1, f"gpu{number}.compute.0": f"{process.pid},1009000000"})
            users = "SELECT DISTINCT rank, device_id FROM gpu.processes WHERE job = 'JOB' AND rank IS NOT NULL"
            until(lambda: len(daemon.rows(users.replace("JOB", ranks.job))) == 2, what=daemon.tail)
            yield ranks
        finally:
            ranks.kill()
            ranks.wait()


def findings(daemon: Daemon, ranks: Ranks) -> dict[str, dict[str, Any]]:
    """Returns the newest row of each verdict that is open."""
    sql = (
        "SELECT verdict, arg_max(ranks, ts) AS ranks, arg_max(sentence, ts) AS sentence,"
        " arg_max(severity, ts) AS severity FROM diagnosis.findings WHERE job = 'JOB' GROUP BY verdict"
    )
    return {row["verdict"]: row for row in daemon.rows(sql.replace("JOB", ranks.job))}


@contextmanager
def heat(double: NvmlDouble, number: int) -> Iterator[None]:
    """Lets the driver count time in which heat holds the clock of a GPU down: all of it."""
    cool = threading.Event()

    def count() -> None:
        held = int(double.values[f"gpu{number}.{HW_THERMAL_NS}"])
        while not cool.wait(0.1):
            held += 100_000_000
            double.set({f"gpu{number}.{HW_THERMAL_NS}": held, f"gpu{number}.clock_mhz.1": 1095})

    thread = threading.Thread(target=count)
    thread.start()
    try:
        yield
    finally:
        cool.set()
        thread.join()


@long
def test_a_throttled_gpu_is_why_a_rank_is_slow(daemon: Daemon, double: NvmlDouble) -> None:
    with job(daemon, double, "bigger_batch") as ranks, heat(double, 1):
        ranks.go()

        def named() -> dict[str, Any] | None:
            row = findings(daemon, ranks).get("slow_rank")
            return row if row is not None and "held down" in row["sentence"] else None

        slow = until(named, what=lambda: f"{findings(daemon, ranks)} {ranks.output()}")
        assert slow["ranks"] == "1"
        assert "its GPU 1 is held down at 1095 of 1980 MHz by heat" in slow["sentence"]
        throttled = findings(daemon, ranks)["gpu_throttled"]
        assert (throttled["ranks"], throttled["severity"]) == ("1", "warning")
        health = daemon.ctl("-f", "json", "health", check=None)
        assert health.returncode == 3
        assert "gpu_throttled" in [found["verdict"] for found in json.loads(health.stdout)[0]["findings"]]


@long
def test_a_lost_gpu_names_the_rank_that_used_it(daemon: Daemon, double: NvmlDouble) -> None:
    with job(daemon, double, "bigger_batch") as ranks:
        double.set({"gpu1.lost": GPU_IS_LOST})
        fault = until(lambda: findings(daemon, ranks).get("gpu_fault"), what=lambda: str(findings(daemon, ranks)))
        assert (fault["ranks"], fault["severity"]) == ("1", "error")
        assert fault["sentence"] == ("node n1: GPU 1 is lost: the GPU has fallen off the bus, which rank 1 uses")


def test_an_xid_names_the_rank_that_uses_the_gpu(daemon: Daemon, double: NvmlDouble) -> None:
    with job(daemon, double, "bigger_batch") as ranks:
        double.event(0, XID_EVENT, 79)
        fault = until(lambda: findings(daemon, ranks).get("gpu_fault"), what=lambda: str(findings(daemon, ranks)))
        assert (fault["ranks"], fault["severity"]) == ("0", "error")
        assert fault["sentence"] == (
            "node n1: GPU 0 reported XID 79, the GPU has fallen off the bus, which rank 0 uses"
        )
        whole = daemon.ctl("diagnose", "--job", ranks.job, check=None)
        assert whole.returncode == 3
        assert "GPU 0 reported XID 79" in whole.stdout
        shown = daemon.ctl("health", check=None)
        assert shown.returncode == 3
        assert "GPU 0 reported XID 79, the GPU has fallen off the bus" in " ".join(shown.stdout.split())


@long
def test_errors_of_nvlink_on_two_gpus_are_one_fault_of_their_fabric(
    double: NvmlDouble, base: Path, make_daemon: Callable[..., Daemon]
) -> None:
    log = base / "kmsg"
    log.touch(mode=0o644)
    double.set({f"gpu{n}.fabric.{name}": value for n in (0, 1) for name, value in (("clique", 7), ("cluster", 0xAB))})
    options = (f"--gpu.library={double.library}", f"--gpu.sysfs={base}/sys", "--gpu.interval_s=0.2")
    daemon = watching(make_daemon("n1", *options, f"--host.kernel_log={log}")).start()
    with job(daemon, double, "bigger_batch") as ranks:
        now_us = time.monotonic_ns() // 1000
        words = "(0x025025c6 0x00000000 0x00000000 0x00000000 0x00000000 0x00000000)"
        log.write_text(
            "".join(
                f"3,{900 + n},{now_us + 250_000 * n},-;NVRM: Xid (PCI:0000:{bus}:00): 149, NETIR_LINK_EVT  Fatal   XC0"
                f" i0 Link 0{n + 4} {words}\n"
                for n, bus in enumerate(("18", "17"))
            )
        )
        fault = until(lambda: findings(daemon, ranks).get("fabric_fault"), what=lambda: str(findings(daemon, ranks)))
        assert fault["severity"] == "error"
        assert (
            "first GPU 1 of node n1: XID 149, NVLink 4 went down (NETIR_LINK_DOWN, fatal, reason 37: its other end went"
            " down): the fault is at the other end of the links" in fault["sentence"]
        )
        assert "fabric abababab-abab-abab-abab-abababababab/7 reported errors within" in fault["sentence"]
        # No rank is to blame, and no single GPU.
        assert fault["ranks"] == ""
        assert "gpu_fault" not in findings(daemon, ranks)


def test_a_node_whose_hardware_is_well(daemon: Daemon) -> None:
    until(lambda: daemon.rows("SELECT 1 FROM gpu.utilization LIMIT 1"), what=daemon.tail)
    found = json.loads(daemon.ctl("-f", "json", "health", check=None).stdout)
    assert [(node["node"], node["gpus"]) for node in found] == [("n1", 2)]
    assert [one for one in found[0]["findings"] if one["verdict"].startswith("gpu")] == []
