"""Provides the members of the cluster to other packages. Thread-safe."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from probing.daemon.cluster.machine import Machine
from probing.daemon.cluster.messages import Call, Message
from probing.daemon.cluster.record import MAX_JOBS, Claim, Proof, Record
from probing.daemon.cluster.table import Entry

__all__ = ("Member", "Membership")

T = TypeVar("T")
# A clock offset is reported as a problem if it exceeds the error of its measurement by more than this, ns.
CLOCK_NS = 1_000_000_000


@dataclass(frozen=True, slots=True)
class Member:
    """A node. ``state``: healthy, suspect, failed, recovering, or unknown for a seed that has not answered.

    ``jobs``: hashes of the jobs that have ranks on the node. ``since_ns``: when the state began as far as this node
    knows, UTC. ``heard_ns``: the time since the node last answered this node. ``clock_offset_ns``: its clock minus the
    clock of this node. ``address``: empty if another node has the address. ``proof``: how the node proved its name to
    this node, a word of ``record.Proof``. ``keyed``: whether the node has a key.
    """

    name: str
    address: str
    state: str
    labels: dict[str, str] = field(default_factory=dict)
    jobs: tuple[int, ...] = ()
    since_ns: int | None = None
    incarnation: int | None = None
    version: str = ""
    engine: str = ""
    heard_ns: int | None = None
    rtt_ns: int | None = None
    clock_offset_ns: int | None = None
    problem: str = ""
    proof: str = ""
    keyed: bool = False


class Membership:
    """The state machine of this node, under a lock. The service calls ``tick`` at each heartbeat and makes the calls
    that ``tick`` returns. It passes each outcome to ``answered`` or ``unanswered``, which may return further calls."""

    def __init__(self, machine: Machine, monotonic: Callable[[], float], wall_ns: Callable[[], int]) -> None:
        self._machine = machine
        self._monotonic = monotonic
        self._wall_ns = wall_ns
        self._lock = threading.Lock()
        self._started_ns = wall_ns()

    @property
    def name(self) -> str:
        return self._machine.view.own.name

    @property
    def heartbeat_s(self) -> float:
        return self._machine.times.heartbeat

    def members(self) -> tuple[Member, ...]:
        """Returns this node and the other nodes in the order of their names, then the seeds that have not answered."""
        now, wall_ns = self._monotonic(), self._wall_ns()
        with self._lock:
            view = self._machine.view
            own = view.own
            mine = _member(
                own,
                state="healthy",
                since_ns=self._started_ns,
                problem=view.conflict(now),
                heard_ns=0,
                rtt_ns=0,
                clock_offset_ns=0,
                proof=Proof.KEY.word,
                keyed=bool(own.key),
            )
            found = [mine, *self._others(now, wall_ns)]
            unknown = [Member("", seed, "unknown") for seed in self._machine.unreached()]
        return (*sorted(found, key=lambda m: m.name), *unknown)

    def set_jobs(self, marks: Sequence[int]) -> None:
        """Announces the jobs that have ranks on this node, as 64-bit hashes; only the first 64 hashes count."""
        jobs = tuple(dict.fromkeys(marks))[:MAX_JOBS]
        with self._lock:
            if self._machine.view.own.jobs != jobs:
                self._machine.change(self._machine.view.own._replace(jobs=jobs))

    def set_engine(self, engine: str) -> None:
        """Announces the version of DuckDB that answers queries here."""
        with self._lock:
            if self._machine.view.own.engine != engine:
                self._machine.change(self._machine.view.own._replace(engine=engine))

    def set_seeds(self, seeds: Sequence[str]) -> None:
        with self._lock:
            self._machine.seeds = tuple(seeds)

    def problems(self) -> list[str]:
        """Returns problems that can make answers of the cluster wrong: two nodes with the same name, wrong clocks,
        false claims, nodes that the table had no room for.
        """
        named = [f"{m.name}: {m.problem}" for m in self.members() if m.problem]
        view = self._machine.view
        lies = [f"{view.lies} claims of peers were wrong"] if view.lies else []
        refused = [f"{view.table.refused} nodes had no room in the table"] if view.table.refused else []
        return [*named, *lies, *refused]

    def tick(self) -> list[Call]:
        return self._locked(lambda: self._machine.tick(self._monotonic(), self._wall_ns()))

    def answer(
        self, message: Message, *, reached: bool = False, relayed: bytes = b"", certified: bool = False
    ) -> Message:
        """Returns the answer to a message of another node. The arguments are as in ``Machine.answer``."""
        return self._locked(
            lambda: self._machine.answer(
                message, self._monotonic(), reached=reached, relayed=relayed, certified=certified
            )
        )

    def relay(self, name: str, nonce: bytes = b"") -> Call | None:
        """Returns the ping of ``name`` that another node requested; None if this node does not know ``name``."""
        return self._locked(lambda: self._machine.relay(name, self._monotonic(), nonce))

    def answered(self, call: Call, message: Message, *, certified: bool = False) -> list[Call]:
        return self._locked(
            lambda: self._machine.answered(call, message, self._monotonic(), self._wall_ns(), certified=certified)
        )

    def proof_of(self, name: str) -> Proof:
        """Returns how another node proved its name; ``Proof.NONE`` for an unknown node."""
        with self._lock:
            entry = self._machine.view.table.entries.get(name)
        return entry.proof if entry else Proof.NONE

    def at(self, address: str) -> Member | None:
        """Returns the other node that has ``address``; None if no node has it."""
        now, wall_ns = self._monotonic(), self._wall_ns()
        with self._lock:
            best = self._owner(address)
            return self._other(best, now, wall_ns) if best else None

    def address_of(self, name: str) -> str:
        """Returns the address of another node; empty if the node is unknown, or if its address belongs to a different
        node.
        """
        view = self._machine.view
        with self._lock:
            if (entry := view.table.entries.get(name)) is None:
                return ""
            address = entry.update.record.address
            return address if address != view.own.address and self._owner(address) is entry else ""

    def _owner(self, address: str) -> Entry | None:
        """Returns the entry of the other node that has ``address``."""
        return self._best(e for e in self._machine.view.table.entries.values() if e.update.record.address == address)

    @staticmethod
    def _best(entries: Iterable[Entry]) -> Entry | None:
        """All ``entries`` have the same address; returns the entry that owns it. A node that has not failed is
        preferred to a failed node, then a node that has answered to a node that has not, then a node with a stronger
        proof.
        """

        def rank(entry: Entry) -> tuple[bool, bool, Proof]:
            return entry.update.claim is not Claim.FAILED, entry.heard is not None, entry.proof

        return max(entries, key=rank, default=None)

    def unanswered(self, call: Call) -> list[Call]:
        return self._locked(lambda: self._machine.unanswered(call, self._monotonic()))

    def _locked(self, do: Callable[[], T]) -> T:
        with self._lock:
            return do()

    def _others(self, now: float, wall_ns: int) -> Iterator[Member]:
        view = self._machine.view
        at: dict[str, list[Entry]] = {}
        for entry in view.table.entries.values():
            at.setdefault(entry.update.record.address, []).append(entry)
        for address, entries in at.items():
            best = None if address == view.own.address else self._best(entries)
            first = best.update.record.name if best else view.own.name
            for entry in entries:
                made = self._other(entry, now, wall_ns)
                if entry is best:
                    yield made
                else:
                    why = f"its record has the address of {first}: {address}"
                    yield replace(made, address="", problem="; ".join(filter(None, (made.problem, why))))

    def _other(self, entry: Entry, now: float, wall_ns: int) -> Member:
        view = self._machine.view
        return _member(
            entry.update.record,
            state=view.state_of(entry, now),
            since_ns=wall_ns - round((now - entry.changed) * 1e9),
            problem="; ".join(filter(None, (view.problem_of(entry, now), _clock_problem(entry)))),
            heard_ns=None if entry.heard is None else round((now - entry.heard) * 1e9),
            rtt_ns=entry.rtt_ns,
            clock_offset_ns=entry.offset_ns,
            proof=entry.proof.word,
            keyed=bool(entry.key),
        )


def _member(record: Record, **more: Any) -> Member:
    return Member(
        record.name,
        record.address,
        labels=dict(record.labels),
        jobs=record.jobs,
        incarnation=record.incarnation,
        version=record.version,
        engine=record.engine,
        **more,
    )


def _clock_problem(entry: Entry) -> str:
    if entry.offset_ns is None or abs(entry.offset_ns) <= CLOCK_NS + (entry.rtt_ns or 0):
        return ""
    return f"its clock is {abs(entry.offset_ns) / 1e9:.1f} s {'ahead of' if entry.offset_ns > 0 else 'behind'} ours"
