"""Walks over memory that is right, wrong, moving and hostile: bounded work, a marked stack or a typed error."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from long import examples
from python_stack_image import BASE, Image, debug_offsets

from probing.api.errors import CorruptTarget, ProbingError, TargetTimeout
from probing.daemon.processes.memory import FakeMemory, Range
from probing.daemon.python_stack.walk.capture import Capture, Known, capture
from probing.daemon.python_stack.walk.layouts import TABLE, Layout, layout_of
from probing.daemon.python_stack.walk.walker import Limits

LAYOUTS = [*TABLE.values(), *(layout_of((3, minor), debug_offsets(minor)) for minor in (13, 14, 15))]
LINES = {
    "lnotab": bytes([0, 1, 4, 1, 4, 1]),
    "ranges": bytes([4, 1, 4, 1, 4, 1]),
    # Each entry: one line further, two units, columns 0 and 0.
    "locations": bytes([0x80 | 11 << 3 | 1, 0, 0] * 3),
}
each_layout = pytest.mark.parametrize("layout", LAYOUTS, ids=lambda x: ".".join(map(str, x.version)))


def build(layout: Layout) -> tuple[Image, list[int]]:
    """Two threads, of three frames and of one; the addresses of the first one's frames, innermost first."""
    image = Image(layout)
    table = LINES[layout.lines]
    codes = [image.code(name, "/srv/größe.py", line, table) for name, line in (("main", 1), ("Ж", 20), ("leaf", 30))]
    outer = image.frame(codes[0], 0, units=0)
    below = image.frame(0, outer, owner=3) if layout.is_shim_from is not None else outer
    middle = image.frame(codes[1], below, units=2)
    leaf = image.frame(codes[2], middle, units=4)
    image.thread(leaf, 101, gil=True)
    image.thread(image.frame(codes[0], 0, units=-1), 102)
    return image, [leaf, middle, outer]


def take(image: Image, memory: FakeMemory | None = None, **options: int) -> Capture:
    limits = Limits(**options)
    return capture(memory or image.memory(), image.runtime, image.layout, time.monotonic() + 60, Known(), limits)


def shown(found: Capture, layout: Layout, thread: int = 0) -> list[tuple[str, str, int | None]]:
    raw, codes = found.threads[thread]
    return [(c.func, c.file, c.line(layout, f)) for f in raw.frames for c in [codes[f.code]]]


@each_layout
def test_a_small_process(layout: Layout) -> None:
    image, _ = build(layout)
    found = take(image)
    assert found.complete
    assert shown(found, layout) == [
        ("leaf", "/srv/größe.py", 33),
        ("Ж", "/srv/größe.py", 22),
        ("main", "/srv/größe.py", 2),
    ]
    assert shown(found, layout, 1) == [("main", "/srv/größe.py", 1)]
    assert [(t.gil, t.complete, t.pthread_tids[0]) for t, _ in found.threads] == [(True, True, 101), (False, True, 102)]
    if layout.is_shim_from is not None:
        assert [f.entry for f in found.threads[0][0].frames] == [False, True, True]


@each_layout
def test_what_is_known_is_read_in_one_call(layout: Layout) -> None:
    image, _ = build(layout)
    known = Known()
    memory = image.memory()
    for _ in range(2):
        capture(memory, image.runtime, layout, time.monotonic() + 60, known)
    calls = memory.calls
    found = capture(memory, image.runtime, layout, time.monotonic() + 60, known)
    assert memory.calls - calls == 1
    assert len(shown(found, layout)) == 3


@each_layout
def test_what_stands_still_is_not_walked_again(layout: Layout) -> None:
    image, frames = build(layout)
    known = Known()

    def again() -> Capture:
        return capture(image.memory(), image.runtime, layout, time.monotonic() + 60, known)

    captures = [again() for _ in range(4)]
    assert captures[3] is captures[2]
    assert shown(captures[3], layout) == shown(captures[0], layout)
    # Two instructions further, in the middle of a stack, and nothing else.
    at = frames[1] + layout.frame_instr - BASE
    image.data[at : at + 4] = (int.from_bytes(image.data[at : at + 4], "little") + 4).to_bytes(4, "little")
    moved = again()
    assert moved is not captures[3]
    assert shown(moved, layout) == shown(take(image), layout) != shown(captures[3], layout)
    assert shown(again(), layout) == shown(moved, layout)


@each_layout
def test_lists_that_are_rings(layout: Layout) -> None:
    image, (leaf, _, outer) = build(layout)
    image.word(outer + layout.frame_previous, leaf)
    found = take(image)
    assert [t.complete for t, _ in found.threads] == [False, True]

    image, _ = build(layout)
    threads = [t.address for t, _ in take(image).threads]
    image.word(threads[1] + layout.thread_next, threads[0])
    image.word(image.interpreter + layout.interp_next, image.interpreter)
    found = take(image)
    assert not found.complete
    assert len(found.threads) == 2


@each_layout
def test_limits(layout: Layout) -> None:
    image, _ = build(layout)
    assert [(len(t.frames), t.complete) for t, _ in take(image, frames=2).threads] == [(2, False), (1, True)]
    assert not take(image, threads=1).complete
    assert [(len(t.frames), t.complete) for t, _ in take(image, all_frames=1).threads] == [(1, False), (0, False)]


@each_layout
def test_wild_pointers(layout: Layout) -> None:
    for wild in (1, 8, BASE - 1, (1 << 64) - 8, 1 << 47, 0xDEAD_BEEF_DEAD_BEEF):
        image, (_, middle, _) = build(layout)
        image.word(middle + layout.frame_previous, wild)
        found = take(image)
        assert [t.complete for t, _ in found.threads] == [False, True]
        image.word(image.interpreter + layout.interp_threads, wild)
        assert take(image).threads == []
        assert not take(image).complete
    image.word(image.runtime + layout.interpreters_head, 0xDEAD_BEEF)
    with pytest.raises(CorruptTarget):
        take(image)


@each_layout
def test_huge_lengths(layout: Layout) -> None:
    image = Image(layout)
    code = image.code("n" * 6000, "/f", 7, LINES[layout.lines])
    image.thread(image.frame(code, 0), 1)
    found = take(image)
    assert found.threads[0][1][code].cut
    assert len(found.threads[0][1][code].func) == 4096

    for huge in (1 << 20, 1 << 39, (1 << 63) - 1, (1 << 64) - 1):
        name = int.from_bytes(image.data[code - BASE + layout.code_name :][:8], "little")
        table = int.from_bytes(image.data[code - BASE + layout.code_linetable :][:8], "little")
        image.word(name + layout.str_length, huge)
        image.word(table + layout.bytes_length, huge)
        raw, codes = take(image).threads[0]
        assert codes[code].cut
        assert codes[code].line(layout, raw.frames[0]) is None


class Moving(FakeMemory):
    """Memory in which ``change`` is called with the number of reads of an address before each of them."""

    def __init__(self, image: Image, address: int, change: Callable[[int], None]) -> None:
        super().__init__(image.memory().segments)
        self._image, self._address, self._change = image, address, change
        self._reads = 0

    def read_many(self, ranges: Sequence[Range]) -> list[bytes | None]:
        found: list[bytes | None] = []
        calls = self.calls
        for address, size in ranges:
            if address <= self._address < address + size:
                self._change(self._reads)
                self._reads += 1
            self.segments = {BASE: bytes(self._image.data)}
            found += super().read_many([(address, size)])
        self.calls = calls + 1
        return found


@each_layout
def test_a_stack_that_never_holds_still_is_marked(layout: Layout) -> None:
    image, (leaf, middle, outer) = build(layout)
    link = leaf + layout.frame_previous
    found = take(image, Moving(image, link, lambda reads: image.word(link, middle if reads % 2 else outer)))
    assert [t.complete for t, _ in found.threads] == [False, True]


@each_layout
def test_a_thread_that_may_run_is_not_proven_by_coming_by_once_more(layout: Layout) -> None:
    """What moves looks the same for three readings; read more often it does not."""
    image, (leaf, middle, _) = build(layout)
    leaf_at, middle_at = leaf + layout.frame_code, middle + layout.frame_code
    codes = [int.from_bytes(image.data[at - BASE :][:8], "little") for at in (leaf_at, middle_at)]
    found = take(image, Moving(image, leaf_at, lambda reads: image.word(leaf_at, codes[reads > 2 and reads % 3 == 1])))
    assert [t.complete for t, _ in found.threads] == [False, True]


@each_layout
def test_a_caller_that_went_on_is_no_caller(layout: Layout) -> None:
    image, (_, middle, _) = build(layout)
    at = middle + layout.frame_instr
    first = int.from_bytes(image.data[at - BASE : at - BASE + 4], "little")
    found = take(image, Moving(image, at, lambda reads: image.put(at, (first + 2 * (reads % 2)).to_bytes(4, "little"))))
    assert [t.complete for t, _ in found.threads] == [False, True]


@each_layout
def test_a_caller_that_still_runs_is_no_caller(layout: Layout) -> None:
    if layout.frame_stack is None:
        # Up to 3.10 each call is one of the C loop; 3.13 does not declare where this is.
        assert layout.version in ((3, 8), (3, 9), (3, 10), (3, 13))
        return
    image, (_, middle, _) = build(layout)
    image.put(middle + layout.frame_stack, b"\0" * 8 if layout.frame_stack_size == 8 else b"\xff" * 4)
    assert [t.complete for t, _ in take(image).threads] == [False, True]


@each_layout
def test_a_call_that_is_not_linked_to_its_caller_is_marked(layout: Layout) -> None:
    """The frame below is a generator that once called from the same place, and is suspended."""
    image = Image(layout)
    code = image.code("f", "/srv/f.py", 1, LINES[layout.lines])
    generator = image.frame(code, 0, linked=False)
    image.thread(image.frame(code, generator), 101)
    resumed = image.frame(code, 0, owner=1, linked=layout.frame_entry is not None)
    image.thread(image.frame(code, resumed), 102)
    # Up to 3.10 frames are objects, which are linked when they are made.
    assert [t.complete for t, _ in take(image).threads] == [layout.frame_owner is None] * 2


@each_layout
def test_code_that_is_replaced_is_marked(layout: Layout) -> None:
    image, _ = build(layout)
    leaf = take(image).threads[0][0].frames[0].code
    texts = [image.text("leaf"), image.text("fael")]
    at = leaf + layout.code_name
    found = take(image, Moving(image, at, lambda reads: image.word(at, texts[reads % 2])))
    assert [t.complete for t, _ in found.threads] == [False, True]


@each_layout
def test_threads_that_come_and_go_while_they_are_listed(layout: Layout) -> None:
    image, _ = build(layout)
    first, second = (t.address for t, _ in take(image).threads)
    link = first + layout.thread_next
    assert not take(image, Moving(image, link, lambda reads: image.word(link, second if reads % 2 else 0))).complete


def test_a_deadline_that_has_passed() -> None:
    image, _ = build(LAYOUTS[0])
    with pytest.raises(TargetTimeout):
        capture(image.memory(), image.runtime, image.layout, time.monotonic() - 1, Known())


@each_layout
def test_a_deadline_that_passes_meanwhile(layout: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    image, _ = build(layout)
    whole = shown(take(image), layout)
    outcomes = set()
    for deadline in range(60):
        # Each look at the clock is a second.
        monkeypatch.setattr("time.monotonic", itertools.count().__next__)
        try:
            found = capture(image.memory(), image.runtime, layout, deadline, Known())
        except TargetTimeout:
            outcomes.add("nothing")
            continue
        some = shown(found, layout)
        assert some == whole[: len(some)]
        assert found.threads[0][0].complete is False or some == whole
        outcomes.add("all" if found.threads[0][0].complete else "some")
    assert outcomes == {"nothing", "some", "all"}


@each_layout
def test_the_oldest_of_many_threads_are_read(layout: Layout) -> None:
    image, _ = build(layout)
    newest, oldest = (t.address for t, _ in take(image).threads)
    found = take(image, stacks=1)
    assert [t.address for t, _ in found.threads] == [oldest]
    assert [t.address for t in found.unread] == [newest]
    assert found.complete


@settings(max_examples=examples(150), deadline=None)
@given(data=st.data())
def test_spoilt_memory(data: st.DataObject) -> None:
    layout = data.draw(st.sampled_from(LAYOUTS))
    image, _ = build(layout)
    used = image.room(0) - BASE
    pointers = st.integers(0, used).map(lambda n: BASE + n)
    for _ in range(data.draw(st.integers(1, 30))):
        at = data.draw(st.integers(0, used // 8)) * 8
        value = data.draw(st.one_of(pointers, st.integers(0, 2**64 - 1), st.integers(0, 255)))
        image.word(BASE + at, value)
    memory = image.memory()
    known = Known()
    for _ in range(2):
        try:
            found = capture(memory, image.runtime, layout, time.monotonic() + 60, known)
        except ProbingError:
            continue
        for thread, codes in found.threads:
            for frame in thread.frames:
                if code := codes.get(frame.code):
                    line = code.line(layout, frame)
                    assert line is None or abs(line) <= 1 << 31
                    code.func.encode()
    assert memory.calls < 20_000


@settings(max_examples=examples(100), deadline=None)
@given(noise=st.binary(min_size=1, max_size=4096), layout=st.sampled_from(LAYOUTS))
def test_noise(noise: bytes, layout: Layout) -> None:
    memory = FakeMemory({BASE: (noise * (65_536 // len(noise) + 1))[:65_536]})
    try:
        capture(memory, BASE, layout, time.monotonic() + 60, Known(), Limits(frames=64, threads=64))
    except ProbingError:
        return
