"""Tables of many simulated nodes with the same entries: one copy for all nodes, and each node's own changes."""

from __future__ import annotations

import random
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from copy import copy

from probing.daemon.cluster.record import Claim, Proof, Update
from probing.daemon.cluster.table import Entry, Table

__all__ = ("SharedTable", "common")


class _Entries(dict[str, Entry]):
    """The node's own entries; other entries are copied from ``base`` when they are asked for."""

    def __init__(self, base: dict[str, Entry], own: str) -> None:
        super().__init__()
        self._base = base
        self._own = own

    def get(self, name: str, default: Entry | None = None) -> Entry | None:  # type: ignore[override]
        return self[name] if name in self else default  # noqa: SIM401

    def __contains__(self, name: object) -> bool:
        return name != self._own and (super().__contains__(name) or name in self._base)

    def __missing__(self, name: str) -> Entry:
        if name == self._own:
            raise KeyError(name)
        self[name] = found = copy(self._base[name])
        return found

    def __len__(self) -> int:
        return len(self._base) - 1 + sum(name not in self._base for name in self)


class SharedTable(Table):
    """A table that begins with the entries of ``base``."""

    def __init__(self, own: Update, base: Table) -> None:
        super().__init__(own)
        self.entries = _Entries(base.entries, own.record.name)
        self._base = base
        self._gone: set[str] = {own.record.name}
        self._digests = list(base._digests)
        self._buckets = list(base._buckets)
        self._copied: set[int] = set()

    @property
    def live(self) -> int:
        return len(self._base._ring) + len(self._ring) - len(self._gone)

    def after(self, key: int, count: int) -> list[str]:
        ring = self._base._ring
        start = bisect_left(ring, (key, ""))
        found: list[str] = []
        for i in range(len(ring)):
            name = ring[(start + i) % len(ring)][1]
            if name not in self._gone:
                found.append(name)
            if len(found) == count:
                break
        return found

    def pick(self, rng: random.Random) -> str | None:
        while True:
            name = rng.choice(self._base._ring)[1]
            if name not in self._gone:
                return name

    def named(self, bucket: int) -> Iterator[tuple[int, Update]]:
        for name, mark in self._buckets[bucket].items():
            yield mark, self._own if name == self._own.record.name else self.entries[name].update

    def _note(self, update: Update, key: int) -> None:
        bucket = key % len(self._buckets)
        if hasattr(self, "_copied") and bucket not in self._copied:
            self._copied.add(bucket)
            self._buckets[bucket] = dict(self._buckets[bucket])
        super()._note(update, key)

    def _place(self, entry: Entry, *, remove: bool = False) -> None:
        name = entry.update.record.name
        if name not in self._base.entries:
            super()._place(entry, remove=remove)
        elif entry.update.claim is not Claim.FAILED:
            (self._gone.add if remove else self._gone.discard)(name)


def common(updates: Sequence[Update]) -> Table:
    """Returns a table of all ``updates``, to be shared."""
    table = Table(updates[0])
    for update in updates:
        if entry := table.put(update, 0.0):
            entry.key, entry.proof = update.record.key, Proof.HEARD
    return table
