"""Records of the sampler, made by hand."""

from __future__ import annotations

import re
import zlib
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from probing.daemon.bpf.build import FOLDER
from probing.daemon.python_stack.sampled_codes import SampledCode, code_check

__all__ = ("FRAMES", "SAMPLE", "START", "code", "record")

FRAMES = 128
START = 70_000_000
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


def code(func: str, first_line: int = 1, file: str = "a.py") -> tuple[int, SampledCode]:
    """(check, code) with one instruction in its first line and one two lines below it, in CPython 3.11's format."""
    table = bytes([0x80 | 13 << 3, 0, 0x80 | 13 << 3, 4])
    check = code_check(zlib.crc32(file.encode()), zlib.crc32(func.encode()), 1 << 20, first_line)
    return check, SampledCode(func, file, first_line, table)
