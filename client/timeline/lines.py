"""Builds lines of JSON, one for each row, which Arrow joins from constant texts and columns."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from probing.client.timeline.coding import UNKNOWN, Ints, Reals

__all__ = ("chosen", "content", "decimals", "integers", "joined", "microseconds", "quoted")


def quoted(text: str) -> str:
    """Returns ``text`` as JSON."""
    return json.dumps(text)


def chosen(texts: Sequence[str], index: Ints) -> Any:
    """Returns the text at each index."""
    return pa.array(texts, pa.string()).take(np.asarray(index, np.int64))


def integers(values: Ints) -> Any:
    """Returns whole numbers as JSON, ``null`` for UNKNOWN."""
    numbers: Any = pa.array(values, mask=values == UNKNOWN)
    return pc.fill_null(numbers.cast(pa.string()), "null")


def decimals(values: Reals) -> Any:
    """Returns finite numbers as JSON."""
    return pc.cast(pa.array(values), pa.string())


def microseconds(ns: Ints) -> Any:
    """Returns times in ns, which must not be negative, as µs with three decimals."""
    whole, rest = np.divmod(ns, 1000)
    parts: list[Any] = [pc.cast(pa.array(part), pa.string()) for part in (whole, rest)]
    return pc.binary_join_element_wise(parts[0], pc.utf8_lpad(parts[1], 3, "0"), ".")


def joined(*parts: Any) -> Any:
    """Returns a line for each row: constant texts and columns of texts, one after the other."""
    return pc.binary_join_element_wise(*parts, "")


def content(lines: Any) -> memoryview:
    """Returns the bytes of all ``lines``, one after the other."""
    if not len(lines):
        return memoryview(b"")
    _, offsets, data = lines.buffers()
    first, last = np.frombuffer(offsets, np.int32)[[lines.offset, lines.offset + len(lines)]].tolist()
    return memoryview(data)[first:last]
