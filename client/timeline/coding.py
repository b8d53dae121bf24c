"""Columns of Arrow batches as numpy arrays: numbers, and texts as indices into dictionaries that grow.

Texts come from targets and nodes, so they are escaped and cut. When a dictionary is full, its last entry stands for all
further values.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from probing.api.text import escape

__all__ = (
    "UNKNOWN",
    "Coder",
    "Entries",
    "Ints",
    "Reals",
    "blocks",
    "distinct",
    "encoded",
    "mixed",
    "numbered",
    "numbers",
    "reals",
    "runs",
    "shown",
)

Ints = npt.NDArray[np.int64]
Reals = npt.NDArray[np.float64]
UNKNOWN = -(2**63)
"""The number for NULL, and for an unknown time."""
_OTHERS = "(others)"
_MOST_CHARACTERS = 256
_MOST_KEYS = 1 << 20
_ROWS_A_BLOCK = 32_768
T = TypeVar("T", bound=Hashable)


def shown(text: object, limit: int = _MOST_CHARACTERS) -> str:
    """Returns a text of a row, escaped, on one line of at most ``limit`` characters; empty for NULL."""
    return "" if text is None else escape(str(text), limit)


def numbers(column: pa.Array[Any], unknown: int = UNKNOWN) -> Ints:
    """Returns whole numbers or times (ns) as int64, ``unknown`` in place of NULL."""
    whole: Any = pc.cast(column, pa.int64(), safe=False)
    return np.asarray(pc.fill_null(whole, unknown).to_numpy(zero_copy_only=False))


def reals(column: pa.Array[Any]) -> npt.NDArray[np.float64]:
    """Returns numbers as float64, NaN in place of NULL."""
    return np.asarray(pc.cast(column, pa.float64(), safe=False).to_numpy(zero_copy_only=False), np.float64)


def encoded(column: pa.Array[Any]) -> tuple[list[Any], Ints]:
    """Returns the distinct values of a column that has no NULL, and for each row the index of its value."""
    coded: Any = column.dictionary_encode()
    return coded.dictionary.to_pylist(), np.asarray(coded.indices.to_numpy(), np.int64)


def numbered(values: Ints, number_of: Callable[[int], int]) -> Ints:
    """Returns a number for each value; ``number_of`` is called once for each distinct value."""
    found, where = encoded(pa.array(values))
    return np.array([number_of(value) for value in found], np.int64)[where]


def blocks(rows: Ints) -> Iterator[Ints]:
    """Yields ``rows`` in parts, so that the text or the packets of a part take little memory."""
    for first in range(0, len(rows), _ROWS_A_BLOCK):
        yield rows[first : first + _ROWS_A_BLOCK]


def runs(values: Ints) -> tuple[Ints, Ints]:
    """Returns the starts and the lengths of the runs of equal values."""
    starts = np.flatnonzero(np.r_[True, np.diff(values) != 0][: len(values)])
    return starts, np.diff(np.r_[starts, len(values)])


def mixed(*columns: Ints) -> Ints:
    """Returns a hash of each row of ``columns``, with the finalizer of splitmix64; equal rows have equal hashes."""
    state = np.zeros(len(columns[0]), np.uint64)
    with np.errstate(over="ignore"):
        for column in columns:
            state = state * np.uint64(0x9E3779B97F4A7C15) + column.view(np.uint64)
            state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            state ^= state >> np.uint64(31)
    return state.view(np.int64)


class Entries(Generic[T]):
    """The distinct values of a kind, in the order of their first use. Values beyond ``most`` share ``other``."""

    def __init__(self, most: int, other: T) -> None:
        self.values: list[T] = []
        self._index: dict[T, int] = {}
        self._most = most
        self._other = other

    def __len__(self) -> int:
        return len(self.values)

    def index(self, value: T) -> int:
        if (index := self._index.get(value)) is not None:
            return index
        if len(self.values) >= self._most - 1 and value != self._other:
            return self.index(self._other)
        self._index[value] = len(self.values)
        self.values.append(value)
        return len(self.values) - 1


class Coder:
    """Turns columns of texts into indices of ``entries``, batch by batch; texts have at most ``limit`` characters."""

    def __init__(self, most: int = 65_535, limit: int = _MOST_CHARACTERS) -> None:
        self.entries: Entries[str] = Entries(most, _OTHERS)
        self._limit = limit

    def code(self, text: str) -> int:
        return self.entries.index(text)

    def text(self, code: int) -> str:
        return self.entries.values[code]

    def codes(self, column: pa.Array[Any]) -> Ints:
        """Returns the index of each text; NULL has the index of the empty text."""
        # A node may send texts dictionary-encoded.
        given: Any = column.cast(pa.string())
        filled: Any = pc.fill_null(given, "")
        texts, where = encoded(filled)
        return np.array([self.entries.index(shown(text, self._limit)) for text in texts], np.int64)[where]


def distinct(keys: Ints, entry: Callable[[int], int], indices: dict[int, int]) -> Ints:
    """Returns an index for each of ``keys``: the index in ``indices``; for a new key, the result of ``entry`` for the
    first row with the key.

    New keys are added to ``indices`` until ``indices`` is full.
    """
    values, rows = encoded(pa.array(keys))
    places = np.fromiter((indices.get(key, -1) for key in values), np.int64, len(values))
    if len(fresh := np.flatnonzero(places < 0)):
        first = np.zeros(len(values), np.int64)
        first[rows[::-1]] = np.arange(len(rows) - 1, -1, -1)
        for number in fresh.tolist():
            places[number] = entry(int(first[number]))
            if len(indices) < _MOST_KEYS:
                indices[values[number]] = int(places[number])
    return places[rows]
