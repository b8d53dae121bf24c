"""Asks all nodes once for the facts of jobs, merges them, and runs the rules."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from probing.api.errors import FormatError, NotFound, QueryTimeout
from probing.client.absence import partial
from probing.client.diagnosis.endings import facts_of_exits
from probing.client.diagnosis.outcome import worst_first
from probing.client.jobs import silent_nodes
from probing.diagnosis.facts import Facts, Missing
from probing.diagnosis.facts_file import from_json, load
from probing.diagnosis.ladder import Diagnosis, diagnose_runs
from probing.diagnosis.merge import merge_runs

if TYPE_CHECKING:
    from probing.client.cluster import Cluster

__all__ = ("diagnosed", "from_file", "gathered")


def gathered(cluster: Cluster, job: str | None) -> list[Facts]:
    """Returns the facts of each run of ``job``, or of all jobs; ``missing`` has the nodes that did not answer.

    Of a job that ended too long ago for facts they are the exits of its processes; of a job that could not be read in
    time they have no ranks. Raises NotFound for an unknown job; PartialAnswer where a node without an answer may have
    the only facts.
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
    silent = silent_nodes(cluster, asked)
    for node, pieces in replies:
        try:
            parts += [from_json(piece) for piece in pieces]
        except FormatError as e:
            silent[node] = e.message
    if not parts and silent:
        what = "no training job was found" if job is None else f"job {job} was not found"
        raise partial(what, silent)
    if absent is not None:
        parts = facts_of_exits(cluster, job) if job else []
        if not parts:
            raise absent
    return merge_runs(parts, silent)


def from_file(path: Path) -> list[Diagnosis]:
    """Returns the diagnoses of the facts in a file, the worst first. Raises FormatError as ``facts_file.load`` does."""
    return diagnosed(load(path))


def diagnosed(facts: Sequence[Facts]) -> list[Diagnosis]:
    """Returns a diagnosis for each of ``facts``, the worst first."""
    return worst_first(diagnose_runs(facts))
