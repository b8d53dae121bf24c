"""Says why dumps of the flight recorder cannot be of one job at one moment."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from probing.api.text import ranks_of, time_text
from probing.diagnosis.flight_recorder.dump import RankDump
from probing.diagnosis.words import clean

__all__ = ("contradictions",)

# Ranks that wait for each other call at nearly the same time; the longest usual time-out is half an hour.
_APART_NS = 3_600 * 10**9
# These end on no rank before all ranks have called them: a root may send and go on.
_TOGETHER = frozenset(("all_reduce", "allreduce", "all_gather", "reduce_scatter", "all_to_all", "barrier"))


def contradictions(dumps: Sequence[RankDump]) -> tuple[str, ...]:
    """Returns a sentence for each thing that dumps of one job at one moment cannot show; none where they may be."""
    found = (_worlds(dumps), _groups(dumps), _times(dumps), _calls(dumps))
    return tuple(text for each in found for text in each)


def _worlds(dumps: Sequence[RankDump]) -> Iterator[str]:
    worlds = {dump.world for dump in dumps if dump.world}
    if len(worlds) > 1:
        yield f"the dumps are of {len(worlds)} jobs, with other ranks: ask for each alone"


def _groups(dumps: Sequence[RankDump]) -> Iterator[str]:
    members: dict[str, tuple[int, ...]] = {}
    for dump in dumps:
        for group in dump.groups:
            if members.setdefault(group.name, group.ranks) != group.ranks:
                yield f"group {clean(group.name)} of rank {dump.rank} has other ranks than in other dumps"
                return


def _times(dumps: Sequence[RankDump]) -> Iterator[str]:
    newest = {dump.rank: max((one.created_ns or 0 for one in dump.records), default=0) for dump in dumps}
    called = {rank: at for rank, at in newest.items() if at}
    if not called:
        return
    last = max(called.values())
    old = [rank for rank, at in called.items() if last - at > _APART_NS]
    if old:
        apart = time_text(last - max(called[rank] for rank in old))
        yield f"the last call of {ranks_of(old)} is {apart} older than that of other ranks"


def _calls(dumps: Sequence[RankDump]) -> Iterator[str]:
    called = {dump.rank: {group.name: seq for group, seq in dump.called.items()} for dump in dumps}
    for dump in dumps:
        ended = {one.group: one for one in dump.records if one.completed and one.op in _TOGETHER}
        for group, record in ended.items():
            behind = [r for r in group.ranks if r in called and called[r].get(group.name, record.seq) < record.seq]
            if behind:
                call = f"{record.op} seq {record.seq} of {clean(group.desc or group.name)}"
                yield f"{call} has completed on rank {dump.rank}, and not been called on {ranks_of(behind)}"
                return
