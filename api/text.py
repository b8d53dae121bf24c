"""Formats numbers, times, sets of numbers, jobs, foreign text and SQL in the same way for daemon, rules and clients."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterable, Sequence

__all__ = (
    "age",
    "bandwidth",
    "bits",
    "count",
    "encoded",
    "escape",
    "escape_json",
    "listed",
    "names_owner",
    "numbers_text",
    "pause_text",
    "percent",
    "plural",
    "ranks_of",
    "share_text",
    "size",
    "sql_name",
    "sql_table",
    "sql_text",
    "time_text",
    "utc",
    "utc_second",
    "with_owner",
)

_SECOND_NS = 1_000_000_000
_BINARY = ("B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")
_DECIMAL = ("", "k", "M", "G", "T", "P")
_MOST_SPANS = 12
_MOST_LISTED = 8
# Unicode's spaces, which Python counts as unprintable although they are harmless.
_SPACES = frozenset("\xa0\u1680\u2000\u2001\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a\u202f\u205f\u3000")
_OWNER = re.compile(r" \(uid [0-9]{1,10}\)$")
_SHORT = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}


def escape(text: bytes | str, limit: int | None = None) -> str:
    r"""Returns foreign ``text`` on one line of at most ``limit`` characters; a text that was cut ends in ``…``.

    Characters that control a terminal, reorder a line or are invisible, and bytes that are not UTF-8, become ``\n``,
    ``\x1b`` or ``\u202e``.
    """
    if isinstance(text, bytes):
        # A character takes at most 4 bytes; one more byte shows that the text is longer.
        text = (text if limit is None else text[: 4 * limit + 4]).decode("utf-8", "backslashreplace")
    if limit is not None:
        text = text[: limit + 1]
    if not text.isprintable():
        text = "".join(_escaped(c) if _unsafe(c) else c for c in text)
    return text if limit is None or len(text) <= limit else text[: limit - 1] + "\u2026"


def escape_json(text: str) -> str:
    """Returns JSON ``text`` with JSON's escapes for the characters that ``escape`` replaces, except line ends."""
    if text.isascii() and "\x7f" not in text:
        return text
    return "".join(_escaped_json(c) if c != "\n" and _unsafe(c) else c for c in text)


def encoded(text: str) -> bytes:
    """Returns ``text`` as UTF-8; surrogates, which come from a target's bytes, are escaped."""
    return text.encode("utf-8", "backslashreplace")


def _unsafe(char: str) -> bool:
    return not char.isprintable() and char not in _SPACES


def _escaped(char: str) -> str:
    code = ord(char)
    short = _SHORT.get(char)
    return short or (f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}")


def _escaped_json(char: str) -> str:
    units = char.encode("utf-16-be", "surrogatepass").hex()
    return "".join(f"\\u{units[i : i + 4]}" for i in range(0, len(units), 4))


def size(number: float | None, total: float | None = None) -> str:
    """Returns a number of bytes in powers of 1024: ``512 B``, ``4.19 MiB``, ``80 GiB``; with ``total``: ``46.1/80
    GiB``.
    """
    if number is None:
        return "-"
    if total is None:
        return _scaled(float(number), 1024, _BINARY)
    whole, unit = size(total).split(" ")
    return f"{_digits(number / 1024 ** _BINARY.index(unit))}/{whole} {unit}"


def bandwidth(gbps: float | None) -> str:
    """Returns a rate in 1e9 bytes/s as text in powers of 1000, as NCCL and makers of hardware do: ``12.3 GB/s``."""
    return "-" if gbps is None else f"{_scaled(gbps * 1e9, 1000, _DECIMAL)}B/s"


def bits(gbps: float | None) -> str:
    """Returns a rate in 1e9 bits/s as text: ``100 Gb/s``, ``17 b/s``."""
    return "-" if gbps is None else f"{_scaled(gbps * 1e9, 1000, _DECIMAL)}b/s"


def _scaled(value: float, base: int, units: Sequence[str]) -> str:
    for unit in units[:-1]:
        if abs(value) < base - 0.5:
            return f"{_digits(value) if unit != units[0] else f'{value:.0f}'} {unit}"
        value /= base
    return f"{_digits(value)} {units[-1]}"


def _digits(value: float) -> str:
    """Returns ``value`` with three significant digits; a whole number has no fraction."""
    magnitude = abs(value)
    if magnitude == int(magnitude) or magnitude >= 99.95:
        return f"{value:.0f}"
    return f"{value:.2f}" if magnitude < 9.995 else f"{value:.1f}"


def count(number: float | None) -> str:
    """Returns an integer with separators of thousands, a float with three digits."""
    if number is None:
        return "-"
    return f"{number:,}" if isinstance(number, int) else _digits(number)


def plural(number: int, what: str) -> str:
    """Returns a number with its noun: ``1 sample``, ``1,234 samples``, ``2 processes``."""
    ending = "" if number == 1 else "es" if what.endswith("s") else "s"
    return f"{number:,} {what}{ending}"


def percent(value: float | None, digits: int = 0) -> str:
    """Returns a percentage as ``97%``; ``-`` for None and values that are not finite."""
    return "-" if value is None or not math.isfinite(value) else f"{value:.{digits}f}%"


def share_text(share: float | None, digits: int = 0) -> str:
    """Returns a share, from 0 to 1, in per cent, such as ``97%``."""
    return percent(None if share is None else 100 * share, digits)


def age(ns: float | None) -> str:
    """Returns a measured duration with three digits: ``812 us``, ``4.31 s``, ``5m07s``, ``3h12m``, ``2d04h``."""
    if ns is None:
        return "-"
    if ns < 0:
        return "-" + age(-ns)
    for unit, scale in (("ns", 1.0), ("us", 1e3), ("ms", 1e6), ("s", 1e9)):
        value = ns / scale
        # From 999.5 on the number would be printed as 1000, so the next unit is used.
        if value < (999.5 if unit != "s" else 59.95):
            return f"{_digits(value)} {unit}"
    seconds = round(ns / 1e9)
    minutes, hours, days = seconds // 60, seconds // 3600, seconds // 86400
    if hours < 1:
        return f"{minutes}m{seconds % 60:02d}s"
    return f"{hours}h{minutes % 60:02d}m" if days < 2 else f"{days}d{hours % 24:02d}h"


def time_text(ns: float | None) -> str:
    """Returns a duration for use in sentences, with two digits: ``1.3 ms``, ``39 s``, ``5 min``, ``2.5 h``."""
    if ns is None:
        return "an unknown time"
    if ns < 999.5e6:
        return f"{_two_digits(ns / 1e6)} ms"
    seconds = ns / 1e9
    if seconds < 120:
        return f"{_two_digits(seconds)} s"
    return f"{_two_digits(seconds / 60)} min" if seconds < 7200 else f"{_two_digits(seconds / 3600)} h"


def _two_digits(value: float) -> str:
    return f"{value:.0f}" if value >= 9.95 else f"{value:.1f}".removesuffix(".0")


def utc(ns: int) -> str:
    """Returns CLOCK_REALTIME ns as ``2026-11-21T08:19:20.123456789Z``; a time outside of the years 1 to 9999 as the
    number itself.
    """
    try:
        year, month, day, hour, minute, second, *_ = time.gmtime(ns // _SECOND_NS)
    except (OverflowError, OSError):
        return str(ns)
    if not 0 < year < 10_000:
        return str(ns)
    return f"{year:04d}-{month:02d}-{day:02d}T{hour:02d}:{minute:02d}:{second:02d}.{ns % _SECOND_NS:09d}Z"


def utc_second(ns: int) -> str:
    """Returns CLOCK_REALTIME ns to the second, in the form ``2026-11-21 08:19:20Z``."""
    return f"{utc(ns)[:19].replace('T', ' ')}Z"


def numbers_text(numbers: Iterable[int | None], most: int | None = None) -> str:
    """Returns a set of numbers as ``0-3,7``, with ``?`` for None. If the set has more than ``most`` spans, only the
    first ``most`` spans and ``…`` are in the text.
    """
    distinct = set(numbers)
    spans: list[list[int]] = []
    for number in sorted(number for number in distinct if number is not None):
        if spans and spans[-1][1] == number - 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    parts = [str(first) if first == last else f"{first}-{last}" for first, last in spans]
    if most is not None and len(parts) > most:
        parts = [*parts[:most], "\u2026"]
    return ",".join([*parts, "?"] if None in distinct else parts)


def ranks_of(ranks: Iterable[int | None], most: int | None = _MOST_SPANS) -> str:
    """Returns ``rank 2`` or ``ranks 0-3,7``; above ``most`` spans, only the first ``most`` and ``…``."""
    distinct = set(ranks)
    return f"rank{'' if len(distinct) == 1 else 's'} {numbers_text(distinct, most)}"


def listed(texts: Iterable[str]) -> str:
    """Returns ``a, b and c``. Of more than 8 texts, only the first 7 and the number of further texts are listed."""
    parts = list(texts)
    if len(parts) > _MOST_LISTED:
        parts = [*parts[: _MOST_LISTED - 1], f"{len(parts) - _MOST_LISTED + 1} more"]
    return " and ".join(part for part in (", ".join(parts[:-1]), *parts[-1:]) if part)


def with_owner(job: str, owner: int) -> str:
    """Returns the name ``job`` with the uid of the job's ``owner``, as in ``4711 (uid 1002)``. Used if another user has
    a job of the same name.
    """
    return f"{job} (uid {owner})"


def names_owner(job: str) -> bool:
    """Returns whether the name of a job contains its owner."""
    return _OWNER.search(job) is not None


def sql_text(value: str) -> str:
    """Returns ``value`` as a string literal of SQL, without NUL, which DuckDB does not accept."""
    return "'" + value.replace("\0", "").replace("'", "''") + "'"


def sql_name(name: str) -> str:
    """Returns ``name`` as a single identifier of SQL."""
    return '"' + name.replace('"', '""') + '"'


def sql_table(name: str) -> str:
    """Returns ``schema.table``, or a name without a schema, as SQL identifiers."""
    return ".".join(map(sql_name, name.split(".")))


def pause_text(node: str, reason: str) -> str:
    """Returns the line about a node whose probes are paused. ``reason``: the reason in the node's status, such
    as ``paused since …``.
    """
    return f"PAUSED on {node}{reason.removeprefix('paused')}: nothing newer is seen"
