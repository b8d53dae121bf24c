"""Writes profiles in the format of a request."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from probing.api.text import age, encoded, escape, plural
from probing.client.profile.model import Profile, folded_imports, grouped, without_lines
from probing.client.profile.request import Request
from probing.client.profile.table import difference_rows, difference_text, function_rows, profile_text
from probing.client.render.output import write_bytes, write_objects
from probing.client.render.table import terminal_width
from probing.client.settings import Settings
from probing.client.version import program

__all__ = ("write_profiles",)


def write_profiles(
    settings: Settings, request: Request, profiles: Sequence[Profile], away: float | None = None
) -> None:
    """Writes the first of ``profiles``, or its difference from the second where ``request`` has a base.

    ``away``: the share of the training threads' time off the CPU, where the profiles lack it and it is the larger part.
    """
    shaped = _shaped(request, list(profiles))
    if request.base is None:
        _write(settings, request, shaped[0], away)
    else:
        _write_difference(settings, request, shaped[1], shaped[0], away)


def _shaped(request: Request, profiles: list[Profile]) -> list[Profile]:
    # The reader of a pprof file chooses between lines and functions.
    if not request.lines and request.kind != "pprof":
        profiles = [without_lines(profile) for profile in profiles]
    if request.kind == "svg":
        profiles = [folded_imports(profile) for profile in profiles]
    # A table has columns for labels, speedscope a profile for each value.
    if request.by and request.kind not in ("speedscope", "table"):
        profiles = [grouped(profile, request.by) for profile in profiles]
    if request.base is not None and profiles[0].title == profiles[1].title:
        profiles = [
            replace(profile, title=f"{profile.title} {selection.interval()}")
            for profile, selection in zip(profiles, (request.selected, request.base), strict=True)
        ]
    return profiles


def _write(settings: Settings, request: Request, profile: Profile, away: float | None) -> None:
    from probing.client.profile.formats.other_tools import folded, pprof, speedscope
    from probing.client.profile.formats.svg import flame_graph

    when = request.selected.interval()
    writers: dict[str, Callable[[], str | bytes]] = {
        "folded": lambda: folded(profile),
        "speedscope": lambda: speedscope(_apart(profile, request.by), profile.title, program()),
        "svg": lambda: flame_graph(profile, _subtitle(profile, when) + _unshown(away)),
        "pprof": lambda: pprof(profile, program()),
    }
    if request.kind in writers:
        _write_file(settings, request.kind, writers[request.kind]())
        return
    rows = function_rows(profile, request.by)
    write_objects(settings, rows, profile_text(profile, when, _width(settings), request.by), rows)


def _write_difference(settings: Settings, request: Request, base: Profile, chosen: Profile, away: float | None) -> None:
    from probing.client.profile.formats.other_tools import folded_difference, speedscope
    from probing.client.profile.formats.svg import flame_graph_difference

    title = f"{chosen.title} compared with {base.title}"
    one, other = request.rivals
    subtitle = f"{escape(one)}: {_subtitle(chosen, '')};  {escape(other)}: {_subtitle(base, '')}{_unshown(away)}"
    writers: dict[str, Callable[[], str]] = {
        "folded": lambda: folded_difference(base, chosen),
        "speedscope": lambda: speedscope([chosen, base], title, program()),
        "svg": lambda: flame_graph_difference(base, chosen, subtitle, other),
    }
    if request.kind in writers:
        _write_file(settings, request.kind, writers[request.kind]())
        return
    rows = difference_rows(base, chosen, request.by)
    write_objects(settings, rows, difference_text(base, chosen, _width(settings), request.by), rows)


def _write_file(settings: Settings, kind: str, content: str | bytes) -> None:
    data = encoded(content) if isinstance(content, str) else content
    write_bytes(settings, data, kind, on_terminal=kind == "folded")


def _apart(profile: Profile, by: tuple[str, ...]) -> list[Profile]:
    """Returns a profile for each value of the labels ``by``, the largest first."""
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
    return escape(
        f"{age(profile.ns)} {profile.time_text} in {plural(profile.seen, 'sample')}{f', {when}' if when else ''}"
    )


def _unshown(away: float | None) -> str:
    return "" if away is None else f";  not shown: {away:.0%} of the training threads' time is off the CPU, see --wall"


def _width(settings: Settings) -> int | None:
    return terminal_width() if settings.output is None else None
