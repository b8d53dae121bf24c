"""Locates the CPython runtime of a process from its mappings and the symbols of the file that contains the runtime.

If a CPython has no ``Py_Version`` (up to 3.10, or stripped), its release is read from ``sys.hexversion``.

Offsets: ``PyDictObject`` and ``PyDictKeysObject`` of ``Objects/dict-common.h`` (up to 3.10) and
``Include/internal/pycore_dict.h`` (3.11, 3.12), ``PyLongObject`` of ``Include/longintrepr.h`` (3.12:
``Include/cpython/longintrepr.h``), ``PyInterpreterState.sysdict`` of ``Include/internal/pycore_interp.h``.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Mapping as Dict
from collections.abc import Sequence
from typing import Any, NamedTuple

from probing.api.errors import NotPython, UnsupportedTarget, UsageError
from probing.daemon.processes.loaded_file import Read
from probing.daemon.processes.procfs import Mapping, clean_text
from probing.daemon.python_stack.walk.layouts import TABLE

__all__ = (
    "SYMBOLS",
    "RuntimeInfo",
    "RuntimeSymbols",
    "candidates",
    "locate",
    "mapped_name",
    "named_python",
    "release_of",
    "sys_hexversion",
)

_SYSDICT = {(3, 8): 72, (3, 9): 872, (3, 10): 872, (3, 11): 904, (3, 12): 352}
_DICT_KEYS = 32
_KEYS_HEAD = 40
_COMPACT_KEYS_HEAD = 32
_MAX_SLOTS = 1 << 12
_NAME = b"hexversion"
_LONG_SIZE, _LONG_DIGIT = 16, 24


def release_of(hexversion: int) -> str:
    """Returns the release as text, such as "3.11.7" or "3.13.0b2", from PY_VERSION_HEX (``Include/patchlevel.h``)."""
    # The digits are major, minor and micro, then the level (a to f) and the serial number.
    text = f"{hexversion >> 24 & 0xFF}.{hexversion >> 16 & 0xFF}.{hexversion >> 8 & 0xFF}"
    level = {0xA: "a", 0xB: "b", 0xC: "rc"}.get(hexversion >> 4 & 0xF)
    return f"{text}{level}{hexversion & 0xF}" if level else text


def sys_hexversion(read: Read, runtime: int, version: tuple[int, int]) -> int | None:
    """Returns ``sys.hexversion`` of the CPython whose ``_PyRuntime`` is at ``runtime``; None if it is not set yet, or
    if it is not of ``version``.
    """
    if version not in _SYSDICT:
        return None
    interpreter = _word(read, runtime + TABLE[version].interpreters_head)
    sysdict = _word(read, interpreter + _SYSDICT[version])
    keys = _word(read, sysdict + _DICT_KEYS)
    entries = _entries(read, keys) if version < (3, 11) else _compact_entries(read, keys)
    start = TABLE[version].str_ascii
    names = read([(name, start + len(_NAME) + 1) for name, _ in entries])
    for (_, value), text in zip(entries, names, strict=True):
        if text is not None and text[start:] == _NAME + b"\0":
            number = read([(value, _LONG_DIGIT + 4)])[0]
            # PY_VERSION_HEX of 3.x has less than 30 bits, so the int has one digit. 3.12 keeps the sign in the lowest
            # bits of the size.
            size, digit = struct.unpack_from("<qI", number or bytes(_LONG_DIGIT + 4), _LONG_SIZE)
            one = 1 if version < (3, 12) else 1 << 3
            return digit if size == one and (digit >> 24, digit >> 16 & 0xFF) == version else None
    return None


def _entries(read: Read, keys: int) -> list[tuple[int, int]]:
    """Returns name and value of each entry of a dict."""
    head = read([(keys, _KEYS_HEAD)])[0]
    if head is None:
        return []
    slots, used = struct.unpack_from("<8xq16xq", head)
    if not 0 < used <= slots <= _MAX_SLOTS:
        return []
    width = 1 if slots <= 0xFF else 2
    table = read([(keys + _KEYS_HEAD + slots * width, used * 24)])[0]
    if table is None:
        return []
    return [(name, value) for _, name, value in struct.iter_unpack("<qQQ", table) if name and value]


def _compact_entries(read: Read, keys: int) -> list[tuple[int, int]]:
    """Returns name and value of each entry of a dict of 3.11 and later. Its sizes are logarithms, and a table with only
    str keys contains no hashes.
    """
    head = read([(keys, _COMPACT_KEYS_HEAD)])[0]
    if head is None:
        return []
    slots, index_bytes, kind, used = struct.unpack("<8xBBB13xq", head)
    if not 0 < used <= _MAX_SLOTS or slots > 16 or index_bytes > 17 or kind not in (0, 1):
        return []
    table = read([(keys + _COMPACT_KEYS_HEAD + (1 << index_bytes), used * (16 if kind else 24))])[0]
    entries = struct.iter_unpack("<QQ" if kind else "<8xQQ", table or b"")
    return [(name, value) for name, value in entries if name and value]


def _word(read: Read, address: int) -> int:
    data = read([(address, 8)])[0] if address > 0 else None
    return int.from_bytes(data or b"", "little")


# Functions, and the version since which each is exported. They identify versions before 3.11, which lack Py_Version.
_SINCE = {"PyCode_NewWithPosOnlyArgs": (3, 8), "PyFrame_GetCode": (3, 9), "Py_NewRef": (3, 10)}
SYMBOLS = ("_PyRuntime", "Py_Version", *_SINCE)
MAX_CANDIDATES = 3
_LIBRARY = re.compile(rb"/libpython3\.\d+[a-z]*\.so[^/]*$")
_PROGRAM = re.compile(rb"/python[0-9.]*[a-z]*$")
_PAGE = 4096


class RuntimeInfo(NamedTuple):
    """The CPython of one process. ``version`` is (3, minor), ``python`` is as precise as possible ("3.11.7", "3.10").

    ``runtime`` is the address of ``_PyRuntime`` in the process, ``version_at`` the address of Py_Version, or 0.
    ``hexversion``: the version in the format of PY_VERSION_HEX, 0 if unknown.
    """

    runtime: int
    version_at: int
    hexversion: int
    version: tuple[int, int]
    python: str
    path: str

    def to_dict(self) -> Dict[str, object]:
        return self._asdict()

    @classmethod
    def from_dict(cls, data: Dict[str, Any]) -> RuntimeInfo:
        """Returns the RuntimeInfo from which ``to_dict`` made ``data``. Raises UsageError for anything else."""
        try:
            major, minor = data["version"]
            numbers = (int(data["runtime"]), int(data["version_at"]), int(data["hexversion"]))
            return cls(*numbers, (int(major), int(minor)), str(data["python"]), str(data["path"]))
        except (KeyError, TypeError, ValueError) as e:
            raise UsageError("a request for stacks does not say where the runtime is") from e


class RuntimeSymbols(NamedTuple):
    """The addresses of SYMBOLS and of the first PT_LOAD, as the file states them. ``relocated``: the file is
    position-independent (ET_DYN), so its addresses in a process differ from these.
    """

    addresses: Dict[str, int]
    first_address: int
    relocated: bool

    def address(self, name: str, mapping: Mapping) -> int:
        """Returns the address of ``name`` in a process in which ``mapping`` is the first mapping of the file; 0 if the
        symbol is missing.
        """
        if name not in self.addresses:
            return 0
        bias = mapping.start - (self.first_address & -_PAGE) if self.relocated else 0
        return self.addresses[name] + bias


def candidates(mappings: Sequence[Mapping]) -> list[Mapping]:
    """Returns the first mapping of each file that may contain the runtime: at most three, the likeliest first.

    A libpython comes before the program, because the program only starts it.
    """
    begins: dict[tuple[tuple[int, int], int], Mapping] = {}
    for mapping in mappings:
        if mapping.inode and mapping.offset == 0 and mapping.path.startswith(b"/"):
            begins.setdefault((mapping.device, mapping.inode), mapping)
    files = list(begins.values())
    libraries = [m for m in files if _LIBRARY.search(m.path)]
    programs = [m for m in files if _PROGRAM.search(m.path)]
    # The first file is a candidate, too, whatever its name: it is nearly always the program itself, which has the
    # lowest mapping (always if ASLR is off, nearly always if it is on).
    return list(dict.fromkeys([*libraries, *programs, *files[:1]]))[:MAX_CANDIDATES]


def locate(mapping: Mapping, symbols: RuntimeSymbols, hexversion: int | None = None) -> RuntimeInfo:
    """Returns the runtime in the file whose first mapping is ``mapping``. ``hexversion``: the value of Py_Version, if
    the file has it.

    Raises NotPython when the file contains no runtime, UnsupportedTarget for an unknown version.
    """
    runtime, version_at = (symbols.address(name, mapping) for name in ("_PyRuntime", "Py_Version"))
    if not runtime:
        raise NotPython(f"{mapped_name(mapping)} holds no CPython runtime")
    if hexversion:
        version = (hexversion >> 24 & 0xFF, hexversion >> 16 & 0xFF)
        return RuntimeInfo(runtime, version_at, hexversion, version, release_of(hexversion), mapped_name(mapping))
    known = [v for name, v in _SINCE.items() if name in symbols.addresses]
    if version_at or not known:
        raise UnsupportedTarget(
            f"the version of the CPython in {mapped_name(mapping)} is not known",
            hint="stacks are read of CPython 3.8 to 3.15",
        )
    version = max(known)
    return RuntimeInfo(runtime, 0, 0, version, f"{version[0]}.{version[1]}", mapped_name(mapping))


def named_python(mapping: Mapping) -> bool:
    """Returns whether the file has a name of CPython: ``libpython3.*.so*`` or ``python*``."""
    return bool(_LIBRARY.search(mapping.path) or _PROGRAM.search(mapping.path))


def mapped_name(mapping: Mapping) -> str:
    """Returns the clean path of the file, at most 256 characters."""
    return clean_text(mapping.path, 256)
