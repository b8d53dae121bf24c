"""Finds the code that a process is to run. The process has already mapped all this code: nothing is loaded into it.

Two instruction sequences are found in the C library by their bytes. An address in a request is accepted only if it
lies in executable memory of a file.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from probing.api.errors import TargetError, UnsupportedTarget, UsageError
from probing.daemon.processes.memory import Memory
from probing.daemon.processes.procfs import Mapping as Mapped

__all__ = (
    "EMPTY_SET",
    "SYMBOLS",
    "Functions",
    "Instructions",
    "free_address",
    "in_c_library",
    "instructions_of",
    "no_c_library",
)

# Exported by every CPython from 3.8 to 3.15.
SYMBOLS = ("Py_AddPendingCall", "PyRun_SimpleString", "_PyEval_EvalFrameDefault", "_PyRuntime")
# Of the C library: writes zeros to its argument, 8 bytes (glibc since 2.28, musl) or 128, and returns 0 (sigsetops(3)).
EMPTY_SET = "sigemptyset"
# If the symbol of the evaluation loop has at least this many bytes, the loop is one function. Such a loop has 34 KB in
# 3.8 and 51 KB in 3.12. If each instruction is a function of its own, the symbol has at most 2 KB.
_LEAST_LOOP = 8 << 10
_C_LIBRARIES = (b"/libc.so.6", b"/libc-2.", b"/ld-musl-", b"/libc.musl-")
# The bytes of `syscall; ret`, and of `mov $15, %rax; syscall`, which calls rt_sigreturn.
_SYSCALL, _SIGRETURN = b"\x0f\x05\xc3", b"\x48\xc7\xc0\x0f\x00\x00\x00\x0f\x05"
_CHUNK, _MOST_TEXT = 1 << 20, 16 << 20
_PAGE = 4096
_LOWEST, _HIGHEST = 1 << 32, 1 << 47
_ROOM = 1 << 30


class Functions(NamedTuple):
    """Addresses in the process. ``empty_set``: the function EMPTY_SET; ``loop`` and ``loop_end``: the evaluation loop;
    ``runtime``: ``_PyRuntime``."""

    add_pending_call: int
    run_string: int
    empty_set: int
    loop: int
    loop_end: int
    runtime: int
    runtime_bytes: int

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], maps: Sequence[Mapped]) -> Functions:
        """Returns the functions that a request names. Raises UsageError if an address is not in the code of a file."""
        try:
            functions = cls(*(int(data[name]) for name in cls._fields))
        except (KeyError, TypeError, ValueError) as e:
            raise UsageError("the request to run code lacks addresses of the interpreter's functions") from e
        if not all(functions.program(maps, at) for at in functions[:5]):
            raise UsageError("the request to run code names addresses without code")
        return functions

    def to_dict(self) -> dict[str, int]:
        return self._asdict()

    @property
    def has_loop(self) -> bool:
        """Whether the evaluation loop is one function, as in CPython 3.8 to 3.12 built by GCC."""
        return self.loop_end - self.loop >= _LEAST_LOOP

    def program(self, maps: Sequence[Mapped], at: int = 0) -> Mapped | None:
        """Returns the executable mapping of a file that contains ``at``, or, if ``at`` is 0, ``add_pending_call``."""
        at = at or self.add_pending_call
        return next((m for m in maps if m.start <= at < m.end and m.executable and m.inode), None)


class Instructions(NamedTuple):
    """Addresses of two instruction sequences of the C library."""

    system_call: int
    restorer: int


def instructions_of(memory: Memory, maps: Iterable[Mapped]) -> Instructions:
    """Returns the addresses of both sequences in the C library. Raises UnsupportedTarget if they are not found."""
    for mapping in maps:
        if mapping.executable and in_c_library(mapping):
            at = _search(memory, mapping)
            if at[_SYSCALL] and at[_SIGRETURN]:
                return Instructions(at[_SYSCALL], at[_SIGRETURN])
    raise no_c_library()


def in_c_library(mapping: Mapped) -> bool:
    return any(name in mapping.path for name in _C_LIBRARIES)


def no_c_library() -> UnsupportedTarget:
    """Returns the error for a process whose C library cannot be used."""
    return UnsupportedTarget(
        "the process has no C library with which code can be run",
        hint="use `probingctl vars` or `stacks`; eval needs glibc or musl as a shared library",
    )


def _search(memory: Memory, mapping: Mapped) -> dict[bytes, int]:
    found = {_SYSCALL: 0, _SIGRETURN: 0}
    end = min(mapping.end, mapping.start + _MOST_TEXT)
    for start in range(mapping.start, end, _CHUNK - 16):
        data = memory.read_many([(start, min(_CHUNK, end - start))])[0] or b""
        for pattern in found:
            if not found[pattern] and (at := data.find(pattern)) >= 0:
                found[pattern] = start + at
    return found


def free_address(maps: Sequence[Mapped], size: int) -> int:
    """Returns a random address, far from all mappings, at which ``size`` bytes are free."""
    below = [m for m in maps if m.end < _HIGHEST]
    gaps = zip([_LOWEST, *(m.end for m in below)], [*(m.start for m in below), _HIGHEST], strict=True)
    roomy = [(start + _ROOM, end - _ROOM - size) for start, end in gaps if end - start > 4 * _ROOM]
    if not roomy:
        hint = "its mappings take nearly all of its addresses"
        raise TargetError("the process's address space has no free range of 4 GiB", hint=hint)
    start, end = max(roomy, key=lambda gap: gap[1] - gap[0])
    return (start + int.from_bytes(os.urandom(7), "little") % (end - start)) & -_PAGE
