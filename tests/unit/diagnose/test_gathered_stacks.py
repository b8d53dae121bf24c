"""Stacks of the wire format become threads of facts."""

from __future__ import annotations

import json
from typing import Any

from probing.daemon.diagnose.gather.history import Innermost
from probing.daemon.diagnose.gather.processes import Key
from probing.daemon.diagnose.gather.stacks import MAX_FRAMES, threads_of_processes
from probing.daemon.stack_wire import ProcessStacks
from probing.diagnosis.facts import Frame, Thread

KEY = Key(100, 7)
C10D = "/torch/distributed/distributed_c10d.py"


def frame(
    func: str, file: str = "/a/train.py", line: int | None = 3, kind: str = "Python", **values: str
) -> dict[str, Any]:
    found: dict[str, Any] = {"func": func, "file": file, "lineno": line, "frame_type": kind, "ip": 1, "entry": False}
    if values:
        found["locals"] = [
            {"name": n, "type": "t", "value": v, "number": None, "reason": ""} for n, v in values.items()
        ]
    return found


def native(func: str) -> dict[str, Any]:
    return frame(func, "/lib/libtorch.so", None, "Native")


def dump(*threads: tuple[int, list[dict[str, Any]]]) -> list[ProcessStacks]:
    rows = [
        {"tid": tid, "thread": f"t{tid}", "state": "sleeping", "gil": False, "complete": True, "frames": frames}
        for tid, frames in threads
    ]
    return [ProcessStacks("j", "r", 0, *KEY, KEY.pid, json.dumps({"threads": rows}).encode())]


def threads(
    first: list[ProcessStacks],
    second: list[ProcessStacks] | None = None,
    deeper: list[ProcessStacks] | None = None,
    **more: Any,
) -> tuple[Thread, ...]:
    waits = {KEY: more.get("waits", ())}
    return threads_of_processes(first, second or [], deeper or [], waits, {KEY: more.get("innermost")})[KEY]


def test_values_are_kept_of_files_that_name_what_is_waited_for() -> None:
    own = [frame("all_reduce", C10D, tensor="Tensor(shape=[1013])", op="SUM"), frame("fit", secret="hush")]
    [thread] = threads(dump((100, own)))
    assert thread.main
    assert thread.frames[0].values == (("tensor", "Tensor(shape=[1013])"), ("op", "SUM"))
    assert thread.frames[1] == Frame("fit", "/a/train.py", 3)


def test_of_a_regular_expression_the_pattern_alone_is_kept() -> None:
    own = [frame("match", "/usr/lib/python3.11/re/__init__.py", pattern="'(a+)+$'", string="'hush'"), frame("fit")]
    [thread] = threads(dump((100, own)))
    assert thread.frames[0].values == (("pattern", "'(a+)+$'"),)
    [other] = threads(dump((100, [frame("match", "/app/core/__init__.py", pattern="'hush'")])))
    assert other.frames[0].values == ()


def test_native_frames_keep_the_values_of_the_python_frames_beside_them() -> None:
    python = [frame("all_reduce", C10D, op="SUM"), frame("fit"), frame("<module>")]
    mixed = [
        native("c10d::wait"),
        frame("all_reduce", C10D),
        native("call"),
        frame("fit"),
        frame("<module>"),
        native("main"),
    ]
    [thread] = threads(dump((100, python)), deeper=dump((100, mixed)))
    assert [one.func for one in thread.frames] == ["c10d::wait", "all_reduce", "call", "fit", "<module>", "main"]
    assert [one.native for one in thread.frames] == [True, False, True, False, False, True]
    assert thread.frames[1].values == (("op", "SUM"),)
    # A frame that has changed meanwhile has other values.
    moved = [native("c10d::wait"), frame("all_gather", C10D), frame("fit"), frame("<module>")]
    [thread] = threads(dump((100, python)), deeper=dump((100, moved)))
    assert thread.frames[1].values == ()


def test_a_stack_moves_when_two_readings_differ() -> None:
    first = dump((100, [frame("fit")]), (101, [frame("pin")]), (102, [frame("gone")]))
    second = dump((100, [frame("fit", line=4)]), (101, [frame("pin")]))
    assert [(one.tid, one.moving) for one in threads(first, second)] == [(100, True), (101, False), (102, None)]


def test_since_holds_for_the_frame_that_the_samples_show() -> None:
    own = dump((100, [native("read"), frame("load", "/a/data.py"), frame("fit")]))
    assert threads(own, innermost=Innermost("load", "/a/data.py", 17))[0].since_ns == 17
    assert threads(own, innermost=Innermost("fit", "/a/train.py", 17))[0].since_ns is None


def test_a_thread_has_what_the_kernel_shows_of_it() -> None:
    wait = {"tid": 101, "wchan": "pipe_read", "syscall": "read", "target": "pipe:[5]", "target_kind": "pipe"}
    main, other = threads(dump((101, [frame("pump")]), (100, [frame("fit")])), waits=[wait])
    assert (main.tid, main.wchan) == (100, None)
    assert (other.wchan, other.syscall, other.target, other.file_system) == ("pipe_read", "read", "pipe:[5]", None)


def test_what_a_process_has_too_much_of_is_cut() -> None:
    deep = [frame(f"f{n}") for n in range(MAX_FRAMES + 13)]
    found = threads(dump(*((tid, deep) for tid in range(90, 113))))
    assert [one.tid for one in found] == [100, *range(90, 100), *range(101, 106)]
    assert {len(one.frames) for one in found} == {MAX_FRAMES}
    # Both ends are kept: what the thread does, and the user's code that began it.
    names = [one.func for one in found[0].frames]
    assert (names[:48], names[48:]) == ([f"f{n}" for n in range(48)], [f"f{n}" for n in range(61, 77)])
    [thread] = threads(dump((100, [frame("f" * 5000, "/x" * 5000, op="o" * 5000)])))
    assert len(thread.frames[0].func) == len(thread.frames[0].file) == 200
