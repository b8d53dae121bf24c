"""Tables for people: aligned, one line a row, cut only where a column says that it may be."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rich.cells import cell_len, set_cell_size

from probing.client.text import escape

__all__ = ("Field", "render", "show_value", "terminal_width")

_GAP = "  "
_LEAST_FLEX = 20


@dataclass(frozen=True, slots=True)
class Field:
    """A column: where its value is in the row, how it is shown, and whether it may be cut to fit the terminal."""

    title: str
    key: str
    show: Callable[[Any], str] | None = None
    right: bool = False
    flex: bool = False


def show_value(value: Any) -> str:
    """Any value of a row as text on one line."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.6g}"
    return str(value)


def terminal_width() -> int | None:
    """Columns of the terminal on stdout; None when stdout is none, so that nothing is cut."""
    if not sys.stdout.isatty():
        return None
    import shutil

    return max(40, shutil.get_terminal_size((100, 40)).columns)


def render(fields: Sequence[Field], rows: Sequence[dict[str, Any]], width: int | None, *, bold: bool = False) -> str:
    """The rows under a line of titles. ``width`` None: as wide as the values are."""
    cells = [[escape((f.show or show_value)(row.get(f.key))) for f in fields] for row in rows]
    widths = [max([cell_len(f.title), *(cell_len(line[i]) for line in cells)]) for i, f in enumerate(fields)]
    _fit(fields, widths, width)
    titles = _line(fields, [f.title for f in fields], widths)
    head = f"\x1b[1m{titles}\x1b[0m" if bold else titles
    return "\n".join([head, *(_line(fields, line, widths) for line in cells)]) + "\n"


def _fit(fields: Sequence[Field], widths: list[int], width: int | None) -> None:
    if width is None:
        return
    over = sum(widths) + len(_GAP) * (len(widths) - 1) - width
    for i, f in reversed(list(enumerate(fields))):
        if f.flex and over > 0:
            cut = min(over, max(0, widths[i] - _LEAST_FLEX))
            widths[i] -= cut
            over -= cut


def _line(fields: Sequence[Field], line: Sequence[str], widths: Sequence[int]) -> str:
    parts = [_cell(text, width, f.right) for f, text, width in zip(fields, line, widths, strict=True)]
    return _GAP.join(parts).rstrip()


def _cell(text: str, width: int, right: bool) -> str:
    length = cell_len(text)
    if length > width:
        return set_cell_size(text, width - 1) + "…"
    return " " * (width - length) + text if right else text + " " * (width - length)
