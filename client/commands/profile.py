"""``profile``: where Python spends its time, from stored samples or sampled now."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from probing.api.errors import NotFound, UsageError
from probing.client.cluster import Cluster
from probing.client.commands.version import program
from probing.client.profile.model import Profile, grouped, without_lines
from probing.client.profile.options import Options, Selection
from probing.client.profile.samples import off_cpu_share, read_profiles
from probing.client.profile.table import difference_people, difference_rows, function_rows, people
from probing.client.render.output import write_bytes, write_objects
from probing.client.render.table import terminal_width
from probing.client.render.text import age, escape, plural
from probing.client.session import hint, job_named, opened, require_job
from probing.client.settings import Settings

__all__ = ("run",)

# Of the main threads' time off the CPU, as a share: who looks at the rest alone looks past the cause.
_MOSTLY = 0.5


def run(settings: Settings, options: Options) -> None:
    if options.kind != "table" and settings.named and settings.format != "table":
        raise UsageError(f"-f {settings.format} and -F {options.kind} contradict each other", hint="leave one out")
    with opened(settings) as cluster:
        options = _with_jobs(cluster, options)
        if options.live:
            from probing.client.profile.live import sample

            options = sample(cluster, options)
        selections = [options.selected, *([options.base] if options.base is not None else [])]
        profiles = read_profiles(cluster, selections)
        for selection, profile in zip(selections, profiles, strict=True):
            _require(cluster, selection, profile)
        profiles = _shaped(options, profiles)
        if options.base is None:
            _write(settings, options, profiles[0])
        else:
            _write_difference(settings, options, profiles[1], profiles[0])
        if options.selected.state == "cpu" and options.kind == settings.format == "table":
            away = off_cpu_share(cluster, options.selected)
            if away is not None and away > _MOSTLY:
                hint(f"{away:.0%} of the main threads' time is off the CPU: --wall shows what they wait for")


def _with_jobs(cluster: Cluster, options: Options) -> Options:
    """``options`` with the names of the jobs that they mean."""
    selected, base = (
        None if selection is None else replace(selection, job=job_named(cluster, selection.job))
        for selection in (options.selected, options.base)
    )
    assert selected is not None
    return replace(options, selected=selected, base=base)


def _require(cluster: Cluster, selection: Selection, profile: Profile) -> None:
    if profile.samples:
        return
    if selection.job:
        require_job(cluster, selection.job)
    next_step = "`probingctl config sampling.hz` says whether there are samples, `probingctl status` what hinders them"
    if selection.state == "cpu" and off_cpu_share(cluster, selection) is not None:
        next_step = "--wall shows the time off the CPU: there are samples of that"
    raise NotFound(f"there are no samples of {selection.title()} {selection.interval()}", hint=next_step)


def _shaped(options: Options, profiles: list[Profile]) -> list[Profile]:
    # pprof tells lines apart or not as its user wants.
    if not options.lines and options.kind != "pprof":
        profiles = [without_lines(profile) for profile in profiles]
    # A table has columns for it.
    if options.by and options.kind not in ("speedscope", "table"):
        profiles = [grouped(profile, options.by) for profile in profiles]
    if options.base is not None and profiles[0].title == profiles[1].title:
        profiles = [
            replace(profile, title=f"{profile.title} {selection.interval()}")
            for profile, selection in zip(profiles, (options.selected, options.base), strict=True)
        ]
    return profiles


def _write(settings: Settings, options: Options, profile: Profile) -> None:
    from probing.client.profile.formats.folded import folded
    from probing.client.profile.formats.pprof import pprof
    from probing.client.profile.formats.speedscope import speedscope
    from probing.client.profile.formats.svg import flame_graph

    when = options.selected.interval()
    writers: dict[str, Callable[[], str | bytes]] = {
        "folded": lambda: folded(profile),
        "speedscope": lambda: speedscope(_apart(profile, options.by), profile.title, program()),
        "svg": lambda: flame_graph(profile, _subtitle(profile, when)),
        "pprof": lambda: pprof(profile, program()),
    }
    if options.kind in writers:
        _write_file(settings, options.kind, writers[options.kind]())
        return
    rows = function_rows(profile, options.by)
    write_objects(settings, rows, people(profile, when, _width(settings), options.by), rows)


def _write_difference(settings: Settings, options: Options, base: Profile, chosen: Profile) -> None:
    from probing.client.profile.formats.folded import folded_difference
    from probing.client.profile.formats.speedscope import speedscope
    from probing.client.profile.formats.svg import flame_graph_difference

    title = f"{chosen.title} compared with {base.title}"
    subtitle = f"is: {_subtitle(chosen, '')};  was: {_subtitle(base, '')}"
    writers: dict[str, Callable[[], str]] = {
        "folded": lambda: folded_difference(base, chosen),
        "speedscope": lambda: speedscope([chosen, base], title, program()),
        "svg": lambda: flame_graph_difference(base, chosen, subtitle),
    }
    if options.kind in writers:
        _write_file(settings, options.kind, writers[options.kind]())
        return
    rows = difference_rows(base, chosen, options.by)
    write_objects(settings, rows, difference_people(base, chosen, _width(settings), options.by), rows)


def _write_file(settings: Settings, kind: str, content: str | bytes) -> None:
    data = content.encode("utf-8", "backslashreplace") if isinstance(content, str) else content
    write_bytes(settings, data, kind, on_terminal=kind == "folded")


def _apart(profile: Profile, by: tuple[str, ...]) -> list[Profile]:
    """A profile for each value of the labels ``by``, the largest first."""
    if not by:
        return [profile]
    names: dict[tuple[str, ...], list[int]] = {}
    for i, sample in enumerate(profile.samples):
        found = dict(sample.labels)
        names.setdefault(tuple(f"{key} {found.get(key, '-')}" for key in by), []).append(i)
    parts = [
        replace(profile, title=", ".join(name), samples=tuple(profile.samples[i] for i in chosen))
        for name, chosen in names.items()
    ]
    return sorted(parts, key=lambda part: (-part.ns, part.title))


def _subtitle(profile: Profile, when: str) -> str:
    what = {"cpu": "on the CPU", "off_cpu": "off the CPU", "wall": "on and off the CPU"}[profile.kind]
    return escape(f"{age(profile.ns)} {what} in {plural(profile.seen, 'sample')}{f', {when}' if when else ''}")


def _width(settings: Settings) -> int | None:
    return terminal_width() if settings.output is None else None
