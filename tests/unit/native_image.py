"""ELF files with call frame information and symbols of the test's choice, as descriptors without a name."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

__all__ = ("CODE", "HEADER", "SIZE", "Function", "cfi", "descriptor", "image", "uleb")

HEADER, FRAMES, SYMBOLS, STRINGS, SECTIONS, CODE, SIZE = 0x1000, 0x2000, 0x8000, 0x9000, 0xA000, 0x10000, 0x20000
# CFA = rsp + 8 and the return address below it: the state at the begin of every function.
AT_ENTRY = b"\x0c\x07\x08\x90\x01"


class Function(NamedTuple):
    """``start`` is from CODE on; ``program`` are its call frame instructions; ``signal``: its frame is a signal's."""

    start: int
    size: int
    program: bytes = b""
    name: str = ""
    signal: bool = False
    info: int = 0x12
    symbol_size: int | None = None


def uleb(value: int) -> bytes:
    out = bytearray()
    while True:
        out.append(value & 0x7F | (0x80 if value > 0x7F else 0))
        value >>= 7
        if not value:
            return bytes(out)


def cfi(functions: Sequence[Function], entry: bytes = AT_ENTRY) -> tuple[bytes, bytes]:
    """.eh_frame_hdr and .eh_frame."""
    frames = bytearray()
    cies = {}
    for signal in (False, True):
        cies[signal] = len(frames)
        augmentation = b"zRS\0" if signal else b"zR\0"
        body = struct.pack("<IB", 0, 1) + augmentation + b"\x01\x78\x10" + b"\x01\x1b" + entry
        frames += struct.pack("<I", len(body)) + body
    table = []
    for function in sorted(functions):
        at = FRAMES + len(frames)
        table.append((CODE + function.start - HEADER, at - HEADER))
        back, begin = at + 4 - FRAMES - cies[function.signal], CODE + function.start - at - 8
        pointers = struct.pack("<Iii", back, begin, function.size)
        body = pointers + b"\x00" + function.program
        frames += struct.pack("<I", len(body)) + body
    header = struct.pack("<BBBBiI", 1, 0x1B, 0x03, 0x3B, FRAMES - HEADER - 4, len(table))
    return header + b"".join(struct.pack("<ii", *pair) for pair in table), bytes(frames)


def image(functions: Sequence[Function], code: dict[int, bytes] | None = None, entry: bytes = AT_ENTRY) -> bytes:
    """A file of SIZE bytes, mapped as a whole at the addresses of its offsets; ``code`` by offset from CODE."""
    data = bytearray(SIZE)
    data[:64] = b"\x7fELF\x02\x01\x01".ljust(16, b"\0") + struct.pack(
        "<HHIQQQIHHHHHH", 3, 62, 1, 0, 64, SECTIONS, 0, 64, 56, 2, 64, 3, 0
    )
    header, frames = cfi(functions, entry)
    data[64:176] = struct.pack("<IIQQQQQQ", 1, 5, 0, 0, 0, SIZE, SIZE, 4096) + struct.pack(
        "<IIQQQQQQ", 0x6474E550, 4, HEADER, HEADER, HEADER, len(header), len(header), 4
    )
    data[HEADER : HEADER + len(header)] = header
    data[FRAMES : FRAMES + len(frames)] = frames
    strings, symbols = bytearray(b"\0"), bytearray(24)
    for function in functions:
        if function.name:
            size = function.size if function.symbol_size is None else function.symbol_size
            symbols += struct.pack("<IBBHQQ", len(strings), function.info, 0, 1, CODE + function.start, size)
            strings += function.name.encode() + b"\0"
    data[SYMBOLS : SYMBOLS + len(symbols)] = symbols
    data[STRINGS : STRINGS + len(strings)] = strings
    sections = [
        bytes(64),
        struct.pack("<IIQQQQIIQQ", 0, 2, 0, 0, SYMBOLS, len(symbols), 2, 0, 8, 24),
        struct.pack("<IIQQQQIIQQ", 0, 3, 0, 0, STRINGS, len(strings), 0, 0, 1, 0),
    ]
    data[SECTIONS : SECTIONS + 192] = b"".join(sections)
    for offset, piece in (code or {}).items():
        data[CODE + offset : CODE + offset + len(piece)] = piece
    return bytes(data)


@contextmanager
def descriptor(data: bytes) -> Iterator[int]:
    fd = os.memfd_create("image")
    try:
        os.write(fd, data)
        yield fd
    finally:
        os.close(fd)
