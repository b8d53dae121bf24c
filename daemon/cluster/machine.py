"""The state machine of one node: the calls that it makes at each tick, its answers, and its conclusions from answers.

At each tick a node pings the three nodes that follow it in a ring of hashed names, and one random node. News travels
with the pings. Digests show whether the random node has the same updates; if not, the two nodes exchange the updates
that differ.

Two nodes compare their tables in three steps: they exchange digests of buckets, then marks (hashes) of updates, then
the updates that differ.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence

from probing.daemon.cluster.keys import NodeKey, answers, is_signed, new_nonce
from probing.daemon.cluster.messages import MAX_MARKS, MAX_UPDATES, Call, Message, Purpose
from probing.daemon.cluster.record import BUCKETS, Claim, Proof, Record, Update, key_of
from probing.daemon.cluster.table import Table
from probing.daemon.cluster.view import Times, View

__all__ = ("Machine",)

REPAIR_BYTES = 8_000


def _listed(table: Table, digests: Sequence[int], rng: random.Random) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns some buckets of ``table`` whose digests differ from ``digests``, and the marks in these buckets."""
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


def _difference(table: Table, message: Message) -> tuple[tuple[Update, ...], tuple[int, ...]]:
    """Returns the updates that the sender of ``message`` lacks, and the marks of updates that ``table`` lacks."""
    theirs = set(message.marks)
    own = {mark: update for bucket in _valid(message.buckets) for mark, update in table.named(bucket)}
    lacking = _fitting([update for mark, update in own.items() if mark not in theirs])
    return lacking, tuple(theirs - own.keys())[:MAX_MARKS]


def _asked_for(table: Table, message: Message) -> tuple[Update, ...]:
    """Returns the updates that ``message`` wants."""
    wanted = set(message.wanted)
    return _fitting([u for bucket in _valid(message.buckets) for mark, u in table.named(bucket) if mark in wanted])


def _valid(buckets: Iterable[int]) -> set[int]:
    return {bucket for bucket in buckets if 0 <= bucket < BUCKETS}


def _fitting(updates: Sequence[Update], room: int = REPAIR_BYTES) -> tuple[Update, ...]:
    """Returns as many of the first ``updates`` as fit into ``room`` bytes together, at most MAX_UPDATES."""
    found = []
    for update in updates[:MAX_UPDATES]:
        room -= update.size
        if room < 0:
            break
        found.append(update)
    return tuple(found)


WATCHED = 3
RELAYS = 2
# The maximum size of the news in a message, bytes.
NEWS_BYTES = 4_000
# The maximum size of all updates in the answers between two ticks, bytes. After that, an answer contains at most
# REFERRALS updates, of random nodes.
ANSWER_BYTES = 96_000
REFERRALS = 8
# If a comparison yields this many updates, the node probably lacks more. It then compares tables again at once, at most
# TURNS times.
BEHIND = 28
TURNS = 1
# The number of ticks between two pings of a failed node, or of a seed while other nodes are reachable.
RETRY_TICKS = 5
FORGET_TICKS = 60


class Machine:
    """The state machine of one node. Not thread-safe. Callers pass all times: ``now`` is in monotonic seconds,
    ``wall_ns`` is the time of the node's wall clock.

    ``seeds``: addresses of nodes to contact first; they can be changed at any time. ``key`` signs the node's record.
    """

    def __init__(
        self,
        own: Record,
        seeds: Sequence[str] = (),
        times: Times | None = None,
        rng: random.Random | None = None,
        key: NodeKey | None = None,
    ) -> None:
        self.times = times or Times()
        self.view = View(own, self.times, key)
        self.seeds = tuple(seeds)
        self._key = key_of(own.name)
        self._rng = rng or random.Random()  # noqa: S311
        # The name of the node that answered at a seed, by the seed's address.
        self._names: dict[str, str] = {}
        self._wall_ns = 0
        self._ticks = 0
        self._answered_bytes = 0
        self._last = self._resumed = -float("inf")

    def unreached(self) -> list[str]:
        """Returns the seeds at which no node has answered."""
        return [seed for seed in self.seeds if seed not in self._names and seed != self.view.own.address]

    def tick(self, now: float, wall_ns: int) -> list[Call]:
        """Claims that silent nodes are suspect or failed, and returns the calls of this heartbeat."""
        self._clock(wall_ns)
        self._ticks += 1
        self._answered_bytes = self.view.checks = 0
        if now - self._last > self.times.suspect:
            self._resumed = now
            self.view.resume(now)
        self._last = now
        self.view.judge(now)
        if self._ticks % FORGET_TICKS == 0:
            self.view.forget()
        table = self.view.table
        other = table.pick(self._rng)
        watched = table.after(self._key, WATCHED)
        # A node that did not answer is pinged again until it counts as failed, even if it is not among the watched
        # nodes.
        missed = [name for name in self.view.silent if name in table.entries and name not in watched]
        names = [*watched, *self._rng.sample(missed, min(len(missed), WATCHED))]
        calls = [self._ping(name, now) for name in names if name != other]
        if other is not None:
            calls.append(self._ping(other, now, digests=table.digests))
        if self._ticks % RETRY_TICKS == 0 and (failed := self.view.failed()):
            calls.append(self._ping(self._rng.choice(failed), now))
        for name, address in self.view.candidates.due():
            calls.append(self._probe(name, address, now))
            if name in table.entries:
                calls.append(self._ping(name, now))
        return [*calls, *self._seed_calls(now)]

    def answer(
        self, message: Message, now: float, *, reached: bool = False, relayed: bytes = b"", certified: bool = False
    ) -> Message:
        """Returns the answer to ``message``. ``reached``: whether the node ``message.relay``, which this node pinged
        for the sender, answered; ``relayed``: the proof in that node's answer. ``certified``: whether TLS proved that
        the caller is the sender."""
        if certified:
            self.view.introduced(message.sender, now)
        self.view.hear((Update.of(message.sender), *message.updates), now)
        found = self._answer(message, reached)._replace(proof=self.view.proof_for(message.nonce), relayed=relayed)
        self._answered_bytes += sum(update.size for update in found.updates) + 8 * len(found.marks)
        return found

    def _answer(self, message: Message, reached: bool) -> Message:
        if self._answered_bytes > ANSWER_BYTES:
            return self._message(self._referrals(), reached=reached)
        if message.wanted:
            return self._message(_asked_for(self.view.table, message), reached=reached)
        buckets, marks = _listed(self.view.table, message.digests, self._rng)
        relayed = self.view.table.entries.get(message.relay)
        first = [relayed.update] if relayed and reached else []
        namesake = self.view.table.entries.get(message.sender.name)
        if namesake and namesake.update.record.uid != message.sender.uid:
            # The sender must learn that another node has the same name.
            first.append(namesake.update)
        return self._message((*first, *self._news()), buckets=buckets, marks=marks, reached=reached)

    def relay(self, name: str, now: float, nonce: bytes = b"") -> Call | None:
        """Returns the ping of ``name`` that another node requested; None if ``name`` is unknown.

        ``nonce``: the nonce of the requesting node, so that the answer proves to that node that ``name`` lives.
        """
        if name not in self.view.table.entries:
            return None
        # With Purpose.PROBE this node does not ask other nodes to ping ``name`` if ``name`` does not answer.
        call = self._ping(name, now)._replace(purpose=Purpose.PROBE)
        return call._replace(message=call.message._replace(nonce=nonce)) if nonce else call

    def answered(
        self, call: Call, message: Message, now: float, wall_ns: int, *, certified: bool = False
    ) -> list[Call]:
        """Handles the answer to ``call``. Returns further calls. ``certified``: TLS proved that ``call.name``
        answered."""
        self._clock(wall_ns)
        sender, view = message.sender, self.view
        if call.purpose is Purpose.RELAY:
            self._relayed(call, message, now)
            return []
        if sender.name == view.own.name:
            if sender.uid != view.own.uid:
                view.rival(sender, call.address, now)
            return []
        proof = Proof.CERTIFICATE if certified and sender.name == call.name else Proof.NONE
        if sender.key:
            if not is_signed(sender) or not answers(message.proof, call.message.nonce, sender):
                return self.unanswered(call, now)
            proof = max(proof, Proof.KEY)
        if not view.vouched(sender, call.address, now, proof):
            return self.unanswered(call, now)
        if call.address in self.seeds:
            self._names[call.address] = sender.name
        entry = view.table.entries.get(sender.name)
        if entry and entry.update.record.uid == sender.uid:
            view.present(entry, now)
            entry.rtt_ns = max(0, round((now - call.sent) * 1e9))
            entry.offset_ns = message.wall_ns - (call.wall_ns + wall_ns) // 2
        view.hear(message.updates, now)
        if call.name and sender.name != call.name:
            # Another node has the address now.
            return self.unanswered(call, now)
        return self._repairs(call, message, now)

    def _relayed(self, call: Call, message: Message, now: float) -> None:
        entry = self.view.table.entries.get(call.name)
        # The relay may know another address of the node, and may have reached the node after a restart. So the answer
        # counts only if the relay's record of the node has the uid that this node knows.
        reached = (u.record.uid for u in message.updates if u.record.name == call.name)
        if message.reached and entry and entry.update.record.uid in reached:
            # A node with a bound key must prove by this key that it lives: the statement of a relay is not enough.
            proven = not entry.key or answers(message.relayed, call.message.nonce, entry.update.record)
            if proven:
                self.view.present(entry, now)
        self.view.hear(message.updates, now)

    def unanswered(self, call: Call, now: float) -> list[Call]:
        """Handles a call that got no answer. Returns the calls that ask other nodes to ping the silent node."""
        table = self.view.table
        entry = table.entries.get(call.name)
        if entry is None or call.purpose is not Purpose.PING or call.address != entry.update.record.address:
            return []
        if entry.update.claim is Claim.FAILED or call.sent < self._resumed:
            return []
        if entry.heard is not None and entry.heard >= call.sent:
            return []
        self.view.missed(call.name, call.sent)
        relays = dict.fromkeys(table.pick(self._rng) for _ in range(RELAYS))
        asks = self._message(relay=call.name)
        return [
            self._call(Purpose.RELAY, call.name, table.entries[relay].update.record.address, asks, now)
            for relay in relays
            if relay is not None and relay != call.name
        ]

    def change(self, record: Record) -> None:
        """Announces ``record`` as the node's own, with the next incarnation."""
        self.view.announce(record._replace(incarnation=self.view.own.incarnation + 1))

    def _clock(self, wall_ns: int) -> None:
        self._wall_ns = wall_ns
        self.view.wall_s = wall_ns // 10**9

    def _seed_calls(self, now: float) -> list[Call]:
        table = self.view.table
        if not self.seeds or (table.live and self._ticks % RETRY_TICKS):
            return []
        live = {name for name in self._names.values() if name in table.entries and name not in self.view.silent}
        asked = [s for s in self.seeds if self._names.get(s) not in live and s != self.view.own.address]
        return [self._probe("", seed, now) for seed in self._rng.sample(asked, min(len(asked), WATCHED))]

    def _ping(self, name: str, now: float, *, digests: tuple[int, ...] = ()) -> Call:
        update = self.view.table.entries[name].update
        # A node must learn of claims about itself, so that it can refute them.
        claimed = () if update.claim is Claim.ALIVE else (update,)
        message = self._message((*claimed, *self._news()), digests=digests)
        return self._call(Purpose.PING, name, update.record.address, message, now)

    def _probe(self, name: str, address: str, now: float) -> Call:
        message = self._message(self._news(), digests=self.view.table.digests)
        return self._call(Purpose.PROBE, name, address, message, now)

    def _repairs(self, call: Call, message: Message, now: float) -> list[Call]:
        """After a comparison, returns a call that sends the updates that the answering node lacks and requests the
        updates that this node lacks. After such a call, returns another comparison if the answer had BEHIND updates or
        more.
        """
        if call.purpose is Purpose.REPAIR:
            if len(message.updates) < BEHIND or call.turn >= TURNS:
                return []
            return [self._probe(call.name, call.address, now)._replace(turn=call.turn + 1)]
        lacking, wanted = _difference(self.view.table, message)
        if not lacking and not wanted:
            return []
        asks = self._message(lacking, buckets=message.buckets, wanted=wanted)
        return [self._call(Purpose.REPAIR, call.name, call.address, asks, now)._replace(turn=call.turn)]

    def _call(self, purpose: Purpose, name: str, address: str, message: Message, now: float) -> Call:
        message = message._replace(nonce=new_nonce())
        return Call(purpose, name, address, message, 0.8 * self.times.heartbeat, now, self._wall_ns)

    def _message(
        self,
        updates: tuple[Update, ...] = (),
        *,
        digests: tuple[int, ...] = (),
        buckets: tuple[int, ...] = (),
        marks: tuple[int, ...] = (),
        wanted: tuple[int, ...] = (),
        relay: str = "",
        reached: bool = False,
    ) -> Message:
        return Message(self.view.own, self._wall_ns, updates, digests, buckets, marks, wanted, relay, reached)

    def _referrals(self) -> tuple[Update, ...]:
        names = {self.view.table.pick(self._rng) for _ in range(REFERRALS)}
        updates = [self.view.table.entries[name].update for name in names if name is not None]
        return _fitting(updates, NEWS_BYTES)

    def _news(self) -> tuple[Update, ...]:
        return self.view.rumors.take(NEWS_BYTES, MAX_UPDATES, self.view.table.live)
