"""Converts the rows of a Parquet file to a table's physical schema: rows as stored, or as shown (``export``)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pyarrow as pa

from probing.api.errors import FormatError
from probing.api.tables import Table
from probing.daemon.store.log.streams import conform

__all__ = ("check_columns", "physical_rows")

# The shown columns from which stored ones can be computed, by table.
_NEEDED = {"comm.ops": ("t_launch", "t_start", "t_done_lo", "t_done_hi", "timing_source")}
_ALWAYS = ("node", "ts")


def check_columns(table: Table, names: Sequence[str]) -> None:
    """Raises FormatError when a file with these columns cannot have rows of ``table``."""
    given = set(names)
    if table.live:
        raise FormatError(f"{table.name} is made when it is asked for, and never stored")
    if len(given) != len(names):
        raise FormatError("two of its columns have one name")
    if missing := [name for name in _ALWAYS if name in table.physical.names and name not in given]:
        raise FormatError(f"it has no column {missing[0]}: whose rows they are cannot be known")
    if unknown := sorted(given - set(table.physical.names) - set(table.logical.names)):
        raise FormatError(f"{table.name} has no column {unknown[0][:80]}")
    if not _is_shown(table, given):
        return
    hidden = set(table.physical.names) - set(table.logical.names)
    if hidden & given:
        raise FormatError("it has columns as they are stored and as they are shown")
    if hidden and table.name not in _NEEDED:
        raise FormatError(f"{table.name} as it is shown lacks what is stored: {', '.join(sorted(hidden))}")
    if lacking := [name for name in _NEEDED.get(table.name, ()) if name not in given]:
        raise FormatError(f"it has no column {lacking[0]}, from which a stored one is made")


def physical_rows(table: Table, rows: pa.Table) -> pa.Table:
    """Returns ``rows``, whose columns passed ``check_columns``, in the physical schema. Raises FormatError."""
    try:
        if _is_shown(table, set(rows.column_names)) and table.name in _NEEDED:
            rows = _stored_times(rows)
        return conform(rows, table.physical)
    except (pa.ArrowException, OverflowError) as e:
        raise FormatError(f"its columns have other types than {table.name}: {str(e).splitlines()[0]}") from e


def _is_shown(table: Table, names: set[str]) -> bool:
    computed = {column.name for column in table.columns if column.sql is not None}
    hidden = set(table.physical.names) - set(table.logical.names)
    # Without a computed column they may still be some of the shown ones.
    return bool(computed & names) or (bool(hidden) and not hidden & names)


def _stored_times(rows: pa.Table) -> pa.Table:
    """Adds the stored times of comm.ops: ns after the call."""
    import pyarrow.compute as pc

    subtract: Callable[..., Any] = pc.subtract_checked
    called: Any = _ns(rows.column("ts"))
    stored = {
        name: subtract(_ns(rows.column(shown)), called)
        for name, shown in (
            ("launch_ns_after", "t_launch"),
            ("start_ns_after", "t_start"),
            ("done_lo_ns", "t_done_lo"),
            ("done_hi_ns", "t_done_hi"),
        )
    }
    for name, column in stored.items():
        rows = rows.append_column(name, column)
    return rows


def _ns(column: Any) -> Any:
    return column.cast(pa.timestamp("ns")).cast(pa.int64())
