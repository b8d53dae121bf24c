"""Answers of one node and of many, and the nodes that did not answer. This module does not import DuckDB, because that
takes long.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, NoReturn, TypedDict, TypeVar

from probing.api.errors import PartialAnswer, PeerError, ProbingError, QueryMemory
from probing.api.text import size
from probing.federation.execution.clocks import Offset

if TYPE_CHECKING:
    import pyarrow as pa
    from typing_extensions import NotRequired

__all__ = (
    "SAME_VERSION",
    "Answer",
    "Answered",
    "AnsweredReport",
    "DetourReport",
    "Failed",
    "FailedReport",
    "Gather",
    "Gathered",
    "OutcomeReport",
    "Reply",
    "Rows",
    "Take",
    "held_back",
    "other_columns",
    "twice",
)

T = TypeVar("T")
SAME_VERSION = "run the same version of probingd on all nodes"
MAX_BYTES = 4 << 30


@dataclass(frozen=True, slots=True)
class Answered(Generic[T]):
    """The answer of a node, with its ``address``, the name that it gave itself, and the offset of its clock."""

    address: str
    node: str
    value: T
    clock: Offset | None = None


class Failed(NamedTuple):
    """A node without a valid answer. ``node`` is empty if the node's name is unknown."""

    address: str
    node: str
    error: ProbingError

    @property
    def reason(self) -> str:
        """The message of the error without the node's address, which is shown beside the message."""
        return self.error.reason


class AnsweredReport(TypedDict):
    """A node that answered. ``clock_offset_ns``: the node's clock minus our clock; missing if it was not measured."""

    address: str
    node: str
    clock_offset_ns: NotRequired[int]
    clock_error_ns: NotRequired[int]


class FailedReport(TypedDict):
    """A node that failed. ``kind``: the name of a class in probing.api.errors."""

    address: str
    node: str | None
    kind: str
    reason: str


class DetourReport(TypedDict):
    address: str
    reason: str


class OutcomeReport(TypedDict):
    """The addresses that were asked, the nodes that answered, and the nodes that failed. ``detours``: see Gathered."""

    asked: list[str]
    answered: list[AnsweredReport]
    failed: list[FailedReport]
    detours: NotRequired[list[DetourReport]]


@dataclass(slots=True)
class Gathered(Generic[T]):
    """The outcome of a question to many nodes, in the order of the addresses."""

    asked: tuple[str, ...]
    answered: list[Answered[T]] = field(default_factory=list)
    failed: list[Failed] = field(default_factory=list)
    # Nodes that failed to relay the answers of other nodes, which were then asked directly.
    detours: list[Failed] = field(default_factory=list)
    _names: dict[str, str] = field(default_factory=dict, repr=False)

    def add(self, address: str, node: str, value: T) -> None:
        """Adds an answer. If the node has already answered at another address, the answer becomes a failure, because
        the rows of the node would count twice.
        """
        other = self._names.setdefault(node, address)
        if other != address:
            self.failed.append(Failed(address, node, twice(node, other)))
        else:
            self.answered.append(Answered(address, node, value))

    def require(self, *, strict: bool) -> None:
        """Raises the nodes' error if no node answered; under ``strict`` raises PartialAnswer if a node failed."""
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
        report: OutcomeReport = {
            "asked": list(self.asked),
            "answered": [_answered_report(answered) for answered in self.answered],
            "failed": [
                {"address": f.address, "node": f.node or None, "kind": f.error.kind, "reason": f.reason}
                for f in self.failed
            ],
        }
        if self.detours:
            report["detours"] = [{"address": f.address, "reason": f.reason} for f in self.detours]
        return report


def other_columns(number: int, expected: int) -> PeerError:
    """Returns the error for an answer of ``number`` columns instead of ``expected``."""
    return PeerError(f"it answered with {number} columns instead of {expected}", hint=SAME_VERSION)


def twice(node: str, other: str) -> PeerError:
    """Returns the error for a second address that answers as ``node``. ``other``: the first address."""
    return PeerError(
        f"it answers as {node}, the name of the node at {other}", hint="give every daemon its own --node-name"
    )


def _answered_report(answered: Answered[Any]) -> AnsweredReport:
    report: AnsweredReport = {"address": answered.address, "node": answered.node}
    if answered.clock is not None:
        report["clock_offset_ns"], report["clock_error_ns"] = answered.clock.offset_ns, answered.clock.error_ns
    return report


def _common(failed: list[Failed]) -> ProbingError:
    """Returns one error for all nodes: their common error, or an error that lists their reasons."""
    first = failed[0].error
    if all((f.error.kind, f.error.message) == (first.kind, first.message) for f in failed):
        return first
    if all(f.error.kind == first.kind and not isinstance(f.error, PeerError) for f in failed):
        return first
    reasons = "; ".join(f"{f.address}: {f.reason}" for f in failed[:4])
    return PeerError(f"none of {len(failed)} nodes answered: {reasons}")


@dataclass(frozen=True, slots=True)
class Reply:
    """The answer of one node to one part. ``warnings`` say which rows are missing. ``clock``: the offset of the node's
    clock. ``lacks``: the error of a node that lacks the table of the part; ``table`` is then empty.
    """

    node: str
    table: pa.Table
    rows_scanned: int = 0
    warnings: tuple[str, ...] = ()
    clock: Offset | None = None
    lacks: ProbingError | None = None


Take = Callable[[Reply], Reply]
Gather = Callable[[Sequence[str], Mapping[str, str], float, Take], Gathered[tuple[Reply, ...]]]
"""Asks nodes for the rows of statements. Its arguments: the addresses, the statements (SQL by name), the timeout in s,
and a function to which each reply is passed: it returns the reply, or raises ProbingError to refuse the reply.
"""


@dataclass(slots=True)
class Answer:
    """The answer of many nodes. ``table``: the rows of all nodes that answered. ``gathered``: which nodes answered."""

    table: pa.Table
    gathered: Gathered[tuple[Reply, ...]]

    @property
    def warnings(self) -> list[str]:
        lines = [f"{r.node}: {w}" for a in self.gathered.answered for r in a.value for w in r.warnings]
        return list(dict.fromkeys(lines))


class Rows:
    """A stream of rows. ``schema`` is known at once. Batches can be read once; after the last batch ``warnings`` are
    complete. ``close`` ends the query.
    """

    def __init__(
        self,
        schema: pa.Schema,
        batches: Generator[pa.RecordBatch, None, None],
        warnings: list[str],
        cancel: Callable[[], None] = lambda: None,
    ) -> None:
        """Makes the rows. ``cancel`` ends a query whose first batch has not been read yet."""
        self.schema = schema
        self.warnings = warnings
        self._batches = batches
        self._cancel = cancel

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        return self._batches

    def __enter__(self) -> Rows:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._batches.close()
        self._cancel()


def held_back(rows: Rows, max_bytes: int = MAX_BYTES) -> Rows:
    """Returns ``rows``, but buffered: the first batch is returned once the last batch has arrived, so that an error is
    raised before any row is returned.

    The rows wait in an unnamed file in the temporary directory. Reading raises QueryMemory beyond ``max_bytes``.
    """
    return Rows(rows.schema, _batches(rows, max_bytes), rows.warnings, rows.close)


def _batches(rows: Rows, max_bytes: int) -> Generator[pa.RecordBatch, None, None]:
    import tempfile

    import pyarrow as pa

    with rows, tempfile.TemporaryFile(prefix="probing-rows-") as file:
        with pa.ipc.new_stream(file, rows.schema) as writer:
            for batch in rows:
                writer.write_batch(batch)
                if file.tell() > max_bytes:
                    raise QueryMemory(
                        f"the answer is larger than the {size(max_bytes)} that --strict holds back",
                        hint="narrow the time range, or leave --strict out: then rows are written as they arrive",
                    )
        file.seek(0)
        yield from pa.ipc.open_stream(file)
