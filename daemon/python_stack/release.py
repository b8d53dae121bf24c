"""The release of a CPython that exports no ``Py_Version`` (up to 3.10): what its ``sys.hexversion`` holds.

Offsets: ``PyDictObject`` and ``PyDictKeysObject`` of ``Objects/dict-common.h``, ``PyLongObject`` of
``Include/longintrepr.h``, ``PyInterpreterState.sysdict`` of ``Include/internal/pycore_interp.h`` (3.8 to 3.10).
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence

from probing.daemon.python_stack.layouts import TABLE
from probing.daemon.python_stack.memory import Range

__all__ = ("release_of", "sys_hexversion")

Read = Callable[[Sequence[Range]], Sequence[bytes | None]]

_SYSDICT = {(3, 8): 72, (3, 9): 872, (3, 10): 872}
_DICT_KEYS = 32
_KEYS_HEAD = 40
_MAX_SLOTS = 1 << 12
_NAME = b"hexversion"
_TEXT = 48
_LONG_SIZE, _LONG_DIGIT = 16, 24


def release_of(hexversion: int) -> str:
    """Such as "3.11.7" or "3.13.0b2", of PY_VERSION_HEX (``Include/patchlevel.h``)."""
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
    entries = _entries(read, keys)
    names = read([(name, _TEXT + len(_NAME) + 1) for name, _ in entries])
    for (_, value), text in zip(entries, names, strict=True):
        if text is not None and text[_TEXT:] == _NAME + b"\0":
            number = read([(value, _LONG_DIGIT + 4)])[0]
            # PY_VERSION_HEX of 3.x has less than 30 bits, so it is one digit.
            size, digit = struct.unpack_from("<qI", number or bytes(_LONG_DIGIT + 4), _LONG_SIZE)
            return digit if size == 1 and (digit >> 24, digit >> 16 & 0xFF) == version else None
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


def _word(read: Read, address: int) -> int:
    data = read([(address, 8)])[0] if address > 0 else None
    return int.from_bytes(data or b"", "little")
