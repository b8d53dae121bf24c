"""``diagnose --history`` and ``diagnose FINDING_ID``: show earlier findings, also of jobs that have ended."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from probing.api.errors import NotFound, UsageError
from probing.api.text import age, escape, sql_text
from probing.client.absence import partial
from probing.client.diagnosis.findings import PARTS, newest_sql, ns_of, parsed, timed
from probing.client.diagnosis.page import confidence_word
from probing.client.diagnosis.page_file import is_page, write_page
from probing.client.jobs import silent_nodes
from probing.client.render.output import write_objects
from probing.client.render.rows import Row, rows_of
from probing.client.render.table import terminal_width, wrapped
from probing.client.session import warn
from probing.client.settings import Settings
from probing.client.times import Interval
from probing.client.zone import clock, when

if TYPE_CHECKING:
    from probing.client.cluster import Cluster

__all__ = ("history", "show", "show_finding")

_MOST = 1000
# An open finding is shown if its newest row was stored at most this long before the interval begins, s.
_OPEN_S = 7 * 86400.0
_MOST_NAMED = 8
_LINE = (
    "node",
    "verdict",
    "severity",
    "state",
    "confidence",
    "sentence",
    "ranks",
    "nodes",
    "victims",
    "about",
    "since",
    "opened",
    "closed",
)
_MORE = ("found_by", "advice", "advice_nodes", "advice_reason", "ends", "ends_by")
_NOW = "epoch_ns(now()) AS now_ns"


def show(settings: Settings, cluster: Cluster, job: str | None, during: Interval, *, full: bool) -> None:
    """Writes the findings of an interval, oldest first; ``full``: with the whole page of each finding."""
    rows = history(cluster, job, during, whole=full or settings.format in ("json", "jsonl"))
    width = terminal_width() if settings.output is None else None
    if full and settings.format == "table":
        text = "\n".join(_page(row, width) for row in rows)
    else:
        text = "".join(line + "\n" for row in rows for line in wrapped(escape(_line(row)), width))
    of_job = f" of job {job}" if job is not None else ""
    nothing = escape(f"(nothing was found{of_job} {during.text()})") + "\n"
    write_objects(settings, rows, text or nothing, rows)


def show_finding(settings: Settings, cluster: Cluster, name: str, job: str | None) -> None:
    """Writes the whole page of the finding whose id is, or begins with, ``name``.

    Raises NotFound if no node has it, PartialAnswer if a node that does not answer may have it, and UsageError if
    several ids begin with ``name``.
    """
    asked = len(cluster.outcomes)
    where = f"starts_with(finding_id, {sql_text(name.lower())})"
    rows = _read(cluster, where if job is None else f"{where} AND job = {sql_text(job)}", (*_LINE, *PARTS, *_MORE))
    exact = [row for row in rows if row["finding_id"] == name]
    ids = sorted({row["finding_id"] for row in exact or rows})
    if len(ids) > 1:
        more = f" and {len(ids) - _MOST_NAMED} more" if len(ids) > _MOST_NAMED else ""
        raise UsageError(
            f"{name} fits several findings: {', '.join(ids[:_MOST_NAMED])}{more}", hint="give the whole id"
        )
    if not ids and (silent := silent_nodes(cluster, asked)):
        raise partial(f"finding {name} is not", silent)
    if not ids:
        elsewhere = "" if cluster.many else "--all-nodes asks the other nodes, and "
        hint = f"{elsewhere}`probingctl diagnose --history` shows the ids of findings"
        raise NotFound(f"there is no finding {name}{'' if cluster.many else ' on this node'}", hint=hint)
    if is_page(settings):
        from probing.client.diagnosis.finding_rows import diagnosis_of

        write_page(settings, [diagnosis_of(row) for row in rows], [_head(row) for row in rows])
        return
    width = terminal_width() if settings.output is None else None
    text = "\n".join(_page(row, width) for row in rows) if settings.format == "table" else ""
    write_objects(settings, rows, text, rows)


def history(cluster: Cluster, job: str | None, during: Interval, *, whole: bool) -> list[Row]:
    """Returns at most 1,000 findings that were open in an interval, oldest first, each in its state at the end of the
    interval.

    ``whole``: the rows have the columns PARTS, too.
    """
    before = Interval(during.begin.earlier(_OPEN_S), during.end).sql()
    where = before if job is None else f"{before} AND job = {sql_text(job)}"
    columns = (*_LINE, *PARTS, *_MORE) if whole else _LINE
    rows = _read(cluster, where, columns, f"arg_max(state, ts) = 'open' OR {during.sql('max(ts)')}")
    if len(rows) == _MOST:
        warn(f"only the newest {_MOST:,} findings are shown: ask for less with --since or --job")
    return rows


def _read(cluster: Cluster, where: str, columns: Sequence[str], having: str = "true") -> list[Row]:
    sql = f"{newest_sql(where, columns, _NOW)} HAVING {having} ORDER BY ts DESC LIMIT {_MOST}"
    rows = rows_of(cluster.query(sql))
    for row in rows:
        if row["state"] == "open":
            row["closed"] = None
        row.update({name: parsed(row[name]) for name in PARTS if name in row})
        now = row.pop("now_ns")
        row["sentence"] = timed(row, now if row["closed"] is None else ns_of(row["closed"]))
    return sorted(rows, key=lambda row: str(row["opened"]))


def _line(row: Row) -> str:
    sure = f"{row['verdict']}, {confidence_word(row['confidence'] or 0.0)} confidence"
    head = f"{when(row['opened'])} {_lasted(row)}"
    return f"{head}  job {row['job']}: {row['sentence']} ({sure}, finding {row['finding_id']})"


def _lasted(row: Row) -> str:
    if row["state"] == "open":
        return "still open"
    opened, closed = ns_of(row["opened"]), ns_of(row["closed"])
    # If a clock was set back, the finding may seem to have been closed before it was opened.
    return "closed" if opened is None or closed is None else f"for {age(max(0, closed - opened))}"


def _page(row: Row, width: int | None) -> str:
    """Returns the page of a finding, below a line that says when it was open and which node found it."""
    from probing.client.diagnosis.finding_rows import diagnosis_of
    from probing.client.diagnosis.page import people

    lines = "".join(line + "\n" for line in wrapped(escape(_head(row)), width))
    return lines + people([diagnosis_of(row)], width)


def _head(row: Row) -> str:
    lasted = "still open" if row["state"] == "open" else f"closed {clock(row['closed'])}, {_lasted(row)}"
    return f"finding {row['finding_id']}  opened {clock(row['opened'])}, {lasted}; by node {row['found_by'] or '?'}"
