"""Looks up source lines in the line tables of sampled code, each of which is decoded once.

``walk.codes.line_of`` decodes a table anew for each instruction. A reader can do this, because it has a deadline. The
thread that drains the rings has no deadline, and a target can fill its tables with whatever takes longest to decode.
The formats are described in ``walk.codes``.
"""

from __future__ import annotations

from array import array

import numpy as np
import numpy.typing as npt

from probing.daemon.python_stack.sampling.codes import NO_LINE, LineIndex, LineTable

__all__ = ("line_index",)


# The maximum bytes of a table that is decoded. Code with a longer table, which is a function with about a hundred
# thousand lines, gets no lines.
MAX_TABLE = 256 << 10
_MAX_LINE = (1 << 31) - 1
# Offsets are ints of 32 bits.
_END = 1 << 31
_Numbers = npt.NDArray[np.int64]


def line_index(kind: LineTable, table: bytes, first_line: int) -> LineIndex:
    """Returns the lines of a table, as ``walk.codes.line_of`` returns them for each offset."""
    if len(table) > MAX_TABLE:
        return LineIndex(array("q"), array("i"))
    data = np.frombuffer(table, np.uint8).astype(np.int64)
    ends, steps, absent = {"lnotab": _lnotab, "ranges": _ranges, "locations": _locations}[kind](data)
    lines = np.cumsum(steps) + first_line
    lines[absent | (lines < 0) | (lines > _MAX_LINE)] = NO_LINE
    last = np.ones(len(lines), bool)
    last[:-1] = lines[1:] != lines[:-1]
    return LineIndex(array("q", ends[last].tobytes()), array("i", lines[last].astype(np.int32).tobytes()))


def _lnotab(data: _Numbers) -> tuple[_Numbers, _Numbers, npt.NDArray[np.bool_]]:
    pairs = data[: len(data) & ~1].reshape(-1, 2)
    # Each pair advances the address first and the line after it, and the last line has no end.
    ends = np.append(np.cumsum(pairs[:, 0]), _END)
    return ends, np.append(0, _signed(pairs[:, 1])), np.zeros(len(ends), bool)


def _ranges(data: _Numbers) -> tuple[_Numbers, _Numbers, npt.NDArray[np.bool_]]:
    pairs = data[: len(data) & ~1].reshape(-1, 2)
    absent = pairs[:, 1] == 0x80
    return np.cumsum(pairs[:, 0]), np.where(absent, 0, _signed(pairs[:, 1])), absent


def _locations(data: _Numbers) -> tuple[_Numbers, _Numbers, npt.NDArray[np.bool_]]:
    # Only the first byte of an entry has its highest bit set; the table begins with an entry.
    begins = data & 0x80 != 0
    begins[:1] = True
    at = np.flatnonzero(begins)
    code = data[at] >> 3 & 15
    steps = np.where((code >= 10) & (code <= 12), code - 10, 0)
    varies = (code == 13) | (code == 14)
    steps[varies] = _signed_varints(data, at[varies] + 1)
    return np.cumsum(2 * ((data[at] & 7) + 1)), steps, code == 15


def _signed_varints(data: _Numbers, at: _Numbers) -> _Numbers:
    values = np.zeros(len(at), np.int64)
    more = np.ones(len(at), bool)
    padded = np.append(data, np.zeros(7, np.int64))
    # A line difference fits into 32 bits, so into six groups of six bits.
    for group in range(6):
        byte = padded[at + group]
        values |= np.where(more, byte & 0x3F, 0) << 6 * group
        more &= byte & 0x40 != 0
    return np.where(values & 1, -(values >> 1), values >> 1)


def _signed(byte: _Numbers) -> _Numbers:
    return np.where(byte > 127, byte - 256, byte)
