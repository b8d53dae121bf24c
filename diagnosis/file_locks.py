"""Ranks that wait for the lock of a file that another rank of the job holds, as edges of the wait-for graph."""

from __future__ import annotations

from collections.abc import Iterable

from probing.diagnosis.facts import Rank
from probing.diagnosis.wait_graph import Pending, WaitGraph
from probing.diagnosis.waits import FILE_LOCK, Wait, halted

__all__ = ("with_file_locks",)


def with_file_locks(graph: WaitGraph, ranks: Iterable[Rank]) -> WaitGraph:
    """Returns ``graph`` with the ranks that wait for a file lock, which wait in no operation, and for whom."""
    living = [rank for rank in ranks if rank.exit is None]
    pids = {(rank.node, rank.pid): rank.rank for rank in living}
    waiters: dict[int, list[int]] = {}
    waits: dict[int, Wait] = {}
    for rank in living:
        condition = rank.condition
        if condition is None or condition.lock_holder is None or rank.rank in graph.waits or halted(rank):
            continue
        holder = pids.get((rank.node, condition.lock_holder))
        if holder is not None and holder != rank.rank:
            waiters.setdefault(holder, []).append(rank.rank)
            waits[rank.rank] = Wait(None, None, FILE_LOCK, condition.asleep_since_ns)
    if not waits:
        return graph
    locks = [Pending(None, None, FILE_LOCK, tuple(own), frozenset((holder,))) for holder, own in waiters.items()]
    return WaitGraph({**graph.waits, **waits}, [*graph.operations, *locks])
