"""Finds rows that were imported before from other files."""

from __future__ import annotations

from collections.abc import Sequence

from probing.api.errors import FormatError
from probing.daemon.store.importing.journal import Entry, Span
from probing.daemon.store.importing.sources import Unit

__all__ = ("is_imported",)


def is_imported(unit: Unit, name: str, span: Span, older: Sequence[Entry]) -> bool:
    """Returns whether the rows of table ``name`` in ``unit`` were imported from other files.

    Between two copies of a state directory log parts are sealed and segments merged, so the same rows come in other
    files. Raises FormatError when only some of the rows may have been imported.
    """
    if unit.parts is None or not unit.node:
        return False
    first, last = unit.parts
    known = [
        (entry.parts, entry.tables[name])
        for entry in older
        if entry.parts
        and entry.node == unit.node
        and name in entry.tables
        and entry.parts[0] <= last
        and first <= entry.parts[1]
        and entry.tables[name].ts_min <= span.ts_max
        and span.ts_min <= entry.tables[name].ts_max
    ]
    if not known:
        return False
    if any(
        parts[0] <= first and last <= parts[1] and old.ts_min <= span.ts_min and span.ts_max <= old.ts_max
        for parts, old in known
    ):
        return True
    inside = all(
        first <= parts[0] and parts[1] <= last and span.ts_min <= old.ts_min and old.ts_max <= span.ts_max
        for parts, old in known
    )
    if inside and sum(old.rows for _, old in known) == span.rows:
        return True
    raise FormatError(f"some of its rows were imported before from other files of {unit.node}: none is taken again")
