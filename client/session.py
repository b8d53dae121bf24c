"""The connection of a command to its nodes: which nodes failed or are paused, the report, and warnings."""

from __future__ import annotations

import sys
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from probing.api.errors import NotFound, error_from
from probing.api.text import escape, pause_text, time_text
from probing.client.absence import silent_of_command, unless_partial
from probing.client.jobs import job_named, require_live, silent_nodes
from probing.client.settings import Settings

if TYPE_CHECKING:
    from probing.client.cluster import Cluster
    from probing.client.messages import Failure
    from probing.federation.execution.answer import AnsweredReport, Gathered, OutcomeReport

__all__ = (
    "hint",
    "job_named",
    "missing_rows",
    "notice_lines",
    "opened",
    "pause_lines",
    "report_failures",
    "require_live",
    "shown_pauses",
    "warn",
    "warn_unless_told",
)

# A warning is written if the clock of a node is off by more than this, ns.
_CLOCK_NS = 1_000_000_000
_MOST_NOTICES = 8


@contextmanager
def opened(settings: Settings) -> Iterator[Cluster]:
    """Returns a context manager whose value is the cluster that ``settings`` describe. The report is written whether
    the command succeeds or fails.
    """
    # This imports gRPC, which `probingctl --help` does not need.
    from probing.client.cluster import Cluster
    from probing.client.wire.credentials import Tls

    cluster = Cluster(
        settings.target,
        nodes=settings.nodes,
        all_nodes=settings.all_nodes,
        where=settings.where,
        strict=settings.strict,
        token=settings.token,
        tls=Tls(*settings.tls) if settings.tls is not None else None,
        timeout=settings.timeout,
    )
    # A node that answers NotFound has answered, so it is not silent.
    silent_of_command(lambda: silent_nodes(cluster, besides=(NotFound,)))
    with cluster:
        try:
            yield cluster
        except NotFound as e:
            raise unless_partial(e) from None
        finally:
            report = _report(cluster.outcomes)
            if settings.report is not None:
                from probing.client.render.output import write_report

                write_report(settings.report, report)
        for clock in report["answered"]:
            ahead_ns, error_ns = clock.get("clock_offset_ns", 0), clock.get("clock_error_ns", 0)
            if abs(ahead_ns) - error_ns > _CLOCK_NS:
                warn(f"the clock of {clock['node']} is {_ahead(ahead_ns)}: its times are off by that")
        for detour in report.get("detours", ()):
            warn(f"{detour['address']} did not relay all answers, the rest was asked directly: {detour['reason']}")
        for failed in report["failed"]:
            name = failed["node"] or failed["address"]
            where = f" ({failed['address']})" if failed["node"] else ""
            warn(f"node {name}{where} is missing: {failed['reason']}")
        for text in missing_rows(cluster.outcomes):
            warn(text)


def missing_rows(outcomes: Sequence[Gathered[Any]]) -> list[str]:
    """Returns the nodes' warnings about rows that are missing from their answers to SELECTs, each warning once.

    ``outcomes`` does not have the warnings of streamed rows.
    """
    from probing.federation.execution.answer import Reply

    found: dict[str, None] = {}
    for answered in (answered for outcome in outcomes for answered in outcome.answered):
        for reply in answered.value if isinstance(answered.value, tuple) else ():
            if isinstance(reply, Reply):
                found |= {f"{reply.node}: {text}": None for text in reply.warnings}
    return list(found)


def _report(outcomes: Sequence[Gathered[Any]]) -> OutcomeReport:
    """Returns one report about all questions of a command; a node that failed in one question counts as failed."""
    reports = [outcome.report() for outcome in outcomes]
    failed = {entry["address"]: entry for report in reports for entry in report["failed"]}
    answered: dict[str, AnsweredReport] = {}
    for report in reports:
        for entry in report["answered"]:
            # An offset of the node's clock that an earlier call measured is kept if this call measured none.
            answered[entry["address"]] = {**answered.get(entry["address"], entry), **entry}
    detours = [entry for report in reports for entry in report.get("detours", ())]
    merged: OutcomeReport = {
        "asked": list(dict.fromkeys(address for report in reports for address in report["asked"])),
        "answered": [entry for address, entry in answered.items() if address not in failed],
        "failed": list(failed.values()),
    }
    if detours:
        merged["detours"] = list({entry["address"]: entry for entry in detours}.values())
    return merged


def _ahead(ahead_ns: int) -> str:
    return f"{time_text(abs(ahead_ns))} {'ahead' if ahead_ns > 0 else 'behind'}"


def warn(message: str) -> None:
    sys.stderr.write(f"warning: {escape(message)}\n")


def warn_unless_told(messages: Iterable[str], told: Container[str]) -> None:
    """Writes the warnings that ``told`` does not contain."""
    for message in messages:
        if message not in told:
            warn(message)


def hint(message: str) -> None:
    """Writes a hint to stderr, because the answer is on stdout."""
    sys.stderr.write(f"hint: {escape(message)}\n")


def report_failures(failures: Sequence[Failure], *, all_failed: bool) -> None:
    """Warns of each process that could not be read; with ``all_failed`` raises the first failure instead."""
    if failures and all_failed:
        first = failures[0]
        raise error_from(first["kind"], _failure_text(first), first["hint"])
    for failure in failures:
        warn(_failure_text(failure))


def _failure_text(failure: Failure) -> str:
    rank = "" if failure["rank"] is None else f" (rank {failure['rank']})"
    return f"pid {failure['pid']}{rank} on {failure['node']}: {failure['reason']}"


def pause_lines(cluster: Cluster) -> dict[str, str]:
    """Returns, for each node whose probes are paused, the line that says so."""
    return {
        reply.node: pause_text(reply.node, reply.reason) for _, reply in cluster.status() if reply.state == "paused"
    }


def notice_lines(cluster: Cluster) -> dict[str, str]:
    """Returns a line for each paused node and for each notice about its processes, such as code that was run in them.

    The key of a pause line is the node, the key of a notice is the node and a number.
    """
    found: dict[str, str] = {}
    for _, reply in cluster.status():
        if reply.state == "paused":
            found[reply.node] = pause_text(reply.node, reply.reason)
        for number, notice in enumerate(reply.notices[:_MOST_NOTICES]):
            found[f"{reply.node} {number}"] = notice
    return found


def shown_pauses(settings: Settings, lines: Mapping[str, str]) -> str:
    """Returns ``lines`` as text above a table; for other formats it writes them as warnings and returns ``""``."""
    if settings.format == "table":
        return "".join(escape(line) + "\n" for line in lines.values())
    for line in lines.values():
        warn(line)
    return ""
