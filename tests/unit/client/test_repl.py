"""The REPL: inputs that are whole, answers of several ranks under one heading, names to complete, and its end."""

from __future__ import annotations

from typing import Any

import pytest

from probing.api.errors import PrivilegeError, TargetTimeout
from probing.client.cluster import Evaluations
from probing.client.commands.repl import Repl, inputs, is_whole


def answer(rank: int | None, **fields: Any) -> dict[str, Any]:
    empty = {"output": "", "dropped": 0, "value": None, "type": "", "raised": None, "seconds": 0.0}
    return {"node": "n1", "job": "j", "run": "r", "rank": rank, "pid": 100 + (rank or 0), **empty, **fields}


class Cluster:
    """Answers by ``answers`` in turn: a list of results or an error. ``asked``: code, pids, session and ``ends``."""

    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)
        self.asked: list[tuple[str, list[int], str, bool]] = []

    def evaluate(
        self, code: str, pids: Any, job: str = "", *, session: str = "", ends: bool = False, **_: Any
    ) -> Evaluations:
        self.asked.append((code, list(pids), session, ends))
        found = self.answers.pop(0)
        if isinstance(found, BaseException):
            raise found
        return Evaluations(found, [])


def repl(*answers: Any) -> tuple[Repl, Cluster, list[str], list[str]]:
    cluster, written, complaints = Cluster(*answers), [], []  # type: ignore[var-annotated]
    made = Repl(cluster, [], "j", None, 5.0, written.append, complaints.append, session="ab")  # type: ignore[arg-type]
    return made, cluster, written, complaints


@pytest.mark.parametrize(
    ("text", "whole"),
    [
        ("x = 1\n", True),
        ("f(1,\n", False),
        ("f(1,\n2)\n", True),
        ("for x in y:\n", False),
        ("for x in y:\n    print(x)\n", False),
        ("for x in y:\n    print(x)\n\n", True),
        ("'''a\n", False),
        ("x = = 1\n", True),
        ("x = '\0'\n", True),
        ("", True),
    ],
)
def test_an_input_is_run_once_it_is_whole(text: str, whole: bool) -> None:
    assert is_whole(text) == whole


def test_lines_become_inputs() -> None:
    lines = ["x = 1\n", "if x:\n", "    x = 2\n", "\n", "x\n", "y = (\n"]
    assert list(inputs(iter(lines))) == ["x = 1\n", "if x:\n    x = 2\n\n", "x\n", "y = (\n"]


def test_the_greeting_names_the_processes() -> None:
    made, cluster, *_ = repl([answer(rank, value="'3.11.2'") for rank in (0, 1, 2, 4)])
    assert made.begin() == "CPython 3.11.2 in 4 processes (ranks 0-2,4 of job j); Ctrl-D to leave\n"
    assert cluster.asked[0][2:] == ("", False)
    made, *_ = repl([answer(None, value="'3.8.18'")])
    assert made.begin() == "CPython 3.8.18 in 1 process; Ctrl-D to leave\n"
    made, *_ = repl(PrivilegeError("it is not enabled"))
    with pytest.raises(PrivilegeError):
        made.begin()


def test_equal_answers_have_one_heading() -> None:
    raised = {"type": "ValueError", "message": "no\x1b[2J", "frames": [["train.py", 7, "main"]]}
    made, cluster, written, _ = repl(
        [answer(0, value="7"), answer(3, value="7"), answer(1, value="5", output="loud\n"), answer(2, raised=raised)],
        [answer(0), answer(1)],
        [answer(None, value="1"), answer(None, value="1", pid=107)],
    )
    made.take("x\n")
    assert "".join(written) == (
        'ranks 0,3:\n7\nrank 1:\nloud\n5\nrank 2:\n  File "train.py", line 7, in main\nValueError: no\\x1b[2J\n'
    )
    written.clear()
    made.take("y = 1\n")
    made.take("1\n")
    assert "".join(written) == "pid 100 on n1, pid 107 on n1:\n1\n"
    made.take("  \n")
    assert [asked[2] for asked in cluster.asked] == ["ab"] * 3


def test_what_fails_is_said_and_the_session_goes_on() -> None:
    made, _, written, complaints = repl(
        TargetTimeout("it is in C code", hint="look at stacks"), KeyboardInterrupt(), [answer(0, value="1")]
    )
    for _ in range(3):
        made.take("x\n")
    assert complaints == [
        "error: it is in C code\nhint: look at stacks\n",
        "no longer waiting for the answer; code that still runs is ended after 5 s\n",
    ]
    assert "".join(written) == "1\n"


def test_names_come_from_the_first_process_and_are_remembered() -> None:
    made, cluster, *_ = repl(
        [answer(0, value="'3.11.2'")], [answer(0, value="['model', 'main', 'a b', 7, '\\x1b', 'max']")]
    )
    made.begin()
    assert made.names("print(ma") == [("main", 2), ("max", 2)]
    assert made.names("mo") == [("model", 2)]
    assert made.names("1 + ") == made.names("f(x).") == made.names("") == []
    assert cluster.asked[1][1] == [100]
    assert len(cluster.asked) == 2


@pytest.mark.parametrize("value", ["[1, 2", "{[]: 1}", "__import__('os').abort()", "7", "'text'", "[" * 5000, None])
def test_an_answer_that_is_no_list_of_names_completes_nothing(value: str | None) -> None:
    made, *_ = repl([answer(0, value=value)])
    assert made.names("model.la") == []


def test_the_end_drops_the_names_and_raises_nothing() -> None:
    made, cluster, *_ = repl(PrivilegeError("no"))
    made.end()
    assert cluster.asked == [("None", [], "ab", True)]
