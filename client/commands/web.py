"""``web``: serves a page that shows jobs, findings, ranks and SQL, to the caller alone or to a team."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from probing.api.errors import UsageError
from probing.api.numpy_import import allow_numpy
from probing.api.text import sql_text
from probing.client.commands import balance, health, nccl, nodes, preflight, query, stacks, status, topo
from probing.client.interrupt import leaving_by_it
from probing.client.render.rows import rows_of
from probing.client.settings import Settings
from probing.client.stacks.merge import merge, plain_groups

if TYPE_CHECKING:
    from probing.client.web.panels import Panels, Question

__all__ = ("EXAMPLES", "Options", "panels", "posted_panels", "run")

EXAMPLES = (
    "probingctl web --all-nodes",
    "probingctl -t gn6:7077 web --listen 0.0.0.0:7443 --cert FILE --key FILE",
)


@dataclass(frozen=True, slots=True)
class Options:
    port: Annotated[
        int | None,
        typer.Option(min=0, max=65535, metavar="P", help="Port on 127.0.0.1; default: 7088, or a free port."),
    ] = None
    listen: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help="Serve a team: each visitor logs in with a token of the nodes."),
    ] = None
    cert: Annotated[Path | None, typer.Option(metavar="FILE", help="With --listen: the certificate of the page.")] = (
        None
    )
    key: Annotated[Path | None, typer.Option(metavar="FILE", help="With --listen: key of --cert.")] = None
    no_browser: Annotated[bool, typer.Option("--no-browser", help="Print the address, and open no browser.")] = False


def run(settings: Settings, options: Options) -> None:
    if options.listen is None and (options.cert or options.key):
        raise UsageError("--cert and --key need --listen", hint="without --listen only 127.0.0.1 is served")
    if options.listen is not None and options.port is not None:
        raise UsageError(
            "--listen and --port exclude each other", hint="leave out --port: --listen HOST:PORT names the port"
        )
    if bool(options.cert) != bool(options.key):
        raise UsageError("a certificate and its key are needed together", hint="give both --cert and --key")
    allow_numpy()
    from probing.client.web.start import serve_caller, serve_team, signs_for_caller

    with leaving_by_it():
        if options.listen is None:
            posted = posted_panels(signs=signs_for_caller())
            serve_caller(settings, panels(), posted, options.port, browser=not options.no_browser)
        else:
            serve_team(settings, panels(), posted_panels(signs=False), options.listen, options.cert, options.key)


def panels() -> Panels:
    """Returns the panels by address. A panel with the name of a command has the data that the command prints with
    -f json.
    """
    from probing.client.web import flames, groups, jobs, ranks, sql

    return {
        **groups.PANELS,
        "balance": _balance,
        "diagnose": jobs.diagnose,
        "health": lambda question: health.collect(question.cluster),
        "history": jobs.history,
        "nccl": _nccl,
        # Only the target is asked: if each of a thousand nodes listed all nodes, there would be a million rows.
        "nodes": lambda question: rows_of(nodes.members(question.of_all_nodes(False))),
        "preflight": lambda question: preflight.collect(question.cluster),
        "profile": flames.profile,
        "profile/diff": flames.difference,
        "ps": _ps,
        "rank": ranks.rank,
        "stacks": _stacks,
        "steps": jobs.steps,
        "status": lambda question: [status.as_object(*one) for one in question.cluster.status()],
        "tables": sql.tables,
        "topo": lambda question: topo.collect(question.cluster, question.job_or_all()),
        "waits": jobs.waits,
    }


def posted_panels(*, signs: bool = True) -> Panels:
    """Returns the panels whose parameters are too long for a URL, and the actions. ``signs``: whether actions are
    carried out; if not, they are refused."""
    from probing.client.web import groups, sql

    actions = groups.ACTIONS if signs else groups.refusing()
    return {"query": sql.query, "query/plan": _plan, **actions}


def _balance(question: Question) -> object:
    return balance.collect(question.cluster, question.job_or_all(), question.parameters.interval("1m"))


def _nccl(question: Question) -> object:
    parameters = question.parameters
    comm = parameters.text("comm", "") or None
    found, _ = nccl.collect(question.cluster, question.job_or_all(), comm, parameters.interval("5m"))
    return found


def _ps(question: Question) -> object:
    job = question.job_or_all()
    return rows_of(question.cluster.processes("" if job is None else f"job = {sql_text(job)}").table)


def _stacks(question: Question) -> object:
    """Returns the threads of ``job``, or of the process ``pid`` of ``node``; with ``merge`` as trees."""
    parameters, node = question.parameters, question.parameters.text("node", "")
    pids = [parameters.pid()] if parameters.text("pid", "") else []
    if not pids and not parameters.text("job", ""):
        raise UsageError("neither a job nor a process is named", hint="add job=... or node=...&pid=...")
    found = question.of_node(node).stacks(
        pids,
        parameters.text("job", ""),
        native=parameters.flag("native"),
        local_variables=parameters.flag("locals"),
    )
    threads = [thread for thread in stacks.in_order(found.threads) if node in ("", thread["node"])]
    question.lacking.extend(
        {"node": f["node"], "error": f"pid {f['pid']}: {f['reason']}"}
        for f in found.failures
        if node in ("", f["node"])
    )
    return plain_groups(merge(threads)) if parameters.flag("merge") else threads


def _plan(question: Question) -> object:
    from probing.client.web.sql import cluster_of

    return query.steps(*cluster_of(question), {})
