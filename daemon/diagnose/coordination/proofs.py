"""Decides which nodes take part in a run of a job, from the connections of ranks that other nodes see.

Any node can claim to have ranks of a job. A claim is proven in two steps: the node answers by its name, and ranks on a
proven node are, or lately were, connected with one of its addresses. This node itself is the first proven node. So each
proof is what the kernel of another node shows, never what a node says about itself. A proven node stays proven until
the run ends.

At the beginning of a run all claims count. This ends some seconds after a rank on this node has completed its first
operation, for which all ranks are connected, and connections of this node's ranks were read.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from probing.api.text import escape
from probing.daemon.diagnose.coordination.peers import Holder, Holding, PeerFacts, Peers, Sight, answers
from probing.daemon.diagnose.coordination.sight import LocalSights

__all__ = ("MAX_BEFORE", "Proofs")

MAX_BEFORE = 8
"""A node stops looking for proofs once this many proven nodes diagnose the job before it does."""
ASK_S = 1.0
MAX_ASKED = 16
# The maximum number of rounds of requests in an examination. One round may not be enough, because each answer may show
# more nodes.
_ROUNDS = 8
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 60.0
# The maximum pause between two examinations of a young run, s. The pause is short because the claims on a young run
# count without proof.
_YOUNG_PAUSE_S = 2.0
# The maximum time for which claims count without proof before the first operation, s. It is long because a job may read
# its data for minutes before its first operation.
START_S = 600.0
_MOST_NAMED = 3
_Key = tuple[str, str]


@dataclass(slots=True)
class _Run:
    """The claims on one run. ``since``, ``due``, ``trains``: monotonic s. ``trains``: when an operation had ended and
    connections were read; None: not yet. ``proven``: the proofs of nodes that take part, as texts by node. ``asked``:
    how often each node was asked. ``sights``: the sights of nodes that have answered. ``whole``: all ranks are on this
    node. ``unproven``: the nodes that claim to take part without a proof."""

    since: float
    due: float
    pause: float = _FIRST_PAUSE_S
    trains: float | None = None
    proven: dict[str, str] = field(default_factory=dict)
    sights: dict[str, Sight] = field(default_factory=dict)
    asked: Counter[str] = field(default_factory=Counter)
    whole: bool = False
    unproven: tuple[str, ...] = ()


class Proofs:
    """Implements ``Peers``, but returns only holders whose claims count. ``step`` examines the claims that are due.

    ``grace_s``: how long all claims count after the first operation of a run, s. ``trusted``: claims always count.
    Thread-safe.
    """

    def __init__(
        self,
        node: str,
        peers: Peers,
        local: LocalSights,
        *,
        grace_s: float,
        trusted: bool = False,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._node = node
        self._peers = peers
        self._local = local
        self._grace_s = grace_s
        self._trusted = trusted
        self._now = now
        self._runs: dict[_Key, _Run] = {}
        self._lock = threading.Lock()

    def hold(self, runs: Mapping[_Key, bool]) -> None:
        now = self._now()
        with self._lock:
            self._runs = {key: self._runs.get(key) or _Run(now, now) for key in runs}
        self._peers.hold(runs)

    def holders(self, job: str, run: str) -> Sequence[Holder]:
        """Returns the other nodes that take part in a run; empty if all ranks of the run are on this node."""
        known = self._runs.get((job, run))
        if known is None or known.whole:
            return ()
        claims = self._peers.holders(job, run)
        if self._trusted:
            return claims
        wanted = self._wanted(known, {one.node: one for one in claims})
        if any(name not in known.unproven for name in wanted):
            # A node is new, or a node before this node has failed, so this node has to prove more claims.
            known.due = min(known.due, self._now())
        if self._is_young(known):
            return claims
        return [one for one in claims if one.node in known.proven]

    def claims(self, job: str, run: str) -> frozenset[str]:
        """Returns the names of the other nodes that claim to take part."""
        return frozenset(one.node for one in self._peers.holders(job, run)) if (job, run) in self._runs else frozenset()

    def takes_part(self, job: str, run: str, node: str) -> bool:
        """Returns whether another node is proven to have ranks of the run. If the proof is missing, the claim of the
        node is examined next.
        """
        known = self._runs.get((job, run))
        if known is None or known.whole or node not in self.claims(job, run):
            return False
        if self._trusted or node in known.proven:
            return True
        if node not in known.unproven:
            known.due, known.pause = self._now(), _FIRST_PAUSE_S
            known.unproven = (*known.unproven, node)
        return False

    def is_new(self, job: str, run: str) -> bool:
        """Returns whether a run, its first operation, or its connections were first seen in the last ``grace_s``."""
        known = self._runs.get((job, run))
        return known is not None and self._is_new(known)

    def _is_new(self, known: _Run) -> bool:
        since = known.since if known.trains is None else known.trains
        return not self._trusted and self._now() < since + self._grace_s

    def _is_young(self, known: _Run) -> bool:
        """Returns whether the run is so young that claims count without proof."""
        starts = known.trains is None and self._now() < known.since + START_S
        return self._is_new(known) or (starts and not self._trusted)

    def unproven(self, job: str, run: str) -> Sequence[str]:
        """Returns the nodes whose claims were examined and are not proven."""
        known = self._runs.get((job, run))
        return () if known is None or known.whole or self._is_young(known) else known.unproven

    def holding(self, job: str, run: str) -> Holding:
        """Returns the ranks of a run on this node."""
        return self._local.holding(job, run)

    def sight(self, node: str, job: str, run: str, timeout: float) -> Future[Sight]:
        return self._peers.sight(node, job, run, timeout)

    def facts(self, node: str, job: str, *, run: str, deep: bool, timeout: float) -> Future[PeerFacts]:
        return self._peers.facts(node, job, run=run, deep=deep, timeout=timeout)

    def record(self, node: str, rows: Sequence[Mapping[str, Any]], timeout: float) -> Future[None]:
        return self._peers.record(node, rows, timeout)

    @property
    def problems(self) -> list[str]:
        """Returns texts about jobs with unproven claims, for ``status``."""
        found = []
        for job, run in list(self._runs):
            if names := self.unproven(job, run):
                more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
                found.append(
                    f"job {escape(job)}: {', '.join(names[:_MOST_NAMED])}{more} claim to take part in its diagnosis,"
                    " but nothing shows connections of their ranks: they do not count (docs/cluster.md)"
                )
        return found

    def step(self) -> None:
        """Examines the runs that are due."""
        for key, known in list(self._runs.items()):
            if known.due <= self._now():
                self._examine(key, known)

    def _examine(self, key: _Key, known: _Run) -> None:
        holding = self._local.holding(*key)
        known.whole = holding.whole
        if known.trains is None and holding.calls and self._local.sight(*key).peers:
            known.trains = self._now()
        claims = {one.node: one for one in self._peers.holders(*key)}
        wanted: list[str] = []
        if claims and not known.whole and not self._trusted:
            wanted = self._settle(key, known, claims)
        known.unproven = tuple(wanted)
        known.due = self._now() + known.pause
        known.pause = min(2 * known.pause, _YOUNG_PAUSE_S if self._is_young(known) else _LONGEST_PAUSE_S)

    def _settle(self, key: _Key, known: _Run, claims: Mapping[str, Holder]) -> list[str]:
        """Asks nodes until all claims that matter are proven, or no node shows further connections. Returns the
        unproven nodes.
        """
        own = self._local.sight(*key)
        known.asked = Counter({name: count for name, count in known.asked.items() if name in claims})
        known.sights = {name: one for name, one in known.sights.items() if name in claims or name in known.proven}
        asked: set[str] = set()
        for _ in range(_ROUNDS):
            self._spread(known, own, claims)
            if not (wanted := self._wanted(known, claims)):
                return []
            # The connections that proven nodes see show which other nodes take part.
            told = [name for name in known.proven if name in claims]
            seen = own.peers.union(*(known.sights[name].peers for name in told))
            left = [name for name in (*told, *wanted) if name not in asked and not claims[name].failed]
            # Nodes with connections come first: thousands of false claims cannot delay a true claim.
            left.sort(key=lambda name: (claims[name].address not in seen, known.asked[name]))
            if not left:
                return wanted
            chosen = left[:MAX_ASKED]
            asked |= set(chosen)
            known.asked.update(chosen)
            known.sights.update(self._ask(key, chosen))
        self._spread(known, own, claims)
        return self._wanted(known, claims)

    def _wanted(self, known: _Run, claims: Mapping[str, Holder]) -> list[str]:
        """Returns the unproven nodes to examine. Nodes of ``known.unproven`` come first; ``takes_part`` adds nodes to
        it. The other unproven nodes follow, unless MAX_BEFORE proven nodes diagnose the job before this node."""
        count = sum(name < self._node and name in known.proven and not claims[name].failed for name in claims)
        names = claims if count < MAX_BEFORE else ()
        named = [name for name in known.unproven if name in claims]
        return [name for name in dict.fromkeys((*named, *sorted(names))) if name not in known.proven]

    def _ask(self, key: _Key, names: Sequence[str]) -> dict[str, Sight]:
        asked = answers({name: self._peers.sight(name, *key, ASK_S) for name in names}, ASK_S)
        return {name: answer for name, answer in asked.items() if isinstance(answer, Sight)}

    def _spread(self, known: _Run, own: Sight, claims: Iterable[str]) -> None:
        """Marks nodes as proven if a proven node sees connections with one of their addresses."""
        owner = _owners({name: known.sights[name] for name in claims if name in known.sights}, own)
        seen = dict.fromkeys(own.peers, self._node)

        def add(name: str) -> None:
            for address in known.sights[name].peers:
                seen.setdefault(address, name)

        for name in known.proven:
            add(name)
        due = set(owner)
        while shown := sorted(due & seen.keys()):
            due -= set(shown)
            for address in shown:
                for name in owner[address]:
                    if name not in known.proven:
                        known.proven[name] = f"node {seen[address]} is connected with {address}"
                        add(name)


def _owners(sights: Mapping[str, Sight], own: Sight) -> dict[str, list[str]]:
    """Returns the owners of each address: the nodes whose daemons answer at the address, else the only node whose ranks
    use it. An address that ranks of several nodes or of this node use proves nothing and is left out."""
    owner: dict[str, list[str]] = {}
    for name, sight in sights.items():
        for address in sight.hosts:
            owner.setdefault(address, []).append(name)
    said: dict[str, list[str]] = {}
    for name, sight in sights.items():
        for address in sight.addresses - owner.keys() - own.addresses:
            said.setdefault(address, []).append(name)
    return owner | {address: names for address, names in said.items() if len(names) == 1}
