"""What parts with jobs share: when the daemon sees a job, its rows of operations, and their comparison."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from gpu_kit import comparisons
from gpu_kit.scene import Scene, until
from gpu_kit.work import Answer, Job

__all__ = ("FIVE", "SEEN_S", "SEVEN", "TWENTY_THREE", "burst", "compare", "rows_since", "warmed")

# Primes, so that no count can be mistaken for another or for a multiple of it.
TWENTY_THREE, SEVEN, FIVE = 23, 7, 5
# From the start of a job until its operations are seen: a libnccl with all of its symbols takes seconds.
SEEN_S = 30.0
_ROWS_S = 15.0
# A second of operations.
_STEADILY = "warm 50 0.02"
_COLUMNS = (
    "pid, op, count, root, peer, comm, comm_rank, comm_size, seq, state, error, timing_source,"
    " epoch_ns(t_call) AS called, epoch_ns(t_done_lo) AS done_lo, epoch_ns(t_done_hi) AS done_hi"
)


def rows_since(scene: Scene, pid: int, begun_ns: int) -> list[dict[str, Any]]:
    """Returns the operations that a process has called since ``begun_ns``, UTC, in the order of the calls."""
    where = f"pid = {pid} AND epoch_ns(ts) >= {begun_ns}"
    return scene.daemon.rows(f"SELECT {_COLUMNS} FROM comm.ops WHERE {where} ORDER BY ts, seq")


def warmed(scene: Scene, job: Job, seconds: float = SEEN_S) -> None:
    """Lets the ranks make operations, steadily, until the daemon has seen ended ones of each. Raises TimeoutError.

    What counts as a hang depends on the longest pause between operations, so the next are always asked for already.
    """
    pids = ", ".join(map(str, job.pids))
    job.tell(_STEADILY)

    def seen() -> bool:
        job.tell(_STEADILY)
        rows = scene.daemon.rows(f"SELECT DISTINCT pid FROM comm.ops WHERE pid IN ({pids})")
        job.hear()
        return len(rows) == job.size

    until(seen, seconds, "operations of all ranks")
    job.hear()


def burst(scene: Scene, job: Job, command: str, label: str = "") -> list[Answer]:
    """Lets the ranks make a burst of operations, and compares the rows with the calls of each; returns the answers."""
    answers = job.do(f"burst {command}", 60)
    for rank, answer in enumerate(answers):
        compare(scene, job, rank, answer, f"{label}rank {rank}: " if job.size > 1 else label)
    return answers


def compare(scene: Scene, job: Job, rank: int, answer: Answer, label: str) -> list[dict[str, Any]]:
    """Compares the rows of one rank with the calls of a burst; returns the rows."""
    calls, pid = answer["calls"], job.pids[rank]

    def enough() -> list[dict[str, Any]]:
        found = rows_since(scene, pid, answer["begun"])
        return found if len(found) >= len(calls) else []

    try:
        rows = until(enough, _ROWS_S, "all rows", poll_s=0.2)
    except TimeoutError:
        rows = rows_since(scene, pid, answer["begun"])
    names = ", ".join(f"{count} {op}" for op, count in Counter(call["op"] for call in calls).items())
    scene.checks.no_problems(f"{label}calls", names, comparisons.operations(calls, rows))
    if len(rows) != len(calls):
        return rows
    scene.checks.equal(f"{label}state", {"done": len(rows)}, dict(Counter(row["state"] for row in rows)))
    _compare_ends(scene, answer, rows, job, rank, label)
    return rows


def _compare_ends(
    scene: Scene, answer: Answer, rows: Sequence[dict[str, Any]], job: Job, rank: int, label: str
) -> None:
    ends = [call.get("end") for call in answer["calls"]]
    if scene.machine.rehearsal:
        lines = job.truth(rank)
        ends = list(comparisons.truth_ends(lines, answer["begun"] - answer["offset"], answer["offset"]))
    if all(end is None for end in ends) or len(ends) != len(rows):
        scene.checks.skip(f"{label}ends", "no times of the ends were kept")
        return
    wanted = "each end of CUDA's events lies in t_done_lo to t_done_hi"
    scene.checks.no_problems(f"{label}ends", wanted, comparisons.ends(ends, rows))
    widths = [row["done_hi"] - row["done_lo"] for row in rows if row["done_lo"] and row["done_hi"]]
    if widths:
        sources = dict(Counter(row["timing_source"] for row in rows))
        middle = sorted(widths)[len(widths) // 2] / 1e6
        scene.checks.measured(f"{label}width of the interval", f"{middle:.2f} ms in the middle, by {sources}")
