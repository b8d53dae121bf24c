"""Queries stored samples by time and process and joins them with their stacks; can also sample faster for a while."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import datetime
from typing import TYPE_CHECKING

from probing.api.errors import NotFound, ProbingError
from probing.api.text import sql_text
from probing.client.messages import Change, Setting
from probing.client.profile.model import OFF_CPU, ON_CPU, STATE, Frame, Profile, Sample
from probing.client.profile.request import Request, Selection
from probing.client.render.progress import StatusLine
from probing.client.render.rows import Row, rows_of

if TYPE_CHECKING:
    from probing.client.cluster import Cluster

__all__ = (
    "off_cpu_share",
    "read_profiles",
    "read_stacks",
    "sample",
)

_INCOMPLETE = Frame("(outer frames are missing)")
_NO_FRAMES = Frame("(no Python frame)")
_UNKNOWN = Frame("(the stack is not stored)")
# The maximum number of stacks in one query. It keeps the text of the query well below the limit of the nodes.
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
    """Returns a profile for each selection; a profile may have no samples."""
    now = time.time_ns()
    found = [rows_of(cluster.query(_SAMPLES.format(where=selection.where()))) for selection in selections]
    stacks = read_stacks(cluster, {row["stack_id"] for rows in found for row in rows})
    return [_profile(s, rows, stacks, now) for s, rows in zip(selections, found, strict=True)]


def off_cpu_share(cluster: Cluster, selection: Selection) -> float | None:
    """Returns the share of the training threads' time that is off the CPU; None if no sample is off the CPU.

    Other threads are left out because they wait most of the time anyway.
    """
    where = replace(selection, state="wall", gil=False).where()
    (row,) = rows_of(cluster.query(_AWAY.format(where=where)))
    return row["away"] / row["whole"] if row["away"] else None


def read_stacks(cluster: Cluster, ids: Iterable[int]) -> dict[int, tuple[Frame, ...]]:
    """Returns the frames of each stack that is stored, outermost first, by stack_id."""
    wanted = sorted(ids)
    stacks: dict[int, tuple[Frame, ...]] = {}
    for start in range(0, len(wanted), _CHUNK):
        chunk = ", ".join(map(str, wanted[start : start + _CHUNK]))
        for row in rows_of(cluster.query(_STACKS.format(ids=chunk))):
            stacks[row["stack_id"]] = _frames(row)
    return stacks


def _frames(row: Row) -> tuple[Frame, ...]:
    """Returns the frames of a row, outermost first. A stack that was cut begins with a frame for all missing frames, so
    it is not merged with complete stacks.
    """
    frames = tuple(Frame(f["func"], f["file"], f["lineno"]) for f in reversed(row["frames"]))
    return frames or (_NO_FRAMES,) if row["complete"] else (_INCOMPLETE, *frames)


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


# A changed setting that was not reset ends by itself this many seconds after the sampling.
_SLACK = 5.0


def sample(cluster: Cluster, request: Request) -> Request:
    """Samples for ``request.live`` seconds; returns ``request`` for the interval of these samples.

    Raises NotFound if there is no such job or process.
    """
    live = [s for s in (request.selected, request.base) if s is not None and not s.shift]
    targets = list({tuple(sorted(t.items())): t for s in live for t in _targets(cluster, s)}.values())
    changes = {"sampling.hz": str(request.hz)}
    if request.selected.state != "cpu" or (request.any_state and request.kind == "svg"):
        changes["sampling.off_cpu"] = "true"
    # The first nodes already sample while the last nodes still change their settings; these samples count.
    begun = time.monotonic()
    with (
        _changed(cluster, changes, targets, request.live + _SLACK),
        StatusLine(lambda past: f"sampling at {request.hz} Hz: {past:.0f} of {request.live:g} s"),
    ):
        time.sleep(request.live)
    past = time.monotonic() - begun
    base = None if request.base is None else replace(request.base, since=past)
    return replace(request, selected=replace(request.selected, since=past), base=base)


def _targets(cluster: Cluster, selection: Selection) -> list[Change]:
    """Returns the jobs or processes whose settings must be changed."""
    if selection.rank is None and not selection.pids:
        return [{"job": selection.job} if selection.job else {}]
    where = ["state <> 'exited'"]
    where += [f"job = {sql_text(selection.job)}"] if selection.job else []
    where += [f"rank = {selection.rank}"] if selection.rank is not None else []
    where += [f"pid IN ({', '.join(map(str, selection.pids))})"] if selection.pids else []
    sql = f"SELECT node, pid FROM process.processes WHERE {' AND '.join(where)} ORDER BY node, pid"
    rows = rows_of(cluster.query(sql))
    if not rows:
        hint = "`probingctl ps` lists the processes that run now"
        raise NotFound(f"there is no process of {selection.title()}", hint=hint)
    return [{"pid": row["pid"], "node": row["node"]} for row in rows]


@contextmanager
def _changed(cluster: Cluster, changes: dict[str, str], targets: Sequence[Change], length: float) -> Iterator[None]:
    asked = [(target, key) for target in targets for key in changes]
    earlier = [row for target, key in asked for row in _earlier(cluster, key, target)]
    try:
        for target, key in asked:
            cluster.config(key, changes[key], **_with(target, {"seconds": length}))
        yield
    finally:
        # Errors are ignored: a process may have ended, and at a node that does not answer the change ends by itself.
        for target, key in asked:
            with suppress(ProbingError):
                cluster.config(key, **_with(target, {"reset": True}))
        for row in earlier:
            with suppress(ProbingError):
                _restore(cluster, row)


def _with(target: Change, more: Change) -> Change:
    return {**target, **more}


def _earlier(cluster: Cluster, key: str, target: Change) -> list[Setting]:
    """Returns earlier changes of the same setting for the same target."""
    scope = (target.get("job"), target.get("pid"))
    found = [row for row in cluster.config(key, **target) if (row["job"], row["pid"]) == scope]
    everywhere = scope == (None, None)
    return [row for row in found if not everywhere or row["value"] != row["default"] or row["persisted"]]


def _restore(cluster: Cluster, row: Setting) -> None:
    left = 0.0
    if row["until"] is not None:
        # Python's datetime has only microseconds.
        left = datetime.fromisoformat(row["until"][:26] + "+00:00").timestamp() - time.time()
        if left <= 0:
            return
    cluster.config(
        row["key"],
        row["value"],
        job=row["job"] or "",
        pid=row["pid"] or 0,
        seconds=left,
        persist=row["persisted"],
        node=row["node"],
    )
