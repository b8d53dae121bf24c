"""What every command that asks nodes does around its question: say who did not answer, and write the report."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from probing.api.errors import NotFound
from probing.client.cluster import Cluster
from probing.client.settings import Settings
from probing.client.text import escape
from probing.federation.fanout import Gathered

__all__ = ("opened", "require_job", "sql_text", "warn")


@contextmanager
def opened(settings: Settings) -> Iterator[Cluster]:
    """The cluster that ``settings`` name. The report is written however the question ends."""
    cluster = Cluster(
        settings.target,
        nodes=settings.nodes,
        all_nodes=settings.all_nodes,
        strict=settings.strict,
        token=settings.token,
        timeout=settings.timeout,
    )
    with cluster:
        try:
            yield cluster
        finally:
            report = _report(cluster.outcomes)
            if settings.report is not None:
                from probing.client.output import write_report

                write_report(settings.report, report)
        for failed in report["failed"]:
            name = failed["node"] or failed["address"]
            where = f" ({failed['address']})" if failed["node"] else ""
            warn(f"node {name}{where} is missing: {failed['reason']}")


def _report(outcomes: Sequence[Gathered[Any]]) -> dict[str, Any]:
    """All questions of one command as one: a node that failed any of them is failed."""
    merged: dict[str, dict[str, Any]] = {"answered": {}, "failed": {}}
    asked: dict[str, None] = {}
    for report in (outcome.report() for outcome in outcomes):
        asked.update(dict.fromkeys(report["asked"]))
        for kind, found in merged.items():
            found.update({entry["address"]: entry for entry in report[kind]})
    answered = [entry for address, entry in merged["answered"].items() if address not in merged["failed"]]
    return {"asked": list(asked), "answered": answered, "failed": list(merged["failed"].values())}


def warn(message: str) -> None:
    sys.stderr.write(f"warning: {escape(message)}\n")


def require_job(cluster: Cluster, job: str) -> None:
    """Raises NotFound when no node has ever heard of ``job``: nothing to show is not the same as a wrong name."""
    for table in ("process.processes", "comm.communicators", "process.events"):
        if cluster.query(f"SELECT job FROM {table} WHERE job = {sql_text(job)} LIMIT 1").num_rows:
            return
    raise NotFound(f"there is no job {job}", hint="`probingctl ps` lists the jobs that run now")


def sql_text(value: str) -> str:
    """``value`` as an SQL literal."""
    return "'" + value.replace("'", "''") + "'"
