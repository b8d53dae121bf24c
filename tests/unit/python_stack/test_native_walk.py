"""Walks over copies of stacks that were made by hand, and what hostile ones may cost."""

from __future__ import annotations

import functools
import itertools
import math
import struct
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from native_image import CODE, Function, descriptor, image

from probing.daemon.python_stack.native import walk as native_walk
from probing.daemon.python_stack.native.modules import CodeSpace, FileNeeded, Modules
from probing.daemon.python_stack.native.payload import CodeMapping, StackCopy
from probing.daemon.python_stack.native.walk import MAX_FRAMES, CStack, walk

# The file is mapped as a whole at BASE; the stack lies at STACK.
BASE, STACK = 0x5500_0000_0000, 0x7F00_0000_0000
PLAIN, POINTER, LEAF, MAIN, SIGNAL, BARE, SIZED = 0x100, 0x200, 0x300, 0x400, 0x500, 0x600, 0x700
MAPPING = CodeMapping(BASE, BASE + 0x20000, 0, 0, 0, 7, "/lib/made.so")


def call(at: int, to: int) -> bytes:
    """A call at one offset from CODE to another; it returns 5 bytes further on."""
    return b"\xe8" + struct.pack("<i", to - at - 5)


FUNCTIONS = [
    Function(PLAIN, 0x80, b"\x0e\x20", "plain"),  # CFA = rsp + 32
    Function(POINTER, 0x80, b"\x0e\x10\x86\x02\x0d\x06", "pointer"),  # CFA = rbp + 16, rbp saved there
    Function(LEAF, 0x80, b"", "leaf"),
    Function(MAIN, 0x80, b"\x07\x10", "main"),  # its return address is not defined: the outermost
    # Registers rbp, rsp and the return address from where the kernel put them, at rsp + 8, 16 and 24.
    Function(SIGNAL, 0x10, b"\x0f\x02\x77\x20\x10\x06\x02\x77\x08\x10\x07\x02\x77\x10\x10\x10\x02\x77\x18", "", True),
    Function(SIZED, 0x80, b"\x0e\x10\x86\x02\x0d\x06", "sized"),
]
CALLS = {
    PLAIN + 0x10: call(PLAIN + 0x10, LEAF),
    PLAIN + 0x20: call(PLAIN + 0x20, POINTER),
    PLAIN + 0x30: b"\xff\xd0" + bytes(5),  # call *%rax
    PLAIN + 0x40: call(PLAIN + 0x40, SIZED),
    MAIN + 0x10: call(MAIN + 0x10, PLAIN),
    POINTER: b"\x55\x48\x89\xe5\x48\x29\xc4",  # push %rbp; mov %rsp,%rbp; sub %rax,%rsp
    POINTER + 0x10: call(POINTER + 0x10, LEAF),
    SIZED: b"\x55\x48\x89\xe5\x48\x83\xec\x20",  # push %rbp; mov %rsp,%rbp; sub $32,%rsp
    SIZED + 0x10: call(SIZED + 0x10, LEAF),
    BARE + 0x10: call(BARE + 0x10, SIZED),
    PLAIN + 0x50: call(PLAIN + 0x50, BARE),
}


def at(offset: int) -> int:
    return BASE + CODE + offset


@functools.cache
def modules() -> Modules:
    """The file, open for all tests."""
    made = Modules()
    with descriptor(image(FUNCTIONS, CALLS)) as fd:
        made.add(MAPPING, (1, 1), fd)
    return made


def walked(
    pc: int, *words: int, sp: int = STACK, absent: frozenset[int] = frozenset(), deadline: float = math.inf
) -> CStack:
    data = b"".join(struct.pack("<Q", word & (1 << 64) - 1) for word in words)
    return walk(StackCopy(1, pc, sp, STACK, data), CodeSpace([MAPPING], modules(), (1, 1), absent), deadline)


def names(stack: CStack) -> list[str]:
    found = []
    for frame in stack.frames:
        function = None
        if frame.place and frame.place.module and frame.place.address is not None:
            function = frame.place.module.function(frame.place.address)
        found.append(function[0] if function else "?")
    return found


RETURNS = (at(PLAIN + 0x15), 1, 2, 3, at(MAIN + 0x15))


def test_a_whole_stack() -> None:
    stack = walked(at(LEAF + 8), *RETURNS)
    assert names(stack) == ["leaf", "plain", "main"]
    assert stack.reason == ""
    assert [frame.ip for frame in stack.frames] == [at(LEAF + 8), at(PLAIN + 0x15), at(MAIN + 0x15)]


def test_a_stack_whose_frames_take_long_ends_at_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    # Each frame takes a second.
    monkeypatch.setattr(native_walk, "time", SimpleNamespace(monotonic=itertools.count().__next__))
    stack = walked(at(LEAF + 8), *RETURNS, deadline=1.0)
    assert names(stack) == ["leaf", "plain"]
    assert stack.reason == "there was no time left"


def test_a_call_at_the_very_end_of_a_function() -> None:
    # The return address already belongs to what follows.
    stack = walked(at(LEAF), at(PLAIN + 0x80), 1, 2, 3, at(MAIN + 0x80))
    assert names(stack) == ["leaf", "plain", "main"]


def test_a_frame_pointer_that_is_not_known_is_expected_where_it_was_put() -> None:
    # leaf, then sized (32 bytes, rbp, return address), then plain.
    stale = at(PLAIN + 0x25)
    stack = walked(at(LEAF), at(SIZED + 0x15), stale, 0, 0, 0, STACK + 400, at(PLAIN + 0x45), 1, 2, 3, at(MAIN + 0x15))
    assert names(stack) == ["leaf", "sized", "plain", "main"]
    assert stack.reason == ""


def test_a_frame_pointer_that_is_not_known_is_searched_for() -> None:
    outer = (STACK + 400, at(PLAIN + 0x25), 1, 2, 3, at(MAIN + 0x15))
    stack = walked(at(LEAF), at(POINTER + 0x15), 11, 22, 33, *outer)
    assert names(stack) == ["leaf", "pointer", "plain", "main"]
    assert "guessed" in stack.reason


def test_a_call_through_a_pointer_counts_when_a_whole_stack_follows() -> None:
    stale = (0, at(PLAIN + 0x32), 1, 2, 3, 12345)
    outer = (STACK + 800, at(PLAIN + 0x32), 1, 2, 3, at(MAIN + 0x15))
    stack = walked(at(LEAF), at(POINTER + 0x15), *stale, *outer)
    assert names(stack) == ["leaf", "pointer", "plain", "main"]
    assert "guessed" in stack.reason


def test_a_function_that_nothing_describes_but_keeps_a_frame_pointer() -> None:
    # leaf, sized, then the bare one, whose frame sized has put down.
    base = STACK + 8 * 8
    sized = (at(SIZED + 0x15), 0, 0, 0, 0, base, at(BARE + 0x15))
    outer = (5, STACK + 800, at(PLAIN + 0x55), 1, 2, 3, at(MAIN + 0x15))
    stack = walked(at(LEAF), *sized, *outer)
    assert names(stack) == ["leaf", "sized", "?", "plain", "main"]
    assert stack.reason == ""
    # Without a call before it the return address is not believed.
    stack = walked(at(LEAF), *sized, 5, STACK + 800, at(PLAIN + 0x59), 1, 2, 3, at(MAIN + 0x15))
    assert names(stack) == ["leaf", "sized", "?"]


def test_no_frame_is_made_up() -> None:
    stack = walked(at(LEAF), at(POINTER + 0x15), *range(40))
    assert names(stack) == ["leaf", "pointer"]
    assert "unknown register" in stack.reason


def test_through_the_frame_of_a_signal() -> None:
    # The handler returns into the signal's frame, which was made at the first instruction of leaf. C libraries describe
    # that frame from a byte before on, because of those who look for the call.
    interrupted = STACK + 8 * 6
    stack = walked(at(LEAF + 4), at(SIGNAL + 1), 0, STACK, interrupted, at(LEAF), 9, *RETURNS)
    assert names(stack) == ["leaf", "?", "leaf", "plain", "main"]
    assert stack.reason == ""
    assert stack.frames[2].place is not None
    assert stack.frames[2].place.address == CODE + LEAF


def test_a_signal_from_another_stack() -> None:
    stack = walked(at(LEAF + 4), at(SIGNAL + 1), 0, STACK, 0x1000, at(LEAF))
    assert names(stack)[:3] == ["leaf", "?", "leaf"]
    assert "copy" in stack.reason


@pytest.mark.parametrize(
    ("words", "found", "reason"),
    [
        ((), ["leaf"], "the copy of the stack ends"),
        ((12345,), ["leaf"], "a return address does not point to code"),
        ((at(PLAIN + 0x15), 1), ["leaf", "plain"], "the copy of the stack ends"),
        ((at(BARE),), ["leaf", "?"], "made.so has no call frame information"),
    ],
)
def test_stacks_that_end_too_early(words: tuple[int, ...], found: list[str], reason: str) -> None:
    stack = walked(at(LEAF), *words)
    assert (names(stack), stack.reason) == (found, reason)


def test_a_stack_without_end_is_cut() -> None:
    stack = walked(at(PLAIN), *[at(PLAIN + 0x15)] * 2000)
    assert len(stack.frames) == MAX_FRAMES
    assert "256" in stack.reason


def test_frame_pointers_in_a_circle() -> None:
    # pointer calls itself, and its rbp leads back to its own frame.
    frame = (at(POINTER + 0x15), STACK + 16, STACK + 24, at(PLAIN + 0x25))
    assert len(walked(at(LEAF), *frame * 50).frames) <= MAX_FRAMES


def test_code_behind_no_file() -> None:
    assert walked(12345, 1).reason == "the code has no call frame information"
    stack = walked(at(LEAF), *RETURNS, absent=frozenset({BASE}))
    assert (names(stack), stack.reason) == (["?"], "made.so has no call frame information")


def test_a_file_that_is_not_there_yet_is_asked_for() -> None:
    space_without = CodeSpace([MAPPING], Modules(), (1, 1), frozenset())
    with pytest.raises(FileNeeded) as needed:
        walk(StackCopy(1, at(LEAF), STACK, STACK, b""), space_without)
    assert needed.value.mapping == MAPPING


def test_a_file_known_by_one_process_only() -> None:
    # Maps name another device than the file itself has, so only the process that it was opened for may use it.
    opened = Modules()
    with descriptor(image(FUNCTIONS, CALLS)) as fd:
        opened.add(MAPPING, (1, 1), fd)
        assert opened.get(MAPPING, (1, 1)) is not None
        assert opened.get(MAPPING, (2, 1)) is None
        opened.add(MAPPING, (2, 1), fd)
        assert opened.get(MAPPING, (2, 1)) is opened.get(MAPPING, (1, 1))
    opened.close()
    assert opened.get(MAPPING, (1, 1)) is None


WORD = st.one_of(
    st.integers(0, (1 << 64) - 1),
    st.integers(0, 64).map(lambda n: STACK + 8 * n),
    st.sampled_from(list(CALLS)).map(lambda c: at(c + 5)),
    st.sampled_from([at(SIGNAL), at(SIGNAL + 4), at(PLAIN + 0x32), at(MAIN + 8)]),
)


@given(st.lists(WORD, max_size=64), WORD, st.integers(-64, 600))
def test_any_stack_comes_to_an_end(words: list[int], pc: int, sp: int) -> None:
    stack = walked(pc, *words, sp=STACK + sp)
    assert len(stack.frames) <= MAX_FRAMES
    # A stack without a reason ends where the outermost function says that it is one, or at a null return address.
    last = names(stack)[-1:]
    assert stack.reason or last == ["main"] or 0 in words or not stack.frames
