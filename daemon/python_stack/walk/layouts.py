"""Offsets of CPython's structs that a stack walk reads, by version.

Up to 3.12 the offsets are in a table. They were measured on x86-64 glibc builds, and are constant within a minor
version; one offset differs on arm64. From 3.13 on the target declares the offsets, which are checked: ``_PyRuntime``
begins with ``_Py_DebugOffsets`` (CPython 3.13 ``Include/internal/pycore_runtime.h``, from 3.14 on
``pycore_debug_offsets.h``).
"""

from __future__ import annotations

import platform
from typing import Literal, NamedTuple

from probing.api.errors import CorruptTarget
from probing.daemon.python_stack.walk.debug_offsets import COOKIE, DEBUG_OFFSETS_SIZE, read_debug_offsets, unsupported

__all__ = ("DEBUG_OFFSETS_SIZE", "TABLE", "Layout", "layout_from_debug_offsets", "layout_of")


class Layout(NamedTuple):
    """The layout of a version, as offsets in bytes. An offset is None if the version has no such field.

    ``instr`` is the meaning of the word at ``frame_instr``: ``lasti_bytes`` (3.8, 3.9), ``lasti_units`` (3.10),
    ``previous`` (the last instruction that began, 3.11 and 3.12) or ``current`` (3.13+).
    """

    version: tuple[int, int]
    interpreters_head: int
    interp_next: int
    interp_threads: int
    thread_id: int
    native_thread_id: int | None
    thread_frame: int
    # In 3.11 and 3.12 the thread points at a C frame, which points at the frame at this offset.
    cframe_frame: int | None
    frame_previous: int
    frame_code: int
    frame_instr: int
    frame_owner: int | None
    frame_entry: int | None
    frame_size: int
    code_filename: int
    # The offset of the qualified name (from 3.11 on), and of the plain name, whose hash every code object has.
    code_name: int
    code_short_name: int
    code_firstlineno: int
    code_linetable: int
    code_adaptive: int | None
    code_size: int
    instr: Literal["lasti_bytes", "lasti_units", "previous", "current"]
    lines: Literal["lnotab", "ranges", "locations"]
    str_ascii: int
    str_compact: int
    # Up to 3.11 the runtime points at the thread that holds the only GIL; later each interpreter points at its own GIL.
    runtime_current: int | None = None
    interp_gil: int | None = None
    gil_holder: int = 8
    gil_locked: int = 16
    # Low bits of a pointer that are not part of the address (_PyStackRef, 3.14+).
    tag_mask: int = 0
    # Shows whether the frame's own instructions run. In 3.11 and 3.12 this is an int of four bytes, below 0 while they
    # run; from 3.14 on it is a pointer, NULL while they run.
    frame_stack: int | None = None
    frame_stack_size: int = 4
    # Two bytes that count how often the code was started.
    code_warmup: int | None = None
    thread_next: int = 8
    thread_interp: int = 16
    str_length: int = 16
    str_state: int = 32
    bytes_length: int = 16
    bytes_data: int = 32

    @property
    def thread_size(self) -> int:
        """The number of bytes of a PyThreadState that must be read to get all its fields."""
        last = (self.thread_id, self.native_thread_id or 0, self.thread_frame, self.thread_next, self.thread_interp)
        return max(last) + 8

    @property
    def is_shim_from(self) -> int | None:
        """The lowest owner of shims: frames that are C calls of the interpreter, and no Python code (3.12+)."""
        return None if self.frame_owner is None or self.version < (3, 12) else 3


# The bytes by which ``runtime_current`` moves on arm64. The GIL, which lies before it, has two pthread_mutex_t of 40
# bytes, or of 48 bytes in glibc on arm64 (measured: 3.11).
_MUTEXES = 16 if platform.machine() == "aarch64" else 0


def _before_311(minor: int, current: int, lasti: int) -> Layout:
    return Layout(
        version=(3, minor),
        interpreters_head=32,
        interp_next=0,
        interp_threads=8,
        runtime_current=current + _MUTEXES,
        thread_id=176,
        native_thread_id=None,
        thread_frame=24,
        cframe_frame=None,
        frame_previous=24,
        frame_code=32,
        frame_instr=lasti,
        frame_owner=None,
        frame_entry=None,
        frame_size=112,
        code_filename=104,
        code_name=112,
        code_short_name=112,
        code_firstlineno=40,
        code_linetable=120,
        code_adaptive=None,
        code_size=128,
        instr="lasti_units" if minor == 10 else "lasti_bytes",
        lines="ranges" if minor == 10 else "lnotab",
        str_ascii=48,
        str_compact=72,
    )


TABLE = {
    (3, 8): _before_311(8, 1368, 104),
    (3, 9): _before_311(9, 568, 104),
    (3, 10): _before_311(10, 568, 96),
    (3, 11): Layout(
        version=(3, 11),
        interpreters_head=40,
        interp_next=0,
        interp_threads=16,
        runtime_current=576 + _MUTEXES,
        thread_id=152,
        native_thread_id=160,
        thread_frame=56,
        cframe_frame=8,
        frame_previous=48,
        frame_code=32,
        frame_instr=56,
        frame_owner=69,
        frame_stack=64,
        frame_entry=68,
        frame_size=72,
        code_filename=112,
        code_name=128,
        code_short_name=120,
        code_firstlineno=72,
        code_linetable=136,
        code_adaptive=184,
        code_warmup=52,
        code_size=144,
        instr="previous",
        lines="locations",
        str_ascii=48,
        str_compact=72,
    ),
    (3, 12): Layout(
        version=(3, 12),
        interpreters_head=40,
        interp_next=0,
        interp_threads=72,
        interp_gil=384,
        thread_id=136,
        native_thread_id=144,
        thread_frame=56,
        cframe_frame=0,
        frame_previous=8,
        frame_code=0,
        frame_instr=56,
        frame_owner=70,
        frame_stack=64,
        frame_entry=None,
        frame_size=72,
        code_filename=112,
        code_name=128,
        code_short_name=120,
        code_firstlineno=68,
        code_linetable=136,
        code_adaptive=192,
        code_size=144,
        instr="previous",
        lines="locations",
        str_ascii=40,
        str_compact=56,
    ),
}


def layout_of(version: tuple[int, int], runtime: bytes) -> Layout:
    """Returns the layout of a CPython ``version``, whose ``_PyRuntime`` begins with the bytes ``runtime``.

    Raises UnsupportedTarget for an unknown version, CorruptTarget for impossible offsets.
    """
    if layout := TABLE.get(version):
        return layout
    if runtime.startswith(COOKIE):
        return layout_from_debug_offsets(runtime)
    if version < (3, 8):
        raise unsupported(version)
    raise CorruptTarget(f"the runtime of CPython {version[0]}.{version[1]} does not begin with its debug offsets")


def layout_from_debug_offsets(runtime: bytes) -> Layout:
    """Returns the layout that a CPython 3.13 or later declares in the first bytes of its ``_PyRuntime``.

    Raises NotPython without the cookie, UnsupportedTarget for an unknown version or build, CorruptTarget for an
    impossible offset.
    """
    return _declared(*read_debug_offsets(runtime))


def _declared(version: tuple[int, int], read: dict[str, dict[str, int]]) -> Layout:
    interpreter, thread, frame = read["interpreter"], read["thread"], read["frame"]
    code, text, data = read["code"], read["unicode"], read["bytes"]
    return Layout(
        version=version,
        interpreters_head=read["runtime"]["interpreters_head"],
        interp_next=interpreter["next"],
        interp_threads=interpreter["threads_head"],
        interp_gil=interpreter["ceval_gil"],
        # Both offsets are relative to the start of PyInterpreterState, which embeds the struct of the GIL. Their
        # difference is the offset within this struct.
        gil_holder=_inside("gil_holder", interpreter["gil_holder"] - interpreter["gil"]),
        gil_locked=_inside("gil_locked", interpreter["gil_locked"] - interpreter["gil"]),
        thread_next=thread["next"],
        thread_interp=thread["interp"],
        thread_id=thread["thread_id"],
        native_thread_id=thread["native_thread_id"],
        thread_frame=thread["current_frame"],
        cframe_frame=None,
        frame_previous=frame["previous"],
        frame_code=frame["executable"],
        frame_instr=frame["instr_ptr"],
        frame_owner=frame["owner"],
        frame_entry=None,
        frame_stack=frame.get("stackpointer"),
        frame_stack_size=8,
        frame_size=max(frame.values()) + 8,
        code_filename=code["filename"],
        code_name=code["qualname"],
        code_short_name=code["name"],
        code_firstlineno=code["firstlineno"],
        code_linetable=code["linetable"],
        code_adaptive=code["co_code_adaptive"],
        code_size=max(code[name] for name in ("filename", "name", "qualname", "linetable", "firstlineno")) + 8,
        instr="current",
        lines="locations",
        bytes_length=data["ob_size"],
        bytes_data=data["ob_sval"],
        str_state=text["state"],
        str_length=text["length"],
        str_ascii=text["asciiobject_size"],
        # PyCompactUnicodeObject adds utf8_length and utf8.
        str_compact=text["asciiobject_size"] + 16,
        tag_mask=3 if version >= (3, 14) else 0,
    )


def _inside(name: str, offset: int) -> int:
    if not 0 <= offset < 256:
        raise CorruptTarget(f"CPython declares {name} {offset} bytes into its GIL")
    return offset
