"""The comparison of two tables: by digests of buckets, then by marks of updates, then the updates that differ."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence

from probing.daemon.cluster.messages import MAX_MARKS, MAX_UPDATES, Message
from probing.daemon.cluster.record import BUCKETS, Update
from probing.daemon.cluster.table import Table

__all__ = ("asked_for", "difference", "fitting", "listed")

REPAIR_BYTES = 8_000


def listed(table: Table, digests: Sequence[int], rng: random.Random) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns some buckets of ``table`` whose digests differ from ``digests``, and the marks in them."""
    if len(digests) != BUCKETS:
        return (), ()
    different = [b for b, (own, other) in enumerate(zip(table.digests, digests, strict=True)) if own != other]
    rng.shuffle(different)
    chosen: list[int] = []
    marks: list[int] = []
    for bucket in different:
        found = table.marks(bucket)
        if chosen and len(marks) + len(found) > MAX_MARKS:
            break
        chosen.append(bucket)
        marks += found[:MAX_MARKS]
    return tuple(chosen), tuple(marks)


def difference(table: Table, message: Message) -> tuple[tuple[Update, ...], tuple[int, ...]]:
    """Returns the updates that the sender of ``message`` lacks, and the marks of those that ``table`` lacks."""
    theirs = set(message.marks)
    own = {mark: update for bucket in _valid(message.buckets) for mark, update in table.named(bucket)}
    lacking = fitting([update for mark, update in own.items() if mark not in theirs])
    return lacking, tuple(theirs - own.keys())[:MAX_MARKS]


def asked_for(table: Table, message: Message) -> tuple[Update, ...]:
    """Returns the updates that ``message`` wants."""
    wanted = set(message.wanted)
    return fitting([u for bucket in _valid(message.buckets) for mark, u in table.named(bucket) if mark in wanted])


def _valid(buckets: Iterable[int]) -> set[int]:
    return {bucket for bucket in buckets if 0 <= bucket < BUCKETS}


def fitting(updates: Sequence[Update], room: int = REPAIR_BYTES) -> tuple[Update, ...]:
    """Returns the first of ``updates`` that fit into ``room`` bytes."""
    found = []
    for update in updates[:MAX_UPDATES]:
        room -= update.size
        if room < 0:
            break
        found.append(update)
    return tuple(found)
