"""GPUs: NVML's values beside nvidia-smi's, the metrics of a loaded GPU, and the processes on it."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from gpu_kit.part import Part
from gpu_kit.scene import Scene, until
from gpu_kit.smi import Reading, bounds, read_double, read_smi
from gpu_kit.work import Job

__all__ = ("PROCESSES", "VALUES")

# Column -> how far a value may lie outside of nvidia-smi's just before and just after, in its unit.
_SLACK = {
    "total_bytes": 1 << 20,
    "used_bytes": 2 << 20,
    "gpu_util_pct": 5.0,
    "power_w": 15.0,
    "temperature_c": 2.0,
    "sm_clock_mhz": 30.0,
    "mem_clock_mhz": 30.0,
    "power_limit_w": 1.0,
}
# Readings are made twice a second here.
_FRESH_S = 10.0
LOAD_S = 8.0


def _truth(scene: Scene) -> list[Reading]:
    if scene.machine.rehearsal:
        return read_double(Path(scene.machine.libraries.nvml).parent / "nvml.values")
    return read_smi()


def _values(scene: Scene) -> None:
    before = _truth(scene)
    direct = _read_directly(scene)
    after = _truth(scene)
    _compare(scene, "read here", before, after, direct)
    if not scene.has("daemon"):
        scene.checks.skip("gpu.utilization", scene.machine.missing["daemon"])
        return
    before, begun = _truth(scene), time.time_ns()
    rows = until(lambda: _fresh(scene, begun, len(before)), _FRESH_S, "a row of gpu.utilization for each GPU")
    _compare(scene, "gpu.utilization", before, _truth(scene), rows)
    devices = scene.daemon.rows("SELECT uuid, name, total_bytes FROM gpu.devices ORDER BY device_id")
    wanted = [{name: reading[name] for name in ("uuid", "name")} for reading in before]
    scene.checks.equal("gpu.devices", wanted, [{name: row[name] for name in ("uuid", "name")} for row in devices])


def _read_directly(scene: Scene) -> list[dict[str, Any]]:
    """Returns what our reader of NVML reads within this process, without a daemon, in the order of the GPUs."""
    from probing.daemon.gpu.nvml.calls import Calls
    from probing.daemon.gpu.nvml.snapshot import Snapshots

    made = Snapshots(Calls(10), Calls(10), scene.machine.libraries.nvml, Path("/sys"))
    made.poll(slow=True, links=False, pairs=False)
    time.sleep(0.5)
    found = made.poll(slow=True, links=False, pairs=False)
    for problem in found["problems"]:
        scene.checks.measured("NVML said", problem)
    return [found["values"][key] for key in sorted(found["values"], key=str) if "." not in key]


def _fresh(scene: Scene, begun_ns: int, gpus: int) -> list[dict[str, Any]]:
    """Returns the first rows that were read after ``begun_ns``, in the order of the GPUs; [] until all are there."""
    where = f"epoch_ns(ts) >= {begun_ns} AND mig IS NULL"
    sql = f"SELECT * EXCLUDE (ts), epoch_ns(ts) AS at FROM gpu.utilization WHERE {where} ORDER BY ts, device_id"
    rows = scene.daemon.rows(sql)
    first = [row for row in rows if row["at"] == rows[0]["at"]]
    return first if len(first) == gpus else []


def _compare(scene: Scene, label: str, before: list[Reading], after: list[Reading], rows: list[dict[str, Any]]) -> None:
    if not scene.checks.equal(f"{label}: GPUs", len(before), len(rows)):
        return
    for column, slack in _SLACK.items():
        problems = []
        for number, (first, last, row) in enumerate(zip(before, after, rows, strict=True)):
            allowed = bounds((first, last), column, slack)
            value = row.get(column)
            if allowed and column in row and not (value is not None and allowed[0] <= value <= allowed[1]):
                problems.append(f"GPU {number}: {value} outside of {allowed[0]:g} to {allowed[1]:g}")
        scene.checks.no_problems(f"{label}: {column}", "as nvidia-smi has it just before and just after", problems)


def _processes(scene: Scene) -> None:
    if scene.machine.rehearsal:
        _processes_by_environment(scene)
        return
    uuid = str(_truth(scene)[0]["uuid"])
    jobs = {
        name: scene.job("torch_rank", name=name, CUDA_VISIBLE_DEVICES=visible)
        for name, visible in (("by index", "0"), ("by UUID", uuid))
    }
    for job in jobs.values():
        job.ready(40).do("hold", 40)
    for name, job in jobs.items():
        row = until(lambda job=job: _process(scene, job), _FRESH_S, f"the process {name}")
        scene.checks.equal(f"GPU of a process with CUDA_VISIBLE_DEVICES {name}", uuid, row["uuid"])
        scene.checks.equal(f"rank of the process {name}", 0, row["rank"])
        scene.checks.at_least(f"memory of the process {name}", 1 << 22, row["used_bytes"])
        scene.checks.measured(f"source of the process {name}", row["source"])
    _load(scene, jobs["by UUID"])


def _process(scene: Scene, job: Job) -> dict[str, Any] | None:
    sql = f"SELECT uuid, device_id, rank, used_bytes, source FROM gpu.processes WHERE pid = {job.pid}"
    rows = scene.daemon.rows(f"{sql} AND rank IS NOT NULL ORDER BY ts DESC LIMIT 1")
    return rows[0] if rows else None


# The double lists no process: each is joined by its environment.
def _processes_by_environment(scene: Scene) -> None:
    uuids = [str(reading["uuid"]) for reading in _truth(scene)]
    for name, visible, number in (("by index", "3", 3), ("by UUID", uuids[5], 5)):
        job = scene.direct_job(name=name.replace(" ", "-"), CUDA_VISIBLE_DEVICES=visible).ready()
        row = until(lambda job=job: _process(scene, job), _FRESH_S, f"the process {name}")
        scene.checks.equal(f"GPU of a process with CUDA_VISIBLE_DEVICES {name}", uuids[number], row["uuid"])
        scene.checks.equal(f"rank of the process {name}", 0, row["rank"])
    scene.checks.skip("a loaded GPU", scene.machine.missing["torch"])


def _load(scene: Scene, job: Job) -> None:
    job.tell(f"load {LOAD_S}")
    job.hear(40)
    time.sleep(LOAD_S / 2)
    before, begun = _truth(scene), time.time_ns()
    rows = until(lambda: _fresh(scene, begun, len(before)), _FRESH_S, "a row of gpu.utilization")
    after = _truth(scene)
    (done,) = job.hear(40)
    row = rows[0]
    scene.checks.measured("matrix product", f"{done['tflops']:.0f} TFLOP/s")
    scene.checks.at_least("gpu_util_pct under load", 90, row["gpu_util_pct"])
    # A product of large matrices keeps the tensor cores busy most of the time.
    scene.checks.at_least("tensor_active_pct under load", 30, row["tensor_active_pct"])
    scene.checks.at_least("sm_active_pct under load", 80, row["sm_active_pct"])
    for column, slack in (("power_w", 60.0), ("sm_clock_mhz", 120.0), ("temperature_c", 3.0)):
        allowed = bounds((before[0], after[0]), column, slack)
        if allowed:
            middle, most = sum(allowed) / 2, (allowed[1] - allowed[0]) / 2
            scene.checks.near(f"{column} under load", middle, row[column], most=most)
    scene.checks.measured("clock_event_reasons under load", row["clock_event_reasons"])


VALUES = Part("nvml_values", "NVML's values beside nvidia-smi's", 30, _values, ("nvml",))
PROCESSES = Part(
    "gpu_processes",
    "processes on their GPU by index and UUID; GPM, power and clocks under load",
    70,
    _processes,
    ("nvml", "daemon"),
)
