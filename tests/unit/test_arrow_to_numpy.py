"""Integers of Arrow arrays without pyarrow.compute, whatever part of an array they are."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from probing.daemon.arrow_to_numpy import integers, texts_and_indices

VALUES = st.lists(st.none() | st.integers(0, 2**31 - 1), max_size=70)


@pytest.mark.parametrize("kind", [pa.int32(), pa.int64(), pa.timestamp("ns")], ids=str)
@given(values=VALUES, cut=st.integers(0, 70))
def test_integers(kind: pa.DataType, values: list[int | None], cut: int) -> None:
    array = pa.array(values, kind).slice(cut)
    assert integers(array).tolist() == [-1 if v is None else v for v in values[cut:]]
    assert integers(array, 7).dtype == np.int64


@given(st.lists(st.none() | st.sampled_from(["a", "b", "c"]), max_size=70), st.integers(0, 70))
def test_texts(values: list[str | None], cut: int) -> None:
    texts, indices = texts_and_indices(pa.array(values, pa.string()).dictionary_encode().slice(cut))
    assert [texts[i] for i in indices] == values[cut:]
