"""Text that is safe on a terminal, and figures with units."""

from __future__ import annotations

import os
import re
import sys
import textwrap
import time
import unicodedata
from collections.abc import Sequence
from datetime import datetime, timezone

from probing.client import zone

__all__ = (
    "age",
    "ascii_only",
    "bandwidth",
    "bits",
    "clock",
    "clock_ms",
    "count",
    "cut_mark",
    "encoded",
    "escape",
    "escape_json",
    "length",
    "moment",
    "now_text",
    "plural",
    "ranks_named",
    "ranks_text",
    "size",
    "utc",
    "when",
    "wrapped",
)

_INTERVAL = re.compile(r"P(?:(-?\d+)D)?T(-?[\d.]+)S")
# Controls, surrogates, and characters that reorder a line on a terminal.
_UNSAFE = frozenset({"Cc", "Cs", "Co", "Cn", "Zl", "Zp"})
_COERCED = ("C.UTF-8", "C.utf8", "UTF-8")
_BIDI = frozenset("\u200e\u200f\u061c\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")


def _unsafe(char: str) -> bool:
    return char in _BIDI or unicodedata.category(char) in _UNSAFE


def escape(text: str) -> str:
    """Returns ``text`` on one line; characters that a terminal acts on become ``\\x1b`` or ``\\u202e``."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(_escaped(c) if _unsafe(c) else c for c in text)


def encoded(text: str) -> bytes:
    """Returns ``text`` as UTF-8; surrogates, which come from a target's bytes, are escaped."""
    return text.encode("utf-8", "backslashreplace")


def escape_json(text: str) -> str:
    """Returns JSON ``text`` with the same characters as JSON escapes, its line ends unchanged."""
    if text.isascii() and "\x7f" not in text:
        return text
    return "".join(f"\\u{ord(c):04x}" if c != "\n" and _unsafe(c) and ord(c) < 0x10000 else c for c in text)


def ascii_only() -> bool:
    """Whether the terminal shows ASCII alone: LANG=C, or an encoding other than UTF-8."""
    # A full screen has put another object into the place of stdout.
    stream = sys.stdout if hasattr(sys.stdout, "encoding") else sys.__stdout__
    if (getattr(stream, "encoding", None) or "utf-8").lower().replace("-", "") != "utf8":
        return True
    every, kind, language = (os.environ.get(name, "") for name in ("LC_ALL", "LC_CTYPE", "LANG"))
    # For LANG=C Python itself sets LC_CTYPE (PEP 538).
    return (every or (language if kind in _COERCED else kind) or language) in ("C", "POSIX")


def cut_mark() -> str:
    """Returns the mark behind text that was cut, one column wide."""
    return "~" if ascii_only() else "…"


def _escaped(char: str) -> str:
    code = ord(char)
    short = {"\n": "\\n", "\t": "\\t", "\r": "\\r"}.get(char)
    return short or (f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}")


def age(ns: float | None) -> str:
    """Returns a duration in ns with three digits and unit: ``812 us``, ``4.31 s``, ``5m07s``, ``3h12m``, ``2d04h``."""
    if ns is None:
        return "-"
    if ns < 0:
        return "-" + age(-ns)
    for unit, scale in (("ns", 1.0), ("us", 1e3), ("ms", 1e6), ("s", 1e9)):
        value = ns / scale
        # 999.5 would be printed as 1e+03.
        if value < (999.5 if unit != "s" else 59.95):
            return f"{_digits(value)} {unit}"
    seconds = round(ns / 1e9)
    minutes, hours, days = seconds // 60, seconds // 3600, seconds // 86400
    if hours < 1:
        return f"{minutes}m{seconds % 60:02d}s"
    return f"{hours}h{minutes % 60:02d}m" if days < 2 else f"{days}d{hours % 24:02d}h"


def utc(ns: int) -> str:
    """Returns CLOCK_REALTIME ns as ``2026-11-21T08:19:20.123456789Z``, or as the number beyond the calendar."""
    try:
        second = datetime.fromtimestamp(ns // 1_000_000_000, timezone.utc)
    except (OverflowError, ValueError, OSError):
        return str(ns)
    return f"{second:%Y-%m-%dT%H:%M:%S}.{ns % 1_000_000_000:09d}Z"


def when(ts: str | None) -> str:
    """Formats a time as ``utc`` gives it to the second, in the zone in use: ``2026-11-22 03:12:07Z``."""
    if ts is None:
        return "-"
    return f"{ts[:19].replace('T', ' ')}Z" if zone.is_utc() else _zoned(ts, "%Y-%m-%d %H:%M:%S")


def moment(ts: str | None) -> str:
    """Formats a time as ``utc`` gives it to the millisecond, in the zone in use: ``2026-11-22 03:12:07.123Z``."""
    if ts is None:
        return "-"
    seconds, _, fraction = ts.removesuffix("Z").replace("T", " ").partition(".")
    rest = f".{fraction[:3]}" if fraction.strip("0") else ""
    return f"{seconds}{rest}Z" if zone.is_utc() else _zoned(ts, "%Y-%m-%d %H:%M:%S", rest)


def length(interval: str | None) -> str:
    """Formats an interval of JSON (``PT8.557761S``) as ``age`` does; one with months stays."""
    found = _INTERVAL.fullmatch(interval or "")
    if found is None:
        return interval or "-"
    days, seconds = (float(part or 0) for part in found.groups())
    return age((days * 86_400 + seconds) * 1e9)


def clock(ts: str | None) -> str:
    """Formats as ``when``; leaves out today's date."""
    return when(ts).removeprefix(f"{zone.wall(time.time()):%Y-%m-%d} ")


def clock_ms(ts: str) -> str:
    """Returns the time of day to the millisecond, in the zone in use: ``03:12:07.123Z``."""
    return f"{ts[11:23]}Z" if zone.is_utc() else _zoned(ts, "%H:%M:%S.%f")


def now_text(form: str = "%H:%M:%S") -> str:
    """Returns the present time in the zone in use, with Z or its offset."""
    moment = zone.wall(time.time())
    return f"{moment:{form}}{zone.shown(moment)}"


def _zoned(ts: str, form: str, rest: str = "") -> str:
    try:
        moment = datetime.fromisoformat(ts[:19] + (ts[19:23] if "%f" in form else "")).replace(tzinfo=timezone.utc)
        here = zone.wall(moment.timestamp())
    except (OSError, OverflowError, ValueError):
        return ts
    text = f"{here:{form}}"
    return f"{text[:12] if '%f' in form else text}{rest}{zone.shown(here)}"


def size(number: float | None) -> str:
    """Returns bytes with a decimal unit: ``512 B``, ``4.19 MB``."""
    if number is None:
        return "-"
    value = float(number)
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if abs(value) < 999.5:
            return f"{value:.0f} B" if unit == "B" else f"{_digits(value)} {unit}"
        value /= 1000
    return f"{_digits(value)} PB"


def bandwidth(gbps: float | None) -> str:
    """Returns 1e9 bytes/s as ``12.3 GB/s``."""
    return "-" if gbps is None else f"{size(gbps * 1e9)}/s"


def bits(gbps: float | None) -> str:
    """Returns 1e9 bits/s as ``100 Gb/s``, ``17 b/s``."""
    return "-" if gbps is None else f"{size(gbps * 1e9).removesuffix('B')}b/s"


def count(number: float | None) -> str:
    """Returns a number with thousands separators; fractions to three digits."""
    if number is None:
        return "-"
    return f"{number:,}" if isinstance(number, int) else _digits(number)


def plural(number: int, what: str) -> str:
    """``1 sample``, ``1,234 samples``."""
    return f"{number:,} {what}" if number == 1 else f"{number:,} {what}s"


def ranks_named(ranks: Sequence[int | None]) -> str:
    """Returns such as ``rank 2`` or ``ranks 0-3,7``."""
    return f"rank{'' if len(set(ranks)) == 1 else 's'} {ranks_text(ranks)}"


def ranks_text(ranks: Sequence[int | None]) -> str:
    """Returns such as ``0-3,7``, with ``?`` for unknown ranks."""
    known = sorted({rank for rank in ranks if rank is not None})
    parts: list[str] = []
    start = 0
    for i, rank in enumerate(known):
        if i + 1 == len(known) or known[i + 1] != rank + 1:
            parts.append(str(rank) if start == i else f"{known[start]}-{rank}")
            start = i + 1
    if len(known) < len(set(ranks)):
        parts.append("?")
    return ",".join(parts)


def wrapped(line: str, width: int | None) -> list[str]:
    """Breaks ``line`` at ``width`` characters, further lines indented; None: one line."""
    return [line] if width is None else textwrap.wrap(line, width, subsequent_indent="    ", break_on_hyphens=False)


def _digits(value: float) -> str:
    magnitude = abs(value)
    if magnitude == int(magnitude) and magnitude < 10:
        return f"{value:.0f}"
    if magnitude < 9.995:
        return f"{value:.2f}"
    return f"{value:.1f}" if magnitude < 99.95 else f"{value:.0f}"
