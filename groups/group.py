"""The record of a group: the signed specification, the owner's last order, and the generation that runs.

Each change of the record is a function of the record before it, so that a change can be tried again on a newer record.
A generation is one start of all ranks. Ranks of a generation start only when no process of an older generation can be
left: the phase ``ending`` lasts until each worker in ``occupied`` has reported that, or is fenced.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Literal

from probing.api.errors import FormatError, PrivilegeError, UsageError
from probing.api.text import encoded, escape
from probing.api.typed import typed_json
from probing.diagnosis.ranks import Worker
from probing.groups.keys import OwnerKey, is_signed
from probing.groups.register import MAX_VALUE, MAX_VOTERS
from probing.groups.spec import MAX_S, MAX_WORKERS, NAME, PORTS, Spec, is_worker, node_of, table

__all__ = ("Action", "Attempt", "Group", "Order", "Phase", "created", "order_of")

Phase = Literal["stopped", "ending", "running", "finished", "failed", "deleted"]
Action = Literal["start", "stop", "restart", "delete"]
_HOUR_NS = 3_600_000_000_000
# The maximum number of restarts after hangs within an hour: a third restart would hardly help.
_HANG_RESTARTS = 2
_MAX_ATTEMPTS, _MAX_REASON, _MAX_ATTEMPT_REASON, _MAX_GENERATION = 100, 300, 100, 1 << 53
_ADDRESS = re.compile(r"[A-Za-z0-9.:_%-]{0,255}")


@dataclass(frozen=True, slots=True)
class Order:
    """An order of the owner. ``generation``: the generation that it begins. ``without``: nodes that are left out."""

    group: str
    action: Action
    generation: int
    version: int
    without: tuple[str, ...] = ()
    signature: str = ""

    def text(self) -> bytes:
        """Returns the text that is signed: all fields except the signature."""
        parts = (self.group, self.action, self.generation, self.version, self.without)
        return json.dumps(parts, separators=(",", ":")).encode()

    def to_json(self) -> bytes:
        return json.dumps(asdict(self), separators=(",", ":")).encode()


@dataclass(frozen=True, slots=True)
class Attempt:
    """A restart without an order of the owner. ``cause``: failure, hang or always. ``at_ns``: Unix time."""

    generation: int
    at_ns: int
    cause: str
    reason: str


# Has no slots, because cached_property needs ``__dict__``. The specification is cached because a node reads it twice
# a second, and parses it only once for each record.
@dataclass(frozen=True)
class Group:
    """The record of a group. ``spec_text``: the specification, with its ``signature`` by ``key`` (hex).

    ``occupied``: workers that may have processes of an older generation. ``fence_s``: the fence time in the
    specification with which these processes were started; 0: the fence time of the present specification; None: no
    fence. ``excluded``: nodes that are left out. ``address`` and ``port``: where the master of this generation listens.
    ``attempts``: restarts without an order, the newest last. ``since_ns``: Unix time at which the phase began.
    ``reason``: why the phase began, for people.
    """

    spec_text: str
    signature: str
    key: str
    phase: Phase = "stopped"
    generation: int = 0
    occupied: tuple[str, ...] = ()
    excluded: tuple[str, ...] = ()
    address: str = ""
    port: int = 0
    order: Order | None = None
    attempts: tuple[Attempt, ...] = ()
    since_ns: int = 0
    reason: str = ""
    fence_s: float | None = 0.0

    @cached_property
    def spec(self) -> Spec:
        """The specification. Raises UsageError."""
        return Spec.from_json(self.spec_text.encode())

    def to_json(self) -> bytes:
        return json.dumps(asdict(self), separators=(",", ":")).encode()

    @classmethod
    def from_json(cls, data: bytes) -> Group:
        """Returns the record in ``data``, whose signatures are verified. Raises FormatError."""
        if len(data) > MAX_VALUE:
            raise FormatError(f"the record of a group has {len(data):,} bytes", hint=f"at most {MAX_VALUE:,}")
        try:
            group = typed_json(cls, data)
            name = group.spec.name
            group.ranks()
        except (UsageError, ValueError) as e:
            raise FormatError(f"the record of a group is malformed: {escape(str(e), 200)}") from None
        if not group.is_signed():
            raise FormatError(f"the record of group {name} is not signed by its owner", hint="see docs/groups.md")
        if not group._is_ordered():
            raise FormatError(f"the record says that group {name} is {group.phase}, but its owner has not ordered that")
        if not group._is_bounded():
            raise FormatError(f"the record of group {name} has a number, a name or a text out of bounds")
        return group

    def _is_ordered(self) -> bool:
        """Returns whether the phase can follow from the owner's last order."""
        if self.phase in ("stopped", "deleted"):
            return True
        order = self.order
        if order is None or order.action not in ("start", "restart"):
            return False
        over = self.phase in ("finished", "failed")
        return over or (order.version == self.spec.version and set(order.without) <= set(self.excluded))

    def _is_bounded(self) -> bool:
        """Returns whether other nodes can store and show the fields that the owner does not sign."""
        spec = self.spec
        nodes = set(map(node_of, spec.workers))
        times = (self.since_ns, *(attempt.at_ns for attempt in self.attempts))
        texts = (self.reason, *(text for attempt in self.attempts for text in (attempt.cause, attempt.reason)))
        return (
            0 <= self.generation < _MAX_GENERATION
            and all(0 <= at_ns < 1 << 63 for at_ns in times)
            and all(0 <= attempt.generation <= self.generation for attempt in self.attempts)
            # The port is not signed, so it must be a port of the group: any other port may belong to another user.
            and (not self.port or spec.master_port <= self.port < min(spec.master_port + PORTS, 1 << 16))
            and bool(_ADDRESS.fullmatch(self.address))
            and len(self.attempts) <= _MAX_ATTEMPTS
            and all(len(text) <= _MAX_REASON and encoded(text).decode() == text for text in texts)
            and len(self.occupied) <= 2 * MAX_WORKERS
            and all(map(is_worker, self.occupied))
            and (self.fence_s is None or 0 <= self.fence_s <= MAX_S)
            and nodes.issuperset(self.excluded)
        )

    def is_signed(self) -> bool:
        """Returns whether the owner signed the specification, and the last order for it."""
        if not is_signed("group", self.spec_text.encode(), self.key, self.signature):
            return False
        order = self.order
        if order is None:
            return self.phase in ("stopped", "deleted")
        ours = order.group == self.spec.name and order.generation <= self.generation
        return ours and is_signed("order", order.text(), self.key, order.signature)

    @cached_property
    def voters(self) -> tuple[str, ...]:
        """The nodes that vote on the record, at most 7: the master's node, and the first other nodes in alphabetical
        order.
        """
        spec = self.spec
        nodes = sorted(set(map(node_of, spec.workers)))
        first = spec.master if spec.master in nodes else node_of(spec.master)
        return (first, *[node for node in nodes if node != first][: MAX_VOTERS - 1])

    @cached_property
    def nodes(self) -> frozenset[str]:
        """The nodes that need the record: the nodes of its workers, and of workers that may have older processes."""
        return frozenset(map(node_of, (*self.spec.workers, *self.occupied)))

    def ranks(self) -> list[Worker]:
        """Returns the workers of this generation in the order of their ranks."""
        return list(self._table)

    @cached_property
    def _table(self) -> list[Worker]:
        return table(self.spec, self.excluded, address=self.address, port=self.port)

    @property
    def fenced_s(self) -> float | None:
        """The time, in s, after which a worker in ``occupied`` that has lost contact has no processes. None: such a
        worker may keep processes.
        """
        own = self.spec.fence_s if self.spec.fenced else None
        return own if self.fence_s == 0.0 else self.fence_s

    @property
    def restarts(self) -> int:
        """The number of restarts since the owner's last order."""
        begun = self.order.generation if self.order else 0
        return sum(attempt.generation > begun for attempt in self.attempts)

    def renewed(self, other: Group) -> Group:
        """Returns the record with the newer specification of ``other``. Raises UsageError or PrivilegeError."""
        old, new = self.spec, other.spec
        if other.key != self.key or (new.uid, new.id) != (old.uid, old.id):
            raise PrivilegeError(f"group {old.name} belongs to {old.owner}", hint="give the group another name")
        if new.version != old.version + 1:
            raise UsageError(f"group {old.name} was changed meanwhile", hint="run the command again")
        if self.phase in ("ending", "running"):
            raise UsageError(
                f"group {old.name} is {self.phase}: its specification cannot change until the group is stopped",
                hint=f"probingctl group stop {old.name}",
            )
        phase = "stopped" if self.phase == "deleted" else self.phase
        occupied = tuple(sorted({*self.occupied, *self._may_run()}))
        same = replace(self, spec_text=other.spec_text, signature=other.signature, phase=phase, occupied=occupied)
        # The old values may not fit the new specification.
        return replace(same, excluded=(), address="", port=0, fence_s=self.fenced_s if occupied else 0.0)

    def ordered(self, order: Order, now_ns: int) -> Group:
        """Returns the record after an order of the owner. Raises UsageError or PrivilegeError."""
        spec = self.spec
        if order.group != spec.name or not is_signed("order", order.text(), self.key, order.signature):
            raise PrivilegeError(f"the order for group {spec.name} is not signed by its owner {spec.owner}")
        if order.generation != self.generation + 1 or order.version != spec.version:
            raise UsageError(f"group {spec.name} was changed meanwhile", hint="run the command again")
        if self.phase == "deleted":
            raise UsageError(f"group {spec.name} is deleted", hint=f"probingctl group create {spec.name}")
        if unknown := set(order.without).difference(map(node_of, spec.workers)):
            raise UsageError(
                f"group {spec.name} has no node {escape(min(unknown), 80)}",
                hint="only nodes of the group can be left out",
            )
        if order.action == "start" and self.phase in ("ending", "running"):
            raise UsageError(f"group {spec.name} is {self.phase}", hint=f"probingctl group status {spec.name}")
        if order.action in ("start", "restart"):
            begun = self._begun(now_ns, f"{order.action} by {spec.owner}", order.without)
            return replace(begun, order=order, address="", port=0)
        phase: Phase = "deleted" if order.action == "delete" else "stopped"
        return replace(self._ended(phase, now_ns, f"{order.action} by {spec.owner}"), order=order)

    def stopped(self, now_ns: int, who: str) -> Group:
        """Returns the record after a stop by ``who``, who is not the owner."""
        return self._ended("stopped", now_ns, f"stop by {who}")

    def restarted(self, cause: str, reason: str, now_ns: int, without: Collection[str] = ()) -> Group | None:
        """Returns the record after a restart by the group's policy. None if the group does not run, or if the policy
        allows no further restart within the hour.
        """
        if self.phase not in ("ending", "running") or not self.may_restart(cause, now_ns):
            return None
        excluded = tuple(sorted({*self.excluded, *without}))
        attempt = Attempt(self.generation + 1, now_ns, cause, escape(reason, _MAX_ATTEMPT_REASON))
        begun = self._begun(now_ns, reason, excluded)
        return replace(begun, attempts=(*self.attempts, attempt)[-_MAX_ATTEMPTS:])

    def may_restart(self, cause: str, now_ns: int) -> bool:
        """Returns whether the group's policy allows a restart now; ``cause``: as in ``Attempt``."""
        # An attempt far in the future was made with a wrong clock, and does not count.
        recent = [attempt for attempt in self.attempts if abs(now_ns - attempt.at_ns) < _HOUR_NS]
        hangs = sum(attempt.cause == "hang" for attempt in recent)
        return len(recent) < self.spec.max_restarts and (cause != "hang" or hangs < _HANG_RESTARTS)

    def running(self, now_ns: int, *, address: str = "", port: int = 0) -> Group:
        """Returns the record with the phase ``running``. Call it once no process of an older generation is left."""
        address, port = address or self.address, port or self.port
        return replace(self, phase="running", occupied=(), fence_s=0.0, since_ns=now_ns, address=address, port=port)

    def over(self, phase: Literal["finished", "failed"], reason: str, now_ns: int) -> Group:
        """Returns the record after all ranks have ended, or a failure after which the group is not started again.

        A failure begins a generation without ranks, which ends the ranks that are left.
        """
        if phase == "failed":
            return self._ended("failed", now_ns, reason)
        return replace(self, phase="finished", since_ns=now_ns, reason=escape(reason, _MAX_REASON))

    def _begun(self, now_ns: int, reason: str, excluded: Collection[str]) -> Group:
        begun = self._ended("ending", now_ns, reason)
        table(self.spec, excluded)
        return replace(begun, excluded=tuple(sorted(excluded)))

    def _ended(self, phase: Phase, now_ns: int, reason: str) -> Group:
        occupied = tuple(sorted({*self.occupied, *self._may_run()}))
        generation = self.generation + 1
        reason = escape(reason, _MAX_REASON)
        return replace(self, phase=phase, generation=generation, occupied=occupied, since_ns=now_ns, reason=reason)

    def _may_run(self) -> set[str]:
        """Returns the workers that may have processes of this generation: ranks, or what ranks left behind."""
        ran = self.order is not None and self.order.version == self.spec.version
        return {rank.worker for rank in self.ranks()} if ran and self.phase in ("running", "finished") else set()


def created(spec: Spec, key: OwnerKey) -> Group:
    """Returns the record of a new group, or, for ``Group.renewed``, of a group with a new specification."""
    text = spec.to_json()
    return Group(text.decode(), key.sign("group", text), key.public)


def order_of(group: Group, action: Action, key: OwnerKey, without: Collection[str] = ()) -> Order:
    """Returns the owner's order for the present record of ``group``. Raises UsageError for an unknown node."""
    spec = group.spec
    nodes = set(map(node_of, spec.workers))
    for node in without:
        if node not in nodes or not NAME.fullmatch(node):
            raise UsageError(f"group {spec.name} has no node {escape(node, 80)}", hint="`probingctl group status`")
    order = Order(spec.name, action, group.generation + 1, spec.version, tuple(sorted(without)))
    return replace(order, signature=key.sign("order", order.text()))
