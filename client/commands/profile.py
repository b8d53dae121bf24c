"""``profile``: shows where Python spends its time, from stored samples or from samples taken now."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from probing.api.errors import NotFound, UsageError
from probing.client.options import Job, Pids, Rank, Until
from probing.client.profile.model import Profile
from probing.client.profile.request import KINDS, Request, Selection, at_times, base_of, labels, of_training_threads
from probing.client.profile.samples import off_cpu_share, read_profiles, sample
from probing.client.profile.write import write_profiles
from probing.client.session import hint, job_named, opened
from probing.client.settings import PROFILE_SUFFIXES, Settings, check_suffix, process_id, profile_format_of
from probing.client.times import seconds

if TYPE_CHECKING:
    from probing.client.cluster import Cluster

__all__ = ("EXAMPLES", "Options", "run")

EXAMPLES = (
    "probingctl profile --job 4711 --rank 7 --diff rank:0",
    "probingctl profile 31337 --seconds 30 -o profile.svg",
)
_MOST_LIVE_S = 3600
_HZ = 99
# If more than this share of the training threads' time is off the CPU, a profile of CPU time would hide the cause.
_MOSTLY = 0.5


@dataclass(frozen=True, slots=True)
class Options:
    pids: Pids = None
    job: Job = None
    rank: Rank = None
    live: Annotated[str | None, typer.Option("--seconds", metavar="TIME", help="Sample now, for this time.")] = None
    since: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="Start of stored samples: how long before now, or an instant; default: 5m."),
    ] = None
    until: Until = None
    cpu: Annotated[bool, typer.Option("--cpu", help="Only time on the CPU, even if most time is off the CPU.")] = False
    wall: Annotated[bool, typer.Option("--wall", help="Time on and off the CPU.")] = False
    off_cpu: Annotated[bool, typer.Option("--off-cpu", help="Only time off the CPU.")] = False
    hz: Annotated[
        int | None, typer.Option(min=1, max=999, metavar="N", help="With --seconds: samples a second; default: 99.")
    ] = None
    by: Annotated[
        str | None,
        typer.Option(metavar="A,B", help="Separate by rank, thread, pid, node or job; A,B for several."),
    ] = None
    lines: Annotated[bool, typer.Option("--lines", help="Count each line of a function separately.")] = False
    kind: Annotated[
        str | None,
        typer.Option("-F", "--output-format", metavar="FORMAT", help="folded, speedscope, svg, pprof, table."),
    ] = None
    diff: Annotated[
        str | None,
        typer.Option(
            metavar="WHAT",
            help="What to compare with: rank:R, pid:P, job:J or before:10m; other filters stay the same.",
        ),
    ] = None
    gil: Annotated[bool, typer.Option("--gil", help="Only while the thread holds the GIL.")] = False

    def request(self, output: Path | None = None, *, named: bool = False) -> Request:
        """Returns the request that the options describe. ``named``: -f names the format; else the suffix of ``output``
        may name it.

        Raises UsageError for a value that cannot be read and for options that contradict each other.
        """
        kind = self.kind or profile_format_of(output)
        if self.kind is None and not named:
            check_suffix(output, PROFILE_SUFFIXES)
        if kind not in KINDS:
            raise UsageError(f"unknown output format {kind}", hint=f"use one of {', '.join(KINDS)}")
        states = [name for name, given in self._states().items() if given]
        if len(states) > 1:
            hint = "--wall alone shows time on and off the CPU"
            raise UsageError(f"{states[0]} and {states[1]} contradict each other", hint=hint)
        if self.live is not None and (self.since is not None or self.until is not None):
            raise UsageError("--seconds samples now, --since and --until look back", hint="leave one out")
        if self.hz is not None and self.live is None:
            raise UsageError(
                "--hz needs --seconds", hint="`probingctl config sampling.hz` shows the rate of stored samples"
            )
        live = 0.0 if self.live is None else seconds(self.live)
        if live > _MOST_LIVE_S:
            raise UsageError("--seconds is at most one hour", hint="for longer times read stored samples with --since")
        pids = tuple(process_id(text) for text in self.pids or ())
        state = "wall" if self.wall else "off_cpu" if self.off_cpu else "cpu"
        whole = Selection(pids, self.job or "", self.rank, state, gil=self.gil)
        selected = at_times(whole, self.since, self.until)
        base = None if self.diff is None else base_of(selected, self.diff)
        if base is not None and kind == "pprof":
            advice = "write two profiles and compare them with pprof -diff_base"
            raise UsageError("a pprof file cannot hold a difference", hint=advice)
        return Request(selected, base, kind, live, self.hz or _HZ, labels(self.by), self.lines, not states)

    def _states(self) -> dict[str, bool]:
        return {"--wall": self.wall, "--off-cpu": self.off_cpu, "--cpu": self.cpu}


def run(settings: Settings, options: Options) -> None:
    request = options.request(settings.output, named=settings.named)
    if request.kind != "table" and settings.named and settings.format != "table":
        raise UsageError(f"-f {settings.format} and -F {request.kind} contradict each other", hint="leave one out")
    with opened(settings) as cluster:
        request = _with_jobs(cluster, request)
        if request.live:
            request = sample(cluster, request)
        away = off_cpu_share(cluster, request.selected) if request.selected.state == "cpu" else None
        mostly = away is not None and away > _MOSTLY
        if request.any_state and request.kind == "svg" and mostly:
            request = of_training_threads(request)
        profiles = read_profiles(cluster, request.selections)
        if request.any_state and away is not None and not profiles[0].samples:
            request = of_training_threads(request)
            profiles = read_profiles(cluster, request.selections)
            hint("no selected sample is on the CPU: this is the training threads' time on and off the CPU")
        for selection, profile in zip(request.selections, profiles, strict=True):
            _require(cluster, selection, profile)
        away = away if mostly and request.selected.state == "cpu" else None
        write_profiles(settings, request, profiles, away)
        if away is not None and request.any_state and (request.kind != "table" or settings.format == "table"):
            hint(f"{away:.0%} of the training threads' time is off the CPU: --wall shows what they wait for")


def _with_jobs(cluster: Cluster, request: Request) -> Request:
    """Returns ``request`` with the full names of its jobs."""
    selected, base = (
        None if selection is None else replace(selection, job=job_named(cluster, selection.job))
        for selection in (request.selected, request.base)
    )
    assert selected is not None
    return replace(request, selected=selected, base=base)


def _require(cluster: Cluster, selection: Selection, profile: Profile) -> None:
    if profile.samples:
        return
    next_step = "`probingctl config sampling.hz` shows the rate of samples, `probingctl status` problems of the sampler"
    if selection.state == "cpu" and off_cpu_share(cluster, selection) is not None:
        next_step = "there are samples off the CPU: --wall shows them"
    whose = selection.title().replace("all processes", "any process")
    raise NotFound(f"there are no samples of {whose} {selection.interval()}", hint=next_step)
