"""Samples at a higher rate for a while: a change of settings that ends by itself."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import datetime
from typing import TYPE_CHECKING

from probing.api.errors import NotFound, ProbingError
from probing.api.text import sql_text
from probing.client.messages import Change, Setting
from probing.client.profile.request import Request, Selection
from probing.client.render.progress import StatusLine
from probing.client.render.rows import rows_of

if TYPE_CHECKING:
    from probing.client.cluster import Cluster

__all__ = ("sample",)

# Seconds after the wait at which the change ends by itself, if it was not taken back.
_SLACK = 5.0


def sample(cluster: Cluster, request: Request) -> Request:
    """Samples for ``request.live`` seconds; returns ``request`` for the interval of these samples.

    Raises NotFound when there is no such job or process.
    """
    live = [s for s in (request.selected, request.base) if s is not None and not s.shift]
    targets = list({tuple(sorted(t.items())): t for s in live for t in _targets(cluster, s)}.values())
    changes = {"sampling.hz": str(request.hz)}
    if request.selected.state != "cpu" or (request.any_state and request.kind == "svg"):
        changes["sampling.off_cpu"] = "true"
    # Samples of the first nodes count while the last node still changes its settings.
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
    """Returns the jobs or processes whose settings have to change."""
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
        # A process may have ended; on a node that does not answer the change soon ends by itself.
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
        # Python's datetime has microseconds.
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
