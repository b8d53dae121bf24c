"""How ``nccl`` looks to people."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from probing.client.render import Field, render
from probing.client.text import age, bandwidth, count, escape, size

__all__ = ("people", "ranks_text", "waits")

_OPS = (
    Field("OP", "op"),
    Field("CALLS", "calls", count, right=True),
    Field("BYTES", "bytes", size, right=True),
    Field("AVG", "avg_ns", age, right=True),
    Field("P50", "p50_ns", age, right=True),
    Field("P99", "p99_ns", age, right=True),
    Field("MAX", "max_ns", age, right=True),
    Field("ALGBW AVG", "algbw_avg_gbps", bandwidth, right=True),
    Field("MIN", "algbw_min_gbps", bandwidth, right=True),
    Field("BUSBW AVG", "busbw_avg_gbps", bandwidth, right=True),
    Field("MIN", "busbw_min_gbps", bandwidth, right=True),
)
_RANKS = (
    Field("RANK", "rank", right=True),
    Field("NODE", "node"),
    Field("PID", "pid", right=True),
    Field("CALLS", "calls", count, right=True),
    Field("LAST SEQ", "last_seq", count, right=True),
    Field("LAG", "lag_ns", age, right=True),
    Field("MAX LAG", "max_lag_ns", age, right=True),
)
_MOST_RANKS = 16


def people(found: Sequence[dict[str, Any]], since: float, width: int | None) -> str:
    if not found:
        return f"(no collective in the last {age(since * 1e9)} and none in flight)\n"
    return "\n".join(_communicator(own, since, width) for own in found)


def _communicator(own: dict[str, Any], since: float, width: int | None) -> str:
    name = f"{own['comm']}" + (f" ({own['name']})" if own["name"] and own["name"] != own["comm"] else "")
    nodes = f" on {own['nodes']} nodes" if own["nodes"] and own["nodes"] > 1 else ""
    lines = [f"job {own['job']}  comm {name}  {own['backend'] or 'unknown backend'}, {own['size'] or '?'} ranks{nodes}"]
    seen = len(own["members"])
    if own["size"] and 0 < seen < own["size"]:
        lines.append(f"  {seen} of its {own['size']} ranks are on the nodes that were asked")
    if own["aborted"] or own["async_error"]:
        lines.append(f"  BROKEN: {own['async_error'] or 'aborted'}")
    lines.extend(f"  {wait}" for wait in waits(own))
    inner = None if width is None else width - 2
    tables = [f"  last {age(since * 1e9)}, all ranks together:"] if own["ops"] else ["  nothing finished lately"]
    if own["ops"]:
        tables.extend(f"    {line}" for line in render(_OPS, own["ops"], inner).splitlines())
    if own["ranks"]:
        shown = _latest(own["ranks"])
        left = len(own["ranks"]) - len(shown)
        tables.append(
            "  by rank, lag behind the rank in the middle:"
            if not left
            else f"  the {len(shown)} ranks that lag most ({left} more in -f json):"
        )
        tables.extend(f"    {line}" for line in render(_RANKS, shown, inner).splitlines())
    return "\n".join([*map(escape, lines), *tables]) + "\n"


def _latest(ranks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    if len(ranks) <= _MOST_RANKS:
        return ranks
    return sorted(ranks, key=lambda r: -(r["lag_ns"] or 0))[:_MOST_RANKS]


def waits(own: dict[str, Any]) -> list[str]:
    """One line for each operation in flight: who is in it, for how long, and which ranks are not."""
    operations: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in own["inflight"]:
        operations.setdefault((row["seq"], row["op"]), []).append(row)
    lines = []
    for (seq, op), rows in operations.items():
        ages = [row["age_ns"] for row in rows if row["age_ns"] is not None]
        inside = [row["rank"] if row["rank"] is not None else row["comm_rank"] for row in rows]
        line = f"IN FLIGHT {op} seq {seq} for {age(max(ages, default=None))}: ranks {ranks_text(inside)}"
        outside = sorted(set(own["members"]) - set(inside))
        if outside and op not in ("send", "recv"):
            line += f"; not in it: {ranks_text(outside)}"
        lines.append(line)
    return lines


def ranks_text(ranks: Sequence[int | None]) -> str:
    """``0-3,7``; ``?`` for ranks that are not known."""
    known = sorted({rank for rank in ranks if rank is not None})
    parts: list[str] = []
    start = 0
    for i, rank in enumerate(known):
        if i + 1 == len(known) or known[i + 1] != rank + 1:
            parts.append(str(rank) if start == i else f"{known[start]}-{rank}")
            start = i + 1
    if len(known) < len(set(ranks)):
        parts.append("?")
    return ",".join(parts)
