"""Sampling more often for a while, as a change of settings that ends by itself."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import datetime
from typing import Any

from probing.api.errors import NotFound, ProbingError
from probing.client.cluster import Cluster
from probing.client.profile.options import Options, Selection
from probing.client.render.rows import rows_of
from probing.client.session import sql_text

__all__ = ("sample",)

# The change outlives the wait by this, should nobody take it back.
_SLACK = 5.0


def sample(cluster: Cluster, options: Options) -> Options:
    """Samples for ``options.live`` seconds; returns the options with the interval in which that was.

    Raises NotFound when there is no such job or process.
    """
    live = [s for s in (options.selected, options.base) if s is not None and not s.shift]
    targets = list({tuple(sorted(t.items())): t for s in live for t in _targets(cluster, s)}.values())
    changes = {"sampling.hz": str(options.hz)}
    if options.selected.state != "cpu":
        changes["sampling.off_cpu"] = "true"
    # What is sampled while the last node is still being told belongs to it.
    begun = time.monotonic()
    with _changed(cluster, changes, targets, options.live + _SLACK):
        _wait(options)
    past = time.monotonic() - begun
    base = None if options.base is None else replace(options.base, since=past)
    return replace(options, selected=replace(options.selected, since=past), base=base)


def _targets(cluster: Cluster, selection: Selection) -> list[dict[str, Any]]:
    """Whose settings are to be changed, as arguments of ``Cluster.config``."""
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
def _changed(
    cluster: Cluster, changes: dict[str, str], targets: Sequence[dict[str, Any]], length: float
) -> Iterator[None]:
    asked = [(target, key) for target in targets for key in changes]
    earlier = [row for target, key in asked for row in _earlier(cluster, key, target)]
    try:
        for target, key in asked:
            cluster.config(key, changes[key], seconds=length, **target)
        yield
    finally:
        # A process may have ended, and should a node not answer now, its change ends by itself soon.
        for target, key in asked:
            with suppress(ProbingError):
                cluster.config(key, reset=True, **target)
        for row in earlier:
            with suppress(ProbingError):
                _restore(cluster, row)


def _earlier(cluster: Cluster, key: str, target: dict[str, Any]) -> list[dict[str, Any]]:
    """Changes of just what is to be changed now, made by somebody else."""
    scope = (target.get("job"), target.get("pid"))
    found = [row for row in cluster.config(key, **target) if (row["job"], row["pid"]) == scope]
    everywhere = scope == (None, None)
    return [row for row in found if not everywhere or row["value"] != row["default"] or row["persisted"]]


def _restore(cluster: Cluster, row: dict[str, Any]) -> None:
    left = 0.0
    if row["until"] is not None:
        # Python's datetime has microseconds.
        left = datetime.fromisoformat(row["until"][:26] + "+00:00").timestamp() - time.time()
        if left <= 0:
            return
    cluster.config(
        row["key"], row["value"], job=row["job"] or "", pid=row["pid"] or 0,
        seconds=left, persist=row["persisted"], node=row["node"],
    )  # fmt: skip


def _wait(options: Options) -> None:
    begun, shown = time.monotonic(), sys.stderr.isatty()
    while (past := time.monotonic() - begun) < options.live:
        if shown:
            sys.stderr.write(f"\rsampling at {options.hz} Hz: {past:.0f} of {options.live:g} s ")
            sys.stderr.flush()
        time.sleep(min(0.5, options.live - past))
    if shown:
        sys.stderr.write("\r\x1b[K")
