"""Demangles names of C++ functions with the C++ library.

Names come from hostile files, and demanglers have had bugs: only a parser, which has no rights, does this.
"""

from __future__ import annotations

import ctypes
import functools

from probing.daemon.processes.procfs import clean_text

__all__ = ("readable",)

MAX_NAME = 512
_MAX_MANGLED = 4096
_MAX_DEMANGLED = 1 << 20


@functools.lru_cache(maxsize=16_384)
def readable(name: bytes) -> str:
    """Returns a symbol's name, demangled if it is a C++ name, printable, of at most 512 characters.

    A longer name loses the arguments of its templates, the innermost first.
    """
    return clean_text(_shortened(_demangled(name).decode("utf-8", "backslashreplace")), MAX_NAME)


def _demangled(name: bytes) -> bytes:
    library = _library()
    # GCC marks a split-off part by a suffix behind a dot, which the C++ library puts into brackets.
    if library is None or not name.startswith((b"_Z", b"__Z")) or len(name) > _MAX_MANGLED:
        return name
    status = ctypes.c_int(-1)
    found = library.__cxa_demangle(name, None, None, ctypes.byref(status))
    if not found:
        return name
    try:
        return ctypes.string_at(found)[:_MAX_DEMANGLED] if status.value == 0 else name
    finally:
        _libc.free(found)


def _shortened(name: str) -> str:
    for depth in (3, 2, 1):
        if len(name) <= MAX_NAME:
            break
        name = _without_arguments(name, depth)
    return name


def _without_arguments(name: str, keep: int) -> str:
    """Replaces all text nested ``keep`` deep in <> by an ellipsis."""
    kept, depth = [], 0
    operator = name.find("operator")
    for at, character in enumerate(name):
        arrow = character == ">" and name[at - 1 : at] == "-"
        named = operator >= 0 and operator + 8 <= at < operator + 11
        if character == "<" and not named:
            depth += 1
            if depth == keep:
                kept.append("<\u2026>")
        elif character == ">" and depth and not arrow and not named:
            if depth < keep:
                kept.append(character)
            depth -= 1
            continue
        if depth < keep:
            kept.append(character)
    return "".join(kept)


@functools.lru_cache(maxsize=1)
def _library() -> ctypes.CDLL | None:
    try:
        library = ctypes.CDLL("libstdc++.so.6")
    except OSError:
        return None
    library.__cxa_demangle.restype = ctypes.c_void_p
    library.__cxa_demangle.argtypes = [ctypes.c_char_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.POINTER(ctypes.c_int)]
    return library


_libc = ctypes.CDLL(None)
_libc.free.restype = None
_libc.free.argtypes = [ctypes.c_void_p]
