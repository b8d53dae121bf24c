"""Reads lengths of time and instants, typed or copied from a screen, and the interval of --since and --until."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from datetime import date, datetime, timedelta, timezone
from datetime import time as clock_time
from typing import NamedTuple

from probing.api.errors import UsageError
from probing.api.text import age, utc
from probing.client import zone
from probing.client.zone import when

__all__ = ("Bound", "Interval", "bound", "interval", "seconds")

_UNITS = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_PART = r"(\d{1,12}(?:\.\d{1,12})?) ?(ns|us|ms|s|min|m|h|d)"
_LENGTH = re.compile(rf"(?:{_PART} ?)+", re.ASCII)
_BARE = re.compile(r"\d{1,12}(?:\.\d{1,12})?", re.ASCII)
_MOST_S = 366 * 86400
_INSTANT = re.compile(
    r"(?:(?P<day>\d{4}-\d\d-\d\d)(?:[T ](?=\d)|$))?"
    r"(?:(?P<clock>\d\d:\d\d(?::\d\d)?)(?:[.,](?P<part>\d{1,9}))?)?"
    r" ?(?P<zone>Z|UTC|[+-]\d\d(?::?\d\d)?)?",
    re.IGNORECASE | re.ASCII,
)
_SECOND_NS = 1_000_000_000
# A time of day that lies further in the future than this, s, means yesterday. A smaller difference may come from a node
# whose clock is ahead.
_AHEAD_S = 60
_EXAMPLES = "for example 5m, 1h30m, 13:05:12Z or 2026-11-21T08:19:20Z"


class Bound(NamedTuple):
    """One end of an interval: ``ago_s`` seconds before the present time of each node, or the instant ``at_ns``
    (UTC).
    """

    ago_s: float = 0.0
    at_ns: int | None = None

    def sql(self) -> str:
        """Returns the time as SQL. ``now()`` is the present time of the node; if many nodes answer together, it is the
        same time on all of them.
        """
        if self.at_ns is not None:
            return f"make_timestamp_ns({self.at_ns})"
        milliseconds = max(1, round(self.ago_s * 1000)) if self.ago_s else 0
        return f"now() - INTERVAL {milliseconds} MILLISECOND" if milliseconds else "now()"

    def earlier(self, length_s: float) -> Bound:
        """Returns the time that is ``length_s`` seconds earlier."""
        if self.at_ns is not None:
            return Bound(at_ns=self.at_ns - round(length_s * _SECOND_NS))
        return Bound(self.ago_s + length_s)

    def ns(self, now_ns: int) -> int:
        """Returns the bound in UTC ns. ``now_ns`` (UTC ns) is the present time."""
        return self.at_ns if self.at_ns is not None else now_ns - round(self.ago_s * _SECOND_NS)

    def text(self) -> str:
        if self.at_ns is not None:
            return when(utc(self.at_ns))
        return f"{age(self.ago_s * 1e9)} ago" if self.ago_s else "now"


@dataclass(frozen=True, slots=True)
class Interval:
    """The time between --since and --until. ``end`` None: up to now, including rows of nodes whose clocks are ahead."""

    begin: Bound
    end: Bound | None = None

    @property
    def open(self) -> bool:
        """Returns whether the interval reaches up to now and thus includes the present state."""
        return self.end is None

    def sql(self, column: str = "ts") -> str:
        """Returns the condition on a column of times."""
        parts = [f"{column} {'>' if self.begin.at_ns is None else '>='} {self.begin.sql()}"]
        parts += [] if self.end is None else [f"{column} <= {self.end.sql()}"]
        return " AND ".join(parts)

    def text(self) -> str:
        """Returns the interval as ``in the last 5m00s``, ``since 13:05:12Z`` or ``from 2h00m ago until 1h00m ago``."""
        if self.end is not None:
            return f"from {self.begin.text()} until {self.end.text()}"
        return f"since {self.begin.text()}" if self.begin.at_ns is not None else f"in the last {self.length()}"

    def length(self) -> str:
        """Returns the length of the interval as text. The interval must begin ``ago_s`` seconds before now."""
        return age(self.begin.ago_s * 1e9)


def seconds(text: str) -> float:
    """Returns a length of time in seconds; ``text`` is typed (``500ms``, ``5``, ``2h``) or printed by a screen
    (``5m07s``, ``39 s``).
    """
    body = text.strip()
    if _BARE.fullmatch(body):
        length = float(body)
    elif _LENGTH.fullmatch(body):
        length = sum(float(number) * _UNITS[unit] for number, unit in re.findall(_PART, body))
    else:
        length = 0.0
    if not 0 < length <= _MOST_S:
        raise UsageError(f"{text} is not a length of time", hint="for example 500ms, 30s, 5m, 2h, 1h30m, 1d")
    return length


def bound(text: str, now_ns: int | None = None) -> Bound:
    """Returns the bound that ``text`` names: a length of time before now, ``now``, or an instant.

    A time of day without a date means its latest occurrence; a time without a zone is in the zone in use. Raises
    UsageError for any other text.
    """
    body = text.strip()
    if body.lower() == "now":
        return Bound()
    if _BARE.fullmatch(body) or _LENGTH.fullmatch(body.removesuffix(" ago")):
        return Bound(seconds(body.removesuffix(" ago")))
    given = _INSTANT.fullmatch(body)
    if given is None or not (given["day"] or given["clock"]):
        raise UsageError(f"{text} is not a time", hint=_EXAMPLES)
    try:
        return Bound(at_ns=_instant(given, time.time_ns() if now_ns is None else now_ns))
    except (OverflowError, ValueError):
        raise UsageError(f"{text} is not a time", hint=_EXAMPLES) from None


def _instant(given: re.Match[str], now_ns: int) -> int:
    part = (given["part"] or "").ljust(9, "0")
    offset = None if given["zone"] is None else _offset(given["zone"].upper())
    now = datetime.fromtimestamp(now_ns // _SECOND_NS, timezone.utc)
    here = now.astimezone(zone.current() if offset is None else offset)
    day = here.date() if given["day"] is None else date.fromisoformat(given["day"])
    clock = clock_time.fromisoformat(given["clock"] or "00:00")
    found = _utc(datetime.combine(day, clock), offset)
    if given["day"] is None and (found - now).total_seconds() > _AHEAD_S:
        # Screens print times of today without the date, so a time of day in the future was printed before midnight.
        found = _utc(datetime.combine(day - timedelta(days=1), clock), offset)
    return (found - datetime(1970, 1, 1, tzinfo=timezone.utc)) // timedelta(seconds=1) * _SECOND_NS + int(part or 0)


def _utc(moment: datetime, offset: timezone | None) -> datetime:
    own = zone.aware(moment) if offset is None else moment.replace(tzinfo=offset)
    return own.astimezone(timezone.utc)


def _offset(text: str) -> timezone:
    if text in ("Z", "UTC"):
        return timezone.utc
    hours, minutes = int(text[1:3]), int(text[3:].removeprefix(":") or 0)
    length = timedelta(hours=hours, minutes=minutes)
    return timezone(length if text[0] == "+" else -length)


def interval(since: str, until: str | None = None) -> Interval:
    """Returns the interval of --since and --until. Raises UsageError if it is empty or a time cannot be read."""
    now_ns = time.time_ns()
    begin = bound(since, now_ns)
    end = None if until is None else bound(until, now_ns)
    if end is not None and end.ns(now_ns) <= begin.ns(now_ns):
        raise UsageError(f"--until {until} is not after --since {since}", hint="for example --since 10m --until 5m")
    return Interval(begin, end)
