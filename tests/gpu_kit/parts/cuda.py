"""Calls of the CUDA runtime: ``cuda.syncs``, ``cuda.memory``, ``cuda.launches`` and graphs, beside the job's counts."""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

from gpu_kit import comparisons
from gpu_kit.part import Part
from gpu_kit.parts.watched import FIVE, SEEN_S, SEVEN, TWENTY_THREE
from gpu_kit.scene import Scene, until
from gpu_kit.work import Job

__all__ = ("COUNTS", "TORCH")

SIZE = 1 << 20
_ROWS_S = 15.0


def _counts(scene: Scene) -> None:
    job = scene.direct_job().ready()
    _syncs_seen(scene, job)
    _syncs(scene, job)
    _memory(scene, job)
    if scene.machine.rehearsal:
        with_launches(scene, job)
    else:
        scene.checks.skip("kernels", "a kernel comes from torch: the next part counts them")


def _syncs_seen(scene: Scene, job: Job) -> None:
    def seen() -> bool:
        job.do("syncs 1 0 0")
        return bool(scene.daemon.rows(f"SELECT 1 AS one FROM cuda.syncs WHERE pid = {job.pid} LIMIT 1"))

    until(seen, SEEN_S, "a synchronization", poll_s=0.3)


def _syncs(scene: Scene, job: Job) -> None:
    (answer,) = job.do(f"syncs {TWENTY_THREE} {SEVEN} {FIVE}")
    wanted = {"stream_synchronize": TWENTY_THREE, "event_synchronize": SEVEN, "device_synchronize": FIVE}

    def found() -> list[dict[str, Any]]:
        where = f"pid = {job.pid} AND epoch_ns(ts) >= {answer['begun']}"
        return scene.daemon.rows(f"SELECT op, stream, event, error FROM cuda.syncs WHERE {where}")

    until(lambda: len(found()) >= sum(wanted.values()), _ROWS_S, "all synchronizations")
    rows = found()
    counts = Counter(row["op"] for row in rows)
    scene.checks.no_problems("cuda.syncs", str(wanted), comparisons.counts(wanted, counts))
    streams = {row["stream"] for row in rows if row["op"] == "stream_synchronize"}
    scene.checks.equal("stream that was waited for", {answer["stream"]}, streams)
    events = {row["event"] for row in rows if row["op"] == "event_synchronize"}
    scene.checks.equal("event that was waited for", {answer["event"]}, events)
    scene.checks.equal("errors", {None}, {row["error"] for row in rows})


def _memory(scene: Scene, job: Job) -> None:
    size = SIZE + 1
    job.do(f"alloc {TWENTY_THREE} {size} {SEVEN}")
    wanted = {"allocations": TWENTY_THREE, "frees": SEVEN, "bytes": TWENTY_THREE * size}
    live = {"live": TWENTY_THREE - SEVEN, "live_bytes": (TWENTY_THREE - SEVEN) * size}
    # The class holds no other size of this job.
    where = f"pid = {job.pid} AND kind = 'device' AND size_class = {SIZE * 2}"

    def found() -> dict[str, int]:
        sums = ", ".join(f"sum({name})::BIGINT AS {name}" for name in wanted)
        lasts = ", ".join(f"arg_max({name}, ts) AS {name}" for name in live)
        (row,) = scene.daemon.rows(f"SELECT {sums}, {lasts} FROM cuda.memory WHERE {where}")
        return {name: value or 0 for name, value in row.items()}

    def all_counted() -> bool:
        now = found()
        return now["allocations"] >= TWENTY_THREE and now["frees"] >= SEVEN

    until(all_counted, _ROWS_S, "all allocations")
    scene.checks.no_problems("cuda.memory", f"{wanted | live}", comparisons.counts(wanted | live, found()))


def with_launches(scene: Scene, job: Job) -> None:
    """Switches ``cuda.launches`` on, and compares the kernels that a job launches."""
    scene.daemon.set("cuda.launches", "true")
    try:
        _launches_seen(scene, job)
        begun = time.time_ns()
        time.sleep(0.01)
        job.do(f"launch {TWENTY_THREE}")
        # torch fills the tensor and adds once before it counts.
        least = TWENTY_THREE
        until(lambda: _launched(scene, job, begun)["kernels"] >= least, _ROWS_S, "all launches")
        # One more row, should there be launches that it should not have.
        time.sleep(1.5)
        got = _launched(scene, job, begun)["kernels"]
        if scene.machine.rehearsal:
            scene.checks.equal("kernels", least, got)
        else:
            scene.checks.one_of("kernels, with a fill, a first addition and a read", range(least + 1, least + 5), got)
    finally:
        scene.daemon.set("cuda.launches", "false")


def _launches_seen(scene: Scene, job: Job) -> None:
    def seen() -> bool:
        job.do("launch 1")
        return bool(scene.daemon.rows(f"SELECT 1 AS one FROM cuda.launches WHERE pid = {job.pid} LIMIT 1"))

    until(seen, SEEN_S, "a launch", poll_s=0.3)
    # The next rows are of the next launches alone.
    time.sleep(2.2)


def _launched(scene: Scene, job: Job, begun_ns: int) -> dict[str, int]:
    where = f"pid = {job.pid} AND epoch_ns(ts) >= {begun_ns}"
    columns = "coalesce(sum(kernels), 0)::BIGINT AS kernels, coalesce(sum(graphs), 0)::BIGINT AS graphs"
    (row,) = scene.daemon.rows(f"SELECT {columns} FROM cuda.launches WHERE {where}")
    return row


def _torch(scene: Scene) -> None:
    job = scene.job("torch_rank").ready(40)
    job.do("hold", 40)
    with_launches(scene, job)
    _graphs(scene, job)
    _allocator(scene, job)


def _graphs(scene: Scene, job: Job) -> None:
    scene.daemon.set("cuda.launches", "true")
    try:
        _launches_seen(scene, job)
        begun = time.time_ns()
        job.do(f"graph {SEVEN}")
        until(lambda: _launched(scene, job, begun)["graphs"] >= SEVEN, _ROWS_S, "all graphs")
        scene.checks.equal("CUDA graphs launched", SEVEN, _launched(scene, job, begun)["graphs"])
    finally:
        scene.daemon.set("cuda.launches", "false")


# torch's allocator counts its own calls of cudaMalloc.
def _allocator(scene: Scene, job: Job) -> None:
    begun = time.time_ns()
    (answer,) = job.do(f"alloc {SEVEN} {100 << 20}", 40)
    wanted = answer["device_allocations"]

    def found() -> list[dict[str, Any]]:
        where = f"pid = {job.pid} AND kind = 'device' AND epoch_ns(ts) >= {begun}"
        return scene.daemon.rows(f"SELECT allocations, caller FROM cuda.memory WHERE {where}")

    until(lambda: sum(row["allocations"] for row in found()) >= wanted, _ROWS_S, "the allocator's allocations")
    scene.checks.equal("allocations of torch's allocator", wanted, sum(row["allocations"] for row in found()))
    callers = {str(row["caller"]) for row in found() if row["allocations"]}
    scene.checks.add("their caller", any("c10_cuda" in name for name in callers), "libc10_cuda", sorted(callers))


COUNTS = Part("cuda", "`cuda.syncs`, `cuda.memory` beside the job's own counts", 60, _counts, ("nccl", "daemon"))
TORCH = Part("cuda_torch", "`cuda.launches`, graphs and torch's allocator", 75, _torch, ("torch", "daemon"))
