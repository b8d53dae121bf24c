"""Dumps of programs that switch functions, generators, code and threads: each stack is right, or is marked.

What is wrong in a stack shows: a callee that is never called from where its caller stands, or code of another file,
number or line than its name says.
"""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from long import LONG, examples
from python_stack_helpers import INTERPRETERS, PROGRAMS, dump, each_interpreter, program, runtime_of

from probing.daemon.python_stack.walk.locate import RuntimeInfo

SAMPLES = examples(10_000)
# Stacks that may be wrong as the interpreter has them, beside one in a thousand: the gate has too few for a rate.
FEW = 0 if LONG else 3
# Where a thread begins, waits, and is forgotten: that may be called by a collection of garbage, from anywhere.
LIBRARY = ("/threading.py", "/_weakrefset.py")
_MADE = re.compile(r"<made (\d{3})>")
_FUNCTION = re.compile(r"\s*def (\w+)\(")
_CALLS = re.compile(r"# -> (.*)")

SHAPES = {"leaf_a", "leaf_b", "leaf_c", "shared", "resume_a", "resume_b", "resume_c", "even", "made", "inner"}

Frame = dict[str, Any]


class Rules:
    """What may be seen of ``switching.py``."""

    def __init__(self) -> None:
        # Of each function: its lines, and what each of them calls, if it is said.
        self.lines: dict[str, range] = {}
        self.calls: dict[int, set[str]] = {}
        function, start = "<module>", 1
        source = (PROGRAMS / "switching.py").read_text().splitlines()
        for number, text in enumerate([*source, "def end("], 1):
            if found := _FUNCTION.match(text):
                self.lines[function] = range(start, number)
                function, start = found[1], number
            elif found := _CALLS.search(text):
                self.calls[number] = set(found[1].split())
        self.lines["<module>"] = range(1, len(source) + 1)

    def faults(self, frames: list[Frame]) -> list[str]:
        """What is wrong with a stack, innermost frame first; nothing when it can be."""
        found = [fault for frame in frames if (fault := self._frame(frame))]
        return found + [fault for callee, caller in pairwise(frames) if (fault := self._pair(callee, caller))]

    def _frame(self, frame: Frame) -> str | None:
        func, file, line = frame["func"], frame["file"], frame["lineno"]
        if made := _MADE.fullmatch(file):
            number = int(made[1])
            # Lines of the module: the two functions' first ones. A module begins at its line 1, or at 0 (3.11+).
            allowed: dict[str, tuple[int, ...]] = {
                f"inner_{made[1]}": (number + 1, number + 2),
                f"outer_{made[1]}": (number + 4, number + 5, number + 6, number + 7),
                "<module>": (0, 1, number + 1, number + 4),
            }
            return None if line in allowed.get(func, ()) else f"{func} at {file}:{line}"
        if file.endswith("/switching.py"):
            return None if line in self.lines.get(func, ()) else f"{func} at line {line}"
        return None if file.endswith(LIBRARY) else f"{func} of {file}"

    def _pair(self, callee: Frame, caller: Frame) -> str | None:
        pair = f"{callee['func']} at {callee['lineno']} called by {caller['func']} at {caller['lineno']}"
        inner, outer = _MADE.fullmatch(callee["file"]), _MADE.fullmatch(caller["file"])
        if outer:
            right = callee["func"] == f"inner_{outer[1]}" and caller["lineno"] == int(outer[1]) + 6
            return None if inner and right else pair
        if not caller["file"].endswith("/switching.py") or callee["file"].endswith(LIBRARY):
            return None
        name = callee["func"].partition("_")[0] if inner and callee["func"] != "<module>" else callee["func"]
        return None if name in self.calls.get(caller["lineno"], ()) else pair


def test_the_rules_see_what_is_wrong() -> None:
    rules = Rules()
    at = {name: next(n for n, names in rules.calls.items() if name in names) for name in ("leaf_a", "outer")}
    here = str(PROGRAMS / "switching.py")

    def frame(func: str, lineno: int, file: str = here) -> Frame:
        return {"func": func, "file": file, "lineno": lineno}

    leaf, branch = frame("leaf_a", rules.lines["leaf_a"][1]), frame("branch_a", at["leaf_a"])
    assert rules.faults([leaf, branch]) == []
    assert rules.faults([frame("leaf_b", rules.lines["leaf_b"][1]), branch])
    assert rules.faults([leaf, frame("branch_a", at["leaf_a"] + 1)])
    assert rules.faults([frame("leaf_a", 1)])
    assert rules.faults([frame("?", 1, "?")])
    inner, outer = frame("inner_007", 9, "<made 007>"), frame("outer_007", 13, "<made 007>")
    executed = frame("executed", at["outer"])
    assert rules.faults([inner, outer, executed]) == []
    assert rules.faults([inner, frame("outer_008", 14, "<made 008>")])
    assert rules.faults([frame("inner_007", 10, "<made 007>")])
    assert rules.faults([inner, frame("outer_007", 12, "<made 007>")])


def stands_still(pid: int, runtime: RuntimeInfo, thread: dict[str, Any]) -> bool:
    """Whether the thread has its stack again without having run in between: then it was not torn.

    What CPython has noted of a caller's line may be late by itself, where it gives the interpreter lock away.
    """
    status = Path(f"/proc/{pid}/task/{thread['tid']}/status")
    before = status.read_text()
    again = [t["frames"] for t in dump(pid, runtime)["threads"] if t["tid"] == thread["tid"]]
    counts = ([line for line in text.splitlines() if "ctxt_switches" in line] for text in (before, status.read_text()))
    first, second = counts
    return again == [thread["frames"]] and first == second and "State:\tR" not in before


@each_interpreter
def test_no_stack_is_wrong(python: str, capsys: pytest.CaptureFixture[str]) -> None:
    rules = Rules()
    samples = -(-SAMPLES // len(INTERPRETERS))
    complete = stacks = 0
    wrong: list[str] = []
    said: list[str] = []
    shapes: set[str] = set()
    with program(python, "switching.py") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        runtime = runtime_of(process.pid)
        dumps = 0
        # A program that was not seen at something proves nothing of it.
        while dumps < samples or (not shapes >= SHAPES and dumps < 20 * samples):
            dumps += 1
            for thread in dump(process.pid, runtime)["threads"]:
                frames = thread["frames"]
                if len(frames) > 1 and thread["tid"] != process.pid:
                    stacks += 1
                    complete += thread["complete"]
                    if thread["complete"]:
                        shapes.update(f["func"].rstrip("_0123456789") for f in frames)
                        faults = [f"{fault}: {thread}" for fault in rules.faults(frames)]
                        (said if faults and stands_still(process.pid, runtime, thread) else wrong).extend(faults)
    with capsys.disabled():
        print(f"\n{python}: {dumps} dumps, {stacks} stacks, {complete / stacks:.1%} complete, {len(wrong)} wrong")
        if said:
            print(f"as the interpreter itself has it: {len(said)}, such as {said[0]}")
    assert wrong[:3] == []
    assert len(said) < FEW + stacks / 1000
    assert shapes >= SHAPES
    # Nor does marking all that moves.
    assert complete / stacks > 0.5
