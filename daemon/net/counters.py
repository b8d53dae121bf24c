"""Computes the growth of counters between two readings, in arrays with a row for each port or interface."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

__all__ = ("UNKNOWN", "Counters", "Differences", "per_second")

# The value of a counter that could not be read.
UNKNOWN = -1
_Integers = npt.NDArray[np.int64]
_Flags = npt.NDArray[np.bool_]


class Differences(NamedTuple):
    """The growth of counters, ``rise[row, counter]``, since the previous reading ``interval`` ns ago. Where ``missing``
    is True, the growth is unknown.
    """

    rise: _Integers
    missing: _Flags
    interval: _Integers
    new: _Flags
    """Rows without a previous reading, or with a counter that decreased: the counters were reset."""


class Counters:
    """Keeps the last reading of each port or interface, by name. Not thread-safe."""

    def __init__(self) -> None:
        self._rows: dict[Hashable, int] = {}
        self._values: _Integers = np.zeros((0, 0), np.int64)
        self._read_ns: _Integers = np.zeros(0, np.int64)

    def read(self, names: Sequence[Hashable], values: _Integers, mono_ns: int) -> Differences:
        """Stores a reading of all present ports or interfaces. Returns its differences to the previous reading.

        ``values[row, counter]`` is UNKNOWN if a counter could not be read. A row in which any counter decreased has no
        differences: it may be another device with the same name.
        """
        count = len(names)
        before = np.full(values.shape, UNKNOWN, np.int64)
        read_ns = np.full(count, mono_ns, np.int64)
        place = np.array([self._rows.get(name, -1) for name in names], np.intp)
        known = place >= 0
        if known.any() and self._values.shape[1] == values.shape[1]:
            before[known] = self._values[place[known]]
            read_ns[known] = self._read_ns[place[known]]
        missing = (before == UNKNOWN) | (values == UNKNOWN)
        rise = np.where(missing, 0, values - before)
        interval = mono_ns - read_ns
        new = ~known | (rise < 0).any(axis=1) | (interval <= 0)
        self._rows = {name: row for row, name in enumerate(names)}
        self._values, self._read_ns = values.copy(), np.full(count, mono_ns, np.int64)
        return Differences(rise, missing | new[:, None], interval, new)


def per_second(rise: _Integers, interval: _Integers, factor: float = 1.0) -> npt.NDArray[np.float64]:
    """Returns ``rise`` times ``factor`` per second of ``interval`` (ns). An interval of 0 counts as 1 ns."""
    return rise * (factor * 1e9) / np.maximum(interval, 1)
