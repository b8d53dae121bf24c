"""The state of other nodes as this node sees it: from updates of other nodes (hearsay), answers, and silence."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from probing.daemon.cluster.keys import NodeKey, is_signed
from probing.daemon.cluster.record import MAX_INCARNATION, Claim, Proof, Record, Update
from probing.daemon.cluster.table import Candidates, Entry, Rumors, Table

__all__ = ("Times", "View")

# The time after which failed nodes are forgotten, s: a day.
FORGET_S = 86_400
# The maximum by which an incarnation may exceed the node's previous incarnation. For a new node: the maximum by which
# it may exceed this node's clock, Unix seconds.
MAX_LEAP = 1 << 33
# The maximum by which this node raises its incarnation to refute a claim that its own key did not sign: two years.
MAX_STRANGE_LEAP = 1 << 26
# The maximum number of signatures that are checked between two ticks. Updates beyond it are ignored; peers send them
# again.
MAX_CHECKS = 2000
# How long a conflict of two nodes with the same name is shown after it was last detected, s.
CONFLICT_S = 90.0
# A node that is known only by hearsay is added while its host has fewer nodes than this.
MAX_OF_HOST = 64
_ONE_MACHINE = ("127.", "localhost", "[::1]", "unix")
# The maximum number of failed nodes that are kept although they never answered this node. The nodes with the lowest
# keys in the ring are kept.
MAX_UNMET = 1024
# The maximum number of other nodes with this node's name that are remembered. This node does not raise its incarnation
# above the incarnations of these nodes.
MAX_RIVALS = 64


class Times(NamedTuple):
    """Times, s. ``heartbeat``: the interval of pings of a watched node. ``suspect`` and ``failed``: the times without
    an answer after which a node is suspect, and has failed.
    """

    heartbeat: float = 1.0
    suspect: float = 2.0
    failed: float = 5.0


class View:
    """The state of all nodes as this node sees it. ``lies`` counts false claims. ``silent``: the nodes that did not
    answer their last ping. ``checks`` counts the signatures checked since the last tick. ``wall_s``: the clock of this
    node.

    Hearsay can add a node, but can make a known node only suspect: before the suspect counts as failed, this node waits
    for the suspect to refute the claim. A live node keeps its address until it has answered at a new address.

    A record is accepted if it is signed by the key that is bound to the node's name. The first key received for a name
    is bound, until the node itself answers with another key, or a certificate proves another key. ``key``: the key of
    this node.
    """

    def __init__(self, own: Record, times: Times, key: NodeKey | None = None) -> None:
        self._key = key
        self.table = Table(Update.of(self._signed(own)))
        self.rumors = Rumors()
        self.rumors.add(self.table.own)
        self.candidates = Candidates()
        self.silent: set[str] = set()
        self.lies = self.checks = 0
        self.wall_s = 0
        self._times = times
        self._suspected: set[str] = set()
        self._rivals: set[int] = set()
        self._conflict: tuple[float, str] | None = None
        self._unmet = 0

    @property
    def own(self) -> Record:
        return self.table.own.record

    def announce(self, record: Record) -> None:
        """Makes ``record`` this node's record, and queues it as news."""
        self.table.own = Update.of(self._signed(record))
        self.rumors.add(self.table.own)

    def _signed(self, record: Record) -> Record:
        return self._key.signed(record) if self._key else record

    def proof_for(self, nonce: bytes) -> bytes:
        """Returns the signed ``nonce``, which proves to the node that made it that this node is alive; empty without a
        key.
        """
        return self._key.answer(nonce, self.own) if self._key else b""

    def state_of(self, entry: Entry, now: float) -> str:
        """Returns healthy, suspect, failed or recovering."""
        if entry.update.claim is not Claim.ALIVE:
            return entry.update.claim.name.lower()
        back = entry.returned is not None and now - entry.returned < self._times.failed
        return "recovering" if back else "healthy"

    def conflict(self, now: float) -> str:
        """Returns a text about another node that answers with the name of this node; empty if there is none."""
        return self._conflict[1] if self._conflict and now - self._conflict[0] < CONFLICT_S else ""

    def problem_of(self, entry: Entry, now: float) -> str:
        """Returns a text about another node that answers with the name of ``entry``; empty if there is none."""
        return entry.problem[1] if entry.problem and now - entry.problem[0] < CONFLICT_S else ""

    def failed(self) -> list[str]:
        if self.table.live == len(self.table.entries):
            return []
        return [name for name, e in self.table.entries.items() if e.update.claim is Claim.FAILED]

    # Silence.

    def resume(self, now: float) -> None:
        """Resets all silence and suspicion, since this node itself was stopped, or has just started."""
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
        """Claims that silent nodes are suspect, and later that they have failed. Also claims that a suspect
        node has failed if it did not refute the suspicion in time.
        """
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
                self._drop(name)
        unmet = [e for e in self.table.entries.values() if e.update.claim is Claim.FAILED and e.heard is None]
        self._unmet = len(unmet)
        for entry in sorted(unmet, key=lambda e: e.place)[MAX_UNMET:]:
            self._drop(entry.update.record.name)

    def _drop(self, name: str) -> None:
        self.table.remove(name)
        self.rumors.drop(name)

    def _claim(self, entry: Entry, claim: Claim, now: float) -> None:
        self._adopt(Update.of(entry.update.record, claim, self.wall_s), now)

    # Hearsay.

    def hear(self, updates: Iterable[Update], now: float) -> None:
        for update in updates:
            record = update.record
            entry = self.table.entries.get(record.name)
            if record.key and not (entry and entry.update.record == record):
                self.checks += 1
                if self.checks > MAX_CHECKS:
                    continue
                if not is_signed(record):
                    self.lies += 1
                    continue
            if record.name == self.own.name:
                self._about_self(update, now)
            elif entry is None:
                self._unknown(update, now)
            elif self._speaks_for(entry, record, now):
                known = entry.update
                # Nodes of older versions pass on the same claim without the signature: the signed update replaces the
                # unsigned update.
                signs = update.rank == known.rank and record.key and not known.record.key
                if update.rank > known.rank or signs:
                    self._known(entry, update, now)
            elif not record.key and record[:4] == entry.update.record[:4] and update.rank > entry.update.rank:
                self._known(entry, Update.of(entry.update.record, update.claim, update.since_s), now)

    def _speaks_for(self, entry: Entry, record: Record, now: float) -> bool:
        """Returns whether ``record`` is signed by the key bound to the node's name; True if no key is bound."""
        if record.key == entry.key:
            return True
        if record.key and (entry.key or entry.live):
            # The key will be bound once the node itself answers with it.
            self.candidates.add(record.name, record.address, now)
        return not entry.key

    def _unknown(self, update: Update, now: float) -> None:
        failed, record = update.claim is Claim.FAILED, update.record
        if record.incarnation > self.wall_s + MAX_LEAP:
            self.lies += 1
        elif self._crowded(record.host) or (failed and self._unmet >= MAX_UNMET):
            self.table.refused += 1
        elif not failed or self.wall_s - update.since_s <= FORGET_S:
            self._adopt(update, now)

    def _crowded(self, host: str) -> bool:
        """Returns whether ``host`` has MAX_OF_HOST nodes; False for loopback hosts and Unix sockets, since a cluster on
        one machine may have any number of nodes.
        """
        return self.table.hosts[host] >= MAX_OF_HOST and not host.startswith(_ONE_MACHINE)

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

    def _adopt(self, update: Update, now: float, proof: Proof = Proof.NONE) -> None:
        name, key = update.record.name, update.record.key
        before = self.table.entries.get(name)
        was = before.update.claim if before else None
        gone = before is None or not before.live
        address = before.update.record.address if before else ""
        entry = self.table.put(update, now, proof)
        if entry is None:
            return
        if proof:
            entry.key, entry.proof = key, proof
        elif key and gone and entry.proof is Proof.NONE:
            entry.key, entry.proof = key, Proof.HEARD
        if not proof and before and address != update.record.address:
            # The node has not answered at its new address yet, so ``heard`` is reset.
            entry.heard = None
        if was is Claim.FAILED and update.claim is Claim.ALIVE:
            entry.returned, entry.missing, entry.heard = now, None, None
        if update.claim is Claim.SUSPECT:
            self._suspected.add(name)
        if update.claim is Claim.ALIVE and self.rumors.busy:
            self.rumors.drop(name)
        else:
            self.rumors.add(update)

    def _about_self(self, update: Update, now: float) -> None:
        """Refutes a claim about this node: announces a record whose incarnation is above that of the claim."""
        own, record = self.own, update.record
        if record.uid != own.uid and record.address != own.address:
            # A ping shows whether this is an earlier address of this node, or belongs to another node with its name.
            self.candidates.add(own.name, record.address, now)
        past = record.incarnation < own.incarnation or record.uid in self._rivals
        # Nodes of older versions drop the key and the signature when they pass on the record.
        same = record == own or (not record.key and record == own._replace(key=b"", signature=b""))
        if past or (same and update.claim is Claim.ALIVE):
            return
        if record.uid == own.uid and not same:
            self.lies += 1
        # Other nodes do not accept a larger increase, and a node without this node's key must not exhaust its
        # incarnations.
        most = MAX_LEAP if record.key == own.key else MAX_STRANGE_LEAP
        if record.incarnation - own.incarnation <= most and record.incarnation + 1 < MAX_INCARNATION:
            self.announce(own._replace(incarnation=record.incarnation + 1))

    # Proof.

    def rival(self, other: Record, address: str, now: float) -> None:
        """Registers that another node, ``other``, answered at ``address`` with the name of this node."""
        if len(self._rivals) < MAX_RIVALS:
            self._rivals.add(other.uid)
        self._conflict = now, f"{address} answers under the name {self.own.name}, too"

    def vouched(self, sender: Record, address: str, now: float, proof: Proof = Proof.NONE) -> bool:
        """Stores ``sender``, the record of another node, which answered at ``address`` with ``proof``.

        Returns whether this node accepts it as the node with that name.
        """
        update = Update.of(sender)
        entry = self.table.entries.get(sender.name)
        if entry is None:
            self._adopt(update, now, proof)
            return True
        known = entry.update.record
        if sender.key != entry.key:
            return self._rebound(entry, update, address, now, proof)
        entry.proof = max(entry.proof, proof)
        other = known.address != sender.address and known.uid != sender.uid
        if other and entry.live:
            # Both nodes answer, so two nodes have the same name.
            if entry.heard is not None and entry.heard >= self.candidates.since(sender.name, address):
                entry.problem = now, f"{address} answers under this name, too"
            else:
                self.candidates.add(sender.name, address, now)
        elif update.rank > entry.update.rank or known.uid != sender.uid:
            self._adopt(update, now)
        return True

    def introduced(self, sender: Record, now: float) -> None:
        """Stores ``sender``, the record of a caller whose certificate proves the name in the record."""
        entry = self.table.entries.get(sender.name)
        if sender.key and not is_signed(sender):
            self.lies += 1
        elif sender.name == self.own.name:
            if sender.uid != self.own.uid:
                self.rival(sender, sender.address, now)
        elif entry is None:
            self._adopt(Update.of(sender), now, Proof.CERTIFICATE)
        elif sender.key == entry.key:
            entry.proof = Proof.CERTIFICATE
        elif entry.proof < Proof.CERTIFICATE or not entry.live:
            self._adopt(Update.of(sender), now, Proof.CERTIFICATE)
        else:
            self.candidates.add(sender.name, sender.address, now)

    def _rebound(self, entry: Entry, update: Update, address: str, now: float, proof: Proof) -> bool:
        """Binds the key of ``update``, or no key, to its name, if no key is bound or ``proof`` proves more than before.

        Returns whether the key was bound. If not, the entry gets a problem: either the node has a new key, or another
        node uses its name.
        """
        there = address == entry.update.record.address
        more = proof > entry.proof or (proof is Proof.CERTIFICATE and (there or not entry.live))
        # The bound key came only by hearsay, but the node answers without a key.
        unkeyed = there and entry.proof is Proof.HEARD and not update.record.key
        if not entry.key or more or unkeyed:
            entry.key, entry.proof = b"", Proof.NONE
            self._adopt(update, now, proof)
            return True
        how = "with another key" if update.record.key else "without its key"
        entry.problem = now, f"{address} answers under this name {how}"
        return False
