"""Asks all nodes once for the facts of jobs, merges them, and runs the rules."""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from probing.api.errors import FormatError, NotFound, PartialAnswer, QueryTimeout
from probing.client.diagnosis.outcome import cautious, settled, worst_first
from probing.client.render.rows import rows_of
from probing.client.render.text import when
from probing.client.session import require_job, sql_text
from probing.diagnosis.facts import Facts, Missing
from probing.diagnosis.facts_file import from_json, load
from probing.diagnosis.ladder import Diagnosis, diagnose
from probing.diagnosis.merge import merge_runs

if TYPE_CHECKING:
    from probing.client.cluster import Cluster

__all__ = ("diagnosed", "from_file", "gathered")

# Most nodes without an answer that a hint names.
_MOST_NAMED = 4
_LAST_END = """
SELECT max(ts) AS ended FROM process.events WHERE event = 'exit' AND role = 'trainer' AND job = {job}
"""


def gathered(cluster: Cluster, job: str | None) -> list[Facts]:
    """Returns the facts of each run of ``job``, or of all jobs; ``missing`` has the nodes that did not answer.

    A job that could not be read in time has facts without ranks. Raises NotFound for an unknown job, and for one that
    has ended with the time of its end; PartialAnswer where a node without an answer may have the only facts.
    """
    asked = len(cluster.outcomes)
    parts: list[Facts] = []
    absent: NotFound | None = None
    replies: list[tuple[str, list[bytes]]] = []
    try:
        replies = cluster.facts(job or "")
    except NotFound as e:
        absent = e
    except QueryTimeout as e:
        if job is None:
            raise
        unread = Missing("history", e.message)
        return [Facts(job, "", None, 0.0, time.time_ns(), (), (), missing=(unread,))]
    failures = [*cluster.absent, *(failed for outcome in cluster.outcomes[asked:] for failed in outcome.failed)]
    silent = {failed.node or failed.address: failed.reason for failed in failures}
    for node, pieces in replies:
        try:
            parts += [from_json(piece) for piece in pieces]
        except FormatError as e:
            silent[node] = e.message
    if not parts and silent:
        what = "no training job was found" if job is None else f"job {job} was not found"
        reasons = "; ".join(f"{node} ({why})" for node, why in list(silent.items())[:_MOST_NAMED])
        raise PartialAnswer(f"{what} on the nodes that answered", hint=f"missing: {reasons}")
    if absent is not None:
        raise (job and _absent(cluster, job)) or absent
    return merge_runs(parts, silent)


def from_file(path: Path) -> list[Diagnosis]:
    """Returns the diagnoses of the facts in a file, the worst first. Raises FormatError as ``facts_file.load`` does."""
    return diagnosed(load(path))


def diagnosed(facts: Iterable[Facts]) -> list[Diagnosis]:
    """Returns a diagnosis for each of ``facts``, the worst first."""
    return worst_first(settled([cautious(diagnose(own)) for own in facts]))


def _absent(cluster: Cluster, job: str) -> NotFound | None:
    """Returns an error that says when ``job`` ended, None if that is unknown. Raises NotFound for an unknown job."""
    require_job(cluster, job)
    ended = rows_of(cluster.query(_LAST_END.format(job=sql_text(job))))[0]["ended"]
    if ended is None:
        return None
    hint = f"`probingctl diagnose --history --job {job}` shows what was found while it ran"
    return NotFound(f"job {job} ended at {when(ended)}", hint=hint)
