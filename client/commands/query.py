"""``query``: shows the rows of one SELECT, from one node or from all nodes."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from probing.api.errors import UsageError
from probing.client.expressions import with_rows_of_expressions
from probing.client.job_hints import Emptiness, hint_at_jobs
from probing.client.render.output import write_stream, write_table
from probing.client.render.progress import Progress
from probing.client.render.table import Field
from probing.client.session import missing_rows, opened, warn_unless_told
from probing.client.settings import Settings

if TYPE_CHECKING:
    from probing.client.cluster import Cluster

__all__ = ("EXAMPLES", "Options", "run", "steps")

EXAMPLES = (
    'probingctl query "SELECT op, count(*) FROM comm.ops GROUP BY op"',
    'probingctl query --param j=4711 "SELECT * FROM comm.inflight WHERE job = $j"',
)

_MAX_TEXT = 1 << 20
_SENDS = {
    "rows": "a node sends the rows of its answer",
    "aggregate": "a node sends its part of each group",
    "ship": "a node sends the columns that the query names",
}
_EXAMPLE = 'for example: probingctl query "SELECT * FROM comm.ops LIMIT 5"'


@dataclass(frozen=True, slots=True)
class Options:
    """The arguments and options. ``sql`` None: it is read from stdin; if stdin is a terminal, the shell runs."""

    sql: Annotated[str | None, typer.Argument(help="One SELECT; - reads it from stdin; default: a shell.")] = None
    param: Annotated[
        list[str] | None, typer.Option(metavar="NAME=VALUE", help="Value of $NAME in the SQL; also NAME:TYPE=VALUE.")
    ] = None
    explain: Annotated[bool, typer.Option("--explain", help="Print the plan: what nodes send, what is merged.")] = False


def run(settings: Settings, options: Options) -> None:
    sql, given = options.sql, options.param or ()
    if sql is None and not options.explain and sys.stdin.isatty():
        from probing.client.shell.loop import run as run_shell

        run_shell(settings, _parameters(given))
        return
    text = sys.stdin.read(_MAX_TEXT) if sql in (None, "-") else sql
    if not text or not text.strip():
        raise UsageError("there is no SQL", hint=_EXAMPLE)
    params = _parameters(given)
    with opened(settings) as cluster:
        if options.explain:
            _explain(settings, cluster, text, params)
        else:
            _write(settings, cluster, text, params)


def _write(settings: Settings, cluster: Cluster, sql: str, params: dict[str, object]) -> None:
    sql = with_rows_of_expressions(cluster, sql)
    with Progress() as progress:
        cluster.watch = progress.update if progress.wanted else None
        cluster.done = progress.done
        to_terminal = settings.output is None and sys.stdout.isatty()
        answer = Emptiness()
        with cluster.stream(sql, params) as rows:
            batches = progress.counting(answer.passed(iter(rows)), to_terminal=to_terminal)
            write_stream(settings, rows.schema, batches)
    # ``opened`` writes the warnings of a merged answer, which is among the outcomes, so they are not written here.
    warn_unless_told(rows.warnings, missing_rows(cluster.outcomes))
    if answer.empty:
        hint_at_jobs(cluster, sql, params)


def _parameters(given: Sequence[str]) -> dict[str, object]:
    if not given:
        return {}
    from probing.federation.sql.parameters import parameter

    found: dict[str, object] = {}
    for text in given:
        name, value = parameter(text)
        if name.lower() in found:
            raise UsageError(f"--param {name} is given twice")
        found[name.lower()] = value
    return found


def _explain(settings: Settings, cluster: Cluster, sql: str, params: dict[str, object]) -> None:
    rows = steps(cluster, sql, params)
    fields = (Field("STEP", "step"), Field("WHERE", "where"), Field("WHY", "why"), Field("SQL", "sql"))
    write_table(settings, fields, rows)


def steps(cluster: Cluster, sql: str, params: dict[str, object]) -> list[dict[str, str]]:
    """Returns the steps of the plan, as docs/json.md describes. Asks the target for its peers, and all nodes for the
    versions of their engines if the plan depends on them."""
    from probing.federation.sql.parameters import bind

    sql = bind(sql, params)
    asked = cluster.asked(sql)
    if not asked:
        rows = [_step("node", cluster.target, "it queries one node", " ".join(sql.split()))]
    else:
        split, others = cluster.plan(sql), ""
        if split.classic and (others := _other_engines(cluster)):
            split = split.classic
        where = f"each of {len(asked)} nodes"
        rows = [_step(split.kind, where, _SENDS[split.kind], part.sql) for part in split.parts]
        why = f"rows are shipped: {others or split.why}" if split.why else ""
        rows.append(_step("merge", "here", why, split.final))
    return rows


def _other_engines(cluster: Cluster) -> str:
    """Returns a text that names the nodes whose engine has another version than the client's; empty if none has."""
    from probing.federation.engine import engine_version

    others = [(reply.node, reply.engine) for _, reply in cluster.status() if reply.engine != engine_version()]
    if not others:
        return ""
    node, engine = others[0]
    more = f" and {len(others) - 1} more" if len(others) > 1 else ""
    return (
        f"{node}{more} has DuckDB {engine or 'of another version'}, whose states DuckDB {engine_version()} cannot read"
    )


def _step(step: str, where: str, why: str, sql: str) -> dict[str, str]:
    return {"step": step, "where": where, "why": why, "sql": sql}
