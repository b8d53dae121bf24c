"""What a target declares about itself is believed only when it can be true."""

from __future__ import annotations

import contextlib
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from long import LONG
from python_stack_image import Image, debug_offsets, offset_words

from probing.api.errors import CorruptTarget, NotPython, ProbingError, UnsupportedTarget
from probing.daemon.python_stack.walk.capture import Known, capture
from probing.daemon.python_stack.walk.layouts import TABLE, layout_from_debug_offsets, layout_of


def test_the_table_is_used_without_asking_the_target() -> None:
    assert [v for v in TABLE if layout_of(v, b"") is TABLE[v]] == [(3, 8), (3, 9), (3, 10), (3, 11), (3, 12)]


@pytest.mark.parametrize(
    ("minor", "owner", "mask", "threads", "native"),
    [(13, 70, 0, 7344, 160), (14, 74, 3, 7344, 160), (15, 74, 3, 7336, 184)],
)
def test_declared_offsets(minor: int, owner: int, mask: int, threads: int, native: int) -> None:
    layout = layout_of((3, minor), debug_offsets(minor))
    assert (layout.version, layout.frame_owner, layout.tag_mask) == ((3, minor), owner, mask)
    assert (layout.interp_gil, layout.gil_holder, layout.gil_locked) == (16, 8, 16)
    assert (layout.interp_threads, layout.thread_frame, layout.native_thread_id) == (threads, 72, native)
    assert (layout.code_name, layout.code_linetable, layout.code_firstlineno) == (128, 136, 68)
    assert (layout.str_ascii, layout.str_compact, layout.is_shim_from) == (40, 56, 3)


def test_what_is_not_known() -> None:
    with pytest.raises(UnsupportedTarget, match=r"3\.7"):
        layout_of((3, 7), b"")
    with pytest.raises(UnsupportedTarget, match=r"3\.99"):
        layout_from_debug_offsets(debug_offsets(13, hexversion=0x036309F0))
    with pytest.raises(UnsupportedTarget, match="free-threaded"):
        layout_from_debug_offsets(debug_offsets(13, free_threaded=1))
    with pytest.raises(CorruptTarget):
        layout_of((3, 13), bytes(1024))
    with pytest.raises(NotPython):
        layout_from_debug_offsets(bytes(1024))


@pytest.mark.parametrize(
    "changed",
    [
        {"thread_current_frame": 304},
        {"thread_next": 1 << 63},
        {"frame_owner": 5000},
        {"interpreter_threads_head": 1 << 21},
        {"interpreter_size": 1},
        {"interpreter_gil_holder": 8},
        {"unicode_asciiobject_size": 65},
        {"code_size": 0},
    ],
)
def test_offsets_outside_of_what_they_are_in(changed: dict[str, int]) -> None:
    with pytest.raises(CorruptTarget):
        layout_from_debug_offsets(debug_offsets(13, **changed))


WILD = (0, 1, 4, 12, 16, 24, 72, 255, 4096, 1 << 14, 1 << 20, 1 << 31, 1 << 32, 1 << 63, (1 << 64) - 1)


@pytest.mark.parametrize("minor", [13, 14, 15])
def test_each_word_spoilt(minor: int) -> None:
    """What is declared wrongly is refused, or leads nowhere: never further than a walk may go, nor to another error."""
    right = layout_of((3, minor), debug_offsets(minor))
    image = Image(right)
    code = image.code("f", "/f", 1, b"\x80\0")
    image.thread(image.frame(code, image.frame(code, 0)), 7, gil=True)
    refused = 0
    for number, name in enumerate(offset_words(minor)):
        for value in WILD if LONG else WILD[number % 3 :: 3]:
            try:
                layout = layout_of((3, minor), debug_offsets(minor, **{name: value}))
            except CorruptTarget:
                refused += 1
                continue
            memory = image.memory()
            with contextlib.suppress(ProbingError):
                capture(memory, image.runtime, layout, time.monotonic() + 60, Known())
            assert memory.calls < 100
            assert memory.bytes_read < 4 << 20
    # Most of what is believed then is in words that are not used.
    assert refused > (200 if LONG else 66)


@pytest.mark.parametrize("level", [0xA0, 0xB1])
def test_a_pre_release(level: int) -> None:
    with pytest.raises(UnsupportedTarget, match="pre-release"):
        layout_from_debug_offsets(debug_offsets(14, hexversion=0x030E0000 | level))
    assert layout_from_debug_offsets(debug_offsets(14, hexversion=0x030E00C1)).version == (3, 14)


@given(st.binary(max_size=1100), st.integers(0, 1024), st.sampled_from([13, 14, 15]))
def test_any_bytes_give_a_layout_or_a_typed_error(noise: bytes, at: int, minor: int) -> None:
    data = bytearray(debug_offsets(minor))
    data[at : at + len(noise)] = noise
    try:
        layout = layout_of((3, minor), bytes(data))
    except ProbingError:
        return
    assert layout.thread_size <= 1 << 15
    assert layout.frame_size <= 1 << 15
