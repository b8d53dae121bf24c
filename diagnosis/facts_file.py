"""Reads and writes facts as JSON: in a file, and between nodes.

A file is JSON lines: a header ``{"format", "version", "facts"}``, then one object for each run. Fields with their
default value are left out, and unknown fields are ignored, so that fields may be added within a version. Numbers that
are not finite occur only in values of series, as the texts "nan", "inf" and "-inf". Input is hostile: it is limited,
and all of it is checked against the type hints of ``facts``.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar

from probing.api.errors import FormatError, UsageError
from probing.api.typed import typed
from probing.diagnosis.facts import MAX_RANKS, VERSION, Facts, Rank

__all__ = ("MAX_BYTES", "RANK_BYTES", "decoded", "encoded", "from_json", "load", "save", "size_of", "to_json")

RANK_BYTES = 64 << 10
"""The maximum size of the facts of one rank."""
MAX_BYTES = 256 << 20
"""The maximum size of a file, and of the facts of one run."""
# The maximum size of those facts of a run that belong to no rank, such as the members of communicators and the history
# of steps.
_SHARED_BYTES = 16 << 20
_MAX_STALL_S = 1e6
_FORMAT = "probing-facts"
_WORDS = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
_LEAST, _MOST, _DIGITS = -(1 << 63), (1 << 64) - 1, 20
_CUT = "the file is cut or damaged: copy it again, or make it again by `probingctl diagnose --save FILE`"
_OTHER = f"read it with the probingctl of the version that wrote it; this one reads version {VERSION}"
_T = TypeVar("_T")


def to_json(facts: Facts) -> bytes:
    """Returns ``facts`` as a line of JSON, without a newline."""
    return _bytes(_plain(facts))


def size_of(rank: Rank) -> int:
    """Returns the bytes that ``rank`` takes in ``to_json``."""
    return len(_bytes(_plain(rank)))


def from_json(data: bytes) -> Facts:
    """Returns the facts that ``to_json`` wrote as ``data``. Raises FormatError for anything else."""
    found = _object(data)
    _check_version(found)
    ranks = found.get("ranks")
    if isinstance(ranks, list):
        _check_size(data, ranks)
        _read_words(ranks)
    facts = _typed(Facts, found)
    for series in (series for rank in facts.ranks for series in rank.series):
        if len(series.ts_ns) != len(series.values):
            raise _damaged(f"{len(series.ts_ns)} times for {len(series.values)} values")
    if not 0 < facts.stall_s < _MAX_STALL_S:
        raise _damaged(f"stall_s is {facts.stall_s:g}")
    return facts


def decoded(kind: type[_T], data: bytes) -> _T:
    """Returns the dataclass ``kind`` that ``encoded`` wrote as ``data``. Raises FormatError for anything else."""
    return _typed(kind, _object(data))


def encoded(value: Any) -> bytes:
    """Returns a dataclass of dataclasses, tuples and plain values as JSON. Fields with their default value are left
    out.
    """
    return _bytes(_plain(value))


def save(path: Path, facts: Sequence[Facts]) -> None:
    """Writes ``facts`` to a file. Raises UsageError if it cannot be written."""
    header = _bytes({"format": _FORMAT, "version": VERSION, "facts": len(facts)})
    try:
        path.write_bytes(b"".join(line + b"\n" for line in (header, *map(to_json, facts))))
    except OSError as e:
        raise UsageError(f"cannot write {path}: {e.strerror}", hint="give a path that can be written") from e


def load(path: Path) -> list[Facts]:
    """Returns the facts in a file. Raises FormatError if ``save`` did not write it, UsageError if it cannot be read."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as e:
        raise UsageError(
            f"cannot read {path}: {e.strerror}", hint="give a file that `probingctl diagnose --save FILE` wrote"
        ) from e
    if len(data) > MAX_BYTES:
        raise _damaged(f"more than {MAX_BYTES} bytes")
    header, *lines = data.split(b"\n")
    found = _object(header)
    if found.get("format") != _FORMAT:
        raise FormatError(
            f"{path} is not a file of facts", hint="give a file that `probingctl diagnose --save FILE` wrote"
        )
    _check_version(found)
    if not lines or lines.pop() or len(lines) != found.get("facts"):
        raise _damaged(f"{len(lines)} entries, but its header says {found.get('facts')!r:.20}")
    return [from_json(line) for line in lines]


def _damaged(problem: str) -> FormatError:
    return FormatError(f"the facts are malformed: {problem}", hint=_CUT)


def _object(data: bytes) -> dict[str, Any]:
    if len(data) > MAX_BYTES:
        raise _damaged(f"more than {MAX_BYTES} bytes")
    try:
        found = json.loads(data.decode(), parse_constant=_number, parse_float=_number, parse_int=_integer)
    except (ValueError, RecursionError):
        raise _damaged("they are not JSON") from None
    if not isinstance(found, dict):
        raise _damaged("they are not a JSON object")
    if rb"\u" in data and not _is_unicode(found):
        raise _damaged("half a character")
    return found


def _typed(kind: type[_T], found: Mapping[str, object]) -> _T:
    try:
        return typed(kind, found)
    except ValueError as e:
        raise _damaged(str(e)) from None


def _number(text: str) -> float:
    if not math.isfinite(number := float(text)):
        raise ValueError("a number is not finite")
    return number


def _integer(text: str) -> int | float:
    """Returns an integer of 64 bits; a larger number becomes a float, which fields for integers refuse."""
    if len(text) <= _DIGITS and _LEAST <= (number := int(text)) <= _MOST:
        return number
    return _number(text)


def _is_unicode(found: Mapping[str, object]) -> bool:
    try:
        json.dumps(found, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


def _read_words(ranks: list[Any]) -> None:
    """Replaces the texts "nan", "inf" and "-inf" in series with floats. Stops at a malformed rank or series: the check
    of types refuses it later.
    """
    with suppress(AttributeError, KeyError, TypeError):
        for series in (series for rank in ranks for series in rank.get("series", ())):
            series["values"] = [_WORDS.get(x, x) if isinstance(x, str) else x for x in series["values"]]


def _check_version(found: Mapping[str, object]) -> None:
    version = found.get("version")
    if type(version) is not int:
        raise _damaged("they have no version")
    if version != VERSION:
        raise FormatError(f"the facts have version {str(version)[:20]}, which is unknown here", hint=_OTHER)


def _check_size(data: bytes, ranks: list[Any]) -> None:
    if len(ranks) > MAX_RANKS:
        raise _damaged(f"more than {MAX_RANKS} ranks")
    # Measuring a rank means encoding it again, which is slow. A file of at most RANK_BYTES cannot contain a rank that
    # is too large, so its ranks are not measured.
    if len(data) > RANK_BYTES:
        if any(len(_bytes(rank)) > RANK_BYTES for rank in ranks):
            raise _damaged(f"a rank of more than {RANK_BYTES} bytes")
        if len(data) > _SHARED_BYTES + RANK_BYTES * len(ranks):
            raise _damaged(f"{len(data)} bytes for {len(ranks)} ranks")


def _bytes(value: Any) -> bytes:
    # Bytes of a target that are not UTF-8 were decoded to surrogates, which cannot be encoded.
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode(errors="replace")


def _plain(value: Any) -> Any:
    if is_dataclass(value):
        found = ((field, getattr(value, field.name)) for field in fields(value))
        return {field.name: _plain(one) for field, one in found if one != field.default or field.name == "version"}
    if isinstance(value, tuple):
        return [_plain(one) for one in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
