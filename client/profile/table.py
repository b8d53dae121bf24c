"""Tables of functions by self time (their own) and total time (with their callees)."""

from __future__ import annotations

from collections.abc import Sequence

from probing.api.text import age, escape, plural
from probing.client.profile.model import Frame, Profile, Sample, short_files
from probing.client.render.rows import Row
from probing.client.render.table import Field, render

__all__ = ("difference_rows", "difference_text", "function_rows", "profile_text")

_SHOWN = 30
_Values = tuple[str | None, ...]


def function_rows(profile: Profile, by: Sequence[str] = ()) -> list[Row]:
    """Returns rows of func, file, lineno, self_ns, total_ns, self_share, total_share; the largest self time first.

    With the labels ``by``, whose columns come first, there is a row for each function and value of the labels; shares
    are parts of the time of that value.
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
    """Returns rows of func, file, lineno, and share, base_share and change of self and total; large changes first.

    ``by`` is as in ``function_rows``.
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
    """Returns self and total ns; a recursive function counts once for each sample."""
    times: dict[tuple[_Values, Frame], tuple[int, int]] = {}
    for sample in profile.samples:
        values = _values(sample, by)
        for frame in dict.fromkeys(sample.frames):
            own, total = times.get((values, frame), (0, 0))
            times[values, frame] = (own + (sample.ns if frame == sample.frames[-1] else 0), total + sample.ns)
    return times


def _wholes(profile: Profile, by: Sequence[str]) -> dict[_Values, int]:
    """Returns the time by value of the labels ``by``, in ns, at least 1."""
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


def profile_text(profile: Profile, when: str, width: int | None, by: Sequence[str] = ()) -> str:
    """Returns the first functions as a table, below a line about all samples."""
    fields = [
        Field("SELF", "self_ns", age, right=True),
        Field("SELF %", "self_share", _percent, right=True),
        Field("TOTAL", "total_ns", age, right=True),
        Field("TOTAL %", "total_share", _percent, right=True),
    ]
    rows = function_rows(profile, by)
    return f"{_head(profile, when)}\n{_rendered(fields, rows, width, [profile], by)}"


def difference_text(base: Profile, chosen: Profile, width: int | None, by: Sequence[str] = ()) -> str:
    """Returns the functions with the largest changes as a table, with their shares before and after."""
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
