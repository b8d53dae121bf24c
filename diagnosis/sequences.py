"""The collectives of each communicator, with sequence numbers that match across its ranks where known, and the progress
of each rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from probing.diagnosis.facts import MAX_RANKS, Communicator, Facts, Operation, Rank
from probing.diagnosis.waits import is_p2p

__all__ = ("Sequence", "Signature", "mixed_comms", "sequences_of", "signature", "world_of")

Signature = tuple[str | None, str | None, int | None, str | None]


def signature(one: Operation) -> Signature:
    """Returns the values of a collective that must be equal on all ranks: name, dtype, count and reduction."""
    return one.op, one.dtype, one.count, one.redop


@dataclass(frozen=True)
class Sequence:
    """The collectives of one communicator. ``counted``: whether their numbers agree between ranks.

    They do not agree if sequence numbers are unknown, or if gloo also counted sends and receives of which some were not
    recorded. ``members``: the known members, as ranks of the job; ``unidentified``: the number of the other members.
    """

    comm: str
    communicator: Communicator | None
    members: tuple[int, ...]
    unidentified: int
    counted: bool
    numbers: Mapping[int, Mapping[int, Operation]] = field(default_factory=dict)
    """The collectives, by rank and number."""
    called: Mapping[int, int] = field(default_factory=dict)
    """The highest number that each rank has called."""
    gaps: frozenset[int] = frozenset()
    """The ranks with gaps between their recorded operations."""

    @cached_property
    def names(self) -> Mapping[int, int]:
        """Maps the ranks of members in the communicator to their ranks in the job."""
        return {m.comm_rank: m.rank for m in self.communicator.members} if self.communicator else {}

    @cached_property
    def last(self) -> int:
        """The highest number that any rank has called."""
        return max(self.called.values(), default=0)

    @cached_property
    def known(self) -> frozenset[int]:
        """The known members."""
        return frozenset(self.members)

    @cached_property
    def complete(self) -> bool:
        """Whether all calls of all members in the window are known, with numbers that agree between ranks."""
        seen = {rank for rank, numbers in self.numbers.items() if numbers}
        return self.counted and not self.gaps and not self.unidentified and seen >= self.known

    def at(self, number: int) -> dict[int, Operation]:
        """Returns the collective ``number`` of each rank for which it was recorded."""
        return {rank: own[number] for rank, own in self.numbers.items() if number in own}

    def number(self, rank: int, seq: int | None) -> int | None:
        """Returns the common number of the collective that has the sequence number ``seq`` on ``rank``."""
        if seq is None or not self.counted:
            return None
        own = self.numbers.get(rank, {})
        if seq in own and own[seq].seq == seq:
            return seq
        return next((number for number, one in own.items() if one.seq == seq), seq)

    def job_rank(self, comm_rank: int | None) -> int | None:
        """Returns the rank in the job that has this rank in the communicator."""
        return None if comm_rank is None else self.names.get(comm_rank, comm_rank)


def world_of(facts: Facts) -> range:
    """Returns the ranks of the job according to its world size; empty if that size is unknown or above MAX_RANKS."""
    size = facts.world_size or 0
    return range(size if size <= MAX_RANKS else 0)


def mixed_comms(ranks: Iterable[Rank]) -> frozenset[str]:
    """Returns the communicators whose sequence numbers also count sends and receives."""
    return frozenset(
        one.comm
        for rank in ranks
        for part in (rank.open, rank.done, rank.progress)
        for one in part
        if one.seq is not None and is_p2p(one.op)
    )


def sequences_of(facts: Facts) -> dict[str, Sequence]:
    """Returns the sequence of each communicator in ``facts``."""
    known = {c.comm: c for c in facts.communicators}
    names = dict.fromkeys(known)
    for rank in facts.ranks:
        names.update(dict.fromkeys([*(o.comm for o in rank.open), *(p.comm for p in rank.progress)]))
    users: dict[str, list[Rank]] = {comm: [] for comm in names}
    for rank in facts.ranks:
        for comm in dict.fromkeys([*(p.comm for p in rank.progress), *(o.comm for o in (*rank.open, *rank.done))]):
            users.setdefault(comm, []).append(rank)
    return {comm: _sequence(comm, known.get(comm), own, facts) for comm, own in users.items()}


def _sequence(comm: str, communicator: Communicator | None, users: list[Rank], facts: Facts) -> Sequence:
    members = tuple(dict.fromkeys(m.rank for m in communicator.members)) if communicator else ()
    size = communicator.size if communicator else None
    if size is not None and size == len(world := world_of(facts)):
        members = tuple(world)
    members = tuple(dict.fromkeys((*members, *(r.rank for r in users))))
    unidentified = max(0, size - len(members)) if size is not None else 0
    own = {r.rank: [o for o in (*r.done, *r.open) if o.comm == comm] for r in users}
    called = {r.rank: p.seq for r in users for p in r.progress if p.comm == comm and p.seq is not None}
    mixed = any(is_p2p(o.op) and o.seq is not None for ops in own.values() for o in ops)
    mixed = mixed or any(is_p2p(p.op) and p.seq is not None for r in users for p in r.progress if p.comm == comm)
    if mixed:
        return _renumbered(Sequence(comm, communicator, members, unidentified, False), own)
    numbers = {rank: {o.seq: o for o in ops if o.seq is not None and not is_p2p(o.op)} for rank, ops in own.items()}
    for rank, found in numbers.items():
        if found:
            called[rank] = max(called.get(rank, 0), *found)
    counted = all(o.seq is not None for ops in own.values() for o in ops if not is_p2p(o.op))
    gaps = frozenset(rank for rank, found in numbers.items() if found and _has_gaps(found, called[rank]))
    return Sequence(comm, communicator, members, unidentified, counted, numbers, called, gaps)


def _renumbered(empty: Sequence, own: Mapping[int, list[Operation]]) -> Sequence:
    # gloo counts the sends and receives of a rank together with its collectives (ProcessGroupGloo::send, seq_). If all
    # operations of each rank were recorded, its collectives can be counted alone.
    numbers: dict[int, dict[int, Operation]] = {}
    for rank, ops in own.items():
        ordered = sorted((o.seq, n) for n, o in enumerate(ops) if o.seq is not None)
        if len(ordered) < len(ops) or not ordered or ordered[0][0] > 1 or _has_gaps([s for s, _ in ordered], None):
            return empty
        collectives = [ops[n] for _, n in ordered if not is_p2p(ops[n].op)]
        numbers[rank] = dict(enumerate(collectives, 1))
    called = {rank: len(found) for rank, found in numbers.items()}
    return Sequence(empty.comm, empty.communicator, empty.members, empty.unidentified, True, numbers, called)


def _has_gaps(numbers: Iterable[int], last: int | None) -> bool:
    found = sorted(numbers)
    return len(found) != found[-1] - found[0] + 1 or (last is not None and last > found[-1])
