"""Formats the answer of ``nccl`` as text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from probing.api.text import age, bandwidth, count, escape, numbers_text, plural, ranks_of, size
from probing.client.collectives.standing import Run, standing_lines
from probing.client.diagnosis.findings import verdict_lines
from probing.client.render.rows import Row
from probing.client.render.table import Field, cut_mark, render, wrapped
from probing.client.times import Interval

if TYPE_CHECKING:
    from probing.diagnosis.wait_graph import Pending

__all__ = ("people",)

_OP = Field("OP", "op")
_TIMES = (
    Field("CALLS", "calls", count, right=True),
    Field("BYTES", "bytes", size, right=True),
    Field("AVG", "avg_ns", age, right=True),
    Field("P50", "p50_ns", age, right=True),
    Field("P99", "p99_ns", age, right=True),
    Field("MAX", "max_ns", age, right=True),
)
_BANDWIDTHS = (
    Field("ALGBW AVG", "algbw_avg_gbps", bandwidth, right=True),
    Field("MIN", "algbw_min_gbps", bandwidth, right=True),
    Field("BUSBW AVG", "busbw_avg_gbps", bandwidth, right=True),
    Field("MIN", "busbw_min_gbps", bandwidth, right=True),
)
_RANKS = (
    Field("RANK", "rank", right=True),
    Field("NODE", "node", flex=True),
    Field("PID", "pid", right=True),
    Field("CALLS", "calls", count, right=True),
    Field("LAST SEQ", "last_seq", count, right=True),
    Field("LAG", "lag_ns", age, right=True),
    Field("MAX LAG", "max_lag_ns", age, right=True),
)
_MOST_RANKS = 16
_MOST_FAILED = 8
_LONG_NAME = 48
# What each value of comm.ops.timing_source says about the durations of operations.
_SOURCES = {
    "exact": "exact",
    "sync": "a thread waited for the end",
    "watchdog": "watchdog polls, durations are known to 100 ms",
    "blocking_wait": "the caller polls",
    "graph": "captured into CUDA graphs, whose runs are not seen",
    "enqueue_only": "only enqueued, no end is seen",
    "none": "the end was missed",
}


def people(
    found: Sequence[Row],
    during: Interval,
    width: int | None,
    pending: Mapping[Run, Sequence[Pending]] = MappingProxyType({}),
) -> str:
    """Returns the page of ``nccl`` as text. ``found``: communicators; ``pending``: the operations in flight by run."""
    if not found:
        return f"(no collective {during.text()}{' and none in flight' if during.open else ''})\n"
    texts, shown = [], set()
    for own in found:
        run = own["job"], own["run"]
        new = run not in shown
        waits = _waits(one for one in pending.get(run, ()) if one.comm == (own["comm"] or ""))
        above = [*(verdict_lines(own["findings"]) if new else ()), *waits, *(standing_lines(own) if new else ())]
        texts.append(_communicator(own, [*above, *_failures(own)], during, width))
        # The state is shown once for each run, above its first communicator.
        shown.add(run)
    return "\n".join(texts)


def _communicator(own: Row, above: Iterable[str], during: Interval, width: int | None) -> str:
    lines = [*_head(own), *(part for line in above for part in wrapped(escape(f"  {line}"), width))]
    inner = None if width is None else width - 4
    tables = [f"  {during.text()}, all ranks together:"] if own["ops"] else [f"  no collective {during.text()}"]
    if own["ops"]:
        tables.extend(f"    {line}" for line in _operations(own["ops"], inner))
        tables.extend(f"  {escape(line)}" for line in _total(own["totals"]))
    if own["ranks"]:
        shown = _latest(own["ranks"])
        left = len(own["ranks"]) - len(shown)
        spread = own.get("clock_spread_ns")
        sharp = "" if spread is None else f"; clocks of its nodes may differ by {age(spread)}"
        tables.append(
            f"  by rank, lag behind the median rank{sharp}:"
            if not left
            else f"  the {len(shown)} ranks that lag most ({left} more in -f json){sharp}:"
        )
        tables.extend(f"    {line}" for line in render(_RANKS, shown, inner).splitlines())
    return "\n".join([*lines, *tables]) + "\n"


def _head(own: Row) -> list[str]:
    if own["comm"] is None:
        known = numbers_text(own["members"])
        return [escape(f"job {own['job']}  run {own['run']}"), f"  {own['size'] or '?'} ranks: {known}"]
    name = _short(own["comm"])
    if own["name"] and own["name"] != own["comm"]:
        name += f" ({_short(own['name'])})"
    nodes = f" on {own['nodes']} nodes" if own["nodes"] and own["nodes"] > 1 else ""
    lines = [f"job {own['job']}  comm {name}", f"  {own['backend'] or 'unknown backend'}, {own['size'] or '?'} ranks"]
    lines[1] += nodes + (f": {numbers_text(own['members'])}" if own["members"] else "") + _state(own["states"])
    if own["role"] not in (None, "unknown"):
        lines.append(f"  role {own['role']}" + (f": {own['role_why']}" if own["role_why"] else ""))
    seen = len(own["members"])
    if own["size"] and 0 < seen < own["size"]:
        lines.append(f"  {seen} of its {own['size']} ranks are on the nodes that were asked")
    if own["aborted"] or own["async_error"]:
        lines.append(f"  BROKEN: {own['async_error'] or 'aborted'}")
    return [escape(line) for line in lines]


def _short(text: str) -> str:
    return text if len(text) <= _LONG_NAME else text[: _LONG_NAME - 1] + cut_mark()


def _state(states: dict[str, int]) -> str:
    if len(states) == 1:
        return f", {next(iter(states))}"
    return ", " + ", ".join(f"{state} on {number}" for state, number in states.items()) if states else ""


def _operations(ops: list[Row], width: int | None) -> list[str]:
    """Returns the operations in one table if it fits ``width``, else in a table of times and a table of bandwidths."""
    lines = render((_OP, *_TIMES, *_BANDWIDTHS), ops, None).splitlines()
    if width is None or max(map(len, lines)) <= width:
        return lines
    lines = render((_OP, *_TIMES), ops, width).splitlines()
    timed = [op for op in ops if op["algbw_avg_gbps"] is not None]
    return [*lines, *(render((_OP, *_BANDWIDTHS), timed, width).splitlines() if timed else ())]


def _total(totals: Row) -> list[str]:
    line = f"total: {plural(totals['calls'], 'call')}, {size(totals['bytes'])}"
    if totals["algbw_gbps"] is not None:
        line += f"; while any call ran: {bandwidth(totals['algbw_gbps'])}, bus {bandwidth(totals['busbw_gbps'])}"
    lines = [line]
    sources = totals["timing_sources"]
    if set(sources) - {"exact"}:
        known = [f"{number:,} {_SOURCES.get(name, name)}" for name, number in sources.items()]
        lines.append(f"timing: {'; '.join(known)}")
    if totals["timed"] < totals["calls"]:
        lines.append(f"AVG to MAX cover only the {totals['timed']:,} calls whose duration is known to within 10%")
    return lines


def _failures(own: Row) -> list[str]:
    """Returns a line for each pair of a failed operation and an error, with the ranks that reported the error."""
    failures: dict[tuple[Any, ...], list[Row]] = {}
    for row in own["failed"]:
        failures.setdefault((row["op"], row["error"]), []).append(row)
    lines = []
    for (op, error), rows in list(failures.items())[:_MOST_FAILED]:
        times = sum(row["calls"] for row in rows)
        what = f"FAILED {op} seq {max((row['last_seq'] for row in rows if row['last_seq'] is not None), default='?')}"
        lines.append(
            f"{what}{f' ({times} times)' if times > len(rows) else ''}:"
            f" {ranks_of([row['rank'] for row in rows])}: {error or 'no reason was given'}"
        )
    if len(failures) > _MOST_FAILED:
        lines.append(f"and {len(failures) - _MOST_FAILED} other failures, in -f json")
    return lines


def _latest(ranks: list[Row]) -> list[Row]:
    if len(ranks) <= _MOST_RANKS:
        return ranks
    return sorted(ranks, key=lambda r: -(r["lag_ns"] or 0))[:_MOST_RANKS]


def _waits(pending: Iterable[Pending]) -> list[str]:
    """Returns a line for each operation in flight: its age, the ranks in it and the ranks that have not joined it."""
    lines = []
    for one in pending:
        seq = "?" if one.seq is None else one.seq
        line = f"IN FLIGHT {one.op} seq {seq} for {age(one.age_ns)}: {ranks_of(one.waiters)}"
        lines.append(f"{line}; not in it: {numbers_text(one.awaited)}" if one.awaited else line)
    return lines
