"""What is read of variables, against what the program that has them prints of them itself."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from python_stack_helpers import child, each_interpreter, program, runtime_of

from probing.daemon.python_stack.stacks.dump import dump_stacks
from probing.daemon.python_stack.values.read import read_values
from probing.daemon.python_stack.walk.threads import read_start_ns
from probing.daemon.stack_wire import pack, unpack

OWN_KINDS = {"own_list", "own_tuple", "point", "ordered"}


@contextmanager
def parked(python: str) -> Iterator[tuple[int, dict[str, list[str]]]]:
    with program(python, "values_park.py") as process:
        assert process.stdout is not None
        told = process.stdout.readline()
        assert told, "the program did not get that far"
        yield process.pid, json.loads(told)


def values(pid: int, names: list[str]) -> dict[str, dict[str, Any]]:
    found = []
    runtime = runtime_of(pid)
    for at in range(0, len(names), 64):
        deadline = time.monotonic() + 60
        found += read_values(pid, read_start_ns(pid), runtime, names[at : at + 64], deadline)["values"]
    assert len(found) == len(names)
    return {row["name"]: row for row in found}


@each_interpreter
def test_values_equal_what_the_program_says(python: str) -> None:
    with parked(python) as (pid, told):
        found = values(pid, list(told))
    for name, (kind, text, number) in told.items():
        row = found[name]
        assert row["reason"] == "", row
        assert row["type"] == kind, row
        if name not in OWN_KINDS:
            assert row["value"] == text, row
        assert number == ("" if row["number"] is None else repr(row["number"])), row
    # A class of one's own is written as the built-in that it is.
    own = [found[name]["value"] for name in ("own_list", "own_tuple", "point", "ordered")]
    assert own == ["[1]", "(1, 2)", "(1, 2)", "{'a': 1}"]
    assert found["late"]["func"] == "park"
    assert found["in_module"]["func"] == "__main__"
    assert {row["tid"] for row in found.values()} == {pid}


@each_interpreter
def test_members_of_enumerations_that_are_each_others_value_end(python: str) -> None:
    code = """
import enum, sys
class A(enum.IntEnum):
    ONE = 1
class B(enum.IntEnum):
    TWO = 2
A.ONE._value_, B.TWO._value_ = B.TWO, A.ONE
one = A.ONE
print("ready", flush=True)
sys.stdin.read()
"""
    with child(python, "-c", code) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        assert values(process.pid, ["one"])["one"]["value"] == "<A.ONE: <B.TWO: <__main__.A object>>>"


@each_interpreter
def test_what_cannot_be_shown_says_why(python: str) -> None:
    names = ["over", "slotted.unset", "nowhere", "gone", "plain.z", "numbers[3]", "both.total", "not_yet"]
    with parked(python) as (pid, _):
        found = values(pid, [*names, "module:os.path.sep", "module:none.such"])
    reasons = {name: found[name]["reason"] for name in names}
    assert all(found[name]["value"] is None for name in names)
    assert reasons["over"] == "it has more than 4096 bits"
    assert reasons["slotted.unset"] == "its slot is empty"
    assert reasons["nowhere"] == "there is no variable 'nowhere' in any frame"
    assert reasons["gone"] == "there is no variable 'gone' in any frame"
    assert reasons["not_yet"] == "there is no variable 'not_yet' in any frame"
    assert reasons["plain.z"] == "Plain has no 'z'"
    assert reasons["numbers[3]"] == "its length is 3"
    assert reasons["both.total"].startswith("a property: its value is computed")
    assert found["module:os.path.sep"]["value"] == "'/'"
    assert found["module:os.path.sep"]["func"] == "os.path"
    assert found["module:none.such"]["reason"] == "no module 'none' was imported"


@each_interpreter
def test_values_are_cut(python: str) -> None:
    with parked(python) as (pid, _):
        found = values(pid, ["twenty", "long_text", "deep", "cycle", "not_a_number", "emptied", "shrunk"])
    assert found["twenty"]["value"] == f"[{', '.join(map(str, range(16)))}, ...]"
    assert found["long_text"]["value"] == f"'{'x' * 256}'..."
    assert found["deep"]["value"] == "[[[[...]]]]"
    assert found["cycle"]["value"] == "[1, [...]]"
    assert (found["not_a_number"]["value"], repr(found["not_a_number"]["number"])) == ("nan", "nan")
    assert found["emptied"]["value"] == "{2}"
    assert found["shrunk"]["value"] == "{'k297': 297, 'k298': 298, 'k299': 299}"


@each_interpreter
def test_objects_that_are_no_data(python: str) -> None:
    names = ["function", "method", "builtin", "cls", "module", "plain", "red", "slotted"]
    with parked(python) as (pid, _):
        found = values(pid, names)
    shown = {name: found[name]["value"] for name in names}
    assert shown.pop("method").endswith("__init__ of <__main__.Plain object>>")
    assert shown == {
        "function": "<function park>",
        "builtin": "<built-in function len>",
        "cls": "<class '__main__.Plain'>",
        "module": "<module 'os'>",
        "plain": "<__main__.Plain object>",
        "red": "<Color.RED: 1>",
        "slotted": "<__main__.Slotted object>",
    }


@each_interpreter
def test_secrets_are_not_shown(python: str) -> None:
    with parked(python) as (pid, _):
        names = ["api_key", "config", "config.password", "config.inner.hf_token", "hidden", "url"]
        found = values(pid, [*names, "arguments", "arguments[2]", "arguments[-3]", "arguments[4]", "request"])
        dumped = dump_stacks(pid, read_start_ns(pid), runtime_of(pid), time.monotonic() + 60, with_locals=True)
    assert {found[name]["value"] for name in names} - {found["config"]["value"]} == {"<redacted>"}
    assert found["config"]["value"] == "{'password': <redacted>, 'user': 'me', 'inner': {'hf_token': <redacted>}}"
    assert found["arguments"]["value"] == "['train.py', '--openai_key', <redacted>, '--lr', '1']"
    assert found["request"]["value"] == "(<redacted>, {'Cookie': <redacted>})"
    # Nor is one that an index names.
    for name in ("arguments[2]", "arguments[-3]"):
        assert (found[name]["value"], found[name]["reason"]) == (None, "the option before it names a secret")
    assert found["arguments[4]"]["value"] == "'1'"
    assert found["api_key"]["reason"] == "its name looks like a secret"
    assert found["hidden"]["reason"] == "it looks like a secret"
    text = json.dumps(dumped)
    assert "hunter2" not in text
    assert "secret@" not in text
    assert "a" * 20 not in text


@each_interpreter
def test_a_dump_holds_the_locals(python: str) -> None:
    with parked(python) as (pid, told):
        dumped = dump_stacks(pid, read_start_ns(pid), runtime_of(pid), time.monotonic() + 60, with_locals=True)
        plain = dump_stacks(pid, read_start_ns(pid), runtime_of(pid), time.monotonic() + 60)
    main = unpack(json.loads(json.dumps(pack(dumped))))["threads"][0]
    assert [f["func"].rpartition(".")[2] for f in main["frames"]] == [
        "park",
        "<module>",
        "Body",
        "generator",
        "deeper",
        "<module>",
    ]
    frames = [{v["name"]: v for v in f["locals"]} for f in main["frames"]]
    assert frames[0]["late"]["value"] == "'late'"
    assert frames[1]["exec_text"]["value"] == "'executed'"
    assert frames[2]["in_class_body"]["value"] == "'class body'"
    assert {"in_generator", "free", "argument_in_cell"} <= frames[3].keys()
    assert len(frames[4]) == 65
    assert frames[4]["..."]["reason"] == "further variables did not fit"
    assert frames[4]["argument"]["value"] == told["argument"][1]
    assert "gone" not in frames[4]
    assert frames[5]["in_module"]["value"] == told["in_module"][1]
    assert all("locals" not in f for t in plain["threads"] for f in t["frames"])
