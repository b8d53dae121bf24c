"""Makes numpy arrays from Arrow arrays without pyarrow.compute."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

__all__ = ("integers", "texts_and_indices")


def integers(array: pa.Array[Any], null: int = -1) -> npt.NDArray[np.int64]:
    """Returns the values of ``array``, integers or timestamps, as 64-bit integers; NULL becomes ``null``.

    Reads the buffers directly, because importing pyarrow.compute takes 25 ms and some megabytes.
    """
    kind = f"<{'u' if pa.types.is_unsigned_integer(array.type) else 'i'}{array.type.bit_width // 8}"
    valid: Any
    data: Any
    valid, data = array.buffers()
    end = array.offset + len(array)
    values = np.frombuffer(data, kind, end)[array.offset :].astype(np.int64) if data else np.zeros(len(array), np.int64)
    if valid is not None and array.null_count:
        bits = np.unpackbits(np.frombuffer(valid, np.uint8), count=end, bitorder="little")[array.offset :]
        values[bits == 0] = null
    return values


def texts_and_indices(array: Any) -> tuple[list[str | None], npt.NDArray[np.int64]]:
    """Returns the texts of a dictionary array, with a final None for NULL, and the index of the text of each row."""
    texts = [*array.dictionary.to_pylist(), None]
    return texts, integers(array.indices, len(texts) - 1)
