"""What one node believes of the others: what it takes from hearsay, what answers prove, what silence means."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from probing.daemon.cluster.candidates import Candidates
from probing.daemon.cluster.record import MAX_INCARNATION, Claim, Record, Update
from probing.daemon.cluster.rumors import Rumors
from probing.daemon.cluster.table import Entry, Table

__all__ = ("Times", "View")

# Failed nodes are forgotten after a day.
FORGET_S = 86_400
# An incarnation may be so far above the known one, or above the clock.
MAX_LEAP = 1 << 33
# What was found of two nodes with one name holds so long, s; it is found again while it lasts.
CONFLICT_S = 90.0
# Nodes with this node's name, with which it does not compete for the highest incarnation.
MAX_RIVALS = 64


class Times(NamedTuple):
    """Seconds: between two pings of a watched node, and without an answer until it is suspect, then failed."""

    heartbeat: float = 1.0
    suspect: float = 2.0
    failed: float = 5.0


class View:
    """``lies`` counts claims that the node itself knows to be wrong, ``silent`` are nodes that have not answered it.

    ``wall_s`` is the node's clock. Hearsay adds nodes and makes known ones suspect, no more: each node waits itself
    whether the accused one refutes it, and a live node keeps its address until the new one answers in its name.
    """

    def __init__(self, own: Record, times: Times) -> None:
        self.table = Table(Update.of(own))
        self.rumors = Rumors()
        self.rumors.add(self.table.own)
        self.candidates = Candidates()
        self.silent: set[str] = set()
        self.lies = 0
        self.wall_s = 0
        self._times = times
        self._suspected: set[str] = set()
        self._rivals: set[int] = set()
        self._conflict: tuple[float, str] | None = None

    @property
    def own(self) -> Record:
        return self.table.own.record

    def announce(self, record: Record) -> None:
        """Makes ``record`` the node's own."""
        self.table.own = Update.of(record)
        self.rumors.add(self.table.own)

    def state_of(self, entry: Entry, now: float) -> str:
        """Returns healthy, suspect, failed or recovering."""
        if entry.update.claim is not Claim.ALIVE:
            return entry.update.claim.name.lower()
        back = entry.returned is not None and now - entry.returned < self._times.failed
        return "recovering" if back else "healthy"

    def conflict(self, now: float) -> str:
        """Returns which other node answers by this node's name; empty if none does."""
        return self._conflict[1] if self._conflict and now - self._conflict[0] < CONFLICT_S else ""

    def problem_of(self, entry: Entry, now: float) -> str:
        """Returns which other node answers by the name of this one; empty if none does."""
        return entry.problem[1] if entry.problem and now - entry.problem[0] < CONFLICT_S else ""

    def failed(self) -> list[str]:
        if self.table.live == len(self.table.entries):
            return []
        return [name for name, e in self.table.entries.items() if e.update.claim is Claim.FAILED]

    # Silence.

    def resume(self, now: float) -> None:
        """Forgets silence and starts suspicion anew: this node itself stood still, or has just started."""
        for name in self.silent | self._suspected:
            if entry := self.table.entries.get(name):
                entry.missing, entry.changed = None, now

    def missed(self, name: str, since: float) -> None:
        """Notes that ``name`` did not answer a ping sent at ``since``."""
        entry = self.table.entries[name]
        if entry.missing is None:
            recent = entry.heard is not None and since - entry.heard < 2 * self._times.heartbeat
            entry.missing = entry.heard if recent else since
        self.silent.add(name)

    def present(self, entry: Entry, now: float) -> None:
        """Notes that the node of ``entry`` answered."""
        entry.missing, entry.heard = None, now
        self.silent.discard(entry.update.record.name)

    def judge(self, now: float) -> None:
        """Claims what silence proves."""
        for name in list(self.silent):
            entry = self.table.entries.get(name)
            if entry is None or entry.missing is None or entry.update.claim is Claim.FAILED:
                self.silent.discard(name)
            elif now - entry.missing >= self._times.failed:
                self._claim(entry, Claim.FAILED, now)
            elif now - entry.missing >= self._times.suspect and entry.update.claim is Claim.ALIVE:
                self._claim(entry, Claim.SUSPECT, now)
        for name in list(self._suspected):
            entry = self.table.entries.get(name)
            if entry is None or entry.update.claim is not Claim.SUSPECT:
                self._suspected.discard(name)
            elif now - entry.changed >= self._times.failed - self._times.suspect:
                self._claim(entry, Claim.FAILED, now)

    def forget(self) -> None:
        """Removes the nodes that failed long ago."""
        for name in self.failed():
            if self.wall_s - self.table.entries[name].update.since_s > FORGET_S:
                self.table.remove(name)
                self.rumors.drop(name)

    def _claim(self, entry: Entry, claim: Claim, now: float) -> None:
        self._adopt(Update.of(entry.update.record, claim, self.wall_s), now)

    # Hearsay.

    def hear(self, updates: Iterable[Update], now: float) -> None:
        for update in updates:
            entry = self.table.entries.get(update.record.name)
            if update.record.name == self.own.name:
                self._about_self(update, now)
            elif entry is None:
                self._unknown(update, now)
            elif update.rank > entry.update.rank:
                self._known(entry, update, now)

    def _unknown(self, update: Update, now: float) -> None:
        if update.record.incarnation > self.wall_s + MAX_LEAP:
            self.lies += 1
        elif update.claim is not Claim.FAILED or self.wall_s - update.since_s <= FORGET_S:
            self._adopt(update, now)

    def _known(self, entry: Entry, update: Update, now: float) -> None:
        known, record = entry.update, update.record
        if record.incarnation - known.record.incarnation > MAX_LEAP:
            self.lies += 1
        elif record.address != known.record.address and known.claim is Claim.ALIVE and entry.missing is None:
            self.candidates.add(record.name, record.address, now)
        elif update.claim is Claim.FAILED and known.claim is not Claim.FAILED:
            suspected = Update.of(record, Claim.SUSPECT, update.since_s)
            if suspected.rank > known.rank:
                self._adopt(suspected, now)
        else:
            self._adopt(update, now)

    def _adopt(self, update: Update, now: float) -> None:
        name = update.record.name
        before = self.table.entries.get(name)
        was = before.update.claim if before else None
        entry = self.table.put(update, now)
        if entry is None:
            return
        if was is Claim.FAILED and update.claim is Claim.ALIVE:
            entry.returned, entry.missing, entry.heard = now, None, None
        if update.claim is Claim.SUSPECT:
            self._suspected.add(name)
        self.rumors.add(update)

    def _about_self(self, update: Update, now: float) -> None:
        """Refutes a claim about this node by an incarnation above the claimed one."""
        own, record = self.own, update.record
        if record.uid != own.uid and record.address != own.address:
            # Its own past, or another node of its name: whether one answers shows.
            self.candidates.add(own.name, record.address, now)
        past = record.incarnation < own.incarnation or record.uid in self._rivals
        if past or (record == own and update.claim is Claim.ALIVE):
            return
        if record.uid == own.uid and record != own:
            self.lies += 1
        # Others do not believe a larger leap either.
        if record.incarnation - own.incarnation <= MAX_LEAP and record.incarnation + 1 < MAX_INCARNATION:
            self.announce(own._replace(incarnation=record.incarnation + 1))

    # Proof.

    def rival(self, other: Record, address: str, now: float) -> None:
        """Notes that ``other`` answered at ``address`` by this node's name."""
        if len(self._rivals) < MAX_RIVALS:
            self._rivals.add(other.uid)
        self._conflict = now, f"{address} answers by the name {self.own.name}, too"

    def vouched(self, sender: Record, address: str, now: float) -> None:
        """Takes the word of another node about itself, which answered at ``address``."""
        update = Update.of(sender)
        entry = self.table.entries.get(sender.name)
        if entry is None:
            self._adopt(update, now)
            return
        known = entry.update.record
        other = known.address != sender.address and known.uid != sender.uid
        if other and entry.update.claim is Claim.ALIVE and entry.missing is None:
            # Two nodes have one name if both answer.
            if entry.heard is not None and entry.heard >= self.candidates.since(sender.name, address):
                entry.problem = now, f"{address} answers by its name, too"
            else:
                self.candidates.add(sender.name, address, now)
        elif update.rank > entry.update.rank or known.uid != sender.uid:
            self._adopt(update, now)
