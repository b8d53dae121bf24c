"""What nodes answer, and what is made of it. Imports no engine, so that asking one node costs none."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING

from probing.federation.fanout import Gathered

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ("Answer", "Reply", "Rows")


@dataclass(frozen=True, slots=True)
class Reply:
    """What one node answers to one part. ``warnings`` say what the rows lack."""

    node: str
    table: pa.Table
    rows_scanned: int = 0
    warnings: tuple[str, ...] = ()


@dataclass(slots=True)
class Answer:
    """``table`` has the rows of all that answered, ``gathered`` says who did."""

    table: pa.Table
    gathered: Gathered[tuple[Reply, ...]]

    @property
    def warnings(self) -> list[str]:
        found = [f"{r.node}: {w}" for a in self.gathered.answered for r in a.value for w in r.warnings]
        return list(dict.fromkeys(found))


class Rows:
    """What a query streams: ``schema`` at once, batches once, then ``warnings``. Close it to end the query."""

    def __init__(
        self,
        schema: pa.Schema,
        batches: Generator[pa.RecordBatch, None, None],
        warnings: list[str],
        cancel: Callable[[], None] = lambda: None,
    ) -> None:
        """``cancel`` ends what may be under way before the first batch is asked for."""
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
