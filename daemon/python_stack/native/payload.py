"""Encodes copies of C stacks, which go from a reader through the collector to a parser.

The bytes are the length of a JSON object (u32), the object, and the copied stacks in sequence. The collector relays
the bytes without parsing the stacks.
"""

from __future__ import annotations

import json
import struct
from typing import NamedTuple, TypedDict

from probing.api.errors import CorruptTarget
from probing.daemon.processes.procfs import clean_text

__all__ = ("MAX_MAPPINGS", "MAX_STACK", "MAX_THREADS", "Captured", "CodeMapping", "StackCopy", "Unwound")

MAX_THREADS = 4096
MAX_MAPPINGS = 4096
MAX_STACK = 256 << 10
MAX_PATH = 256
_LENGTH = struct.Struct("<I")
_WORD = 1 << 64


class CodeMapping(NamedTuple):
    """An executable mapping. ``inode`` 0: anonymous memory. ``path`` is printable."""

    start: int
    end: int
    offset: int
    major: int
    minor: int
    inode: int
    path: str


class StackCopy(NamedTuple):
    """The copied stack of a blocked thread. ``pc`` and ``sp`` are the thread's registers, ``data`` is its stack from
    address ``low`` on. ``reason`` says why there is no copy: ``runs``, ``gone``, ``refused`` or ``limit``.
    """

    tid: int
    pc: int = 0
    sp: int = 0
    low: int = 0
    data: bytes = b""
    reason: str = ""


class Unwound(TypedDict):
    """A parser's answer. ``need``: the starts of mappings whose files the parser lacks. If there are any, the other
    fields are empty. ``threads``: (tid, [(index in ``codes``, ip), ...], reason), with the innermost frame first. The
    reason says why frames are missing. ``codes``: (func, file)."""

    need: list[int]
    threads: list[tuple[int, list[tuple[int, int]], str]]
    codes: list[tuple[str, str]]


class Captured(NamedTuple):
    """The threads of a process, and its executable mappings in the order of their addresses."""

    pid: int
    start_ns: int
    threads: tuple[StackCopy, ...]
    mappings: tuple[CodeMapping, ...]

    def encode(self) -> bytes:
        text = json.dumps(
            {
                "pid": self.pid,
                "start_ns": self.start_ns,
                "threads": [[t.tid, t.pc, t.sp, t.low, len(t.data), t.reason] for t in self.threads],
                "mappings": self.mappings,
            },
            separators=(",", ":"),
        ).encode()
        return b"".join((_LENGTH.pack(len(text)), text, *(t.data for t in self.threads)))

    @classmethod
    def decode(cls, data: bytes) -> Captured:
        """Decodes the bytes of ``encode``. Raises CorruptTarget for any other bytes."""
        try:
            (length,) = _LENGTH.unpack_from(data)
            text = json.loads(data[_LENGTH.size : _LENGTH.size + length])
            mappings = tuple(_mapping(*m) for m in text["mappings"][:MAX_MAPPINGS])
            threads, at = [], _LENGTH.size + length
            for tid, pc, sp, low, size, reason in text["threads"][:MAX_THREADS]:
                if not 0 <= size <= MAX_STACK or at + size > len(data):
                    raise ValueError("a stack is cut")
                threads.append(
                    StackCopy(_int(tid), _int(pc), _int(sp), _int(low), data[at : at + size], clean_text(reason, 32))
                )
                at += size
            return cls(_int(text["pid"]), _int(text["start_ns"]), tuple(threads), mappings)
        except (struct.error, ValueError, TypeError, KeyError, AttributeError, RecursionError) as e:
            raise CorruptTarget("the copied stacks of a reader are malformed") from e


def _mapping(start: int, end: int, offset: int, major: int, minor: int, inode: int, path: str) -> CodeMapping:
    numbers = (_int(start), _int(end), _int(offset), _int(major), _int(minor), _int(inode))
    return CodeMapping(*numbers, clean_text(path, MAX_PATH))


def _int(value: object) -> int:
    if not isinstance(value, int) or not 0 <= value < _WORD:
        raise ValueError("no number of 64 bits")
    return value
