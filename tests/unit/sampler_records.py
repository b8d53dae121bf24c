"""Records of the sampler made by hand, and a ring that holds them."""

from __future__ import annotations

import os
import re
import zlib
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from probing.daemon.bpf.build import FOLDER
from probing.daemon.python_stack.sampling.codes import SampledCode, code_check
from probing.daemon.python_stack.sampling.line_index import line_index

__all__ = ("FRAMES", "SAMPLE", "SLOT", "START", "TWO_LINES", "FakeRing", "code", "record")

FRAMES = 128
START = 70_000_000
SLOT = 2112
_C_TYPES = {"__u64": "<u8", "__s32": "<i4", "__u32": "<u4", "__u16": "<u2", "__u8": "u1"}


def _fields(text: str, name: str) -> list[tuple[Any, ...]]:
    """The members of a struct of scalars in C, which leaves no holes: the kernel's records may have none."""
    body = re.search(rf"struct {name} {{(.*?)\n}};", text, re.DOTALL)
    assert body, name
    return [(m[2], _C_TYPES[m[1]]) for m in re.finditer(r"^\t(__\w+) (\w+);", body[1], re.MULTILINE)]


@lru_cache(maxsize=1)
def _sample() -> np.dtype[Any]:
    text = (Path(FOLDER) / "python.bpf.h").read_text()
    frame = np.dtype(_fields(text, "python_frame"))
    return np.dtype([*_fields(text, "python_sample"), ("frames", frame, (FRAMES,))])


SAMPLE = _sample()


def record(*frames: tuple[int, int, int], **values: Any) -> np.ndarray[Any, Any]:
    """One sample with frames (code, offset, check), innermost first."""
    found = np.zeros(1, SAMPLE)
    standard = {"tgid": 2, "tid": 2, "start_ns": START, "ktime": 1_000, "kind": 1, "depth": len(frames)}
    for name, value in {**standard, "hash": hash(frames) & (1 << 64) - 1, **values}.items():
        found[name] = value
    for index, frame in enumerate(frames):
        found["frames"][0][index] = frame
    return found


# One instruction in the first line and one two lines below it, in CPython 3.11's format.
TWO_LINES = bytes([0x80 | 13 << 3, 0, 0x80 | 13 << 3, 4])


def code(func: str, first_line: int = 1, file: str = "a.py", table: bytes = TWO_LINES) -> tuple[int, SampledCode]:
    """(check, code) with a line table in CPython 3.11's format."""
    name = zlib.crc32(func.encode())
    check = code_check(zlib.crc32(file.encode()), name, 1 << 20, first_line, name)
    return check, SampledCode(func, file, first_line, line_index("locations", table, first_line))


class Peeked(NamedTuple):
    records: np.ndarray[Any, Any]
    position: int


class FakeRing:
    """A ring of records in a list; ``push`` wakes the reader on request."""

    def __init__(self) -> None:
        self.records: list[np.ndarray[Any, Any]] = []
        self.position = 0
        self.size = 64 * SLOT
        self._event = os.eventfd(0, os.EFD_NONBLOCK)

    @property
    def backlog(self) -> int:
        return len(self.records) * SLOT - self.position

    def fileno(self) -> int:
        return self._event

    def push(self, *records: np.ndarray[Any, Any], wake: bool = True) -> None:
        self.records += records
        if wake:
            os.eventfd_write(self._event, 1)

    def peek(self, position: int, max_bytes: int) -> Peeked:
        first = position // SLOT
        taken = self.records[first : first + max(1, max_bytes // SLOT)]
        records = np.concatenate(taken) if taken else np.empty(0, SAMPLE)
        return Peeked(records, position + len(taken) * SLOT)

    def close(self) -> None:
        os.close(self._event)
