"""What the gate returns for a statement. Apart from the gate, so that the service does without its parser."""

from __future__ import annotations

from dataclasses import dataclass, field

from probing.api.tables import Table
from probing.daemon.store.needs import Need

__all__ = ("Checked",)


@dataclass(frozen=True, slots=True)
class Checked:
    """``sql``: the text for DuckDB. ``needs``: by name of each table in it, the rows that it can need. ``users``: the
    tables of users' probes among them. ``warnings``: for the caller. ``columns``: names, in lower case, of which each
    column that the statement uses is one; None: it uses whole rows."""

    sql: str
    needs: dict[str, Need]
    users: dict[str, Table] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    columns: frozenset[str] | None = None

    @property
    def tables(self) -> tuple[str, ...]:
        """The names of the tables, sorted."""
        return tuple(sorted(self.needs))
