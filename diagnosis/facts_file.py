"""Reads and writes facts as JSON: in a file, and between nodes.

A file is JSON lines: a header ``{"format", "version", "facts"}``, then one object for each run. Fields with their
default value are left out, and unknown fields are ignored, so that fields may be added within a version. Numbers that
are not finite occur only in values of series, as the texts "nan", "inf" and "-inf". Input is hostile: it is limited,
and all of it is checked against the type hints of ``facts``.
"""

from __future__ import annotations

import json
import math
import types
from collections.abc import Callable, Sequence
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any, NoReturn, TypeVar, cast, get_args, get_origin, get_type_hints

from probing.api.errors import FormatError, UsageError
from probing.diagnosis.facts import MAX_RANKS, VERSION, Facts, Rank, Series

__all__ = ("MAX_BYTES", "RANK_BYTES", "decoded", "encoded", "from_json", "load", "save", "size_of", "to_json")

RANK_BYTES = 64 << 10
"""The most bytes of a rank."""
MAX_BYTES = 256 << 20
"""The most bytes of a file, and of the facts of one run."""
# The most bytes of facts other than ranks: members of communicators, history of steps.
_SHARED_BYTES = 16 << 20
_MAX_STALL_S = 1e6
_FORMAT = "probing-facts"
_WORDS = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
_CUT = "the file is cut or damaged: copy it again, or make it again by `probingctl diagnose --save FILE`"
_OTHER = f"read it with the probingctl of the version that wrote it; this one reads version {VERSION}"
_Read = Callable[[Any], Any]
_T = TypeVar("_T")


class _Wrong(Exception):
    """A value of a wrong type or out of bounds. ``path``: its place, built while the error propagates."""

    def __init__(self, problem: str) -> None:
        super().__init__(problem)
        self.problem = problem
        self.path = ""


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
    try:
        return cast("Facts", _reader(Facts)(found))
    except _Wrong as e:
        raise _damaged(f"{e.path.lstrip('.') or 'they'}: {e.problem}") from None


def decoded(kind: type[_T], data: bytes) -> _T:
    """Returns the dataclass ``kind`` that ``encoded`` wrote as ``data``. Raises FormatError for anything else."""
    try:
        return cast("_T", _reader(cast("Any", kind))(_object(data)))
    except _Wrong as e:
        raise _damaged(f"{e.path.lstrip('.') or 'they'}: {e.problem}") from None


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
        raise UsageError(f"cannot write {path}: {e.strerror}", hint="give the path of a file to write") from e


def load(path: Path) -> list[Facts]:
    """Returns the facts in a file. Raises FormatError if ``save`` did not write it, UsageError if it cannot be read."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as e:
        raise UsageError(f"cannot read {path}: {e.strerror}", hint="give a file of `diagnose --save`") from e
    if len(data) > MAX_BYTES:
        raise _damaged(f"more than {MAX_BYTES} bytes")
    header, *lines = data.split(b"\n")
    found = _object(header)
    if found.get("format") != _FORMAT:
        raise FormatError(f"{path} is not a file of facts", hint="give a file of `probingctl diagnose --save FILE`")
    _check_version(found)
    if not lines or lines.pop() or len(lines) != found.get("facts"):
        raise _damaged(f"{len(lines)} entries, where its header has {found.get('facts')!r:.20}")
    return [from_json(line) for line in lines]


def _damaged(problem: str) -> FormatError:
    return FormatError(f"the facts are malformed: {problem}", hint=_CUT)


def _object(data: bytes) -> dict[str, Any]:
    if len(data) > MAX_BYTES:
        raise _damaged(f"more than {MAX_BYTES} bytes")
    try:
        found = json.loads(data.decode(), parse_constant=_refuse)
    except (ValueError, RecursionError):
        raise _damaged("they are no JSON") from None
    if not isinstance(found, dict):
        raise _damaged("they are no JSON object")
    return found


def _refuse(word: str) -> NoReturn:
    raise ValueError(word)


def _check_version(found: dict[str, Any]) -> None:
    version = found.get("version")
    if type(version) is not int:
        raise _damaged("they have no version")
    if version != VERSION:
        raise FormatError(f"facts of version {str(version)[:20]}", hint=_OTHER)


def _check_size(data: bytes, ranks: list[Any]) -> None:
    if len(ranks) > MAX_RANKS:
        raise _damaged(f"more than {MAX_RANKS} ranks")
    # To measure a rank it is encoded again, which is not needed for small facts.
    if len(data) > RANK_BYTES:
        if any(len(_bytes(rank)) > RANK_BYTES for rank in ranks):
            raise _damaged(f"a rank of more than {RANK_BYTES} bytes")
        if len(data) > _SHARED_BYTES + RANK_BYTES * len(ranks):
            raise _damaged(f"{len(data)} bytes for {len(ranks)} ranks")


def _bytes(value: Any) -> bytes:
    # Bytes of a target that are not UTF-8 became surrogates.
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


@cache
def _reader(hint: Any) -> _Read:
    """Returns the function that checks and converts a JSON value to the type ``hint``."""
    if is_dataclass(hint):
        return _dataclass_reader(cast("type[Any]", hint))
    if isinstance(hint, types.UnionType):
        [one] = [arg for arg in get_args(hint) if arg is not types.NoneType]
        read = _reader(one)
        return lambda value: None if value is None else read(value)
    if get_origin(hint) is tuple:
        return _tuple_reader(get_args(hint))
    return _PLAIN[hint]


def _dataclass_reader(cls: type[Any]) -> _Read:
    hints = get_type_hints(cls)
    readers = {field.name: _reader(hints[field.name]) for field in fields(cls)}
    if cls is Series:
        readers["values"] = _series_values
    needed = [field.name for field in fields(cls) if field.default is MISSING and field.default_factory is MISSING]

    def read(value: Any) -> Any:
        if type(value) is not dict:
            raise _Wrong("no object")
        for name in needed:
            if name not in value:
                raise _Wrong(f"without {name}")
        found = cls(**{name: _at(f".{name}", one, value[name]) for name, one in readers.items() if name in value})
        if isinstance(found, Series) and len(found.ts_ns) != len(found.values):
            raise _Wrong(f"{len(found.ts_ns)} times of {len(found.values)} values")
        if isinstance(found, Facts) and not 0 < found.stall_s < _MAX_STALL_S:
            raise _Wrong(f"stall_s is {found.stall_s:g}")
        return found

    return read


def _tuple_reader(args: tuple[Any, ...]) -> _Read:
    if args[-1] is Ellipsis:
        each = _reader(args[0])
        return lambda value: tuple(_at(f"[{i}]", each, one) for i, one in enumerate(_list(value)))
    readers = [_reader(arg) for arg in args]

    def read(value: Any) -> Any:
        if len(_list(value)) != len(readers):
            raise _Wrong(f"{len(value)} values instead of {len(readers)}")
        return tuple(_at(f"[{i}]", one, part) for i, (one, part) in enumerate(zip(readers, value, strict=True)))

    return read


def _at(place: str, read: _Read, value: Any) -> Any:
    try:
        return read(value)
    except _Wrong as e:
        e.path = place + e.path
        raise


def _list(value: Any) -> list[Any]:
    if type(value) is not list:
        raise _Wrong("no list")
    return value


def _int(value: Any) -> int:
    if type(value) is not int or not -(1 << 63) <= value < 1 << 64:
        raise _Wrong("no integer of 64 bits")
    return value


def _float(value: Any) -> float:
    if type(value) is int:
        value = float(_int(value))
    if type(value) is not float or not math.isfinite(value):
        raise _Wrong("no finite number")
    return value


def _series_values(value: Any) -> tuple[float, ...]:
    return tuple(_WORDS[one] if type(one) is str and one in _WORDS else _float(one) for one in _list(value))


def _bool(value: Any) -> bool:
    if type(value) is not bool:
        raise _Wrong("neither true nor false")
    return value


def _str(value: Any) -> str:
    if type(value) is not str:
        raise _Wrong("no text")
    if not value.isascii() and any("\ud800" <= char <= "\udfff" for char in value):
        raise _Wrong("half a character")
    return value


_PLAIN: dict[Any, _Read] = {int: _int, float: _float, bool: _bool, str: _str}
