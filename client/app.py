"""The command line of ``probingctl``: options are read here, and each command is a module imported when it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from probing.api.errors import UsageError
from probing.client import examples, main_python, main_query
from probing.client.commands import unsupported as later
from probing.client.settings import (
    DEFAULT_TARGET,
    FORMATS,
    JOB_HELP,
    Settings,
    format_of,
    node_list,
    read_token,
    seconds,
)

__all__ = ("app", "events", "logs", "nccl", "nodes", "pause", "ps", "rdma", "status", "tables", "top", "version")

_Job = Annotated[str | None, typer.Option(metavar="JOB", help=JOB_HELP)]
_Wide = Annotated[bool, typer.Option("-w", "--wide", help="All columns, however wide the terminal is.")]
_EPILOG = "The options above may stand before or after the command. `probingctl COMMAND --help` has examples."
# As wide as the terminal, up to what reads well.
_CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 100}

app = typer.Typer(
    name="probingctl",
    help="Ask probingd, on one node or all, what the trainings do.",
    epilog=_EPILOG,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings=_CONTEXT,
)
cluster_app = typer.Typer(help="The same for all nodes: list, nodes, query.", rich_markup_mode=None)
app.add_typer(cluster_app, name="cluster")


def _version(wanted: bool) -> None:
    if wanted:
        version()
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _options(
    context: typer.Context,
    target: Annotated[
        str, typer.Option("-t", "--target", envvar="PROBING_TARGET", metavar="ADDRESS", help="unix:PATH or HOST:PORT.")
    ] = DEFAULT_TARGET,
    nodes: Annotated[
        str | None, typer.Option(metavar="A,B,C|FILE", help="Nodes to ask: A,B,C or a file with one a line.")
    ] = None,
    all_nodes: Annotated[bool, typer.Option("--all-nodes", help="Ask all nodes that the target knows.")] = False,
    strict: Annotated[bool, typer.Option("--strict", help="Exit 4 unless all nodes answer with all rows.")] = False,
    token_file: Annotated[str | None, typer.Option(metavar="FILE", help="File with the bearer token.")] = None,
    token: Annotated[
        str | None, typer.Option(metavar="TOKEN", help="The token itself; the process list shows it.")
    ] = None,
    output_format: Annotated[
        str | None,
        typer.Option("-f", "--format", metavar="FORMAT", help=f"{', '.join(FORMATS)}; as the file is named, or table."),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="FILE", help="File to write instead of stdout.")
    ] = None,
    report: Annotated[
        Path | None, typer.Option(metavar="FILE", help="File for who answered and who did not, as JSON.")
    ] = None,
    timeout: Annotated[str, typer.Option(metavar="TIME", help="Time for all answers, such as 5 or 500ms.")] = "30s",
    _show_version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
        raise typer.Exit
    if output_format is not None and output_format not in FORMATS:
        raise UsageError(f"unknown format {output_format}", hint=f"one of {', '.join(FORMATS)}")
    context.obj = Settings(
        target=target,
        nodes=node_list(nodes) if nodes is not None else (),
        all_nodes=all_nodes or nodes is not None,
        strict=strict,
        token=read_token(token, token_file),
        format=output_format or format_of(output),
        named=output_format is not None,
        output=output,
        report=report,
        timeout=seconds(timeout),
    )


@app.command()
def ps(
    context: typer.Context,
    job: _Job = None,
    ended: Annotated[bool, typer.Option("--ended", help="Those that have ended, the newest first.")] = False,
    since: Annotated[str, typer.Option(metavar="TIME", help="How far back, with --ended.")] = "1d",
    wide: _Wide = False,
) -> None:
    """Training processes: job, rank, pid, state, backends."""
    from probing.client.commands import ps as command

    command.run(context.obj, job, since=seconds(since) if ended else None, wide=wide)


@app.command()
def events(
    context: typer.Context,
    job: _Job = None,
    since: Annotated[str, typer.Option(metavar="TIME", help="How far back.")] = "1d",
) -> None:
    """Starts, exits and kills, and who of a job failed first."""
    from probing.client.commands import events as command

    command.run(context.obj, job, seconds(since))


app.command("list", help="The same as ps.", hidden=True)(ps)


@app.command()
def top(
    context: typer.Context,
    job: _Job = None,
    once: Annotated[bool, typer.Option("--once", help="Print one frame and end.")] = False,
    interval: Annotated[str, typer.Option(metavar="TIME", help="Time between frames.")] = "1s",
    window: Annotated[str, typer.Option(metavar="TIME", help="Rates and lags are of this last time.")] = "10s",
) -> None:
    """Live, all ranks: rates, what is in flight, lag, Python."""
    from probing.client.commands import top as command

    command.run(context.obj, job, once=once, interval=seconds(interval), window=seconds(window))


@app.command()
def nccl(
    context: typer.Context,
    job: _Job = None,
    comm: Annotated[str | None, typer.Option(metavar="COMM", help="Only this communicator.")] = None,
    since: Annotated[str, typer.Option(metavar="TIME", help="How far back.")] = "5m",
) -> None:
    """Collectives: times, bandwidth, lag by rank, in flight."""
    from probing.client.commands import nccl as command

    command.run(context.obj, job, comm, seconds(since))


@app.command()
def logs(
    context: typer.Context,
    job: _Job = None,
    rank: Annotated[int | None, typer.Option(min=0, metavar="R", help="Only this rank.")] = None,
    kind: Annotated[
        str | None, typer.Option(metavar="TEXT", help="Only lines of a pattern that contains this text.")
    ] = None,
    since: Annotated[str, typer.Option(metavar="TIME", help="How far back.")] = "1h",
    follow: Annotated[bool, typer.Option("--follow", help="Go on with what comes.")] = False,
) -> None:
    """Lines that trainers wrote and that match an allow-list."""
    from probing.client.commands import logs as command

    command.run(context.obj, command.Filter(job, rank, kind), seconds(since), follow=follow)


@app.command()
def tables(
    context: typer.Context, name: Annotated[str | None, typer.Argument(help="Show this table's columns.")] = None
) -> None:
    """The tables, or the columns of one."""
    from probing.client.commands import tables as command

    command.run(context.obj, name)


@app.command()
def status(context: typer.Context) -> None:
    """How the daemon and each of its sources are."""
    from probing.client.commands import status as command

    command.run(context.obj)


@app.command()
def nodes(context: typer.Context) -> None:
    """The nodes that the target knows."""
    from probing.client.commands import nodes as command

    command.run(context.obj)


@app.command()
def rdma(
    context: typer.Context,
    hca: Annotated[str | None, typer.Argument(metavar="[HCA]", help="Only this device.")] = None,
    length: Annotated[
        str | None, typer.Option("--seconds", metavar="TIME", help="Also what the ports carry in this time.")
    ] = None,
) -> None:
    """Ports of RDMA devices: state, traffic, errors."""
    from probing.client.commands import rdma as command

    command.run(context.obj, hca, 0.0 if length is None else seconds(length))


@app.command()
def pause(
    context: typer.Context,
    resume: Annotated[bool, typer.Option("--resume", help="Let the probes run again.")] = False,
) -> None:
    """Stop all probes at once."""
    from probing.client.commands import pause as command

    command.run(context.obj, resume=resume)


@app.command()
def version() -> None:
    """The version of probingctl."""
    from probing.client.commands import version as command

    command.run()


main_python.register(app)
later.register(app)
main_query.register(app, cluster_app)


@cluster_app.callback(invoke_without_command=True)
def _cluster(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
        raise typer.Exit


def _everywhere(context: typer.Context) -> None:
    from dataclasses import replace

    context.obj = replace(context.obj, all_nodes=True)


@cluster_app.command("list")
def _cluster_list(context: typer.Context, job: _Job = None, wide: _Wide = False) -> None:
    """ps on all nodes."""
    _everywhere(context)
    ps(context, job, wide=wide)


@cluster_app.command("nodes")
def _cluster_nodes(context: typer.Context) -> None:
    """The nodes that the target knows."""
    nodes(context)


examples.add_examples(app, cluster_app)
