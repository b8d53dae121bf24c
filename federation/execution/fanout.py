"""Asks many nodes at once, and records which answered and why the others failed."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, NoReturn, TypedDict, TypeVar

from probing.api.errors import InternalError, PartialAnswer, PeerError, ProbingError
from probing.federation.execution.clocks import Offset

if TYPE_CHECKING:
    from typing_extensions import NotRequired

__all__ = (
    "Answered",
    "AnsweredReport",
    "DetourReport",
    "Failed",
    "FailedReport",
    "Gathered",
    "OutcomeReport",
    "fan_out",
    "late",
)

T = TypeVar("T")
# Calls that have just begun, and how long a call counts as one, s.
_AT_ONCE = 64
_PATIENCE_S = 0.5
# s that a node has beyond its own deadline, to report the reason itself.
_GRACE_S = 0.5


@dataclass(frozen=True, slots=True)
class Answered(Generic[T]):
    """A node that answered: its ``address``, the name it gave itself, its answer, and the offset of its clock."""

    address: str
    node: str
    value: T
    clock: Offset | None = None


class Failed(NamedTuple):
    """A node without a valid answer. ``node`` is empty where its name is unknown."""

    address: str
    node: str
    error: ProbingError

    @property
    def reason(self) -> str:
        """The message, without the address that is shown beside it."""
        message = self.error.message.removeprefix(f"{self.address} does not answer: ")
        return message.removeprefix(f"{self.address}: ")


class AnsweredReport(TypedDict):
    """The offset of the node's clock from ours is there where it was measured."""

    address: str
    node: str
    clock_offset_ns: NotRequired[int]
    clock_error_ns: NotRequired[int]


class FailedReport(TypedDict):
    """``kind`` names a class of probing.api.errors."""

    address: str
    node: str | None
    kind: str
    reason: str


class DetourReport(TypedDict):
    address: str
    reason: str


class OutcomeReport(TypedDict):
    """Which addresses were asked, which answered, and why the others failed. ``detours``: see Gathered."""

    asked: list[str]
    answered: list[AnsweredReport]
    failed: list[FailedReport]
    detours: NotRequired[list[DetourReport]]


@dataclass(slots=True)
class Gathered(Generic[T]):
    """The outcome of one fan-out, in the order of the addresses."""

    asked: tuple[str, ...]
    answered: list[Answered[T]] = field(default_factory=list)
    failed: list[Failed] = field(default_factory=list)
    # Nodes that did not pass on the answers of others, which were then asked directly.
    detours: list[Failed] = field(default_factory=list)
    _names: dict[str, str] = field(default_factory=dict, repr=False)

    def add(self, address: str, node: str, value: T) -> None:
        """Counts an answer; that of a node under a second address has failed: its rows would count twice."""
        if node in self._names:
            hint = "give every daemon its own --node-name"
            twice = PeerError(f"it answers as {node}, as {self._names[node]} does", hint=hint)
            self.failed.append(Failed(address, node, twice))
            return
        self._names[node] = address
        self.answered.append(Answered(address, node, value))

    def require(self, *, strict: bool) -> None:
        """Raises the nodes' error where none answered, and PartialAnswer under ``strict`` where one failed."""
        if not self.failed:
            return
        if not self.answered:
            raise _common(self.failed)
        if strict:
            self.refuse()

    def refuse(self) -> NoReturn:
        """Raises PartialAnswer with the names of the nodes that failed."""
        names = ", ".join(f"{f.node or f.address} ({f.reason})" for f in self.failed[:8])
        raise PartialAnswer(f"{len(self.failed)} of {len(self.asked)} nodes did not answer: {names}")

    def report(self) -> OutcomeReport:
        found: OutcomeReport = {
            "asked": list(self.asked),
            "answered": [_answered_report(answered) for answered in self.answered],
            "failed": [
                {"address": f.address, "node": f.node or None, "kind": f.error.kind, "reason": f.reason}
                for f in self.failed
            ],
        }
        if self.detours:
            found["detours"] = [{"address": f.address, "reason": f.reason} for f in self.detours]
        return found


def _answered_report(answered: Answered[Any]) -> AnsweredReport:
    found: AnsweredReport = {"address": answered.address, "node": answered.node}
    if answered.clock is not None:
        found["clock_offset_ns"], found["clock_error_ns"] = answered.clock.offset_ns, answered.clock.error_ns
    return found


def fan_out(addresses: Sequence[str], ask: Callable[[str, float], tuple[str, T]], timeout: float) -> Gathered[T]:
    """Calls ``ask(address, seconds_left)`` for every address at once; it returns the node's name and its answer.

    A node that takes longer than ``timeout`` seconds has failed. So has a node that answers under the name of another
    address: its rows would count twice.
    """
    unique = tuple(dict.fromkeys(addresses))
    outcome: Gathered[T] = Gathered(unique)
    if not unique:
        return outcome
    deadline = time.monotonic() + timeout
    stopped = threading.Event()

    def one(address: str) -> tuple[str, T]:
        left = deadline - time.monotonic()
        if left <= 0 or stopped.is_set():
            raise PeerError("it was not asked in time", hint="raise --timeout, or ask fewer nodes")
        return ask(address, left)

    futures: dict[str, Future[tuple[str, T]]] = {}
    young: list[tuple[float, Future[tuple[str, T]]]] = []
    try:
        for address in unique:
            young = _with_place(young, deadline)
            futures[address] = _started(one, address)
            young.append((time.monotonic(), futures[address]))
        _wait(list(futures.values()), deadline + _GRACE_S)
    finally:
        stopped.set()
    for address, future in futures.items():
        _account(outcome, address, future, timeout)
    return outcome


_Calls = list[tuple[float, Future[Any]]]


def _with_place(young: _Calls, deadline: float) -> _Calls:
    """Waits until fewer than ``_AT_ONCE`` calls are young, so that nodes that do not answer hold up nobody."""
    while len(young) >= _AT_ONCE and (now := time.monotonic()) < deadline:
        wait([future for _, future in young], max(young[0][0] + _PATIENCE_S - now, 0.0), FIRST_COMPLETED)
        now = time.monotonic()
        young = [(begun, future) for begun, future in young if not future.done() and now - begun < _PATIENCE_S]
    return young


def _started(work: Callable[[str], T], address: str) -> Future[T]:
    """Runs ``work`` in a thread of its own, which nobody waits for at the end of the process."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            result = work(address)
        except BaseException as e:
            future.set_exception(e)
        else:
            future.set_result(result)

    threading.Thread(target=run, name="ask", daemon=True).start()
    return future


def _wait(futures: list[Future[Any]], deadline: float) -> None:
    pending = set(futures)
    while pending:
        left = deadline - time.monotonic()
        if left <= 0:
            return
        done, pending = wait(pending, timeout=left, return_when=FIRST_COMPLETED)
        # A shared limit, such as the bytes of all answers, ends the question at every node.
        for future in done:
            error = future.exception() if not future.cancelled() else None
            if error is not None and not isinstance(error, ProbingError):
                raise error


def _account(outcome: Gathered[T], address: str, future: Future[tuple[str, T]], timeout: float) -> None:
    if not future.done() or future.cancelled():
        outcome.failed.append(Failed(address, "", late(address, timeout)))
        return
    error = future.exception()
    if isinstance(error, ProbingError):
        outcome.failed.append(Failed(address, "", error))
        return
    if error is not None:
        raise InternalError(f"asking {address}: {error}") from error
    outcome.add(address, *future.result())


def late(address: str, timeout: float) -> PeerError:
    """Returns the error of a node that took too long."""
    return PeerError(f"{address} does not answer: no answer within {timeout:g} s", hint="raise --timeout")


def _common(failed: list[Failed]) -> ProbingError:
    """Returns one error for all nodes: theirs where it is the same, else a list of reasons."""
    first = failed[0].error
    if len(failed) == 1 or all((f.error.kind, f.reason) == (first.kind, first.message) for f in failed):
        return first
    if all(f.error.kind == first.kind and not isinstance(f.error, PeerError) for f in failed):
        return first
    said = "; ".join(f"{f.address}: {f.reason}" for f in failed[:4])
    return PeerError(f"none of {len(failed)} nodes answered: {said}")
