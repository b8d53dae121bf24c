"""Chooses the columns of a table that fit the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from probing.client.render.rows import Row
from probing.client.render.table import Field, Grid

__all__ = ("fitting",)


def fitting(fields: Sequence[Field], rows: Sequence[Row], width: int | None, *, spare: Sequence[str]) -> list[Field]:
    """Returns ``fields`` without the first ones of the keys ``spare``, as many as must go for the table to fit."""
    kept = list(fields)
    for key in spare:
        if width is None or not rows or Grid(kept, rows, width).width <= width:
            break
        # A column that distinguishes rows stays.
        if len({str(row.get(key)) for row in rows}) == 1 or key != "node":
            kept = [field for field in kept if field.key != key]
    return kept
