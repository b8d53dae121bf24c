"""The command line of what answers with rows of tables: query and export."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

import typer

from probing.client.settings import JOB_HELP

__all__ = ("cluster_query", "export", "query", "register")

_Sql = Annotated[str | None, typer.Argument(help="One SELECT; - reads it from stdin. A shell if left out.")]
_Param = Annotated[
    list[str] | None, typer.Option(metavar="NAME=VALUE", help="Value of $NAME in the SQL; also NAME:TYPE=VALUE.")
]
_Explain = Annotated[bool, typer.Option("--explain", help="Print what each node would be asked.")]
_Since = Annotated[
    str | None, typer.Option(metavar="TIME", help="How far back to begin, or a time; all there is if left out.")
]
_Until = Annotated[str | None, typer.Option(metavar="TIME", help="How far back to end, or a time; now if left out.")]
_Tables = Annotated[str | None, typer.Option(metavar="A,B,C", help="All stored tables if left out.")]
_Job = Annotated[str | None, typer.Option(metavar="JOB", help=JOB_HELP)]


def register(app: typer.Typer, cluster_app: typer.Typer) -> None:
    """Adds the commands to ``app``, and query of all nodes to ``cluster_app``."""
    app.command("query")(query)
    app.command("export")(export)
    cluster_app.command("query")(cluster_query)


def query(context: typer.Context, sql: _Sql = None, param: _Param = None, explain: _Explain = False) -> None:
    """Rows of one SELECT, of one node or all; without SQL a shell."""
    from probing.client.commands import query as command

    command.run(context.obj, sql, param or (), explain=explain)


def cluster_query(context: typer.Context, sql: _Sql = None, param: _Param = None, explain: _Explain = False) -> None:
    """query on all nodes."""
    context.obj = replace(context.obj, all_nodes=True)
    query(context, sql, param, explain)


def export(
    context: typer.Context, since: _Since = None, until: _Until = None, tables: _Tables = None, job: _Job = None
) -> None:
    """Stored rows as files for other engines, in the place of -o."""
    from probing.client.commands import export as command

    command.run(context.obj, since=since, until=until, tables=tables, job=job)
