"""Answers of nodes, and of all nodes together. Imports no engine, so that a question to one node loads none."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Protocol

from probing.federation.execution.clocks import Offset
from probing.federation.execution.fanout import Gathered

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ("Answer", "Gather", "Reply", "Rows", "Take")


@dataclass(frozen=True, slots=True)
class Reply:
    """The answer of one node to one part. ``warnings`` say which rows are missing; ``clock``: how far its clock is."""

    node: str
    table: pa.Table
    rows_scanned: int = 0
    warnings: tuple[str, ...] = ()
    clock: Offset | None = None


Take = Callable[[Reply], Reply]


class Gather(Protocol):
    """Asks all of ``addresses`` for the rows of ``statements`` (SQL by name), within ``timeout`` seconds.

    Each reply goes through ``take``, which raises ProbingError for one that is refused.
    """

    def __call__(
        self, addresses: Sequence[str], statements: Mapping[str, str], timeout: float, take: Take
    ) -> Gathered[tuple[Reply, ...]]: ...


@dataclass(slots=True)
class Answer:
    """``table`` has the rows of all nodes that answered, ``gathered`` which nodes those are."""

    table: pa.Table
    gathered: Gathered[tuple[Reply, ...]]

    @property
    def warnings(self) -> list[str]:
        found = [f"{r.node}: {w}" for a in self.gathered.answered for r in a.value for w in r.warnings]
        return list(dict.fromkeys(found))


class Rows:
    """A stream of rows: ``schema`` at once, batches once, then ``warnings``. Close it to end the query."""

    def __init__(
        self,
        schema: pa.Schema,
        batches: Generator[pa.RecordBatch, None, None],
        warnings: list[str],
        cancel: Callable[[], None] = lambda: None,
    ) -> None:
        """``cancel`` ends a query whose first batch was not read yet."""
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
