"""The request for a profile: its samples, their interval, the samples to compare them with, and the format."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from datetime import datetime, timezone

from probing.api.errors import UsageError
from probing.api.text import sql_text, utc
from probing.client.settings import process_id
from probing.client.times import Bound, bound, seconds
from probing.client.zone import when

__all__ = ("KINDS", "Request", "Selection", "at_times", "base_of", "labels", "of_training_threads")

KINDS = ("table", "folded", "speedscope", "svg", "pprof")
_LABELS = ("job", "rank", "node", "pid", "thread", "state")
_DEFAULT_SINCE = 300.0


@dataclass(frozen=True, slots=True)
class Selection:
    """Chooses samples by process and interval.

    The interval goes from ``since`` to ``until`` seconds before the query, or from ``since_at`` to ``until_at``
    (CLOCK_REALTIME s) where these are given; ``shift`` moves the interval this many seconds into the past. ``state`` is
    ``cpu``, ``wall`` or ``off_cpu``. ``gil``: only samples of threads that held the GIL. ``trains``: only samples of
    threads that train.
    """

    pids: tuple[int, ...] = ()
    job: str = ""
    rank: int | None = None
    state: str = "cpu"
    since: float = _DEFAULT_SINCE
    until: float = 0.0
    since_at: float | None = None
    until_at: float | None = None
    shift: float = 0.0
    gil: bool = False
    trains: bool = False

    def where(self) -> str:
        """Returns the condition on python.samples as SQL."""
        parts = [f"ts >= {_instant(self.since_at, self.since, self.shift)}"]
        parts.append(f"ts < {_instant(self.until_at, self.until, self.shift)}")
        if self.job:
            parts.append(f"job = {sql_text(self.job)}")
        if self.rank is not None:
            parts.append(f"rank = {self.rank}")
        if self.pids:
            parts.append(f"pid IN ({', '.join(map(str, self.pids))})")
        if self.state != "wall":
            parts.append("on_cpu" if self.state == "cpu" else "NOT on_cpu")
        if self.gil:
            parts.append("gil")
        if self.trains:
            parts.append("coalesce(trains, tid = pid)")
        return " AND ".join(parts)

    def title(self) -> str:
        """Returns the processes as text: ``job 4711, rank 3``."""
        who = [f"job {self.job}"] if self.job else []
        who += [] if self.rank is None else [f"rank {self.rank}"]
        who += [f"pid {', '.join(map(str, self.pids))}"] if self.pids else []
        return (", ".join(who) or "all processes") + (" with the GIL" if self.gil else "")

    def interval(self) -> str:
        """Returns the interval as text: ``since 5m ago``, or ``from 10m ago until 5m ago``."""
        begin = _when(self.since_at, self.since, self.shift)
        end = _when(self.until_at, self.until, self.shift)
        return f"since {begin}" if end == "now" else f"from {begin} until {end}"

    def span(self, now_ns: int) -> tuple[int, int]:
        """Returns the begin and the end as CLOCK_REALTIME ns, for a query at ``now_ns``."""
        now = now_ns / 1e9
        begin = self.since_at if self.since_at is not None else now - self.since
        end = self.until_at if self.until_at is not None else now - self.until
        return round((begin - self.shift) * 1e9), round((end - self.shift) * 1e9)


@dataclass(frozen=True, slots=True)
class Request:
    """The request. ``live``: the number of seconds for which new samples are taken, at ``hz`` samples a second; 0:
    stored samples are used. ``base``: the samples with which ``selected`` is compared.

    Samples are grouped by the labels ``by``, and with ``lines`` also by line. ``any_state``: no option chooses between
    time on and off the CPU.
    """

    selected: Selection
    base: Selection | None
    kind: str
    live: float
    hz: int
    by: tuple[str, ...]
    lines: bool
    any_state: bool = False

    @property
    def selections(self) -> list[Selection]:
        """The selected samples, and the samples with which they are compared, if any."""
        return [self.selected, *([self.base] if self.base is not None else [])]

    @property
    def rivals(self) -> tuple[str, str]:
        """Returns names for ``selected`` and ``base`` that say how they differ: ``rank 1``, ``rank 0``; ``now``,
        ``before``.
        """
        one, other = self.selected, self.base
        if other is None or other.shift != one.shift:
            return "now", "before"
        if other.rank is not None and other.rank != one.rank:
            return one.title() if one.rank is None else f"rank {one.rank}", f"rank {other.rank}"
        if other.pids and other.pids != one.pids:
            return one.title() if len(one.pids) != 1 else f"pid {one.pids[0]}", f"pid {other.pids[0]}"
        return f"job {one.job}" if one.job else one.title(), f"job {other.job}"


def of_training_threads(request: Request) -> Request:
    """Returns ``request`` for the time on and off the CPU of training threads. Other threads are left out because they
    wait nearly always.
    """
    selected, base = (
        None if one is None else replace(one, state="wall", trains=True) for one in (request.selected, request.base)
    )
    assert selected is not None
    return replace(request, selected=selected, base=base)


def at_times(selection: Selection, since: str | None, until: str | None) -> Selection:
    """Returns ``selection`` with the interval of the command line. Its ends are lengths of time before now, or
    instants.

    Raises UsageError if the interval is empty.
    """
    now_ns = time.time_ns()
    begin = None if since is None else bound(since, now_ns)
    end = None if until is None else bound(until, now_ns)
    if begin is not None:
        selection = replace(selection, since=begin.ago_s, since_at=_seconds_of(begin))
    if end is not None:
        selection = replace(selection, until=end.ago_s, until_at=_seconds_of(end))
    first, last = selection.span(now_ns)
    if first >= last:
        hint = "give lengths of time before now, or instants: --since 10m --until 5m"
        raise UsageError(f"--until {until or 'now'} is not after --since {since or '5m'}", hint=hint)
    return selection


def _seconds_of(end: Bound) -> float | None:
    return None if end.at_ns is None else end.at_ns / 1e9


def base_of(selected: Selection, text: str) -> Selection:
    """Returns ``selected`` with the one change that ``text``, the value of --diff, asks for: ``rank:R``, ``pid:P``,
    ``job:J`` or ``before:10m``.
    """
    kind, _, value = text.partition(":")
    if kind == "rank" and value.isascii() and value.isdigit() and len(value) < 9:
        return replace(selected, rank=int(value), pids=())
    if kind == "pid":
        return replace(selected, pids=(process_id(value),), rank=None)
    if kind == "job" and value:
        return replace(selected, job=value)
    if kind == "before" and value:
        return replace(selected, shift=seconds(value))
    raise UsageError(f"--diff {text} is not understood", hint="give rank:R, pid:P, job:J or before:10m")


def labels(by: str | None) -> tuple[str, ...]:
    """Returns the labels in a text such as ``A,B``. Raises UsageError for an unknown label."""
    keys = tuple(dict.fromkeys(part.strip() for part in (by or "").split(",") if part.strip()))
    for key in keys:
        if key not in _LABELS:
            raise UsageError(f"--by {key} is not known", hint=f"use one or more of {', '.join(_LABELS)}")
    return keys


def _instant(at: float | None, ago: float, shift: float) -> str:
    if at is not None:
        moment = datetime.fromtimestamp(at - shift, timezone.utc)
        return f"TIMESTAMP '{moment:%Y-%m-%d %H:%M:%S.%f}'"
    milliseconds = round((ago + shift) * 1000)
    return f"now() - INTERVAL {milliseconds} MILLISECOND" if milliseconds else "now()"


def _when(at: float | None, ago: float, shift: float) -> str:
    if at is not None:
        return when(utc(round((at - shift) * 1e9)))
    back = ago + shift
    if not back:
        return "now"
    for scale, unit in ((86400, "d"), (3600, "h"), (60, "m")):
        if back >= scale and back % scale == 0:
            return f"{back / scale:g}{unit} ago"
    return f"{back:.3g}s ago" if back < 1000 else f"{back:.0f}s ago"
