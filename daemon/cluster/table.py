"""The table of known nodes: which of two claims holds, digests of buckets, the ring, and bounds."""

from __future__ import annotations

import random
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from probing.daemon.cluster.record import BUCKETS, Claim, Proof, Update, bucket_of, key_of

__all__ = ("MAX_MEMBERS", "Entry", "Table")

MAX_MEMBERS = 16_384


@dataclass(slots=True)
class Entry:
    """A node. Times are monotonic seconds: ``changed`` when the claim did, ``heard`` of the last answer to this node,
    ``missing`` since when it has not answered, ``returned`` when it came back after a failure. ``problem`` is the time
    at which another node of its name was found, and a text. ``key`` is the only one that counts for its name from
    ``proof`` on; empty where none was bound to it."""

    update: Update
    place: int
    changed: float
    heard: float | None = None
    missing: float | None = None
    returned: float | None = None
    rtt_ns: int | None = None
    offset_ns: int | None = None
    problem: tuple[float, str] | None = None
    key: bytes = b""
    proof: Proof = Proof.NONE

    @property
    def live(self) -> bool:
        """Whether nothing says that it is gone."""
        return self.update.claim is Claim.ALIVE and self.missing is None


class Table:
    """Entries by name, without the node itself. The ring holds those that have not failed, by their keys."""

    def __init__(self, own: Update) -> None:
        self.entries: dict[str, Entry] = {}
        self.refused = 0
        # Nodes by host: most have one.
        self.hosts: Counter[str] = Counter()
        self._own = own
        self._ring: list[tuple[int, str]] = []
        self._digests = [0] * BUCKETS
        self._buckets: list[dict[str, int]] = [{} for _ in range(BUCKETS)]
        self._note(own, key_of(own.record.name))

    @property
    def own(self) -> Update:
        return self._own

    @own.setter
    def own(self, update: Update) -> None:
        self._own = update
        self._note(update, key_of(update.record.name))

    @property
    def digests(self) -> tuple[int, ...]:
        """A hash of each bucket, equal at nodes that know the same."""
        return tuple(self._digests)

    @property
    def live(self) -> int:
        """How many other nodes have not failed."""
        return len(self._ring)

    def put(self, update: Update, now: float, proof: Proof = Proof.NONE) -> Entry | None:
        """Stores ``update``, which holds from now on. Returns None for a new node that the table has no room for.

        ``proof``: what proves a new node. One that has proven itself takes the place of one that has not.
        """
        name = update.record.name
        entry = self.entries.get(name)
        if entry is None:
            if len(self.entries) >= MAX_MEMBERS - 1 and not self._make_room(proof):
                self.refused += 1
                return None
            entry = self.entries[name] = Entry(update, key_of(name), now)
            self.hosts[update.record.host] += 1
            self._place(entry)
        else:
            self._place(entry, remove=True)
            self._count_out(entry)
            self.hosts[update.record.host] += 1
            if update.claim is not entry.update.claim:
                entry.changed = now
            entry.update = update
            self._place(entry)
        self._note(update, entry.place)
        return entry

    def remove(self, name: str) -> None:
        entry = self.entries.pop(name)
        self._place(entry, remove=True)
        self._count_out(entry)
        bucket = bucket_of(entry.place)
        self._digests[bucket] ^= self._buckets[bucket].pop(name)

    def after(self, key: int, count: int) -> list[str]:
        """Returns the ``count`` nodes of the ring that follow ``key``."""
        ring = self._ring
        start = bisect_left(ring, (key, ""))
        return [ring[(start + i) % len(ring)][1] for i in range(min(count, len(ring)))]

    def pick(self, rng: random.Random) -> str | None:
        """Returns a node that has not failed; None if there is none."""
        return self._ring[rng.randrange(len(self._ring))][1] if self._ring else None

    def marks(self, bucket: int) -> list[int]:
        """Returns the marks of all updates of ``bucket``, the node's own among them."""
        return list(self._buckets[bucket].values())

    def named(self, bucket: int) -> Iterator[tuple[int, Update]]:
        """Yields each mark of ``bucket`` with its update."""
        for name, mark in self._buckets[bucket].items():
            yield mark, self._own if name == self._own.record.name else self.entries[name].update

    def _make_room(self, proof: Proof) -> bool:
        """Forgets a failed node, first one without a proof; for a new node with a proof also a living node without."""
        # Without a look at all where none has failed, as invented names may come by hundreds.
        gone = self.live < len(self.entries)
        failed = [e for e in self.entries.values() if e.update.claim is Claim.FAILED] if gone else []
        if not failed and proof > Proof.HEARD:
            failed = [e for e in self.entries.values() if e.proof <= Proof.HEARD and e.heard is None]
        if failed:
            self.remove(min(failed, key=lambda e: (e.proof > Proof.HEARD, e.changed)).update.record.name)
        return bool(failed)

    def _count_out(self, entry: Entry) -> None:
        host = entry.update.record.host
        self.hosts[host] -= 1
        if not self.hosts[host]:
            del self.hosts[host]

    def _note(self, update: Update, key: int) -> None:
        bucket = bucket_of(key)
        self._digests[bucket] ^= self._buckets[bucket].get(update.record.name, 0) ^ update.mark
        self._buckets[bucket][update.record.name] = update.mark

    def _place(self, entry: Entry, *, remove: bool = False) -> None:
        if entry.update.claim is Claim.FAILED:
            return
        item = (entry.place, entry.update.record.name)
        if remove:
            del self._ring[bisect_left(self._ring, item)]
        else:
            insort(self._ring, item)
