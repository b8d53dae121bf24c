"""The gate's result for a statement, and the parts of an answer that the engine yields besides rows.

This module is separate from the gate, so that the service does not need the gate's parser.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from probing.api.errors import ProbingError
from probing.api.tables import Table
from probing.daemon.store.needs import Need

__all__ = (
    "Checked",
    "End",
    "Item",
    "QueryProgress",
    "StatementEnd",
)


@dataclass(frozen=True, slots=True)
class Checked:
    """A checked statement. ``sql``: the text for DuckDB. ``needs``: by table name, the rows that the statement can
    need. ``users``: the statement's tables that users' probes or jobs fill. ``warnings``: warnings for the caller.
    ``columns``: a set of lower-case names that contains each column that the statement uses; None if the statement uses
    whole rows."""

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
    incomplete. ``warnings``: the warnings of this statement alone."""

    index: int
    rows: int = 0
    warnings: tuple[str, ...] = ()
    error: ProbingError | None = None


@dataclass(frozen=True, slots=True)
class End:
    """The end of an answer. ``rows``: the number of rows of all statements. ``rows_scanned``: the number of rows in the
    snapshot's segments and log; for a caller limited to jobs it equals ``rows``, since the true number would reveal
    other jobs. ``warnings``: which rows the answer lacks."""

    rows: int
    rows_scanned: int
    warnings: list[str] = field(default_factory=list)


Item = bytes | QueryProgress | StatementEnd | End
