"""The table of nodes, the news to pass on (``Rumors``), and possible new addresses of nodes (``Candidates``).

Each update is passed on a limited number of times; updates that were passed on least often go first. A possible new
address of a node is used only after the node has answered there.
"""

from __future__ import annotations

import random
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from probing.daemon.cluster.record import BUCKETS, Claim, Proof, Update, bucket_of, key_of

__all__ = ("MAX_MEMBERS", "Candidates", "Entry", "Rumors", "Table")

MAX_MEMBERS = 16_384


@dataclass(slots=True)
class Entry:
    """The entry of a node. Times are monotonic seconds. ``changed``: when the claim changed; ``heard``: when the node
    last answered this node; ``missing``: since when it has not answered; ``returned``: when it came back after a
    failure. ``place``: the node's key, which is its position in the ring. ``problem``: the time when another node with
    the same name was last seen, and a text about it. ``key``: the public key that ``proof`` bound to the node's name;
    empty if no key is bound."""

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
        """Whether nothing indicates that the node is gone."""
        return self.update.claim is Claim.ALIVE and self.missing is None


class Table:
    """The entries of the other nodes, by name. The ring has the nodes that have not failed, ordered by the hash of
    their names.
    """

    def __init__(self, own: Update) -> None:
        self.entries: dict[str, Entry] = {}
        self.refused = 0
        # The number of nodes of each host; most hosts have one node.
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
        """Returns a hash of each bucket; two nodes with the same updates have equal digests."""
        return tuple(self._digests)

    @property
    def live(self) -> int:
        """The number of other nodes that have not failed."""
        return len(self._ring)

    def put(self, update: Update, now: float, proof: Proof = Proof.NONE) -> Entry | None:
        """Stores ``update``, which replaces the node's older update. Returns the entry; None if the table has no room
        for a new node.

        ``proof``: how a new node proved its name. A proven node may replace an unproven node.
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
        """Returns the marks of all updates of ``bucket``, including the node's own update."""
        return list(self._buckets[bucket].values())

    def named(self, bucket: int) -> Iterator[tuple[int, Update]]:
        """Yields each mark of ``bucket`` with its update."""
        for name, mark in self._buckets[bucket].items():
            yield mark, self._own if name == self._own.record.name else self.entries[name].update

    def _make_room(self, proof: Proof) -> bool:
        """Drops a failed node, preferably an unproven node. Returns whether there is room.

        If no node has failed and the new node has a proof, drops an unproven node that never answered.
        """
        # The entries are searched for a failed node only if there is one: an attacker may send hundreds of invented
        # names, and each name would cost a search.
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


# While more updates than this wait to be passed on, each update is passed on only SENDS_BUSY times, and the comparison
# of tables spreads the rest. That costs fewer bytes: a comparison sends only updates that a node lacks, but news may
# reach a node twice, each time with a signature, which cannot be compressed.
BUSY = 6
SENDS_BUSY = 2


class Rumors:
    """The updates to pass on, by name of the node. A newer update of a node replaces its older update."""

    def __init__(self) -> None:
        # Updates by the number of times they were sent; a dict keeps the order of arrival.
        self._by_sends: list[dict[str, Update]] = [{}]
        self._sends: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._sends)

    @property
    def busy(self) -> bool:
        """Whether there is so much news that updates are left to the comparison of tables."""
        return len(self._sends) >= BUSY

    def add(self, update: Update) -> None:
        self.drop(update.record.name)
        self._sends[update.record.name] = 0
        self._by_sends[0][update.record.name] = update

    def drop(self, name: str) -> None:
        sends = self._sends.pop(name, None)
        if sends is not None:
            del self._by_sends[sends][name]

    def take(self, room: int, most: int, nodes: int) -> tuple[Update, ...]:
        """Returns news of at most ``room`` bytes and ``most`` updates, and counts them as passed on."""
        limit = SENDS_BUSY if len(self._sends) > BUSY else 2 * max(nodes, 2).bit_length()
        taken: list[Update] = []
        for update in self._in_order():
            if len(taken) >= most or update.size > room:
                break
            room -= update.size
            taken.append(update)
        for update in taken:
            self._count(update, limit)
        return tuple(taken)

    def _in_order(self) -> Iterator[Update]:
        for level in self._by_sends:
            yield from level.values()

    def _count(self, update: Update, limit: int) -> None:
        name = update.record.name
        sends = self._sends[name]
        self.drop(name)
        if sends + 1 >= limit:
            return
        while len(self._by_sends) <= sends + 1:
            self._by_sends.append({})
        self._sends[name] = sends + 1
        self._by_sends[sends + 1][name] = update


MAX_CANDIDATES = 64
# The number of pings of a candidate, and the time after which the candidate may be added again, s.
TRIES = 3
AGAIN_S = 30.0


class Candidates:
    """Possible new addresses of nodes: when each was added, and how many times it is still to be pinged."""

    def __init__(self) -> None:
        self._since: dict[tuple[str, str], float] = {}
        self._left: dict[tuple[str, str], int] = {}

    def add(self, name: str, address: str, now: float) -> None:
        """Adds ``address``, unless it was added recently or there are too many addresses."""
        key = name, address
        if key in self._since and now - self._since[key] < AGAIN_S:
            return
        if len(self._since) >= MAX_CANDIDATES:
            oldest = min(self._since, key=self._since.__getitem__)
            if self._left.get(oldest) or now - self._since[oldest] < AGAIN_S:
                return
            del self._since[oldest]
        self._since[key], self._left[key] = now, TRIES

    def since(self, name: str, address: str) -> float:
        """Returns the time at which the address was added; infinity if it was not added."""
        return self._since.get((name, address), float("inf"))

    def due(self) -> list[tuple[str, str]]:
        """Returns (name, address) of the candidates to ping now, and counts the pings."""
        asked = [key for key, left in self._left.items() if left]
        for key in asked:
            self._left[key] -= 1
        for key in [key for key, left in self._left.items() if not left]:
            del self._left[key]
        return asked
