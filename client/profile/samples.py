"""Queries stored samples by time and process, and joins them with their stacks."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from probing.client.profile.model import OFF_CPU, ON_CPU, STATE, Frame, Profile, Sample
from probing.client.profile.request import Selection
from probing.client.render.rows import Row, rows_of

if TYPE_CHECKING:
    from probing.client.cluster import Cluster

__all__ = ("INCOMPLETE", "off_cpu_share", "read_profiles")

INCOMPLETE = Frame("(outer frames are missing)")
_NO_FRAMES = Frame("(no Python frame)")
_UNKNOWN = Frame("(the stack is not stored)")
# Stacks of one query: its text stays well below the bound of the nodes.
_CHUNK = 1000
_SAMPLES = """
SELECT node, job, rank, pid, thread, stack_id, on_cpu, sum("count") AS n, sum(duration_ns) AS ns
FROM python.samples WHERE {where} GROUP BY node, job, rank, pid, thread, stack_id, on_cpu
"""
_AWAY = """
SELECT sum(CASE WHEN on_cpu THEN 0 ELSE duration_ns END) AS away, sum(duration_ns) AS whole
FROM python.samples WHERE coalesce(trains, tid = pid) AND {where}
"""
_STACKS = """
SELECT stack_id, any_value(complete) AS complete, any_value(frames) AS frames
FROM python.stacks WHERE stack_id IN ({ids}) GROUP BY stack_id
"""


def read_profiles(cluster: Cluster, selections: Sequence[Selection]) -> list[Profile]:
    """Returns a profile for each selection; it may have no samples."""
    now = time.time_ns()
    found = [rows_of(cluster.query(_SAMPLES.format(where=selection.where()))) for selection in selections]
    stacks = _stacks(cluster, {row["stack_id"] for rows in found for row in rows})
    return [_profile(s, rows, stacks, now) for s, rows in zip(selections, found, strict=True)]


def off_cpu_share(cluster: Cluster, selection: Selection) -> float | None:
    """Returns the share of the training threads' time off the CPU; None without such samples.

    Other threads wait most of the time anyway.
    """
    where = replace(selection, state="wall", gil=False).where()
    (row,) = rows_of(cluster.query(_AWAY.format(where=where)))
    return row["away"] / row["whole"] if row["away"] else None


def _stacks(cluster: Cluster, ids: Iterable[int]) -> dict[int, tuple[Frame, ...]]:
    wanted = sorted(ids)
    stacks: dict[int, tuple[Frame, ...]] = {}
    for start in range(0, len(wanted), _CHUNK):
        chunk = ", ".join(map(str, wanted[start : start + _CHUNK]))
        for row in rows_of(cluster.query(_STACKS.format(ids=chunk))):
            stacks[row["stack_id"]] = _frames(row)
    return stacks


def _frames(row: Row) -> tuple[Frame, ...]:
    """Returns frames outermost first; a cut stack begins with a frame for the missing ones, to keep it apart."""
    frames = tuple(Frame(f["func"], f["file"], f["lineno"]) for f in reversed(row["frames"]))
    return frames or (_NO_FRAMES,) if row["complete"] else (INCOMPLETE, *frames)


def _profile(selection: Selection, rows: Iterable[Row], stacks: dict[int, tuple[Frame, ...]], now: int) -> Profile:
    begin, end = selection.span(now)
    samples = tuple(Sample(stacks.get(row["stack_id"], (_UNKNOWN,)), row["ns"], row["n"], _labels(row)) for row in rows)
    return Profile(selection.title(), selection.state, samples, begin, max(0, end - begin), selection.trains)


def _labels(row: Row) -> tuple[tuple[str, str], ...]:
    values = {
        "job": row["job"],
        "rank": row["rank"],
        "node": row["node"],
        "pid": row["pid"],
        "thread": row["thread"],
        STATE: ON_CPU if row["on_cpu"] else OFF_CPU,
    }
    return tuple((key, str(value)) for key, value in values.items() if value not in (None, ""))
