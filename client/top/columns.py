"""The columns of the table of ranks: chooses columns and widths that fit a terminal, and formats the cells of
a rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from probing.client.collectives.in_flight import NOTABLE_NS
from probing.client.render.rows import Row
from probing.client.top.figures import Line, Span, brief_age, brief_size, fitted, number, rate, spark

__all__ = ("Column", "cells", "chosen", "head")

# The temperature (°C) and the lag (ns) from which a value is coloured.
_HOT_C, _LATE_NS = 85.0, 10e6
# When other columns are widened on a wide screen, this many cells of the spare width stay for the flexible column.
_ROOM_FOR_PYTHON = 20
_COLLECTIVES = ("last_age_ns", "op")


@dataclass(frozen=True, slots=True)
class Column:
    """A column. ``width`` is in cells; for a flexible column it is the minimum width. Columns with a lower ``rank`` get
    space first.

    ``needs``: the column is shown only if some row has a value for one of these keys; empty: always. ``most``: the
    maximum width on a wide screen; 0: always ``width``.
    """

    title: str
    width: int
    rank: int
    show: Callable[[Row, int], str]
    style: Callable[[Row], str] = lambda _: ""
    right: bool = True
    needs: tuple[str, ...] = ()
    flex: bool = False
    most: int = 0


def head(columns: Sequence[tuple[Column, int]]) -> Line:
    """Returns the line of titles."""
    return (Span("  " + " ".join(fitted(c.title, width, right=c.right) for c, width in columns), "head"),)


def cells(columns: Sequence[tuple[Column, int]], row: Row) -> Line:
    """Returns the line of a rank, as wide as the line of titles."""
    spans = [Span(_mark(row), _row_style(row)), Span(" ")]
    for column, width in columns:
        text = fitted(column.show(row, width), width, right=column.right)
        spans.append(Span(text, "dim" if row["away"] or row["ended"] else column.style(row)))
        spans.append(Span(" "))
    return tuple(spans[:-1])


def chosen(width: int, rows: Iterable[Row], *, nodes: int) -> tuple[tuple[Column, int], ...]:
    """Returns the columns that fit ``width``, with their widths. The choice depends on which keys of ``rows`` have
    values, not on the values themselves.

    ``nodes``: the number of nodes with rows.
    """
    missing = {name for column in _COLUMNS for name in column.needs}
    for row in rows:
        missing -= {name for name in missing if row.get(name) not in (None, [])}
        if not missing:
            break
    able = [
        column
        for column in _COLUMNS
        if (not column.needs or set(column.needs) - missing) and (column.title != "NODE" or nodes > 1)
    ]
    left = width - 2
    taken: set[int] = set()
    for i, column in sorted(enumerate(able), key=lambda pair: pair[1].rank):
        cost = column.width + (1 if taken else 0)
        if cost <= left:
            taken.add(i)
            left -= cost
    more: dict[int, int] = {}
    for i in taken:
        more[i] = min(max(0, able[i].most - able[i].width), max(0, left - _ROOM_FOR_PYTHON))
        left -= more[i]
    return tuple((c, c.width + more[i] + (left if c.flex else 0)) for i, c in enumerate(able) if i in taken)


def _mark(row: Row) -> str:
    if row["ended"] is not None:
        return "x"
    if row["away"]:
        return "?"
    return {"culprit": "!", "victim": "."}.get(row["blame"], " ")


def _row_style(row: Row) -> str:
    if row["ended"] is not None and row["first"]:
        return "bad"
    return {"culprit": "bad", "victim": "warn"}.get(row["blame"], "dim")


def _rank_style(row: Row) -> str:
    return {"culprit": "bad", "victim": "warn"}.get(row["blame"], "bold")


def _wait_style(row: Row) -> str:
    return "warn" if (row["age_ns"] or 0) >= NOTABLE_NS else "dim"


def _inflight(row: Row, _width: int) -> str:
    if row["op"] is None:
        return ""
    return f"{row['op']} #{row['seq']}" if row["seq"] is not None else str(row["op"])


def _doing(row: Row, _width: int) -> str:
    if row["ended"] is not None:
        return str(row["how"])
    if row["away"]:
        return "the node does not answer"
    if row["state"] not in (None, "running"):
        return f"[{row['state']}] {row['python'] or ''}"
    if row["waits_in"] is not None and row["op"] is None:
        return f"in {row['waits_in']}, {row['python'] or 'no Python frame'}"
    return row["python"] or ""


def _gpu_ids(row: Row, _width: int) -> str:
    ids = [str(gpu["device_id"]) for gpu in row["gpus"] if gpu["device_id"] is not None]
    return ",".join(ids)


def _history(name: str, most: float | None = None) -> Callable[[Row, int], str]:
    return lambda row, width: spark(row["history"][name], width, most)


def _memory_history(row: Row, width: int) -> str:
    return spark(row["history"]["gpu_used_bytes"], width, row["gpu_total_bytes"])


def _power_history(row: Row, width: int) -> str:
    limits = [gpu["power_limit_w"] for gpu in row["gpus"] if gpu.get("power_limit_w")]
    return spark(row["history"]["power_w"], width, sum(limits))


def _lag(value: float | None) -> str:
    return "0" if value is not None and value < 1000 else brief_age(value)


_COLUMNS = (
    Column("RANK", 5, 0, lambda r, _: "?" if r["rank"] is None else str(r["rank"]), _rank_style),
    Column("NODE", 10, 4, lambda r, _: str(r["node"]), right=False),
    Column("PID", 7, 8, lambda r, _: str(r["pid"]), lambda _: "dim"),
    Column("COLL/S", 6, 7, lambda r, _: rate(r["collectives_per_s"]), needs=_COLLECTIVES),
    Column("STEP", 8, 7, lambda r, _: number(r["step"]), needs=("step",)),
    Column("STEP/S", 6, 3, lambda r, _: rate(r["steps_per_s"]), needs=("step",)),
    Column("", 6, 11, _history("steps_per_s", 0.0), lambda _: "step", needs=("step",), right=False),
    Column("IN FLIGHT", 14, 1, _inflight, _wait_style, right=False, needs=_COLLECTIVES, most=32),
    Column("AGE", 6, 1, lambda r, _: brief_age(r["age_ns"]), _wait_style, needs=_COLLECTIVES),
    Column(
        "LAG",
        6,
        3,
        lambda r, _: _lag(r["lag_ns"]),
        lambda r: "warn" if (r["lag_ns"] or 0) > _LATE_NS else "",
        needs=("lag_ns",),
    ),
    Column("CPU", 5, 2, lambda r, _: number(r["cpu_pct"], "%"), lambda _: "cpu", needs=("cpu_pct",)),
    Column("", 8, 10, _history("cpu_pct", 100.0), lambda _: "cpu", right=False, needs=("cpu_pct",)),
    Column("RSS", 5, 4, lambda r, _: brief_size(r["rss_bytes"]), lambda _: "mem", needs=("rss_bytes",)),
    Column("GPU", 3, 7, _gpu_ids, lambda _: "dim", right=False, needs=("gpus",)),
    Column("UTIL", 4, 2, lambda r, _: number(r["gpu_pct"], "%"), lambda _: "gpu", needs=("gpu_pct",)),
    Column("", 8, 10, _history("gpu_pct", 100.0), lambda _: "gpu", right=False, needs=("gpu_pct",)),
    Column("GMEM", 5, 5, lambda r, _: brief_size(r["gpu_used_bytes"]), lambda _: "mem", needs=("gpu_used_bytes",)),
    Column("", 6, 11, _memory_history, lambda _: "mem", right=False, needs=("gpu_used_bytes",)),
    Column("POWER", 5, 6, lambda r, _: number(r["power_w"], "W"), lambda _: "power", needs=("power_w",)),
    Column("", 6, 12, _power_history, lambda _: "power", right=False, needs=("power_w",)),
    Column(
        "TEMP",
        4,
        6,
        lambda r, _: number(r["temperature_c"], "C"),
        lambda r: "bad" if (r["temperature_c"] or 0) >= _HOT_C else "temp",
        needs=("temperature_c",),
    ),
    Column("", 6, 12, _history("temperature_c", 100.0), lambda _: "temp", right=False, needs=("temperature_c",)),
    Column("PYTHON", 14, 2, _doing, right=False, flex=True),
)
