"""Builds the memory of a small CPython by a layout, so that it can then be spoilt."""

from __future__ import annotations

import struct

from probing.daemon.processes.memory import FakeMemory
from probing.daemon.python_stack.walk.layouts import Layout

__all__ = ("Image", "debug_offsets", "offset_words")

BASE = 0x7F00_0000_0000
SIZE = 1 << 17


class Image:
    """One segment of memory that is filled from its begin. ``runtime`` is the address of ``_PyRuntime``."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.data = bytearray(SIZE)
        self._next = BASE
        self.runtime = self.room(2048)
        self.interpreter = self.room(max(layout.interp_threads, layout.interp_next, layout.interp_gil or 0) + 8)
        self.word(self.runtime + layout.interpreters_head, self.interpreter)
        self._last_thread = self.interpreter + layout.interp_threads - layout.thread_next
        if layout.interp_gil is not None:
            self.gil = self.room(32)
            self.word(self.interpreter + layout.interp_gil, self.gil)

    def memory(self) -> FakeMemory:
        return FakeMemory({BASE: bytes(self.data)}, max_calls=20_000)

    def room(self, size: int) -> int:
        address = self._next
        self._next += (size + 15) & -16
        assert self._next < BASE + SIZE
        return address

    def put(self, address: int, data: bytes) -> None:
        self.data[address - BASE : address - BASE + len(data)] = data

    def word(self, address: int, value: int) -> None:
        self.put(address, struct.pack("<Q", value & (1 << 64) - 1))

    def text(self, text: str) -> int:
        layout, kind = self.layout, 1 if max(text, default=" ") < "\u0100" else 2 if max(text) < "\U00010000" else 4
        data = text.encode({1: "latin-1", 2: "utf-16-le", 4: "utf-32-le"}[kind], "surrogatepass")
        start = layout.str_ascii if text.isascii() else layout.str_compact
        address = self.room(start + len(data) + kind)
        self.word(address + layout.str_length, len(text))
        self.put(address + layout.str_state, bytes([1 | kind << 2 | 1 << 5 | text.isascii() << 6]))
        self.put(address + start, data)
        return address

    def code(self, name: str, file: str, first_line: int, table: bytes) -> int:
        layout = self.layout
        lines = self.room(layout.bytes_data + len(table) + 1)
        self.word(lines + layout.bytes_length, len(table))
        self.put(lines + layout.bytes_data, table)
        address = self.room(max(layout.code_size, layout.code_adaptive or 0) + 16)
        self.word(address + layout.code_name, self.text(name))
        self.word(address + layout.code_filename, self.text(file))
        self.word(address + layout.code_linetable, lines)
        self.put(address + layout.code_firstlineno, struct.pack("<i", first_line))
        return address

    def frame(self, code: int, previous: int, *, units: int = 0, owner: int = 0, linked: bool = True) -> int:
        """A frame called by the one at ``previous``; without one it begins a run of the interpreter loop, or its caller
        is not ``linked`` yet."""
        layout = self.layout
        if linked and not previous and layout.is_shim_from is not None and owner < layout.is_shim_from:
            previous = self.frame(0, 0, owner=layout.is_shim_from)
        address = self.room(layout.frame_size)
        if linked and not previous and layout.frame_entry is not None:
            self.put(address + layout.frame_entry, b"\1")
        self.word(address + layout.frame_previous, previous)
        self.word(address + layout.frame_code, code | (1 if layout.tag_mask else 0))
        if layout.code_adaptive is not None:
            self.word(address + layout.frame_instr, code + layout.code_adaptive + 2 * units)
        else:
            lasti = units if layout.instr == "lasti_units" else 2 * units
            self.put(address + layout.frame_instr, struct.pack("<i", lasti))
        if layout.frame_stack is not None and layout.frame_stack_size == 8:
            self.word(address + layout.frame_stack, address)
        if layout.frame_owner is not None:
            self.put(address + layout.frame_owner, bytes([owner]))
        return address

    def thread(self, frame: int, native_id: int, *, gil: bool = False) -> int:
        layout = self.layout
        address, pthread = self.room(layout.thread_size), self.room(1024)
        self.word(self._last_thread + layout.thread_next, address)
        self._last_thread = address
        self.word(address + layout.thread_interp, self.interpreter)
        self.word(address + layout.thread_id, pthread)
        self.word(pthread, pthread)
        self.put(pthread + 720, struct.pack("<i", native_id))
        if layout.native_thread_id is not None:
            self.word(address + layout.native_thread_id, native_id)
        if layout.cframe_frame is not None:
            cframe = self.room(32)
            self.word(cframe + layout.cframe_frame, frame)
            frame = cframe
        self.word(address + layout.thread_frame, frame)
        if gil and layout.runtime_current is not None:
            self.word(self.runtime + layout.runtime_current, address)
        elif gil:
            self.word(self.gil + layout.gil_holder, address)
            self.put(self.gil + layout.gil_locked, struct.pack("<i", 1))
        return address


# The words of each block as CPython 3.13.0, 3.14.10 and 3.15.2 (x86-64, glibc) have them.
_WORDS = {
    13: {
        "runtime": (24, {"size": 283320, "finalizing": 608, "interpreters_head": 632}),
        "interpreter": (
            48,
            {"size": 194968, "id": 7272, "next": 7264, "threads_head": 7344, "gc": 7400, "imports": 7656}
            | {"sysdict": 7640, "builtins": 7648, "ceval_gil": 16, "gil": 7752, "enabled": 0}
            | {"gil_locked": 7768, "gil_holder": 7760},
        ),
        "thread": (
            152,
            {"size": 304, "prev": 0, "next": 8, "interp": 16, "current_frame": 72, "thread_id": 152}
            | {"native_thread_id": 160, "datastack_chunk": 232, "status": 32},
        ),
        "frame": (
            224,
            {"size": 80, "previous": 8, "executable": 0, "instr_ptr": 56, "locals": 72, "owner": 70},
        ),
        "code": (272, {"co_code_adaptive": 200}),
        "bytes": (512, {"size": 40, "ob_size": 16, "ob_sval": 32}),
        "unicode": (536, {"size": 64, "state": 32, "length": 16, "asciiobject_size": 40}),
    },
    14: {
        "runtime": (24, {"size": 316616, "finalizing": 784, "interpreters_head": 808}),
        "interpreter": (
            48,
            {"size": 225864, "id": 7280, "next": 7272, "threads_head": 7344, "threads_main": 7360, "gc": 7408}
            | {"imports": 7688, "sysdict": 7672, "builtins": 7680, "ceval_gil": 16, "gil": 7784, "enabled": 0}
            | {"gil_locked": 7800, "gil_holder": 7792},
        ),
        "thread": (
            176,
            {"size": 832, "prev": 0, "next": 8, "interp": 16, "current_frame": 72, "thread_id": 152}
            | {"native_thread_id": 160, "datastack_chunk": 232, "status": 32},
        ),
        "frame": (
            248,
            {"size": 88, "previous": 8, "executable": 0, "instr_ptr": 56, "locals": 80, "owner": 74}
            | {"stackpointer": 64, "tlbc_index": 0},
        ),
        "code": (312, {"size": 216, "co_code_adaptive": 208}),
        "bytes": (592, {"size": 40, "ob_size": 16, "ob_sval": 32}),
        "unicode": (616, {"size": 64, "state": 32, "length": 16, "asciiobject_size": 40}),
    },
    15: {
        "runtime": (24, {"size": 346568, "finalizing": 912, "interpreters_head": 936}),
        "interpreter": (
            48,
            {"size": 226240, "id": 7272, "next": 7264, "threads_head": 7336, "threads_main": 7352, "gc": 7400}
            | {"imports": 7592, "sysdict": 7576, "builtins": 7584, "ceval_gil": 16, "gil": 7736, "enabled": 0}
            | {"gil_locked": 7752, "gil_holder": 7744},
        ),
        "thread": (
            176,
            {"size": 888, "prev": 0, "next": 8, "interp": 16, "current_frame": 72, "base_frame": 80}
            | {"last_profiled_frame": 88, "last_profiled_frame_seq": 96, "thread_id": 176}
            | {"native_thread_id": 184, "datastack_chunk": 256, "status": 32, "holds_gil": 36},
        ),
        "frame": (
            312,
            {"size": 88, "previous": 8, "executable": 0, "instr_ptr": 56, "locals": 80, "owner": 74}
            | {"stackpointer": 64, "tlbc_index": 0},
        ),
        "code": (376, {"size": 216, "co_code_adaptive": 208}),
        "bytes": (688, {"size": 40, "ob_size": 16, "ob_sval": 32}),
        "unicode": (712, {"size": 64, "state": 32, "length": 16, "asciiobject_size": 40}),
    },
}
_CODE = {"size": 208, "filename": 112, "name": 120, "qualname": 128, "linetable": 136, "firstlineno": 68} | {
    "argcount": 52,
    "localsplusnames": 96,
    "localspluskinds": 104,
}


def offset_words(minor: int) -> dict[str, int]:
    """Where in the debug offsets of 3.``minor`` each word is, by its name ("thread_next")."""
    return {
        f"{block}_{name}": start + 8 * i
        for block, (start, fields) in _WORDS[minor].items()
        for i, name in enumerate(_CODE | fields if block == "code" else fields)
    }


def debug_offsets(minor: int, **changed: int) -> bytes:
    """What CPython 3.13 to 3.15 (x86-64) has at the begin of _PyRuntime; ``changed`` words by their names."""
    data = bytearray(1024)
    hexversion = changed.get("hexversion", 3 << 24 | minor << 16 | 0x0AF0)
    struct.pack_into("<8sQQ", data, 0, b"xdebugpy", hexversion, changed.get("free_threaded", 0))
    for block, (_, fields) in _WORDS[minor].items():
        for name, value in (_CODE | fields if block == "code" else fields).items():
            key = f"{block}_{name}"
            struct.pack_into("<Q", data, offset_words(minor)[key], changed.get(key, value))
    return bytes(data)
