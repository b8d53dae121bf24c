"""Objects of this very interpreter, recorded and then spoilt: whatever is read, it ends, and is a value or a reason."""

from __future__ import annotations

import ctypes
import os
import sys
import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from long import examples

from probing.api.errors import CorruptTarget
from probing.daemon.processes.memory import PAGE, FakeMemory, ProcessMemory, Range
from probing.daemon.python_stack.values.attributes import walk
from probing.daemon.python_stack.values.frames import Frames, LocalsReader
from probing.daemon.python_stack.values.heap import Heap, Torn
from probing.daemon.python_stack.values.layout import ObjectLayout, object_layout
from probing.daemon.python_stack.values.objects import Objects
from probing.daemon.python_stack.values.render import Renderer, Value
from probing.daemon.python_stack.walk.layouts import DEBUG_OFFSETS_SIZE, TABLE, layout_of
from probing.daemon.python_stack.walk.walker import RawFrame

MINOR = sys.version_info[:2]
RUNTIME = ctypes.string_at(ctypes.addressof(ctypes.c_char.in_dll(ctypes.pythonapi, "_PyRuntime")), DEBUG_OFFSETS_SIZE)
OWN = object_layout(layout_of(MINOR, RUNTIME), RUNTIME)
MAX_CALLS = 3000


class Slotted:
    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = {"in": [1.5, ("a slot", None)]}


ROOT: dict[Any, Any] = {
    "number": 12345678901234567890,
    "text": "größe 名前",
    "plain": SimpleNamespace(a=1, b=[True, 2.5]),
    "slotted": Slotted(),
    "set": {1, 2, 3},
    3: (b"bytes", frozenset({"x"}), 1 - 2j, Slotted, len, os),
    "list": [{"deep": [[[0]]]}] * 20,
}
PATHS: tuple[tuple[str | int, ...], ...] = (
    (),
    ("plain", "b", 0),
    ("slotted", "value", "in"),
    (3, 1),
    ("list", -1, "deep"),
)


class Recording:
    """The memory of this process; ``pages`` are all that were touched."""

    def __init__(self) -> None:
        self.calls = self.bytes_read = 0
        self.pages: dict[int, bytes] = {}
        self._memory = ProcessMemory(os.getpid())

    def read_many(self, ranges: Sequence[Range]) -> list[bytes | None]:
        for address, size in ranges:
            wanted = [p for p in range(address & -PAGE, address + size, PAGE) if p not in self.pages]
            for page, data in zip(wanted, self._memory.read_many([(p, PAGE) for p in wanted]), strict=True):
                if data is not None:
                    self.pages[page] = data
        return self._memory.read_many(ranges)

    def segments(self) -> dict[int, bytes]:
        found: dict[int, bytearray] = {}
        start, end = 0, -1
        for page, data in sorted(self.pages.items()):
            start = start if page == end else page
            found.setdefault(start, bytearray()).extend(data)
            end = page + PAGE
        return {at: bytes(data) for at, data in found.items()}


def read_all(memory: Any, layout: ObjectLayout, root: int) -> list[Value | CorruptTarget]:
    objects = Objects(Heap(memory, time.monotonic() + 60), layout)
    found: list[Value | CorruptTarget] = []
    for path in PATHS:
        try:
            objects.heap.begin()
            found.append(Renderer(objects).value(walk(objects, root, path)))
            assert objects.heap.held()
        except CorruptTarget as e:
            found.append(e)
    return found


@pytest.fixture(scope="module")
def image() -> dict[int, bytes]:
    recording = Recording()
    found = read_all(recording, OWN, id(ROOT))
    assert [v.text for v in found if isinstance(v, Value)][1:] == [
        "True",
        "[1.5, ('a slot', None)]",
        "frozenset({'x'})",
        "[[[0]]]",
    ]
    return recording.segments()


def spoilt(image: dict[int, bytes], changes: list[tuple[int, int, int]]) -> dict[int, bytes]:
    """``image`` with some of its words replaced by a small number, a wild one, or another address in it."""
    segments = {at: bytearray(data) for at, data in image.items()}
    bases = list(segments)
    total = sum(map(len, segments.values())) // 8
    for where, kind, value in changes:
        at = where % total * 8
        for base in bases:
            if at < len(segments[base]):
                other = bases[value % len(bases)]
                inside = other + value // 7 * 8 % len(segments[other])
                word = (value % 64, value * 0x9E3779B97F4A7C15 % 2**64, inside)[kind]
                segments[base][at : at + 8] = word.to_bytes(8, "little")
                break
            at -= len(segments[base])
    return {at: bytes(data) for at, data in segments.items()}


def interesting(image: dict[int, bytes]) -> list[int]:
    """The words, counted as ``spoilt`` does, that the objects of ROOT begin with."""
    found, before = [], 0
    addresses = [id(o) for o in (ROOT, *ROOT.values(), dict, str, Slotted, SimpleNamespace, ROOT["plain"].b)]
    for base, data in image.items():
        found += [(before + a - base) // 8 for a in addresses if base <= a < base + len(data)]
        before += len(data)
    return found


@settings(max_examples=examples(150), deadline=None)
@given(data=st.data())
def test_a_spoilt_image_gives_values_or_reasons(image: dict[int, bytes], data: st.DataObject) -> None:
    near = interesting(image)
    word = st.one_of(
        st.integers(0, 1 << 24), st.tuples(st.sampled_from(near), st.integers(0, 50)).map(lambda pair: sum(pair))
    )
    changes = data.draw(st.lists(st.tuples(word, st.integers(0, 2), st.integers(0, 1 << 40)), max_size=40))
    memory = FakeMemory(spoilt(image, changes), max_calls=MAX_CALLS)
    for value in read_all(memory, OWN, id(ROOT)):
        if isinstance(value, Value):
            assert value.text is not None or value.reason
            assert len(value.text or "") <= 1024
            assert (value.text or "").isprintable() or "\u2026" in (value.text or "")
    assert memory.calls < MAX_CALLS


@pytest.mark.parametrize("minor", [v for v in TABLE if v != MINOR])
def test_the_layout_of_another_version_ends(image: dict[int, bytes], minor: tuple[int, int]) -> None:
    memory = FakeMemory(image, max_calls=MAX_CALLS)
    layout = object_layout(TABLE[minor], b"")
    assert all(isinstance(v, Value | CorruptTarget) for v in read_all(memory, layout, id(ROOT)))
    assert memory.calls < MAX_CALLS


def own_frame() -> RawFrame:
    """The frame of the caller's caller, as a walk would find it."""
    frame = sys._getframe(1)
    address = id(frame)
    if MINOR >= (3, 11):
        # PyFrameObject.f_frame (Include/internal/pycore_frame.h).
        address = int.from_bytes(ctypes.string_at(id(frame) + 24, 8), "little")
    return RawFrame(address, id(frame.f_code), 0)


def read_locals(memory: Any, frame: RawFrame) -> list[dict[str, Any]]:
    reader = LocalsReader(memory, OWN, time.monotonic() + 60)
    reader.load([frame])
    return reader.read(frame)


@pytest.fixture(scope="module")
def frame_image() -> tuple[dict[int, bytes], RawFrame]:
    number, text, cell, items = 5, "a text", {"in": "a cell"}, [1, 2, (3, None)]
    recording, frame = Recording(), own_frame()
    found = {row["name"]: row["value"] for row in read_locals(recording, frame)}
    assert (lambda: cell)() is cell
    assert (found["number"], found["text"], found["items"]) == ("5", "'a text'", "[1, 2, (3, None)]")
    assert found["cell"] == "{'in': 'a cell'}"
    assert (number, text, items) == (5, "a text", [1, 2, (3, None)])
    return recording.segments(), frame


@settings(max_examples=examples(150), deadline=None)
@given(data=st.data())
def test_a_spoilt_frame_gives_locals_or_reasons(
    frame_image: tuple[dict[int, bytes], RawFrame], data: st.DataObject
) -> None:
    image, frame = frame_image
    near, before = [], 0
    for base, part in image.items():
        near += [(before + a - base) // 8 for a in (frame.address, frame.code) if base <= a < base + len(part)]
        before += len(part)
    word = st.one_of(
        st.integers(0, 1 << 24), st.tuples(st.sampled_from(near), st.integers(0, 30)).map(lambda pair: sum(pair))
    )
    changes = data.draw(st.lists(st.tuples(word, st.integers(0, 2), st.integers(0, 1 << 40)), max_size=40))
    memory = FakeMemory(spoilt(image, changes), max_calls=MAX_CALLS)
    for row in read_locals(memory, frame):
        assert row["value"] is not None or row["reason"]
        assert len(row["value"] or "") <= 1024
    assert memory.calls < MAX_CALLS


def test_nothing_where_an_object_should_be() -> None:
    for address in (0, 8, 7, 1 << 50, (1 << 64) - 8):
        found = read_all(FakeMemory({}), OWN, address)
        assert all(isinstance(v, CorruptTarget) for v in found)


def test_a_frame_that_is_gone_has_no_variables() -> None:
    objects = Objects(Heap(FakeMemory({}), time.monotonic() + 60), OWN)
    frames, frame = Frames(objects), RawFrame(4096 * 8, 4096 * 16, 0)
    frames.load([frame])
    with pytest.raises(CorruptTarget):
        frames.local(frame, "x")
    reader = LocalsReader(FakeMemory({}), objects.layout, time.monotonic() + 60)
    reader.load([frame])
    assert [v["reason"] for v in reader.read(frame)] == ["it changed while it was read"]
    late = LocalsReader(FakeMemory({}), objects.layout, 0.0)
    late.load([frame])
    assert [v["reason"] for v in late.read(frame)] == ["the values could not be read in time"]


class Emptied:
    """The memory of this process, with zeros between ``start`` and ``end``."""

    def __init__(self, start: int, end: int) -> None:
        self.start, self.end = start, end
        self._memory = ProcessMemory(os.getpid())

    def read_many(self, ranges: Sequence[Range]) -> list[bytes | None]:
        found = []
        for (address, _), data in zip(ranges, self._memory.read_many(ranges), strict=True):
            part = bytearray(data or b"")
            first, last = max(self.start - address, 0), min(self.end - address, len(part))
            if first < last:
                part[first:last] = bytes(last - first)
            found.append(None if data is None else bytes(part))
        return found


def test_entries_that_are_not_there_yet_are_no_value() -> None:
    subject = {"a": 23, "b": [7, 5]}
    keys = ctypes.c_uint64.from_address(id(subject) + OWN.dict_keys).value
    whole = Objects(Heap(ProcessMemory(os.getpid()), time.monotonic() + 60), OWN)
    slots = [slot for slot, _, _ in whole.table(keys, 0)]
    assert Renderer(whole).value(id(subject)).text == "{'a': 23, 'b': [7, 5]}"
    for start in (slots[0] - 16, slots[1] - 16):
        heap = Heap(Emptied(start, slots[1] + 8), time.monotonic() + 60)
        with pytest.raises(Torn):
            Renderer(Objects(heap, OWN)).value(id(subject))
