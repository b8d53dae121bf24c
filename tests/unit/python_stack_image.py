"""Builds the memory of a small CPython by a layout, so that it can then be spoilt."""

from __future__ import annotations

import struct

from probing.daemon.python_stack.layouts import Layout
from probing.daemon.python_stack.memory import FakeMemory

__all__ = ("Image", "debug_offsets")

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

    def frame(self, code: int, previous: int, *, units: int = 0, owner: int = 0) -> int:
        layout = self.layout
        address = self.room(layout.frame_size)
        self.word(address + layout.frame_previous, previous)
        self.word(address + layout.frame_code, code | (1 if layout.tag_mask else 0))
        if layout.code_adaptive is not None:
            self.word(address + layout.frame_instr, code + layout.code_adaptive + 2 * units)
        else:
            lasti = units if layout.instr == "lasti_units" else 2 * units
            self.put(address + layout.frame_instr, struct.pack("<i", lasti))
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


def debug_offsets(minor: int, **changed: int) -> bytes:
    """What CPython 3.13 or 3.14 (x86-64) has at the begin of _PyRuntime; ``changed`` words by their names."""
    main = int(minor > 13)
    blocks: dict[str, tuple[int, dict[str, int]]] = {
        "runtime": (24, {"size": 400_000, "finalizing": 600, "interpreters_head": 808 if main else 632}),
        "interpreter": (48, dict.fromkeys(["size"], 200_000)),
        "thread": (176 if main else 152, {"size": 304, "prev": 0, "next": 8, "interp": 16, "current_frame": 72}),
        "frame": (248 if main else 224, {"size": 88, "previous": 8, "executable": 0, "instr_ptr": 56, "locals": 80}),
        "code": (312 if main else 272, {"size": 216, "filename": 112, "name": 120, "qualname": 128, "linetable": 136}),
        "unicode": (616 if main else 536, {"size": 64, "state": 32, "length": 16, "asciiobject_size": 40}),
    }
    blocks["interpreter"][1].update({"id": 7300, "next": 7272 if main else 7264, "threads_head": 7344})
    if main:
        blocks["interpreter"][1]["threads_main"] = 7352
    rest = ("gc", "imports", "sysdict", "builtins")
    blocks["interpreter"][1].update(dict.fromkeys(rest, 7400))
    blocks["interpreter"][1].update({"ceval_gil": 16, "gil": 9000, "enabled": 0})
    blocks["interpreter"][1].update({"gil_locked": 9016, "gil_holder": 9008})
    blocks["thread"][1].update({"thread_id": 152, "native_thread_id": 160, "datastack_chunk": 232, "status": 40})
    blocks["frame"][1]["owner"] = 74 if main else 70
    blocks["code"][1].update({"firstlineno": 68, "argcount": 52, "names": 96, "kinds": 104})
    blocks["code"][1]["co_code_adaptive"] = 208 if main else 200
    data = bytearray(1024)
    hexversion = changed.get("hexversion", 3 << 24 | minor << 16 | 0x0AF0)
    struct.pack_into("<8sQQ", data, 0, b"xdebugpy", hexversion, changed.get("free_threaded", 0))
    for block, (start, fields) in blocks.items():
        for i, (name, value) in enumerate(fields.items()):
            struct.pack_into("<Q", data, start + 8 * i, changed.get(f"{block}_{name}", value))
    return bytes(data)
