"""Finds the release of a CPython without ``Py_Version`` (up to 3.10, or stripped) in ``sys.hexversion``.

Offsets: ``PyDictObject`` and ``PyDictKeysObject`` of ``Objects/dict-common.h`` (up to 3.10) and
``Include/internal/pycore_dict.h`` (3.11, 3.12), ``PyLongObject`` of ``Include/longintrepr.h`` (3.12:
``Include/cpython/longintrepr.h``), ``PyInterpreterState.sysdict`` of ``Include/internal/pycore_interp.h``.
"""

from __future__ import annotations

import struct

from probing.daemon.processes.loaded_file import Read
from probing.daemon.python_stack.walk.layouts import TABLE

__all__ = ("release_of", "sys_hexversion")

_SYSDICT = {(3, 8): 72, (3, 9): 872, (3, 10): 872, (3, 11): 904, (3, 12): 352}
_DICT_KEYS = 32
_KEYS_HEAD = 40
_COMPACT_KEYS_HEAD = 32
_MAX_SLOTS = 1 << 12
_NAME = b"hexversion"
_LONG_SIZE, _LONG_DIGIT = 16, 24


def release_of(hexversion: int) -> str:
    """The release as text, such as "3.11.7" or "3.13.0b2", from PY_VERSION_HEX (``Include/patchlevel.h``)."""
    # Major, minor and micro, then the level (a to f) and the serial.
    text = f"{hexversion >> 24 & 0xFF}.{hexversion >> 16 & 0xFF}.{hexversion >> 8 & 0xFF}"
    level = {0xA: "a", 0xB: "b", 0xC: "rc"}.get(hexversion >> 4 & 0xF)
    return f"{text}{level}{hexversion & 0xF}" if level else text


def sys_hexversion(read: Read, runtime: int, version: tuple[int, int]) -> int | None:
    """``sys.hexversion`` of the CPython whose ``_PyRuntime`` is at ``runtime``; None where it cannot be found yet."""
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
            # PY_VERSION_HEX of 3.x has less than 30 bits, so it is one digit. 3.12 keeps the sign in three low bits.
            size, digit = struct.unpack_from("<qI", number or bytes(_LONG_DIGIT + 4), _LONG_SIZE)
            one = 1 if version < (3, 12) else 1 << 3
            return digit if size == one and (digit >> 24, digit >> 16 & 0xFF) == version else None
    return None


def _entries(read: Read, keys: int) -> list[tuple[int, int]]:
    """Name and value of each entry of a dict."""
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
    """Like ``_entries``, from 3.11 on: sizes are logarithms, and no hashes are kept for names."""
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
