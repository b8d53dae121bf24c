"""Writes profiles in the format of a request. Tables of functions have self time (of the function alone) and total time
(with the functions that it calls).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from probing.api.text import age, encoded, escape, plural
from probing.client.profile.model import Frame, Profile, Sample, folded_imports, grouped, short_files, without_lines
from probing.client.profile.request import Request
from probing.client.render.output import write_bytes, write_objects
from probing.client.render.rows import Row
from probing.client.render.table import Field, render, terminal_width
from probing.client.settings import Settings
from probing.client.version import program

__all__ = (
    "difference_rows",
    "function_rows",
    "write_profiles",
)

_SHOWN = 30
_Values = tuple[str | None, ...]


def function_rows(profile: Profile, by: Sequence[str] = ()) -> list[Row]:
    """Returns rows of func, file, lineno, self_ns, total_ns, self_share, total_share; ordered from the largest self
    time.

    With labels ``by``, whose columns come first, there is a row for each function and combination of label values. Its
    shares are relative to the whole time of that combination.
    """
    wholes = _wholes(profile, by)
    rows = [
        {
            **_labels(by, values),
            **_place(frame),
            "self_ns": own,
            "total_ns": total,
            "self_share": own / wholes[values],
            "total_share": total / wholes[values],
        }
        for (values, frame), (own, total) in sorted(_times(profile, by).items(), key=lambda time: str(time[0][0]))
    ]
    return sorted(rows, key=lambda row: (-row["self_ns"], -row["total_ns"], row["func"], row["file"]))


def difference_rows(base: Profile, chosen: Profile, by: Sequence[str] = ()) -> list[Row]:
    """Returns rows of func, file, lineno, and three columns each for ``self`` and ``total``, such as self_base_share,
    self_share and self_change; ordered from the largest self_change.

    ``by``: see ``function_rows``.
    """
    before, after = _times(base, by), _times(chosen, by)
    wholes = _wholes(base, by), _wholes(chosen, by)
    rows = []
    for key in dict.fromkeys([*after, *before]):
        values, frame = key
        row: Row = {**_labels(by, values), **_place(frame)}
        for i, name in enumerate(("self", "total")):
            was = before.get(key, (0, 0))[i] / wholes[0].get(values, 1)
            now = after.get(key, (0, 0))[i] / wholes[1].get(values, 1)
            row |= {f"{name}_base_share": was, f"{name}_share": now, f"{name}_change": now - was}
        rows.append(row)
    return sorted(rows, key=lambda r: (-abs(r["self_change"]), -abs(r["total_change"]), r["func"], r["file"]))


def _times(profile: Profile, by: Sequence[str]) -> dict[tuple[_Values, Frame], tuple[int, int]]:
    """Returns self and total time in ns; a recursive function is counted once for each sample."""
    times: dict[tuple[_Values, Frame], tuple[int, int]] = {}
    for sample in profile.samples:
        values = _values(sample, by)
        for frame in dict.fromkeys(sample.frames):
            own, total = times.get((values, frame), (0, 0))
            times[values, frame] = (own + (sample.ns if frame == sample.frames[-1] else 0), total + sample.ns)
    return times


def _wholes(profile: Profile, by: Sequence[str]) -> dict[_Values, int]:
    """Returns the time of each combination of values of the labels ``by``, in ns, at least 1."""
    wholes: dict[_Values, int] = {}
    for sample in profile.samples:
        values = _values(sample, by)
        wholes[values] = wholes.get(values, 0) + sample.ns
    return {values: ns or 1 for values, ns in wholes.items()}


def _values(sample: Sample, by: Sequence[str]) -> _Values:
    if not by:
        return ()
    found = dict(sample.labels)
    return tuple(found.get(key) for key in by)


def _labels(by: Sequence[str], values: _Values) -> Row:
    """Returns the labels as columns; ranks and pids are numbers."""
    pairs = zip(by, values, strict=True)
    return {key: int(value) if value and key in ("rank", "pid") else value for key, value in pairs}


def _place(frame: Frame) -> Row:
    return {"func": frame.func, "file": frame.file, "lineno": frame.lineno}


def _profile_text(profile: Profile, when: str, width: int | None, by: Sequence[str] = ()) -> str:
    """Returns a table of the functions with the most time, below a line about all samples."""
    fields = [
        Field("SELF", "self_ns", age, right=True),
        Field("SELF %", "self_share", _percent, right=True),
        Field("TOTAL", "total_ns", age, right=True),
        Field("TOTAL %", "total_share", _percent, right=True),
    ]
    rows = function_rows(profile, by)
    return f"{_head(profile, when)}\n{_rendered(fields, rows, width, [profile], by)}"


def _difference_text(base: Profile, chosen: Profile, width: int | None, by: Sequence[str] = ()) -> str:
    """Returns a table of the functions with the largest changes, with their shares before and after."""
    fields = [
        Field("SELF", "self_change", _points, right=True),
        Field("WAS", "self_base_share", _percent, right=True),
        Field("IS", "self_share", _percent, right=True),
        Field("TOTAL", "total_change", _points, right=True),
        Field("WAS", "total_base_share", _percent, right=True),
        Field("IS", "total_share", _percent, right=True),
    ]
    rows = difference_rows(base, chosen, by)
    head = f"is:  {_head(chosen, '')}\nwas: {_head(base, '')}"
    return f"{head}\n{_rendered(fields, rows, width, [base, chosen], by)}"


def _head(profile: Profile, when: str) -> str:
    whose = f"{profile.title} {when}".rstrip()
    return escape(f"{whose}: {age(profile.ns)} {profile.time_text} in {plural(profile.seen, 'sample')}")


def _rendered(fields: list[Field], rows: list[Row], width: int | None, shown: list[Profile], by: Sequence[str]) -> str:
    short = short_files(shown)
    places = [Field("FUNCTION", "func", flex=True), Field("FILE", "place", flex=True)]
    first = [{**row, "place": _where(row, short)} for row in rows[:_SHOWN]]
    more = f"({len(rows) - _SHOWN} more; -f json shows all)\n" if len(rows) > _SHOWN else ""
    keys = [Field(key.upper(), key, right=key in ("rank", "pid"), flex=key in ("job", "thread")) for key in by]
    return render([*keys, *fields, *places], first, width) + more


def _where(row: Row, short: dict[str, str]) -> str:
    file = short.get(row["file"]) or str(row["file"])
    return file if row["lineno"] is None else f"{file}:{row['lineno']}"


def _percent(share: float) -> str:
    return f"{share * 100:.1f}"


def _points(change: float) -> str:
    return f"{change * 100:+.1f}"


def write_profiles(
    settings: Settings, request: Request, profiles: Sequence[Profile], away: float | None = None
) -> None:
    """Writes the first of ``profiles``, or its difference from the second profile if ``request`` has a base.

    ``away``: the share of the training threads' time that is off the CPU and that the profiles do not contain, for a
    note; None: no note.
    """
    shaped = _shaped(request, list(profiles))
    if request.base is None:
        _write(settings, request, shaped[0], away)
    else:
        _write_difference(settings, request, shaped[1], shaped[0], away)


def _shaped(request: Request, profiles: list[Profile]) -> list[Profile]:
    # A pprof file keeps the lines, because pprof lets its user choose between lines and functions.
    if not request.lines and request.kind != "pprof":
        profiles = [without_lines(profile) for profile in profiles]
    if request.kind == "svg":
        profiles = [folded_imports(profile) for profile in profiles]
    # A table has columns for the labels, and speedscope has a profile for each value.
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
    write_objects(settings, rows, _profile_text(profile, when, _width(settings), request.by), rows)


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
    write_objects(settings, rows, _difference_text(base, chosen, _width(settings), request.by), rows)


def _write_file(settings: Settings, kind: str, content: str | bytes) -> None:
    data = encoded(content) if isinstance(content, str) else content
    write_bytes(settings, data, kind, on_terminal=kind == "folded")


def _apart(profile: Profile, by: tuple[str, ...]) -> list[Profile]:
    """Returns a profile for each combination of values of the labels ``by``, ordered from the largest."""
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
