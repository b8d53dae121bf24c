"""A job on the page: its diagnosis, its findings so far, who waits for whom, and its steps."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np

from probing.api.text import numbers_text, sql_text
from probing.client.render.rows import Row, rows_of
from probing.client.web.panels import Question

if TYPE_CHECKING:
    from probing.diagnosis.ladder import Diagnosis
    from probing.diagnosis.wait_graph import Pending

__all__ = ("diagnose", "finding_file", "history", "steps", "waits")

_HISTORY = "7d"
# The timeout of answers, s; the diagnosis names the nodes that do not answer.
_PATIENCE_S = 10.0
_LIVE = """
SELECT node, job, run, rank, world_size, pid FROM process.processes
WHERE role = 'trainer' AND state <> 'exited' AND {where} ORDER BY rank, node, pid
"""
_MOST_EDGES = 20_000
# The maximum number of steps of each rank, and of steps of all ranks together.
_MOST_STEPS, _MOST_CELLS = 2_000, 500_000
_EXTENT = """
SELECT run, max(step) AS last, count(DISTINCT rank) AS ranks, max(ts) AS at FROM train.steps
WHERE {during} AND {where} GROUP BY run ORDER BY at DESC LIMIT 1
"""
_STEPS = """
SELECT rank, step, max(duration_ns) AS duration_ns FROM train.steps
WHERE {during} AND {where} AND run = {run} AND step > {after} AND rank IS NOT NULL GROUP BY rank, step
"""


def diagnose(question: Question) -> Row:
    """Returns the object of ``diagnose -f json``; empty if no job was found."""
    from probing.client.diagnosis.page import as_object

    found = _diagnoses(question)
    return as_object(found) if found else {}


def finding_file(question: Question) -> str:
    """Returns the page of ``diagnose -o finding.html``."""
    from probing.client.diagnosis.html import finding_page

    return finding_page(_diagnoses(question))


def _diagnoses(question: Question) -> list[Diagnosis]:
    from probing.client.diagnosis.asking import diagnosed, gathered, with_stored_findings

    cluster = question.cluster
    cluster.timeout = cluster.enough(min(cluster.timeout, _PATIENCE_S))
    return with_stored_findings(cluster, diagnosed(gathered(cluster, question.job_or_all())))


def history(question: Question) -> list[Row]:
    """Returns the rows of ``diagnose --history -f json``, of the last seven days unless an interval is given."""
    from probing.client.diagnosis.history import history as rows

    return rows(question.cluster, question.job_or_all(), question.parameters.interval(_HISTORY), whole=True)


def waits(question: Question) -> dict[str, object]:
    """Returns the ``ranks`` of a job, its ``operations`` in flight with waiting and awaited ranks, and ``edges`` from
    each waiting to each awaited rank: 20,000 at most; ``truncated``: there are more."""
    from probing.client.collectives.in_flight import CALLED, INFLIGHT, in_flight

    cluster = question.cluster
    where = f"job = {sql_text(question.job())}"
    asked = {name: sql.format(where=where) for name, sql in (("live", _LIVE), ("in", INFLIGHT), ("called", CALLED))}
    tables = cluster.query_all(asked)
    live, inflight, called = (rows_of(tables[name]) for name in asked)
    names = {row["comm"]: row["name"] for row in inflight}
    pending = [one for of_run in in_flight(live, inflight, called).values() for one in of_run]
    pairs = ((one, waiter, awaited) for one in pending for waiter in one.waiters for awaited in sorted(one.awaited))
    edges = [
        {"from_rank": waiter, "to_rank": awaited, **_operation(one, names)}
        for one, waiter, awaited in islice(pairs, _MOST_EDGES)
    ]
    return {
        "ranks": [{name: row[name] for name in ("rank", "node", "pid")} for row in live if row["rank"] is not None],
        "operations": [
            {
                **_operation(one, names),
                "waiters": numbers_text(one.waiters),
                "awaited": numbers_text(sorted(one.awaited)),
                "unknown": numbers_text(sorted(one.unknown)),
            }
            for one in pending
        ],
        "edges": edges,
        "truncated": sum(len(one.waiters) * len(one.awaited) for one in pending) > len(edges),
    }


def _operation(one: Pending, names: dict[Any, Any]) -> Row:
    return {"comm": one.comm, "comm_name": names.get(one.comm), "seq": one.seq, "op": one.op, "age_ns": one.age_ns}


def steps(question: Question) -> dict[str, object]:
    """Returns the last steps of the newest run of a job: ``ranks``, numbers of ``steps``, and ``duration_ns`` by rank,
    null for an unknown step; 2,000 steps at most, fewer if there are many ranks."""
    cluster, during = question.cluster, question.parameters.interval("10m").sql()
    where = f"job = {sql_text(question.job())}"
    extent = rows_of(cluster.query(_EXTENT.format(during=during, where=where)))
    if not extent or extent[0]["last"] is None:
        return {"run": None, "ranks": [], "steps": [], "duration_ns": []}
    last, ranks = extent[0]["last"], max(1, extent[0]["ranks"])
    run, after = sql_text(str(extent[0]["run"])), last - min(_MOST_STEPS, max(1, _MOST_CELLS // ranks))
    table = cluster.query(_STEPS.format(during=during, where=where, run=run, after=after))
    numbers, row = np.unique(table["rank"].to_numpy(), return_inverse=True)
    ended, column = np.unique(table["step"].to_numpy(), return_inverse=True)
    durations = np.full((len(numbers), len(ended)), None, object)
    durations[row, column] = table["duration_ns"].to_pylist()
    return {
        "run": extent[0]["run"],
        "ranks": numbers.tolist(),
        "steps": ended.tolist(),
        "duration_ns": durations.tolist(),
    }
