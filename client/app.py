"""The command line of ``probingctl``: its commands, and the global options, which may stand before or after the
command.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperOption
from typer.main import get_command

from probing.api.errors import UsageError
from probing.client.lazy import Entry, LazyGroup, taking
from probing.client.settings import (
    DEFAULT_TARGET,
    FORMATS,
    Settings,
    check_suffix,
    conditions,
    format_of,
    node_list,
    read_token,
)
from probing.client.times import seconds
from probing.client.zone import use as use_zone
from probing.client.zone import zone_of

__all__ = ("GlobalOptions", "Program", "program")

COMMANDS = {
    "ps": Entry("ps", "Training processes: job, rank, pid, state, backends."),
    "events": Entry("events", "Starts, exits and kills; which process failed first."),
    "list": Entry("ps", "The same as ps.", hidden=True),
    "top": Entry("top", "Live view of ranks: rates, operations in flight, lag, Python."),
    "nccl": Entry("nccl", "Collectives, also in flight: times, bandwidth, lag by rank."),
    "diagnose": Entry("diagnose", "What is wrong with a job, who holds it up, and why."),
    "why": Entry("diagnose", "The same as diagnose.", hidden=True),
    "preflight": Entry("preflight", "Whether nodes are fit for a job, before it starts."),
    "balance": Entry("balance", "Shares of a step: compute, communication, wait, IO, by rank."),
    "logs": Entry("logs", "Lines that trainers wrote, if they match an allow-list."),
    "tables": Entry("tables", "The tables, or the columns of one table."),
    "web": Entry("web", "A page for the browser: jobs, findings, ranks, SQL."),
    "status": Entry("status", "State of the daemon and of each of its sources."),
    "nodes": Entry("nodes", "The nodes that the target knows."),
    "gpu": Entry("gpu", "GPUs by rank: activity, memory, clocks, what is wrong."),
    "health": Entry("health", "What is wrong with the hardware of each node, and what to do."),
    "memory": Entry("memory", "Memory of host and GPU by rank; which rank uses the most."),
    "mem": Entry("memory", "The same as memory.", hidden=True),
    "topo": Entry("topo", "How GPUs, NICs and NUMA nodes are linked, with ranks on them."),
    "rdma": Entry("rdma", "Ports of RDMA devices: state, traffic, errors."),
    "net": Entry("net", "Interfaces, and TCP connections of ranks: RTT, retransmits."),
    "pause": Entry("pause", "Stop all probes at once."),
    "version": Entry("version", "The version of probingctl."),
    "stacks": Entry("stacks", "Python stacks of all threads, innermost frame first."),
    "backtrace": Entry("stacks", "The same as stacks.", hidden=True),
    "bt": Entry("stacks", "The same as stacks.", hidden=True),
    "vars": Entry("variables", "Values of variables, read from outside."),
    "profile": Entry("profile", "Where Python spends its time: functions, flame graph, pprof."),
    "timeline": Entry("timeline", "A range of a job as a trace, or as an HTML file."),
    "flamegraph": Entry("flamegraph", "The same as profile -F svg."),
    "config": Entry("config", "Settings of the daemon: show them, or change one."),
    "annotate": Entry("annotate", "Set labels of ranks, such as the phase that they are in."),
    "eval": Entry("evaluate", "Run Python in processes of a job, where it is allowed."),
    "repl": Entry("repl", "Run Python in processes of a job line by line, at a prompt."),
    "launch": Entry("unsupported", "Start a job.", hidden=True, function="launch"),
    "inject": Entry("unsupported", "Load a library into a job.", hidden=True, function="launch"),
    "worker": Entry("worker", "Serve workers of this node: run ranks of groups as your user."),
    "query": Entry("query", "Rows of a SELECT, from one node or all; without SQL, a shell."),
    "bugreport": Entry("bugreport", "An archive for a bug report, without names."),
    "export": Entry("export", "Write stored rows to the file or directory of -o."),
}
CLUSTER_COMMANDS = {
    "query": Entry("cluster_query", "query on all nodes."),
    "list": Entry("cluster_list", "ps on all nodes."),
    "nodes": Entry("nodes", "The nodes that the target knows."),
}
GROUP_COMMANDS = {
    "create": Entry("group_spec", "A new group: its workers, master and command.", function="create"),
    "set": Entry("group_spec", "Change a stopped group.", function="change"),
    "add": Entry("group_spec", "Add workers to a stopped group.", function="add", options="WorkerOptions"),
    "remove": Entry("group_spec", "Remove workers of a stopped group.", function="remove", options="WorkerOptions"),
    "start": Entry("group", "Start all ranks, after checks of the nodes.", function="start", options="StartOptions"),
    "stop": Entry("group", "End all ranks.", function="stop"),
    "restart": Entry("group", "End all ranks and start them again.", function="restart", options="StartOptions"),
    "status": Entry(
        "group", "All groups, or a group with its workers and ranks.", function="status", options="StatusOptions"
    ),
    "list": Entry("group", "The same as status.", hidden=True, function="status", options="StatusOptions"),
    "logs": Entry("group", "The output of a rank.", function="logs", options="LogOptions"),
    "key": Entry("group", "Your public key, for launch.trusted on other nodes.", function="key", options=""),
    "delete": Entry("group", "End all ranks, and forget the group.", function="delete"),
}
RANKS_COMMANDS = {"check": Entry("ranks_check", "Whether the ranks of a job are numbered and placed as they must be.")}
# Commands whose -o file has a format of their own, so its suffix is not checked here.
_OWN_FILES = ("profile", "flamegraph", "timeline", "export", "bugreport", "diagnose", "why")
_EPILOG = "The options above may stand before or after the command. `probingctl COMMAND --help` has examples."
# Help is as wide as the terminal, up to a width that is easy to read.
_CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 100}


def _show_version(wanted: bool) -> None:
    if wanted:
        from probing.client.commands import version

        version.run()
        raise typer.Exit


@dataclass(frozen=True, slots=True)
class GlobalOptions:
    """The options that every command has."""

    target: Annotated[
        str,
        typer.Option(
            "-t", "--target", envvar="PROBING_TARGET", metavar="ADDRESS", help="Node to ask: unix:PATH or HOST:PORT."
        ),
    ] = DEFAULT_TARGET
    nodes: Annotated[
        str | None,
        typer.Option(metavar="A,B,C|FILE", help="Nodes to ask: A,B,C, a file, dns:NAME:PORT or slurm:."),
    ] = None
    all_nodes: Annotated[bool, typer.Option("--all-nodes", help="Ask all nodes that the target knows.")] = False
    where: Annotated[
        list[str] | None, typer.Option(metavar="LABEL=VALUE", help="Ask the nodes with this label, such as rack=r7.")
    ] = None
    strict: Annotated[bool, typer.Option("--strict", help="Exit 4 unless all nodes answer with all rows.")] = False
    token_file: Annotated[str | None, typer.Option(metavar="FILE", help="File with the bearer token.")] = None
    token: Annotated[str | None, typer.Option(metavar="TOKEN", help="The token itself; the process list shows it.")] = (
        None
    )
    tls: Annotated[bool, typer.Option("--tls", help="Connect to HOST:PORT by TLS; trust the system's CAs.")] = False
    tls_ca: Annotated[
        str | None,
        typer.Option(envvar="PROBING_TLS_CA", metavar="FILE", help="Connect by TLS; trust the CAs in this file."),
    ] = None
    tls_cert: Annotated[
        str | None, typer.Option(envvar="PROBING_TLS_CERT", metavar="FILE", help="Certificate to show to nodes.")
    ] = None
    tls_key: Annotated[
        str | None, typer.Option(envvar="PROBING_TLS_KEY", metavar="FILE", help="Key of --tls-cert.")
    ] = None
    output_format: Annotated[
        str | None,
        typer.Option(
            "-f",
            "--format",
            metavar="FORMAT",
            help=f"{', '.join(FORMATS)}; default: the output file's suffix, else table.",
        ),
    ] = None
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="FILE", help="File to write instead of stdout.")
    ] = None
    report: Annotated[
        Path | None, typer.Option(metavar="FILE", help="File for a JSON report on which nodes answered or failed.")
    ] = None
    tz: Annotated[
        str | None,
        typer.Option(
            "--tz", envvar="PROBING_TZ", metavar="ZONE", help="Time zone: Asia/Shanghai, +08:00 or local; default: UTC."
        ),
    ] = None
    timeout: Annotated[str, typer.Option(metavar="TIME", help="Time limit for all answers: 5 (s) or 500ms.")] = "30s"
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False

    def settings(self) -> Settings:
        """Returns the settings of the command, and sets the zone in which times are shown.

        Raises UsageError for an unknown format, an empty list of nodes, an invalid duration and an invalid zone.
        """
        use_zone(zone_of(self.tz))
        if self.output_format is not None and self.output_format not in FORMATS:
            raise UsageError(f"unknown format {self.output_format}", hint=f"use one of {', '.join(FORMATS)}")
        if self.where and self.nodes is not None:
            raise UsageError("--where chooses among the nodes that the target knows", hint="leave --nodes out")
        return Settings(
            target=self.target,
            nodes=node_list(self.nodes) if self.nodes is not None else (),
            all_nodes=self.all_nodes or self.nodes is not None or bool(self.where),
            where=conditions(self.where or ()),
            strict=self.strict,
            token=read_token(self.token, self.token_file),
            tls=self._tls_files(),
            format=self.output_format or format_of(self.output),
            named=self.output_format is not None,
            output=self.output,
            report=self.report,
            timeout=seconds(self.timeout),
        )

    def _tls_files(self) -> tuple[str, str, str] | None:
        files = (self.tls_ca or "", self.tls_cert or "", self.tls_key or "")
        return files if self.tls or any(files) else None


class Program(LazyGroup):
    """The command ``probingctl``."""

    def parse_args(self, ctx: Any, args: list[str]) -> Any:
        return super().parse_args(ctx, self.hoisted(args))

    def hoisted(self, arguments: Sequence[str]) -> list[str]:
        """Returns ``arguments`` with the global options first, so that users may write them before or after the
        command.
        """
        options = [option for option in self.params if isinstance(option, TyperOption) and not option.is_eager]
        flags = {name for option in options if option.is_flag for name in option.opts}
        valued = {name for option in options if not option.is_flag for name in option.opts}
        first: list[str] = []
        rest: list[str] = []
        waiting = iter(arguments)
        for argument in waiting:
            name, equals, _ = argument.partition("=")
            # An option and its value may be one word: --format=json, -fjson.
            short = not argument.startswith("--") and argument[:2] in valued
            if argument == "--":
                rest += [argument, *waiting]
            elif argument in valued:
                first += [argument, *(value for value in [next(waiting, None)] if value is not None)]
            else:
                (first if argument in flags or short or (equals and name in valued) else rest).append(argument)
        return first + rest


def program() -> Program:
    """Returns the command ``probingctl``; its method ``main`` runs it."""
    top: Program = _group(Program, "probingctl", "Ask probingd about training jobs, on one node or all.", _EPILOG)
    top.add(COMMANDS)
    cluster = _group(LazyGroup, "cluster", "Commands for all nodes: list, nodes, query.")
    cluster.add(CLUSTER_COMMANDS)
    ranks = _group(LazyGroup, "ranks", "Ranks of jobs: check.")
    ranks.add(RANKS_COMMANDS)
    top.add_command(cluster)
    top.add_command(ranks)
    groups = _group(LazyGroup, "group", "Groups of workers: create, start, stop, status.")
    groups.add(GROUP_COMMANDS)
    top.add_command(groups)
    return top


def _group(kind: type[LazyGroup], name: str, text: str, epilog: str | None = None) -> Any:
    app = typer.Typer(
        name=name,
        cls=kind,
        help=text,
        epilog=epilog,
        invoke_without_command=True,
        add_completion=False,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings=_CONTEXT,
    )
    app.callback()(taking(GlobalOptions, _begin) if kind is Program else _help)
    return get_command(app)


def _begin(context: typer.Context, options: GlobalOptions) -> None:
    _help(context)
    if options.output_format is None and context.invoked_subcommand not in _OWN_FILES:
        check_suffix(options.output)
    context.obj = options.settings()


def _help(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
        raise typer.Exit
