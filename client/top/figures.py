"""Formats figures in a few cells: sizes, ages and rates, sparklines, and text cut to a width."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from rich.cells import cell_len, set_cell_size

from probing.api.text import age, escape, size
from probing.client.render.table import ascii_only, cut_mark

__all__ = ("Line", "Span", "brief_age", "brief_size", "fitted", "number", "rate", "spark", "text_of")

_BLOCKS = "▁▂▃▄▅▆▇█"
# Characters of a bar, ordered by their height in the cell.
_LETTERS = "_.-=+*%#"


@dataclass(frozen=True, slots=True)
class Span:
    """A text without control characters, and the name of its style in ``client/top/screen.py``."""

    text: str
    style: str = ""


Line = tuple[Span, ...]


def text_of(line: Line) -> str:
    """Returns the text of a line without styles."""
    return "".join(span.text for span in line)


def fitted(text: str, width: int, *, right: bool = False) -> str:
    """Returns ``text``, escaped and exactly ``width`` cells wide: padded, or cut with a mark."""
    text = escape(text)
    length = cell_len(text)
    if length > width:
        return set_cell_size(text, width - 1) + cut_mark() if width > 0 else ""
    return " " * (width - length) + text if right else text + " " * (width - length)


def brief_age(ns: float | None) -> str:
    """Returns a duration in at most 6 characters: ``812ms``, ``35.0s``, ``5m07s``, ``3h12m``, ``2d04h``."""
    return "" if ns is None else age(max(ns, 0)).replace(" ", "")


def brief_size(number: float | None) -> str:
    """Returns a number of bytes in powers of 1024 in at most 5 characters: ``512B``, ``4.19M``, ``61.2G``."""
    return "" if number is None else size(number).replace(" ", "").removesuffix("iB")


def number(value: float | None, unit: str = "") -> str:
    """Returns a whole number with its unit, such as ``97%``; an empty text if it is unknown."""
    return "" if value is None or not math.isfinite(value) else f"{value:.0f}{unit}"


def rate(value: float | None) -> str:
    """Returns events a second in at most 5 characters: ``0.25``, ``12.3``, ``1234``."""
    if value is None or not math.isfinite(value):
        return ""
    return f"{value:.2f}" if value < 9.995 else f"{value:.1f}" if value < 999.5 else f"{value:.0f}"


def spark(values: Sequence[float | None], width: int, most: float | None = None) -> str:
    """Returns the last ``width`` of ``values`` as bars, right-aligned; an unknown value leaves a gap.

    The scale of the bars goes from 0 to ``most``; without ``most`` from the least to the greatest value shown.
    """
    shown = list(values)[-width:] if width > 0 else []
    known = [value for value in shown if value is not None and math.isfinite(value)]
    low = 0.0 if most is not None else min(known, default=0.0)
    high = max([*known, *([] if most is None else [most])], default=0.0)
    # A value that hardly changes becomes a flat line; its noise is not magnified.
    span = max(high - low, abs(high) * 0.05, 1e-9)
    return "".join(_bar(value, low, span) for value in shown).rjust(width)


def _bar(value: float | None, low: float, span: float) -> str:
    if value is None or not math.isfinite(value):
        return " "
    bars = _LETTERS if ascii_only() else _BLOCKS
    return bars[min(len(bars) - 1, max(0, int((value - low) / span * len(bars))))]
