"""Functions by the time they take: themselves (self), and with all that they call (total)."""

from __future__ import annotations

from typing import Any

from probing.client.profile_model import Frame, Profile, short_files
from probing.client.render import Field, render
from probing.client.text import age, escape, plural

__all__ = ("difference_people", "difference_rows", "function_rows", "people")

_SHOWN = 30


def function_rows(profile: Profile) -> list[dict[str, Any]]:
    """Dicts func, file, lineno, self_ns, total_ns, self_share, total_share; the largest self time first."""
    whole = profile.ns or 1
    times = _times(profile)
    rows = [
        {**_place(frame), "self_ns": own, "total_ns": total, "self_share": own / whole, "total_share": total / whole}
        for frame, (own, total) in times.items()
    ]
    return sorted(rows, key=lambda row: (-row["self_ns"], -row["total_ns"], row["func"], row["file"]))


def difference_rows(base: Profile, chosen: Profile) -> list[dict[str, Any]]:
    """Dicts func, file, lineno, and of self and total: share, base_share and change; the largest change first."""
    before, after = _times(base), _times(chosen)
    wholes = base.ns or 1, chosen.ns or 1
    rows = []
    for frame in dict.fromkeys([*after, *before]):
        row: dict[str, Any] = _place(frame)
        for i, name in enumerate(("self", "total")):
            was, now = before.get(frame, (0, 0))[i] / wholes[0], after.get(frame, (0, 0))[i] / wholes[1]
            row |= {f"{name}_base_share": was, f"{name}_share": now, f"{name}_change": now - was}
        rows.append(row)
    return sorted(rows, key=lambda r: (-abs(r["self_change"]), -abs(r["total_change"]), r["func"], r["file"]))


def _times(profile: Profile) -> dict[Frame, tuple[int, int]]:
    """Self and total ns; a function that calls itself is counted once."""
    times: dict[Frame, tuple[int, int]] = {}
    for sample in profile.samples:
        for frame in dict.fromkeys(sample.frames):
            own, total = times.get(frame, (0, 0))
            times[frame] = (own + (sample.ns if frame == sample.frames[-1] else 0), total + sample.ns)
    return times


def _place(frame: Frame) -> dict[str, Any]:
    return {"func": frame.func, "file": frame.file, "lineno": frame.lineno}


def people(profile: Profile, when: str, width: int | None) -> str:
    """The first functions under a line that says what was seen."""
    fields = [
        Field("SELF", "self_ns", age, right=True), Field("SELF %", "self_share", _percent, right=True),
        Field("TOTAL", "total_ns", age, right=True), Field("TOTAL %", "total_share", _percent, right=True),
    ]  # fmt: skip
    rows = function_rows(profile)
    return f"{_head(profile, when)}\n{_rendered(fields, rows, width, [profile])}"


def difference_people(base: Profile, chosen: Profile, width: int | None) -> str:
    """The first functions by change, with their share before and after."""
    fields = [
        Field("SELF", "self_change", _points, right=True), Field("WAS", "self_base_share", _percent, right=True),
        Field("IS", "self_share", _percent, right=True), Field("TOTAL", "total_change", _points, right=True),
        Field("WAS", "total_base_share", _percent, right=True), Field("IS", "total_share", _percent, right=True),
    ]  # fmt: skip
    rows = difference_rows(base, chosen)
    head = f"is:  {_head(chosen, '')}\nwas: {_head(base, '')}"
    return f"{head}\n{_rendered(fields, rows, width, [base, chosen])}"


def _head(profile: Profile, when: str) -> str:
    what = {"cpu": "on the CPU", "off_cpu": "off the CPU", "wall": "on and off the CPU"}[profile.kind]
    whose = f"{profile.title} {when}".rstrip()
    return escape(f"{whose}: {age(profile.ns)} {what} in {plural(profile.seen, 'sample')}")


def _rendered(
    fields: list[Field], rows: list[dict[str, Any]], width: int | None, shown: list[Profile]
) -> str:
    short = short_files(shown)
    places = [Field("FUNCTION", "func", flex=True), Field("FILE", "place", flex=True)]
    first = [{**row, "place": _where(row, short)} for row in rows[:_SHOWN]]
    more = f"({len(rows) - _SHOWN} more; -f json shows all)\n" if len(rows) > _SHOWN else ""
    return render([*fields, *places], first, width) + more


def _where(row: dict[str, Any], short: dict[str, str]) -> str:
    file = short.get(row["file"], row["file"])
    return file if row["lineno"] is None else f"{file}:{row['lineno']}"


def _percent(share: float) -> str:
    return f"{share * 100:.1f}"


def _points(change: float) -> str:
    return f"{change * 100:+.1f}"
