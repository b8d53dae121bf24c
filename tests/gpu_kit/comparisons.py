"""Compares rows with a truth; each function returns the problems as texts, none where all is right."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

__all__ = ("calls_of_recorder", "counts", "ends", "operations", "recorded_operations", "truth_ends")

Row = Mapping[str, Any]
# A CUDA event behind an operation comes some microseconds after it, and the runtime's clock of events and ours drift by
# some parts in a million in a burst of seconds.
SLACK_NS = 200_000
_SAID = ("op", "count", "root", "peer")


def counts(expected: Mapping[str, int], got: Mapping[str, int]) -> list[str]:
    """Returns where two counts by name differ; a name that is missing counts 0."""
    names = sorted({*expected, *got})
    return [
        f"{name}: {got.get(name, 0)} instead of {expected.get(name, 0)}"
        for name in names
        if got.get(name, 0) != expected.get(name, 0)
    ]


def operations(calls: Sequence[Row], rows: Sequence[Row]) -> list[str]:
    """Returns where the rows of one rank, in the order of the calls, are not those calls, each once.

    A root or peer that the truth does not name is not compared.
    """
    wrong = counts(Counter(call["op"] for call in calls), Counter(row["op"] for row in rows))
    if wrong:
        return wrong
    return [
        f"{call['op']} {number}: {_said(row, call)} instead of {_said(call, call)}"
        for number, (call, row) in enumerate(zip(calls, rows, strict=True))
        if _said(row, call) != _said(call, call)
    ]


def _said(row: Row, call: Row) -> dict[str, Any]:
    return {name: row.get(name) for name in _SAID if call.get(name) is not None}


def ends(true_ends: Sequence[tuple[int, int] | None], rows: Sequence[Row], slack_ns: int = SLACK_NS) -> list[str]:
    """Returns which rows have an interval of completion that cannot hold the true end, UTC ns.

    A true end is itself known to an interval (lo, hi). ``done_lo`` and ``done_hi`` are those of a row, NULL where
    nothing is claimed; a row that claims no upper bound is a problem.
    """
    found = []
    for number, (true, row) in enumerate(zip(true_ends, rows, strict=True)):
        if true is None:
            continue
        if row["done_hi"] is None:
            found.append(f"{row['op']} {number} has no end")
        elif row["done_hi"] < true[0] - slack_ns:
            found.append(f"{row['op']} {number} ended {(true[0] - row['done_hi']) / 1e3:.0f} us after done_hi")
        elif row["done_lo"] is not None and row["done_lo"] > true[1] + slack_ns:
            found.append(f"{row['op']} {number} ended {(row['done_lo'] - true[1]) / 1e3:.0f} us before done_lo")
    return found


def truth_ends(lines: Iterable[Row], begun_mono_ns: int, offset_ns: int) -> list[tuple[int, int]]:
    """Returns the ends that the double of NCCL wrote for the calls since ``begun_mono_ns``, in the order of the calls.

    ``offset_ns``: what to add to its CLOCK_MONOTONIC to get UTC.
    """
    calls, ended = [], {}
    for line in lines:
        if line["event"] == "call" and line["inside"] >= begun_mono_ns:
            calls.append(line["id"])
        elif line["event"] == "end":
            ended[line["id"]] = line["end"] + offset_ns
    return [(ended[number], ended[number]) for number in calls if number in ended]


def calls_of_recorder(entries: Sequence[Row], begun_ns: int) -> list[dict[str, Any]]:
    """Returns the operations that PyTorch's flight recorder holds since ``begun_ns``, UTC, as calls.

    ``profiling_name`` is ``nccl:all_reduce``, ``nccl:send 0->1`` or ``nccl:recv 0<-1``.
    """
    calls = []
    for entry in entries:
        if (entry.get("time_created_ns") or 0) < begun_ns:
            continue
        name, _, ends_of = str(entry["profiling_name"]).removeprefix("nccl:").partition(" ")
        sizes = entry.get("input_sizes") or [[]]
        peer = int(ends_of.replace("<-", "->").split("->")[1]) if "-" in ends_of else None
        calls.append({"op": name, "count": sum(math.prod(size) for size in sizes), "root": None, "peer": peer})
    return calls


def recorded_operations(entries: Sequence[Row] | None, begun_ns: int, rows: Sequence[Row]) -> list[str]:
    """Returns where the rows differ from what the flight recorder has since ``begun_ns``."""
    if entries is None:
        return ["this torch has no flight recorder"]
    return operations(calls_of_recorder(entries, begun_ns), rows)
