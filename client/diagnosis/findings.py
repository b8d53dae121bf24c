"""Reads diagnosis.findings: the newest row of each finding, and the open findings as lines for other commands."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from datetime import datetime, timezone
from typing import Any

from probing.api.text import time_text
from probing.client.render.rows import Row
from probing.client.zone import clock

__all__ = (
    "DEATHS",
    "OPEN",
    "OPEN_COLUMNS",
    "PARTS",
    "ROW_AGE",
    "SHOWN",
    "Verdicts",
    "blamed",
    "by_run",
    "dead_ranks",
    "newest_sql",
    "ns_of",
    "numbers",
    "open_by_run",
    "order",
    "parsed",
    "timed",
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
# Longer JSON is not parsed, because no daemon writes so much.
_MOST_BYTES = 1 << 20
# Matches the length of time in a sentence, as ``time_text`` writes it.
_LASTS = re.compile(r" for (\d+(?:\.\d)?) (s|min|h)\b")
_UNITS_NS = {"s": 10**9, "min": 60 * 10**9, "h": 3600 * 10**9}
_SECOND_NS = 10**9
_MOST_DIGITS = 9


def newest_sql(where: str, columns: Sequence[str], *more: str) -> str:
    """Returns the SELECT for the newest row of each finding: its key, ``ts``, ``columns``, and the expressions
    ``more``.
    """
    newest = ", ".join([*(f"arg_max({column}, ts) AS {column}" for column in columns), *more])
    key = ", ".join(_KEY)
    return f"SELECT {key}, max(ts) AS ts, {newest} FROM diagnosis.findings WHERE {where} GROUP BY {key}"


ROW_AGE = "epoch_ns(now()) - epoch_ns(max(ts)) AS row_age_ns"
"""An expression for ``newest_sql``: the age of the row, ns, according to the clock of the node that answers."""
OPEN_COLUMNS = (*SHOWN, "since")
_LATELY = "ts > now() - INTERVAL 7 DAY AND {of_job}"
OPEN = newest_sql(_LATELY, OPEN_COLUMNS, ROW_AGE) + (
    " HAVING arg_max(state, ts) = 'open' OR arg_max(verdict, ts) = 'rank_died'"
)
"""The open findings of the last 7 days, and the closed findings of deaths; ``{of_job}`` is a condition."""
DEATHS = newest_sql(f"verdict = 'rank_died' AND {_LATELY}", ("verdict", "severity", "state", "ranks"))
"""The deaths of the last 7 days."""


def order(row: Row) -> tuple[Any, ...]:
    """Returns the key that sorts rows of findings by severity, then by confidence, the highest first."""
    return _ORDER.get(row["severity"], len(_ORDER)), -(row["confidence"] or 0.0), str(row["opened"])


def by_run(rows: Iterable[Row]) -> Verdicts:
    """Returns ``rows`` of findings by run, the worst finding of each run first; notes are left out."""
    found: Verdicts = {}
    for row in sorted(rows, key=order):
        if row["severity"] != "note":
            found.setdefault((row["job"], row["run"]), []).append(row)
    return found


def open_by_run(rows: Iterable[Row]) -> Verdicts:
    """Returns the open findings among ``rows`` (of the query OPEN) by run, without notes. Each sentence is updated to
    say how long the state has lasted by now."""
    return by_run(_now(row) for row in rows if row["state"] == "open")


def dead_ranks(rows: Iterable[Row]) -> dict[tuple[Any, Any], list[int]]:
    """Returns the ranks that died first, by job and run, from the newest finding of a death; an open finding has
    precedence over a closed finding."""
    deaths = [row for row in rows if (row["verdict"], row["severity"]) == ("rank_died", "error")]
    ordered = sorted(deaths, key=lambda row: (row["state"] == "open", str(row["ts"])))
    return {(row["job"], row["run"]): numbers(row["ranks"]) for row in ordered}


def _now(row: Row) -> Row:
    shown = {name: row[name] for name in row if name not in ("row_age_ns", "since")}
    written, passed = ns_of(row["ts"]), row.get("row_age_ns")
    return {**shown, "sentence": timed(row, None if written is None or passed is None else written + passed)}


def timed(row: Row, now_ns: int | None) -> str:
    """Returns the sentence of a row. For severity error, the length of time in the sentence is updated to ``now_ns``
    (UTC ns).

    The sentence stays as stored if the length is unknown, or if the length in the sentence does not begin at ``since``.
    """
    sentence, since, written = str(row["sentence"]), ns_of(row.get("since")), ns_of(row["ts"])
    lasts = _LASTS.search(sentence)
    if lasts is None or since is None or written is None or now_ns is None or row["severity"] != "error":
        return sentence
    unit = _UNITS_NS[lasts[2]]
    stored = float(lasts[1]) * unit
    if stored > written - since + max(unit, _SECOND_NS) or now_ns < since:
        return sentence
    return f"{sentence[: lasts.start()]} for {time_text(now_ns - since)}{sentence[lasts.end() :]}"


def ns_of(text: Any) -> int | None:
    """Returns a time of an answer, such as "2026-11-28T01:14:04.562500000Z", in UTC ns; None for any other value."""
    try:
        moment = datetime.fromisoformat(text[:19]).replace(tzinfo=timezone.utc)
        return int(moment.timestamp()) * 10**9 + int((text[20:].rstrip("Z") or "0").ljust(9, "0")[:9])
    except (TypeError, ValueError):
        return None


def numbers(text: str | None) -> list[int]:
    """Returns the ranks in the text of a column such as ``ranks``: [1, 3] for "1,3"."""
    # No rank has more digits, and int() refuses more than 4,300.
    return [int(rank) for rank in (text or "").split(",") if rank.isdecimal() and len(rank) <= _MOST_DIGITS]


def parsed(text: str | None) -> object:
    """Returns the parsed value of a column of PARTS; None if it is not JSON."""
    try:
        return None if text is None or len(text) > _MOST_BYTES else json.loads(text)
    except (ValueError, RecursionError):
        return None


def blamed(rows: Iterable[Row]) -> set[tuple[int, str]]:
    """Returns pairs of a rank at fault and the verdict on it, from the rows of severity error."""
    return {(rank, row["verdict"]) for row in rows if row["severity"] == "error" for rank in numbers(row["ranks"])}


def verdict_lines(rows: Iterable[Row]) -> list[str]:
    """Returns lines for the first open findings of a run, and a line with the number of the others."""
    sentences = {str(row["sentence"]): row["opened"] for row in rows}
    lines = [f"DIAGNOSIS at {clock(at)}: {sentence}" for sentence, at in list(sentences.items())[:_MOST_LINES]]
    if len(sentences) > _MOST_LINES:
        lines.append(f"and {len(sentences) - _MOST_LINES} more: see `probingctl diagnose`")
    return lines
