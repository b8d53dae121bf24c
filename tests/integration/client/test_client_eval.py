"""``eval``: which processes are asked, what is shown of values, output and exceptions, and what goes wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from client_fake_node import FakeNode

from probing.api.errors import PrivilegeError
from probing.api.proto.probing.v1 import node_pb2 as pb

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def node(pair: tuple[FakeNode, FakeNode]) -> FakeNode:
    return pair[0]


def result(pid: int, rank: int | None = None, **fields: object) -> pb.Evaluated:
    return pb.Evaluated(job="j1", run="r", rank=rank, pid=pid, start_ns=1, **fields)  # type: ignore[arg-type]


def test_a_value_is_printed_as_it_is(node: FakeNode, ctl: Run) -> None:
    node.evaluated = [result(7, 0, value="42", type="int")]
    assert ctl("eval", "7", "6 * 7") == (0, "42\n", "")
    [asked] = node.code_asked
    assert (list(asked.pids), asked.code, asked.job, asked.HasField("rank"), asked.limit_ms) == (
        [7],
        "6 * 7",
        "",
        False,
        5000,
    )


def test_output_comes_before_the_value_and_is_escaped(node: FakeNode, ctl: Run) -> None:
    node.evaluated = [result(7, output="one\ntwo \x1b[31mred\n", dropped=12345, value="'x\\n'", type="str")]
    code, out, err = ctl("eval", "7", "f()")
    assert (code, err) == (0, "")
    assert out == "one\ntwo \\x1b[31mred\n(12,345 more characters of output were dropped)\n'x\\n'\n"


def test_several_ranks_have_headings_in_order(node: FakeNode, ctl: Run) -> None:
    node.evaluated = [result(9, 1, value="b", type="str"), result(8, 0, value="a", type="str"), result(7, output="c\n")]
    code, out, _ = ctl("eval", "--job", "j1", "name", "--limit", "250ms")
    assert code == 0
    name = node.name
    assert out == f"rank 0, pid 8 on {name}:\na\nrank 1, pid 9 on {name}:\nb\npid 7 on {name}:\nc\n"
    assert node.code_asked[-1].limit_ms == 250
    assert ctl("eval", "--rank", "1", "name")[1] == "b\n"


def test_an_exception_is_shown_and_fails_the_command(node: FakeNode, ctl: Run) -> None:
    frames = [pb.CodeFrame(file="<eval>", line=2, function="<module>"), pb.CodeFrame(file="a.py", line=9, function="f")]
    node.evaluated = [result(7, output="before\n", raised=pb.Raised(type="m.E", message="no\x07", frames=frames))]
    code, out, err = ctl("eval", "7", "f()")
    assert code == 1
    assert out == 'before\n  File "<eval>", line 2, in <module>\n  File "a.py", line 9, in f\n'
    assert err.startswith("error: the code raised m.E: no\\x07\n")


def test_json_has_all_of_it(node: FakeNode, ctl: Run) -> None:
    node.evaluated = [
        result(7, 0, value="1", type="int", seconds=0.5, stops=3, longest_stop_us=250),
        result(8, 1, raised=pb.Raised(type="E", message="m")),
    ]
    code, out, _ = ctl("-f", "json", "eval", "--job", "j1", "x")
    assert code == 1
    first, second = json.loads(out)
    assert first == {
        "node": node.name,
        "job": "j1",
        "run": "r",
        "rank": 0,
        "pid": 7,
        "value": "1",
        "type": "int",
        "output": "",
        "dropped": 0,
        "seconds": 0.5,
        "raised": None,
        "stops": 3,
        "longest_stop_us": 250,
    }
    assert second["raised"] == {"type": "E", "message": "m", "frames": []}
    header, *rows = ctl("-f", "csv", "eval", "--job", "j1", "x")[1].splitlines()
    assert header.split(",")[-2:] == ["error", "message"]
    assert len(rows) == 2


def test_code_of_a_file(node: FakeNode, ctl: Run, tmp_path: Path) -> None:
    node.evaluated = [result(7, output="x\n")]
    path = tmp_path / "look.py"
    path.write_text("a = 1\nprint(a)\n")
    assert ctl("eval", "7", "--file", str(path))[0] == 0
    assert node.code_asked[-1].code == "a = 1\nprint(a)\n"
    path.write_text("x" * (65 << 10))
    assert ctl("eval", "7", "--file", str(path))[0] == 2
    assert "cannot read" in ctl("eval", "7", "--file", str(tmp_path / "none"))[2]


@pytest.mark.parametrize(
    "words", [("eval",), ("eval", "7"), ("eval", "1 + 1"), ("eval", "x", "1 + 1"), ("eval", "--job", "j1")]
)
def test_what_is_missing_is_named(words: tuple[str, ...], node: FakeNode, ctl: Run) -> None:
    code, _, err = ctl(*words)
    assert code == 2
    assert "\nhint: " in err
    assert node.code_asked == []


def test_where_it_is_not_enabled_the_nearest_command_is_named(node: FakeNode, ctl: Run) -> None:
    node.broken = {
        "calls": PrivilegeError("running code in processes is not enabled on node alpha", hint="inject.enabled")
    }
    code, _, err = ctl("eval", "7", "trainer.state.step")
    assert code == 1
    assert "not enabled" in err
    assert "probingctl vars trainer.state.step" in err


def test_processes_in_which_it_did_not_run_are_warned_of(node: FakeNode, ctl: Run) -> None:
    error = pb.Error(kind="TargetTimeout", message="the main thread did not get to it", hint="see stacks")
    node.failures = [pb.TargetFailure(pid=8, rank=1, job="j1", error=error)]
    node.evaluated = [result(7, 0, value="1", type="int")]
    code, out, err = ctl("eval", "--job", "j1", "1")
    assert (code, out) == (0, "1\n")
    assert "pid 8 (rank 1)" in err
    node.evaluated = []
    code, out, err = ctl("eval", "--job", "j1", "1")
    assert (code, out) == (1, "")
    assert "hint: see stacks" in err


def test_ps_says_that_code_was_run(node: FakeNode, ctl: Run) -> None:
    node.notices = ["alpha: unix: uid 0, pid 9 had code run in 1 process"]
    assert "alpha: unix: uid 0, pid 9 had code run in 1 process\n" in ctl("ps")[1]
