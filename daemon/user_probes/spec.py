"""Reads and checks the specification of a user's probe: NAME.toml and NAME.c in the directory of probes."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from probing.api.errors import ConfigError, FormatError
from probing.api.tables.schema import Table
from probing.api.tables.user import COLUMN_TYPES, MAX_COLUMNS, MAX_DOC, USER_NAME, user_table
from probing.daemon import toml

__all__ = ("Attach", "Field", "Spec", "read_spec", "spec_names", "stamp_of")

MAX_PROBES = 32
MAX_ATTACH = 8
MAX_TOML_BYTES = 64 << 10
MAX_C_BYTES = 256 << 10
MAX_TEXT_BYTES = 256
MAX_BUDGET = 1_000_000
DEFAULT_BUDGET = 10_000
WHO = ("trainers", "training", "all")
_KINDS = ("uprobe", "uretprobe", "tracepoint")
_FUNCTION = re.compile(r"[A-Za-z_]\w{0,63}", re.ASCII)
_SYMBOL = re.compile(r"[A-Za-z_.$@][\w.$@]{0,511}", re.ASCII)
_TRACEPOINT = re.compile(r"[a-z]\w{0,63}:[a-z]\w{0,63}", re.ASCII)
_C_WORDS = re.compile(
    r"auto|bool|break|case|char|const|continue|default|do|double|else|enum|extern|float|for|goto|if|inline|int|long"
    r"|register|restrict|return|short|signed|sizeof|static|struct|switch|typedef|[su]\d+|union|unsigned|void|volatile"
    r"|while|probing_.*"
)
_EXAMPLES = "docs/user-probes.md describes the keys"
_T = TypeVar("_T")


class Field(NamedTuple):
    """A column that the program fills. ``bytes``: the size of a text, 0 for a number."""

    name: str
    type: str
    doc: str
    bytes: int = 0


class Attach(NamedTuple):
    """Where ``function`` of NAME.c runs: at ``symbol`` of ``library``, or at ``tracepoint``, category:name."""

    kind: str
    function: str
    library: str = ""
    symbol: str = ""
    tracepoint: str = ""

    @property
    def on_return(self) -> bool:
        return self.kind == "uretprobe"

    @property
    def where(self) -> str:
        return self.tracepoint or f"{self.symbol} in {self.library}"


class Spec(NamedTuple):
    """A probe. ``budget``: the maximum number of hits a second, of all its attachments together; ``who``: the
    processes to probe, a word of WHO.
    """

    name: str
    doc: str
    who: str
    budget: int
    attach: tuple[Attach, ...]
    fields: tuple[Field, ...]
    code: str

    @property
    def table(self) -> Table:
        return user_table(self.name, self.doc, [(f.name, f.type, f.doc) for f in self.fields])


def spec_names(folder: Path) -> list[str]:
    """Returns each NAME for which NAME.toml exists. Raises ConfigError if there are too many."""
    try:
        names = sorted(path.stem for path in folder.iterdir() if path.suffix == ".toml")
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as e:
        hint = "make it readable for the daemon's user"
        raise ConfigError(f"the probes in {folder} cannot be listed: {e.strerror}", hint=hint) from e
    if len(names) > MAX_PROBES:
        raise ConfigError(f"{folder} has {len(names)} probes", hint=f"remove some: at most {MAX_PROBES} run on a node")
    return names


def stamp_of(folder: Path, name: str) -> tuple[object, ...]:
    """Returns a stamp that changes with the files of the probe and their owners and modes."""

    def of(path: Path) -> tuple[int, ...]:
        try:
            s = path.stat()
        except OSError:
            return ()
        return (s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns, s.st_mode, s.st_uid)

    return (of(folder)[4:], of(folder / f"{name}.toml"), of(folder / f"{name}.c"))


def read_spec(folder: Path, name: str) -> Spec:
    """Returns the specification of the probe NAME in ``folder``. Raises ConfigError, which names the file and
    the key.
    """
    path = folder / f"{name}.toml"
    if not USER_NAME.fullmatch(name):
        raise ConfigError(
            f"{str(path)[:200]!r} cannot be the name of a probe", hint="use a-z, 0-9 and _, at most 41 of them"
        )
    _check_owner(folder)
    text = _read(path, MAX_TOML_BYTES)
    code = _read(folder / f"{name}.c", MAX_C_BYTES)
    try:
        values = toml.loads(text)
    except ValueError as e:
        raise ConfigError(f"{path} is not TOML: {' '.join(str(e).split())}", hint=_EXAMPLES) from e
    return _Reader(path).spec(name, values, code)


def _check_owner(path: Path) -> None:
    # These files become kernel code, so only users who have the rights already may write them.
    try:
        status = path.stat()
    except OSError as e:
        raise ConfigError(f"{path} cannot be read: {e.strerror}", hint="a probe is NAME.toml and NAME.c") from e
    if status.st_uid not in (0, os.geteuid()):
        hint = f"run `chown root {path}`"
        raise ConfigError(f"{path} belongs to user {status.st_uid}, not to root or the daemon's user", hint=hint)
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise ConfigError(f"{path} is writable by users other than its owner", hint=f"run `chmod go-w {path}`")


def _read(path: Path, limit: int) -> str:
    _check_owner(path)
    try:
        with open(path, "rb") as stream:
            data = stream.read(limit + 1)
        text = data.decode()
    except OSError as e:
        raise ConfigError(f"{path} cannot be read: {e.strerror}", hint="make it readable for the daemon's user") from e
    except UnicodeDecodeError as e:
        raise ConfigError(f"{path} is not UTF-8 text", hint="write it as UTF-8") from e
    if len(data) > limit or "\0" in text:
        hint = "shorten it, or remove the zero byte"
        raise ConfigError(f"{path} is longer than {limit} bytes or holds a zero byte", hint=hint)
    return text


class _Reader:
    """Reads and checks the keys of one file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def spec(self, name: str, values: Mapping[str, Any], code: str) -> Spec:
        self._only(values, ("description", "processes", "budget", "attach", "columns"), "")
        who = self._text(values, "processes", "", WHO[0])
        if who not in WHO:
            raise self._wrong("processes", who, f"one of {', '.join(WHO)}")
        budget = values.get("budget", DEFAULT_BUDGET)
        if type(budget) is not int or not 1 <= budget <= MAX_BUDGET:
            raise self._wrong("budget", budget, f"a number of hits a second, 1 to {MAX_BUDGET}")
        attach = tuple(self._list(values, "attach", MAX_ATTACH, lambda v, at: self._attach(v, at, who)))
        fields = tuple(self._list(values, "columns", MAX_COLUMNS, self._field))
        spec = Spec(name, self._text(values, "description", ""), who, budget, attach, fields, code)
        try:
            _ = spec.table
        except FormatError as e:
            hint = (
                "each name must differ from the others and from the columns that every table has (docs/user-probes.md)"
            )
            raise ConfigError(f"{self._path}: {e.message}", hint=hint) from e
        return spec

    def _attach(self, values: Mapping[str, Any], at: str, who: str) -> Attach:
        kind = self._text(values, "kind", at)
        if kind not in _KINDS:
            raise self._wrong(f"{at}kind", kind, f"one of {', '.join(_KINDS)}")
        function = self._matching(values, "function", at, _FUNCTION, "the name of a C function")
        if kind == "tracepoint":
            self._only(values, ("kind", "function", "tracepoint"), at)
            point = self._matching(values, "tracepoint", at, _TRACEPOINT, "category:name")
            return Attach(kind, function, tracepoint=point)
        self._only(values, ("kind", "function", "library", "symbol"), at)
        library = self._text(values, "library", at)
        if who == "all" and not library.startswith("/"):
            raise self._wrong(f"{at}library", library, 'the path of a file, since processes = "all"')
        if who == "all" and any(c in library for c in "*?["):
            raise self._wrong(f"{at}library", library, 'a path without wildcards, since processes = "all"')
        symbol = self._matching(values, "symbol", at, _SYMBOL, "the name of a symbol, without wildcards")
        return Attach(kind, function, library, symbol)

    def _field(self, values: Mapping[str, Any], at: str) -> Field:
        kind = self._text(values, "type", at)
        if kind not in COLUMN_TYPES:
            raise self._wrong(f"{at}type", kind, f"one of {', '.join(COLUMN_TYPES)}")
        name = self._matching(values, "name", at, USER_NAME, "a-z, 0-9 and _, at most 41, a letter first")
        if _C_WORDS.fullmatch(name):
            raise self._wrong(f"{at}name", name, "not a word of C, and not a name that begins with probing_")
        doc = self._text(values, "doc", at)
        if kind != "text":
            self._only(values, ("name", "type", "doc"), at)
            return Field(name, kind, doc)
        self._only(values, ("name", "type", "doc", "bytes"), at)
        room = values.get("bytes")
        if type(room) is not int or not 1 <= room <= MAX_TEXT_BYTES:
            raise self._wrong(f"{at}bytes", room, f"the size of the text in bytes, 1 to {MAX_TEXT_BYTES}")
        return Field(name, kind, doc, room)

    def _list(
        self, values: Mapping[str, Any], key: str, most: int, make: Callable[[Mapping[str, Any], str], _T]
    ) -> list[_T]:
        found = values.get(key)
        if not isinstance(found, list) or not all(isinstance(v, dict) for v in found) or not 1 <= len(found) <= most:
            raise self._wrong(key, type(found).__name__ if found else "", f"1 to {most} tables [[{key}]]")
        return [make(value, f"{key}[{i}].") for i, value in enumerate(found)]

    def _text(self, values: Mapping[str, Any], key: str, at: str, default: str | None = None) -> str:
        value = values.get(key, default)
        if not isinstance(value, str) or not value.strip() or len(value) > MAX_DOC or not value.isprintable():
            raise self._wrong(f"{at}{key}", value, f"a text in quotes, of at most {MAX_DOC} printable characters")
        return value

    def _matching(self, values: Mapping[str, Any], key: str, at: str, pattern: re.Pattern[str], expected: str) -> str:
        value = self._text(values, key, at)
        if not pattern.fullmatch(value):
            raise self._wrong(f"{at}{key}", value, expected)
        return value

    def _only(self, values: Mapping[str, Any], known: tuple[str, ...], at: str) -> None:
        if more := [key for key in values if key not in known]:
            hint = f"known here: {', '.join(known)}"
            raise ConfigError(f"{self._path}: unknown key {at}{more[0][:80]}", hint=hint)

    def _wrong(self, key: str, value: object, expected: str) -> ConfigError:
        problem = "is missing" if value in (None, "") else f"= {str(value)[:80]!r} is wrong"
        return ConfigError(f"{self._path}: {key} {problem}", hint=f"it must be {expected}")
