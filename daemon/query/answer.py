"""The gate's result for a statement, and the parts of an answer other than rows, read from a worker's messages.

This module is separate from the gate, so that the service does not need the gate's parser.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from probing.api.errors import InternalError, ProbingError
from probing.api.tables import Table
from probing.daemon.ipc import error_of
from probing.daemon.store.needs import Need

__all__ = (
    "Checked",
    "End",
    "Item",
    "QueryProgress",
    "StatementEnd",
    "end_of",
    "statement_end",
)


@dataclass(frozen=True, slots=True)
class Checked:
    """A checked statement. ``sql``: the text for DuckDB. ``needs``: by name of each table in it, the rows that it can
    need. ``users``: the tables of users' probes among them. ``warnings``: for the caller. ``columns``: names in lower
    case, among them the name of each column that the statement uses; None: it uses whole rows."""

    sql: str
    needs: dict[str, Need]
    users: dict[str, Table] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    columns: frozenset[str] | None = None

    @property
    def tables(self) -> tuple[str, ...]:
        """The names of the tables, sorted."""
        return tuple(sorted(self.needs))


class QueryProgress(NamedTuple):
    """The progress of a query. ``fraction``: the share of the work that is done, 0 to 1; negative while unknown.
    ``rows_to_scan``: rows in the segments that are read, 0 for a caller that is limited to jobs; ``elapsed_ms``: time
    since the request began."""

    fraction: float
    rows_to_scan: int
    elapsed_ms: int


@dataclass(frozen=True, slots=True)
class StatementEnd:
    """The end of the rows of statement number ``index``. With ``error`` the statement failed, and its rows are
    incomplete. ``warnings``: only of this statement."""

    index: int
    rows: int = 0
    warnings: tuple[str, ...] = ()
    error: ProbingError | None = None


@dataclass(frozen=True, slots=True)
class End:
    """The end of an answer. ``rows``: the number of rows of all statements. ``rows_scanned``: the number of rows in the
    snapshot's segments and log; for a caller limited to jobs it equals ``rows``, since the true number would reveal
    other jobs. ``warnings``: rows that the snapshot lacks."""

    rows: int
    rows_scanned: int
    warnings: list[str] = field(default_factory=list)


Item = bytes | QueryProgress | StatementEnd | End


def statement_end(answer: Mapping[str, Any], index: int, statement: Checked | ProbingError) -> StatementEnd:
    """Returns the end of ``statement`` from a worker's ``answer``. Raises InternalError."""
    warnings = statement.warnings if isinstance(statement, Checked) else ()
    try:
        if error := answer.get("error"):
            return StatementEnd(index, 0, warnings, error_of(error))
        return StatementEnd(index, int(answer["rows"]), warnings)
    except (AttributeError, KeyError, TypeError, ValueError) as e:
        raise InternalError("a worker's answer is malformed") from e


def end_of(answer: Mapping[str, Any], rows: int, scanned: int, warnings: list[str], *, complete: bool) -> End:
    """Returns the End from a worker's ``answer``; ``complete``: every statement was answered. Raises InternalError."""
    try:
        if not complete:
            raise ValueError("a statement has no answer")
        return End(rows, scanned + int(answer["tail_rows"]), [*warnings, *map(str, answer["warnings"])])
    except (KeyError, TypeError, ValueError) as e:
        raise InternalError("a worker's answer is malformed") from e
