"""Answers of processes, addresses and options of command lines: what is hostile or odd is refused, and nothing else."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from probing.api.errors import CorruptTarget, TargetError, UnsupportedTarget
from probing.daemon.inject.consent import _options
from probing.daemon.inject.evaluation import _decoded
from probing.daemon.inject.pending import find_pending_lock, is_unlocked
from probing.daemon.inject.places import free_address
from probing.daemon.processes.memory import FakeMemory
from probing.daemon.processes.procfs import Mapping

_TEXTS = st.text(max_size=40)


def packed(*texts: str) -> bytes:
    raws = [text.encode("utf-8", "surrogatepass") for text in texts]
    return b"".join(len(raw).to_bytes(4, "little") + raw for raw in raws)


@given(_TEXTS, _TEXTS)
def test_a_value_and_its_output_come_back(value: str, output: str) -> None:
    found = _decoded(packed("value", value, "type", "str", "output", output, "seconds", "0.25", "dropped", "3"))
    assert found == {"value": value, "type": "str", "output": output, "seconds": 0.25, "dropped": 3}


def test_an_exception_comes_back_with_its_frames() -> None:
    found = _decoded(packed("error", "E", "message", "m", "frame", "a.py\x0012\0f", "frame", "odd", "frame", "b\0x\0g"))
    assert found["error"] == {
        "type": "E",
        "message": "m",
        "frames": [("a.py", 12, "f"), ("odd", 0, ""), ("b", 0, "g")],
    }


@given(st.binary(max_size=300))
def test_any_answer_is_read_or_refused(data: bytes) -> None:
    try:
        found = _decoded(data)
    except CorruptTarget:
        return
    assert found.keys() <= {"value", "type", "output", "error", "seconds", "dropped"}


@given(st.lists(st.sampled_from(["value", "error", "frame", "seconds", "dropped", "nan", "9" * 400]), max_size=300))
def test_texts_of_any_order_are_read(texts: list[str]) -> None:
    _decoded(packed(*texts))


def mapping(start: int, end: int) -> Mapping:
    return Mapping(start, end, "rw-p", 0, (0, 0), 0, b"")


def test_a_free_address_is_far_from_everything() -> None:
    maps = [mapping(0x5555_0000_0000, 0x5555_1000_0000), mapping(0x7FFF_0000_0000, 0x7FFF_1000_0000)]
    maps.append(mapping(0xFFFF_FFFF_FF60_0000, 0xFFFF_FFFF_FF60_1000))
    seen = {free_address(maps, 1 << 21) for _ in range(50)}
    assert len(seen) == 50
    for address in seen:
        assert address % 4096 == 0
        assert 0 < address < 1 << 47
        assert all(address + (1 << 21) < m.start or address > m.end for m in maps)


RUNTIME = 0x5000_0000


def runtime(before: int, first: int, waiting: int, *, lock: int = 0, most: int = 32) -> bytes:
    """A ``_PyRuntime`` with the ring of pending calls ``before`` bytes after its begin."""
    calls = [(0, 0, 0)] * 300
    for number in range(waiting):
        calls[(first + number) % 300] = (0x401000, 0x7F00, 1)
    head = struct.pack("<QB3xiii", 0, lock, waiting, most, 0)
    ring = b"".join(struct.pack("<3Q", *call) for call in calls)
    # Other numbers that look like the begin of a ring.
    noise = struct.pack("<QQii", 7, 7, 32, 0) * 9
    return bytes(before) + head + ring + struct.pack("<II", first, (first + waiting) % 300) + noise + bytes(9000)


@given(st.integers(0, 400), st.integers(0, 299), st.integers(0, 32))
def test_the_lock_of_pending_calls_is_found_by_its_ring(words: int, first: int, waiting: int) -> None:
    data = runtime(8 * words, first, waiting)
    assert find_pending_lock(FakeMemory({RUNTIME: data}), RUNTIME, len(data)) == RUNTIME + 8 * words + 8


@pytest.mark.parametrize(
    "data", [b"", bytes(20000), runtime(8, 0, 0, most=300), runtime(8, 0, 0) + runtime(8, 0, 0), runtime(4, 0, 0)]
)
def test_a_lock_that_is_not_certain_is_none(data: bytes) -> None:
    with pytest.raises(UnsupportedTarget, match="lock of the interpreter's pending calls"):
        find_pending_lock(FakeMemory({RUNTIME: data}), RUNTIME, len(data))


@pytest.mark.parametrize(("lock", "unlocked"), [(0, True), (1, False), (2, False), (3, False)])
def test_a_lock_with_waiting_threads_is_not_free(lock: int, unlocked: bool) -> None:
    data = runtime(0, 5, 2, lock=lock)
    memory = FakeMemory({RUNTIME: data})
    assert is_unlocked(memory, find_pending_lock(memory, RUNTIME, len(data))) is unlocked


def test_no_address_is_free() -> None:
    with pytest.raises(TargetError, match="no free range"):
        free_address([mapping(0x1000, (1 << 47) - 4096)], 1 << 21)


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ("python -I x.py", {"-I"}),
        ("python -uBI x.py", {"-u", "-B", "-I"}),
        ("python x.py -I", set()),
        ("python -c -I", set()),
        ("python -m mod -I", set()),
        ("python -W error::I x.py", {"-Werror::I"}),
        ("python -X disable-remote-debug x.py", {"-Xdisable-remote-debug"}),
        ("python -uXdisable-remote-debug x.py", {"-u", "-Xdisable-remote-debug"}),
        ("python -", set()),
        ("python -X", {"-X"}),
        ("", set()),
    ],
)
def test_options_are_those_of_the_interpreter(words: str, found: set[str]) -> None:
    assert _options([word.encode() for word in words.split()]) == {text.encode() for text in found}
