"""Tries whether a program may call global functions while it disables preemption: ``load_guarded(disable, enable)``.

Kernels before the Linux commit "bpf: Summarize sleepable global subprogs" (in v6.15) refuse such a call, as 6.12 does,
which has the functions that disable preemption. Whether a function is global is in its BTF, so this loads some.
"""

from __future__ import annotations

import os
import struct

from probing.daemon.bpf import syscalls

__all__ = ("load_guarded",)

_PROG_KPROBE = 2
_KIND_INT, _KIND_FUNC, _KIND_FUNC_PROTO = 1, 12, 13
_GLOBAL, _SIGNED, _BITS = 1, 1 << 24, 32
_MAGIC, _HEADER_BYTES = 0xEB9F, 24
_NAMES = b"\0int\0program\0function\0"
_PROGRAM, _FUNCTION = 3, 4
_FUNCTION_AT = 5
_RETURN_0 = struct.pack("<BBhiBBhi", 0xB7, 0, 0, 0, 0x95, 0, 0, 0)


def load_guarded(disable: int, enable: int) -> int:
    """Returns the descriptor of such a program; takes the BTF ids of the kernel's functions. Raises OSError."""
    btf = syscalls.load_btf(_types())
    try:
        return syscalls.load_program(_PROG_KPROBE, _code(disable, enable), btf=btf, functions=_FUNCTIONS)
    finally:
        os.close(btf)


# struct bpf_func_info: where each function begins, and its type.
_FUNCTIONS = struct.pack("<IIII", 0, _PROGRAM, _FUNCTION_AT, _FUNCTION)


def _types() -> bytes:
    """Returns the BTF of two global functions ``int (void)`` (include/uapi/linux/btf.h)."""
    types = (
        struct.pack("<IIII", _NAMES.index(b"int"), _KIND_INT << 24, 4, _SIGNED | _BITS),
        struct.pack("<III", 0, _KIND_FUNC_PROTO << 24, 1),
        struct.pack("<III", _NAMES.index(b"program"), _KIND_FUNC << 24 | _GLOBAL, 2),
        struct.pack("<III", _NAMES.index(b"function"), _KIND_FUNC << 24 | _GLOBAL, 2),
    )
    body = b"".join(types)
    return struct.pack("<HBBIIIII", _MAGIC, 1, 0, _HEADER_BYTES, 0, len(body), len(body), len(_NAMES)) + body + _NAMES


def _code(disable: int, enable: int) -> bytes:
    def call(source: int, target: int) -> bytes:
        return struct.pack("<BBhi", 0x85, source << 4, 0, target)

    own, of_kernel = 1, 2
    return call(of_kernel, disable) + call(own, _FUNCTION_AT - 2) + call(of_kernel, enable) + _RETURN_0 + _RETURN_0
