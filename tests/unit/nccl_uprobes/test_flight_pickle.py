"""Pickles of plain data load as with pickle; all other pickles are refused without effect."""

from __future__ import annotations

import os
import pickle
import struct
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from probing.api.errors import CorruptTarget, UnsupportedTarget
from probing.diagnosis.flight_recorder.plain_pickle import load_plain

PROTOCOLS = (2, 3, 4, 5)
_SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(1 << 100), 1 << 100)
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary(max_size=300)
)
_KEYS = st.text() | st.integers(-(1 << 53) + 1, (1 << 53) - 1)
PLAIN = st.recursive(
    _SCALARS,
    lambda inner: st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(_KEYS, inner),
    max_leaves=40,
)


class Calls:
    """Pickled, it is a call of ``function``."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self._call = (function, arguments)

    def __reduce__(self) -> Any:
        return self._call


@given(PLAIN, st.sampled_from(PROTOCOLS))
def test_plain_data_is_read_as_pickle_reads_it(value: Any, protocol: int) -> None:
    data = pickle.dumps(value, protocol)
    if protocol == 2 and pickle.dumps(value, 3) != data.replace(b"\x80\x02", b"\x80\x03", 1):
        # Protocol 2 has no bytes: they are a call of a codec there.
        with pytest.raises(UnsupportedTarget):
            load_plain(data)
        return
    assert load_plain(data) == pickle.loads(data)


def test_a_repeated_value_is_one_object() -> None:
    shared = ["x" * 20]
    first, second = load_plain(pickle.dumps([shared, shared]))
    assert first is second


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_call_is_refused_and_not_made(protocol: int, tmp_path: Path) -> None:
    made = tmp_path / "made"
    with pytest.raises(UnsupportedTarget, match="plain data"):
        load_plain(pickle.dumps({"entries": [Calls(os.system, f"touch {made}")]}, protocol))
    assert not made.exists()


@pytest.mark.parametrize(
    "data",
    [
        b"\x80\x02cos\nsystem\n.",
        b"\x80\x02(S'true'\nios\nsystem\n.",
        b"\x80\x02P1\n.",
        b"\x80\x04K\x01Q.",
        b"\x80\x02\x82\x01.",
        b"\x80\x02}}b.",
        b"\x80\x05\x97.",
        b"\x80\x04\x8f.",
        b"I1\n.",
    ],
    ids=["global", "inst", "persid", "binpersid", "ext", "build", "buffer", "set", "protocol 0"],
)
def test_other_opcodes_are_refused(data: bytes) -> None:
    with pytest.raises(UnsupportedTarget):
        load_plain(data)


def test_repetition_of_repetition_costs_no_memory() -> None:
    # Each list holds the one before ten times: 10 ** 60 leaves in a few hundred bytes.
    body = b"".join(b"](" + b"h" + bytes([i]) + (b"h" + bytes([i])) * 9 + b"eq" + bytes([i + 1]) for i in range(60))
    value = load_plain(b"\x80\x02(]q\x00" + body + b"l.")
    assert len(value) == 61
    assert len(value[-1]) == 10
    assert all(inner is value[-2] for inner in value[-1])


def test_deep_nesting_without_marks_needs_no_recursion() -> None:
    depth = 200_000
    value = load_plain(b"\x80\x02" + b"]" * depth + b"a" * (depth - 1) + b".")
    for _ in range(depth - 1):
        (value,) = value
    assert value == []


def test_deep_nesting_of_marks_is_refused() -> None:
    with pytest.raises(UnsupportedTarget, match="deeper"):
        load_plain(b"\x80\x02" + b"(" * 1000 + b"l" * 1000 + b".")


def test_huge_integers_are_refused() -> None:
    with pytest.raises(UnsupportedTarget, match="integer"):
        load_plain(pickle.dumps(1 << 4096))
    with pytest.raises(UnsupportedTarget, match="integer"):
        load_plain(b"\x80\x02\x8b" + struct.pack("<i", -1) + b".")


@pytest.mark.parametrize("key", [(1, 2), 1.5, 1 << 60, None, b"bytes"])
def test_keys_are_texts_or_small_integers(key: Any) -> None:
    with pytest.raises(UnsupportedTarget, match="key"):
        load_plain(pickle.dumps({key: 1}))


@pytest.mark.parametrize("size", ["\x8d", "\x8e"])
def test_a_size_beyond_the_file_allocates_nothing(size: str) -> None:
    with pytest.raises(CorruptTarget, match="ends"):
        load_plain(b"\x80\x04" + size.encode("latin-1") + struct.pack("<Q", 1 << 62) + b"x.")


@given(PLAIN, st.data())
def test_a_pickle_that_is_cut_is_an_error(value: Any, data: Any) -> None:
    whole = pickle.dumps(value, 4)
    cut = data.draw(st.integers(0, len(whole) - 1))
    with pytest.raises(CorruptTarget):
        load_plain(whole[:cut])


@given(st.binary(max_size=400))
def test_any_bytes_give_a_value_or_a_typed_error(data: bytes) -> None:
    for start in (b"", b"\x80\x02", b"\x80\x04("):
        with suppress(CorruptTarget, UnsupportedTarget):
            load_plain(start + data)


@given(PLAIN, st.data())
def test_a_pickle_with_changed_bytes_gives_a_value_or_a_typed_error(value: Any, data: Any) -> None:
    spoilt = bytearray(pickle.dumps(value, data.draw(st.sampled_from(PROTOCOLS))))
    for _ in range(data.draw(st.integers(1, 6))):
        spoilt[data.draw(st.integers(0, len(spoilt) - 1))] = data.draw(st.integers(0, 255))
    with suppress(CorruptTarget, UnsupportedTarget):
        load_plain(bytes(spoilt))
