"""The command line of what looks into Python, and of what is collected: stacks, vars, profile, config."""

from __future__ import annotations

from typing import Annotated

import typer

from probing.api.errors import UsageError
from probing.client.settings import JOB_HELP, process_id, seconds

__all__ = ("config", "flamegraph", "profile", "register", "stacks", "variables")

_Pids = Annotated[list[str] | None, typer.Argument(metavar="[PID]...", help="All if left out.")]
_Job = Annotated[str, typer.Option(metavar="JOB", help=JOB_HELP)]
_For = Annotated[
    str | None, typer.Option("--for", metavar="TIME", help="Take the change back after so long, such as 10m.")
]
_Rank = Annotated[int | None, typer.Option(min=0, metavar="R", help="Only this rank.")]
_Seconds = Annotated[str | None, typer.Option("--seconds", metavar="TIME", help="Sample now, for so long.")]
_Since = Annotated[str | None, typer.Option(metavar="TIME", help="From stored samples: how far back; 5m if left out.")]
_Until = Annotated[str | None, typer.Option(metavar="TIME", help="With --since: how far back to stop.")]
_Wall = Annotated[bool, typer.Option("--wall", help="Time on and off the CPU.")]
_OffCpu = Annotated[bool, typer.Option("--off-cpu", help="Only time off the CPU.")]
_Gil = Annotated[bool, typer.Option("--gil", help="Only while the thread holds the GIL.")]
_Hz = Annotated[int, typer.Option(min=1, max=999, metavar="N", help="With --seconds: samples a second.")]
_By = Annotated[
    str | None, typer.Option(metavar="A,B", help="What to keep apart: rank, thread, pid, node, job; A,B for several.")
]
_Lines = Annotated[bool, typer.Option("--lines", help="Keep the lines of one function apart.")]
_Kind = Annotated[
    str | None, typer.Option("-F", "--output-format", metavar="FORMAT", help="folded, speedscope, svg, pprof, table.")
]
_Diff = Annotated[
    str | None,
    typer.Option(
        metavar="WHAT", help="What to compare with: rank:R, pid:P, job:J or before:10m; the rest stays as selected.",
    ),
]


def register(app: typer.Typer) -> None:
    """Adds the commands to ``app``."""
    app.command("stacks")(stacks)
    for alias in ("backtrace", "bt"):
        app.command(alias, help="The same as stacks.", hidden=True)(stacks)
    app.command("vars")(variables)
    app.command("profile")(profile)
    app.command("flamegraph")(flamegraph)
    app.command("config")(config)


def stacks(
    context: typer.Context,
    pids: _Pids = None,
    job: _Job = "",
    native: Annotated[bool, typer.Option("--native", help="With the frames of C and C++ code.")] = False,
    show_locals: Annotated[bool, typer.Option("--locals", help="With the local variables of each frame.")] = False,
    merge: Annotated[bool, typer.Option("--merge", help="Equal stacks of a job's ranks as one tree.")] = False,
    threads: Annotated[
        str | None, typer.Option(metavar="main|all", help="With --merge: main (also if left out) or all.")
    ] = None,
) -> None:
    """Python stacks of all threads, innermost frame first."""
    from probing.client.commands import stacks as command

    if threads not in (None, "main", "all"):
        raise UsageError(f"--threads {threads} is neither main nor all")
    if threads is not None and not merge:
        raise UsageError("--threads belongs to --merge", hint="without --merge all threads are shown")
    command.run(
        context.obj, [process_id(text) for text in pids or []], job,
        native=native, local_variables=show_locals, merged=(threads or "main") if merge else None,
    )  # fmt: skip


def variables(
    context: typer.Context,
    words: Annotated[
        list[str] | None, typer.Argument(metavar="[PID]... NAME...", help="Names such as loss or trainer.state.step.")
    ] = None,
    job: _Job = "",
    watch: Annotated[bool, typer.Option("--watch", help="Store the values whenever they change.")] = False,
    unwatch: Annotated[bool, typer.Option("--unwatch", help="Store them no longer.")] = False,
    interval: Annotated[
        str | None, typer.Option(metavar="TIME", help="With --watch: time between two readings.")
    ] = None,
    for_: _For = None,
) -> None:
    """Values of variables, read from outside."""
    from probing.client.commands import variables as command

    if watch and unwatch:
        raise UsageError("--watch and --unwatch contradict each other")
    if not watch and (interval is not None or for_ is not None):
        raise UsageError("--interval and --for belong to --watch")
    pids = [process_id(word) for word in words or [] if word.isdigit()]
    names = [word for word in words or [] if not word.isdigit()]
    if unwatch:
        command.unwatch(context.obj, names, pids, job)
    elif watch:
        every = None if interval is None else seconds(interval)
        command.watch(context.obj, names, pids, job, every=every, length=0.0 if for_ is None else seconds(for_))
    else:
        command.run(context.obj, names, pids, job)


def profile(
    context: typer.Context,
    pids: _Pids = None,
    job: _Job = "",
    rank: _Rank = None,
    live: _Seconds = None,
    since: _Since = None,
    until: _Until = None,
    wall: _Wall = False,
    off_cpu: _OffCpu = False,
    hz: _Hz = 99,
    by: _By = None,
    lines: _Lines = False,
    kind: _Kind = None,
    diff: _Diff = None,
    gil: _Gil = False,
) -> None:
    """Where Python spends its time: functions, flame graph, pprof."""
    from probing.client.commands import profile as command
    from probing.client.profile.options import options
    from probing.client.settings import profile_format_of

    chosen = options(
        pids=[process_id(text) for text in pids or []], job=job, rank=rank, live=live, since=since, until=until,
        wall=wall, off_cpu=off_cpu, hz=hz, by=by, lines=lines,
        kind=kind or profile_format_of(context.obj.output), diff=diff, gil=gil,
    )  # fmt: skip
    command.run(context.obj, chosen)


def flamegraph(
    context: typer.Context,
    pids: _Pids = None,
    job: _Job = "",
    rank: _Rank = None,
    live: _Seconds = None,
    since: _Since = None,
    until: _Until = None,
    wall: _Wall = False,
    off_cpu: _OffCpu = False,
    hz: _Hz = 99,
    by: _By = None,
    lines: _Lines = False,
    kind: _Kind = None,
    diff: _Diff = None,
    gil: _Gil = False,
) -> None:
    """The same as profile -F svg."""
    profile(context, pids, job, rank, live, since, until, wall, off_cpu, hz, by, lines, kind or "svg", diff, gil)


def config(
    context: typer.Context,
    what: Annotated[str | None, typer.Argument(metavar="[KEY[=VALUE]]", help="All settings if left out.")] = None,
    job: Annotated[
        str, typer.Option(metavar="JOB", help="For this job alone: its name, the end of it, a run or a pid.")
    ] = "",
    pid: Annotated[str | None, typer.Option(metavar="PID", help="Set it for this process alone.")] = None,
    for_: _For = None,
    persist: Annotated[bool, typer.Option("--persist", help="Keep it when the daemon restarts.")] = False,
    reset: Annotated[bool, typer.Option("--reset", help="Take a change back.")] = False,
) -> None:
    """What is collected: show settings, or change one."""
    from probing.client.commands import config as command

    process = 0 if pid is None else process_id(pid)
    length = 0.0 if for_ is None else seconds(for_)
    command.run(context.obj, what, job=job, pid=process, length=length, persist=persist, reset=reset)
