"""Reads diagnosis.findings: the newest row of each finding, and the open ones as lines for other commands."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

from probing.client.render.rows import Row
from probing.client.render.text import clock

__all__ = (
    "OPEN",
    "PARTS",
    "SHOWN",
    "Verdicts",
    "blamed",
    "by_run",
    "newest_sql",
    "numbers",
    "order",
    "parsed",
    "verdict_lines",
)

Verdicts = dict[tuple[Any, Any], list[Row]]
"""Open findings by job and run, the worst first."""
PARTS = ("culprits", "evidence", "missing", "refuted_by", "next_steps", "stacks")
"""Columns that hold JSON."""
_KEY = ("finding_id", "job", "run")
_ORDER = {"error": 0, "warning": 1, "note": 2}
SHOWN = ("node", "verdict", "severity", "state", "confidence", "sentence", "ranks", "victims", "opened")
"""Columns that commands show of a finding."""
_MOST_LINES = 3
# Longer JSON is not parsed: no daemon writes it.
_MOST_BYTES = 1 << 20


def newest_sql(where: str, columns: Sequence[str]) -> str:
    """Returns the SELECT of ``columns`` of the newest row of each finding, with its key and ``ts``."""
    newest = ", ".join(f"arg_max({column}, ts) AS {column}" for column in columns)
    key = ", ".join(_KEY)
    return f"SELECT {key}, max(ts) AS ts, {newest} FROM diagnosis.findings WHERE {where} GROUP BY {key}"


# The open findings of the last 7 days; ``{of_job}`` is a condition.
OPEN = newest_sql("ts > now() - INTERVAL 7 DAY AND {of_job}", SHOWN) + " HAVING arg_max(state, ts) = 'open'"


def order(row: Row) -> tuple[Any, ...]:
    """Returns the key that sorts rows of findings: the worst first, then the most certain."""
    return _ORDER.get(row["severity"], len(_ORDER)), -(row["confidence"] or 0.0), str(row["opened"])


def by_run(rows: Iterable[Row]) -> Verdicts:
    """Returns the rows of OPEN by run; notes are left out."""
    found: Verdicts = {}
    for row in sorted(rows, key=order):
        if row["severity"] != "note":
            found.setdefault((row["job"], row["run"]), []).append(row)
    return found


def numbers(text: str | None) -> list[int]:
    """Returns the ranks of a column such as ``ranks``: [1, 3] of "1,3"."""
    return [int(rank) for rank in (text or "").split(",") if rank.isdecimal()]


def parsed(text: str | None) -> object:
    """Returns the value of a column of PARTS; None for anything but JSON."""
    try:
        return None if text is None or len(text) > _MOST_BYTES else json.loads(text)
    except (ValueError, RecursionError):
        return None


def blamed(rows: Iterable[Row]) -> set[tuple[int, str]]:
    """Returns the ranks at fault, each with its verdict, of the rows of severity error."""
    return {(rank, row["verdict"]) for row in rows if row["severity"] == "error" for rank in numbers(row["ranks"])}


def verdict_lines(rows: Iterable[Row]) -> list[str]:
    """Returns a line for each of the first open findings of a run, and one that counts the rest."""
    sentences = {str(row["sentence"]): row["opened"] for row in rows}
    lines = [f"DIAGNOSIS at {clock(at)}: {sentence}" for sentence, at in list(sentences.items())[:_MOST_LINES]]
    if len(sentences) > _MOST_LINES:
        lines.append(f"and {len(sentences) - _MOST_LINES} more: see `probingctl diagnose`")
    return lines
