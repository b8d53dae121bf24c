"""Merging, names, and what goes from reader to parser."""

from __future__ import annotations

import ctypes
import json
import os
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from native_image import CODE, Function, descriptor, image

from probing.api.errors import CorruptTarget, NotPython, TargetTimeout, UnsupportedTarget, UsageError
from probing.daemon.ipc import Message
from probing.daemon.python_stack.native.modules import readable
from probing.daemon.python_stack.native.payload import MAX_STACK, Captured, CodeMapping, StackCopy
from probing.daemon.python_stack.native.registers import handlers as reader_handlers
from probing.daemon.python_stack.native.requests import NativeStacks, merge
from probing.daemon.python_stack.native.unwind import handlers as parser_handlers

LOOP = "_PyEval_EvalFrameDefault"
MISFIT = "its Python and native frames do not fit together"


def python(*names: str) -> list[dict[str, Any]]:
    """Frames of these names; one that ends in ! is an entry."""
    return [{"func": n.rstrip("!"), "frame_type": "Python", "entry": n.endswith("!")} for n in names]


def native(*names: str) -> list[dict[str, Any]]:
    return [{"func": name, "frame_type": "Native", "entry": False} for name in names]


def names(frames: Sequence[dict[str, Any]]) -> list[str]:
    return [frame["func"] for frame in frames]


@pytest.mark.parametrize(
    ("python_frames", "native_frames", "reason", "merged", "told"),
    [
        (("f!",), ("read", LOOP, "main"), "", ["read", "f", "main"], ""),
        (("f", "g!", "h!"), ("read", LOOP, "call", LOOP, "main"), "", ["read", "f", "g", "call", "h", "main"], ""),
        (("f!", "g!"), ("read", LOOP + ".cold", LOOP + ".constprop.0.lto_priv.1"), "", ["read", "f", "g"], ""),
        (("f!",), ("read", "_TAIL_CALL_CALL_KW.llvm.7", "main"), "", ["read", "f", "main"], ""),
        (("f!",), ("read", "_TAIL_CALL_CALL", LOOP, "main"), "", ["read", "f", "main"], ""),
        # The outermost frame is not marked where a walk ended before it.
        (("f!", "g"), (LOOP, "call", LOOP, "main"), "", ["f", "call", "g", "main"], ""),
        ((), ("read", "main"), "", ["read", "main"], ""),
        ((), ("read",), "cut", ["read"], "cut"),
        (("f!",), (), "it runs", ["f"], "it runs"),
        (("f!",), (), "", ["f"], "the thread has no native frames"),
        # What is missing of the native stack is outside of what is there.
        (("f!", "g!", "h!"), ("read", LOOP, "call"), "cut", ["read", "f", "call", "g", "h"], "cut"),
        (("f!", "g!"), ("read", "write"), "cut", ["read", "write", "f", "g"], "cut"),
        # The two are of different moments, or a loop has no name.
        (("f!",), ("read", LOOP, "call", LOOP, "main"), "", ["read", "f"], MISFIT),
        (("f!", "g!"), ("read", LOOP, "main"), "", ["read", "f", "g"], MISFIT),
        (("f!",), ("read", "main"), "", ["read", "main", "f"], MISFIT),
        (("f!",), ("not_" + LOOP, LOOP + "Not"), "", ["not_" + LOOP, LOOP + "Not", "f"], MISFIT),
    ],
)
def test_merge(
    python_frames: Sequence[str], native_frames: Sequence[str], reason: str, merged: list[str], told: str
) -> None:
    frames, missing = merge(python(*python_frames), native(*native_frames), reason)
    assert (names(frames), missing) == (merged, told)


@given(
    st.lists(st.booleans(), max_size=20),
    st.lists(st.sampled_from(["read", LOOP, "call", "_TAIL_CALL_X"]), max_size=30),
    st.sampled_from(["", "cut"]),
)
def test_merging_loses_no_python_frame(entries: list[bool], loops: list[str], reason: str) -> None:
    inner = python(*(f"f{n}!" if entry else f"f{n}" for n, entry in enumerate(entries)))
    frames, missing = merge(inner, native(*loops), reason)
    assert [f for f in frames if f["frame_type"] == "Python"] == inner
    kept = [f["func"] for f in frames if f["frame_type"] == "Native"]
    if not missing and inner:
        assert kept == [name for name in loops if name in ("read", "call")]


def test_names_are_made_readable() -> None:
    assert readable(b"main") == "main"
    assert readable(b"_PyEval_EvalFrameDefault.cold") == "_PyEval_EvalFrameDefault.cold"
    assert readable(b"evil\x1b[31m\nname") == "evil\\x1b[31m\\nname"
    try:
        ctypes.CDLL("libstdc++.so.6")
    except OSError:
        assert readable(b"_ZN4gloo9allreduceEv") == "_ZN4gloo9allreduceEv"
        return
    assert readable(b"_ZN4gloo9allreduceEv") == "gloo::allreduce()"
    assert readable(b"_ZN4gloo9allreduceEv.cold").startswith("gloo::allreduce()")
    assert readable(b"_Znonsense") == "_Znonsense"


def test_long_names_lose_the_arguments_of_templates() -> None:
    inner = b"".join(b"St4pairIiSt6vectorIlSaIlEEE" for _ in range(20))
    name = readable(b"_ZN4gloo9allreduceISt5tupleIJ" + inner + b"EEEEvv")
    assert len(name) <= 512
    assert name.startswith("void gloo::allreduce<")


@given(st.binary(max_size=200))
def test_any_name_is_clean_and_short(name: bytes) -> None:
    for each in (name, b"_Z" + name, b"a<b<c<" + name * 10):
        text = readable(each)
        assert len(text) <= 512
        assert text.isprintable() or not text.isascii()


MAPPING = CodeMapping(0x10000, 0x30000, 0, 8, 1, 5, "/lib/made.so")


def test_what_was_captured_arrives() -> None:
    captured = Captured(7, 8, (StackCopy(7, 1, 2, 3, b"abc"), StackCopy(9, reason="runs")), (MAPPING,))
    assert Captured.decode(captured.encode()) == captured


@given(st.binary(max_size=300))
def test_anything_else_is_refused(data: bytes) -> None:
    for text in (data, len(data).to_bytes(4, "little") + data):
        with pytest.raises(CorruptTarget):
            Captured.decode(text)


@pytest.mark.parametrize(
    "text",
    [
        {"threads": [[1, 2, 3, 4, 5, ""]]},
        {"threads": [[1, 2, 3, 4, MAX_STACK + 1, ""]]},
        {"threads": [[1, 2, 3, 4, -1, ""]]},
        {"threads": [[1, -2, 3, 4, 0, ""]]},
        {"threads": [[1, 1 << 64, 3, 4, 0, ""]]},
        {"threads": [[1]]},
        {"mappings": [[1, 2, 3, 4, 5, 6]]},
        {"mappings": [[1, 2, 3, 4, 5, "6", ""]]},
        {"pid": None},
    ],
)
def test_numbers_out_of_bounds_are_refused(text: dict[str, Any]) -> None:
    whole = json.dumps({"pid": 1, "start_ns": 1, "threads": [], "mappings": [], **text}).encode()
    with pytest.raises(CorruptTarget):
        Captured.decode(len(whole).to_bytes(4, "little") + whole)


@pytest.mark.parametrize(
    "request_", [{}, {"pid": 1}, {"pid": 1, "start_ns": 1, "tids": ["1"]}, {"pid": 1, "start_ns": 1, "tids": [0]}]
)
def test_requests_that_make_no_sense(request_: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        reader_handlers()["native"](request_)
    with pytest.raises(UsageError):
        parser_handlers()["unwind"](Message({"starts": [1]}))


class FakeReaders:
    """One thread within ``leaf``, which ``main`` called; its file is ``data``."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.opened: list[int] = []
        self.refuse = False

    def call(self, op: str, *, pid: int, start_ns: int, timeout: float, **args: Any) -> Message:
        if op == "open":
            self.opened.append(args["start"])
            if self.refuse:
                raise UnsupportedTarget("it was replaced")
            return Message({}, fds=[os.dup(self.fd)])
        base = MAPPING.start
        stack = (base + CODE + 0x110).to_bytes(8, "little") * 2
        copies = (StackCopy(7, base + CODE, 0x7000_0000, 0x7000_0000, stack), StackCopy(8, reason="runs"))
        return Message({"python": None}, Captured(pid, start_ns, copies, (MAPPING,)).encode())


class FakeParsers:
    """A parser that can be replaced by a fresh one."""

    def __init__(self) -> None:
        self.unwind = parser_handlers()["unwind"]

    def call(self, op: str, payload: bytes, *, fds: Sequence[int], timeout: float, **args: Any) -> dict[str, Any]:
        answer = json.loads(self.unwind(Message(args, payload, list(fds))))
        assert isinstance(answer, dict)
        return answer


def no_runtime(*_: object) -> Any:
    raise NotPython("none")


def asked(readers: FakeReaders, parsers: Any) -> list[dict[str, Any]]:
    threads: list[dict[str, Any]] = [{"tid": tid, "frames": []} for tid in (7, 8, 9)]
    NativeStacks(readers, parsers, no_runtime).add(1, 1, threads, 30.0)
    return threads


FUNCTIONS = [Function(0, 0x80, b"", "leaf"), Function(0x100, 0x80, b"\x07\x10", "main")]
NOT_BLOCKED = ["it runs, and only a thread that is blocked can be read without stopping it", "it ended"]


def test_a_parser_is_given_files_once_and_again_when_it_is_a_new_one() -> None:
    with descriptor(image(FUNCTIONS)) as fd:
        readers, parsers = FakeReaders(fd), FakeParsers()
        for _ in range(3):
            threads = asked(readers, parsers)
            assert names(threads[0]["frames"]) == ["leaf", "main"]
            assert threads[0]["frames"][1] == {
                "func": "main",
                "file": "/lib/made.so",
                "lineno": None,
                "frame_type": "Native",
                "ip": MAPPING.start + CODE + 0x110,
                "entry": False,
            }
            assert [t["native_missing"] for t in threads] == ["", *NOT_BLOCKED]
        assert readers.opened == [MAPPING.start]
        asked(readers, FakeParsers())
        assert readers.opened == [MAPPING.start] * 2


def test_a_file_that_was_written_over_is_read_again() -> None:
    with descriptor(image(FUNCTIONS)) as fd:
        readers, parsers = FakeReaders(fd), FakeParsers()
        asked(readers, parsers)
        os.utime(fd, ns=(1, 1))
        asked(readers, parsers)
    assert readers.opened == [MAPPING.start] * 2


def test_a_file_that_cannot_be_opened_ends_the_stack() -> None:
    with descriptor(b"") as fd:
        readers = FakeReaders(fd)
        readers.refuse = True
        threads = asked(readers, FakeParsers())
    assert names(threads[0]["frames"]) == [f"made.so+{CODE:#x}"]
    assert threads[0]["native_missing"] == "made.so has no call frame information"


class Broken:
    def __init__(self, answer: dict[str, Any]) -> None:
        self.answer = answer

    def call(self, op: str, payload: bytes, **_: Any) -> dict[str, Any]:
        return self.answer


@pytest.mark.parametrize(
    "answer",
    [
        {},
        {"need": [5], "threads": [], "codes": []},
        {"need": "x", "threads": [], "codes": []},
        {"need": []},
        {"need": [], "threads": [[7, [[0, 1]], ""]], "codes": []},
    ],
)
def test_a_parser_that_answers_nonsense_costs_the_native_frames(answer: dict[str, Any]) -> None:
    with descriptor(b"") as fd:
        threads = asked(FakeReaders(fd), Broken(answer))
    assert all(t["frames"] == [] and "parser" in t["native_missing"] for t in threads)


def test_a_parser_that_always_wants_a_file_is_not_asked_for_ever() -> None:
    with descriptor(b"") as fd:
        readers = FakeReaders(fd)
        threads = asked(readers, Broken({"need": [MAPPING.start], "threads": [], "codes": []}))
    assert threads[0]["native_missing"] == "the parser process ended while it unwound the stacks"
    assert len(readers.opened) < 5


def test_errors_become_reasons() -> None:
    class Late:
        def call(self, op: str, **_: Any) -> Message:
            raise TargetTimeout("process 1 could not be read")

    threads = [{"tid": 1, "frames": python("f!")}]
    NativeStacks(Late(), FakeParsers(), no_runtime).add(1, 1, threads, 30.0)
    assert threads[0]["native_missing"] == "process 1 could not be read"
    assert names(threads[0]["frames"]) == ["f"]
