"""A session of code in real processes of each CPython: its names stay until it ends, and then nothing does."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

from inject_helpers import asked, beats, busy, evaluated, regions
from python_stack_helpers import each_interpreter

from probing.daemon.inject.evaluation import evaluate

LEFT = "[name for name in dir(__import__('sys')) if 'probing' in name]"


def typed(pid: int, session: str, code: str, *, ends: bool = False) -> Any:
    return evaluate(asked(pid, code, session=session, ends=ends))


@each_interpreter
def test_names_of_a_session_stay_until_it_ends(python: str) -> None:
    with busy(python) as process:
        mine, other = (partial(typed, process.pid, session) for session in ("a1", "b2"))
        mine("base = 7\ndef add(number):\n    return base + number + later")
        mine("later = 23")
        assert mine("add(5)")["value"] == "35"
        assert mine("[n for n in range(3) if n < base]")["value"] == "[0, 1, 2]"
        # Neither another session nor the program sees them.
        other("base = 11")
        assert other("(base, 'add' in globals())")["value"] == "(11, False)"
        assert evaluated(process.pid, "'base' in globals()")["value"] == "False"
        # What the program changes is seen, what the session has assigned stays.
        steps = [int(mine("step")["value"]) for _ in range(2)]
        beats(process)
        assert int(mine("step")["value"]) > steps[1] >= steps[0]
        mine("step = -1")
        assert mine("step")["value"] == "-1"
        assert int(evaluated(process.pid, "step")["value"]) > 0
        # An error ends no session.
        assert mine("1 / 0")["error"]["type"] == "ZeroDivisionError"
        assert mine("base")["value"] == "7"
        mine("None", ends=True)
        assert mine("'base' in globals()", ends=True)["value"] == "False"
        assert evaluated(process.pid, LEFT)["value"] == "['__probing_sessions__']"
        other("None", ends=True)
        assert evaluated(process.pid, LEFT)["value"] == "[]"
        beats(process)
        assert regions(process.pid) == []


@each_interpreter
def test_of_many_sessions_the_newest_stay(python: str) -> None:
    with busy(python) as process:
        for number in range(7):
            typed(process.pid, f"{number:x}", f"mine = {number}")
        kept = evaluated(process.pid, "list(__import__('sys').__probing_sessions__)")["value"]
        assert re.findall(r"'(\w)'", kept) == ["3", "4", "5", "6"]
        assert typed(process.pid, "3", "mine")["value"] == "3"
