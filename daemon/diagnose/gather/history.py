"""Reads the steps, series of values, samples and log lines of the ranks of a run from stored rows."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeVar

from probing.daemon.diagnose.gather.processes import Key
from probing.daemon.diagnose.gather.tables import Row, Rows
from probing.diagnosis.facts import Frame, Sample, Series, Step

__all__ = ("History", "Innermost", "frames_of", "histories")

_MAX_SERIES = 8
_MAX_VALUES = 128
_NAME = 100
_T = TypeVar("_T")


class Innermost(NamedTuple):
    """The innermost frame of a main thread in its newest sample. ``since_ns`` (UTC): all samples since then show this
    frame.
    """

    func: str
    file: str
    since_ns: int


class History:
    """The stored history of one process. The fields are the same as in ``facts.Rank``."""

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self.series: list[Series] = []
        self.samples: list[Sample] = []
        self.past_samples: list[Sample] = []
        self.logs: list[str] = []
        self.innermost: Innermost | None = None


def histories(rows: Rows) -> defaultdict[Key, History]:
    """Returns the history of each process. ``rows`` maps the name of each statement, a key of
    ``statements.statements()``, to its rows."""
    found: defaultdict[Key, History] = defaultdict(History)
    for row in rows.get("steps", ()):
        step = Step(row["step"], row["started_ns"], row["duration_ns"], row["comm_ns"], row["wait_ns"])
        found[Key.of(row)].steps.append(step)
    for row in rows.get("samples", ()):
        own = found[Key.of(row)]
        sample = Sample(frames_of(row["frames"]), round(row["share"] or 0.0, 4), bool(row["on_cpu"]))
        (own.samples if row["recent"] else own.past_samples).append(sample)
    for row in rows.get("lines", ()):
        found[Key.of(row)].logs.append(row["line"] or "")
    for row in rows.get("frames of samples", ()):
        found[Key.of(row)].innermost = Innermost(row["func"] or "", row["file"] or "", row["since_ns"])
    _add_series(found, rows.get("memory", ()), lambda _: "rss_bytes", "bytes")
    _add_series(found, _device_totals(rows.get("device memory", ())), lambda _: "device_bytes", "bytes")
    newest_first = rows.get("variables", ())
    _add_series(found, newest_first[::-1], lambda row: row["name"], "number")
    return found


def frames_of(frames: Iterable[Row]) -> tuple[Frame, ...]:
    """Returns frames from a column of python.stacks."""
    return tuple(Frame(frame["func"] or "", frame["file"] or "", frame["lineno"]) for frame in frames)


def _add_series(found: defaultdict[Key, History], rows: Iterable[Row], name: Callable[[Row], str], value: str) -> None:
    points: dict[tuple[Key, str], list[tuple[int, float]]] = defaultdict(list)
    for row in rows:
        points[Key.of(row), name(row)[:_NAME]].append((row["ts_ns"], float(row[value])))
    for (key, title), own in points.items():
        if len(found[key].series) < _MAX_SERIES:
            times, values = zip(*_thinned(own), strict=True)
            found[key].series.append(Series(title, times, values))


def _thinned(points: Sequence[_T]) -> Sequence[_T]:
    """Returns at most _MAX_VALUES of ``points``, evenly spaced and including the last point."""
    every = -(-len(points) // _MAX_VALUES)
    return points[(len(points) - 1) % every :: every]


def _device_totals(rows: Iterable[Row]) -> Sequence[Row]:
    """Returns, for each row, the total bytes of all allocating stacks of its process at that time. Before the first row
    of a stack its bytes are unknown; the bytes of its first row are used for that time."""
    own: dict[Key, list[Row]] = defaultdict(list)
    for row in rows:
        own[Key.of(row)].append(row)
    totals = []
    for key, changes in own.items():
        now: dict[tuple[Any, ...], int] = {}
        for row in changes:
            now.setdefault(_place(row), row["bytes"] or 0)
        total = sum(now.values())
        for row in changes:
            total += (row["bytes"] or 0) - now[_place(row)]
            now[_place(row)] = row["bytes"] or 0
            totals.append({**key._asdict(), "ts_ns": row["ts_ns"], "bytes": total})
    return totals


def _place(row: Row) -> tuple[Any, ...]:
    return row["kind"], row["size_class"], row["stack"]
