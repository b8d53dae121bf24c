"""Specifications of groups: each rule that refuses, hostile JSON, and signatures."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import pytest
from group_records import BASE, spec_of
from hypothesis import given
from hypothesis import strategies as st

from probing.api.errors import UsageError
from probing.groups.spec import GIVEN, MAX_SPEC, MAX_WORKERS, Spec, checked, table

INF, NAN = float("inf"), float("nan")
MANY = tuple(f"gn{number // 8}-{number % 8}" for number in range(MAX_WORKERS))

REFUSED: tuple[tuple[str, dict[str, Any], str], ...] = (
    ("no name", {"name": ""}, "this is not a valid name"),
    ("a path as name", {"name": "../etc"}, "this is not a valid name"),
    ("a line end in the name", {"name": "llama\n"}, "this is not a valid name"),
    ("an escape sequence in the name", {"name": "a\x1b[2J"}, "this is not a valid name"),
    ("a long name", {"name": "a" * 64}, "this is not a valid name"),
    ("no workers", {"workers": ()}, "it has 0 workers"),
    ("too many workers", {"workers": (*MANY, "gn9999-0")}, "it has 16,385 workers"),
    ("a worker without a number", {"workers": ("gn6",)}, "gn6 is not a worker"),
    ("a number with a zero in front", {"workers": ("gn6-00",)}, "gn6-00 is not a worker"),
    ("a number of another script", {"workers": ("gn6-\u0663",)}, "is not a worker"),
    ("an escape sequence in a worker", {"workers": ("g\x1b[2J-0",)}, "g\\x1b[2J-0 is not a worker"),
    ("nodes that differ only in case", {"workers": ("gn6-0", "GN6-1")}, "nodes gn6 and GN6 differ only in case"),
    ("a worker twice", {"workers": ("gn6-0", "gn7-0", "gn6-0")}, "worker gn6-0 occurs twice"),
    ("an unknown master", {"master": "gn8"}, "the master gn8 is not among the workers gn6-0, gn6-1, gn7-0 and gn7-1"),
    ("an unknown worker as master", {"master": "gn6-7"}, "the master gn6-7 is not among the workers"),
    ("no command", {"command": ()}, "it has no command"),
    ("an empty command", {"command": ("",)}, "it has no command"),
    ("a zero byte in the command", {"command": ("python", "a\0b")}, "its command has a zero byte"),
    ("a surrogate in the command", {"command": ("a\udc80",)}, "its command has a character that is not Unicode"),
    ("many words", {"command": ("a",) * 1025}, "its command is too long"),
    ("a long word", {"command": ("a" * 65_537,)}, "its command is too long"),
    ("a word that is long in UTF-8", {"command": ("\u00e9" * 32_769,)}, "its command is too long"),
    ("many long words", {"command": ("a" * 60_000,) * 3}, "its command is too long"),
    ("a zero byte in the save command", {"save": ("a\0",)}, "its command before a restart has a zero byte"),
    ("an empty save command", {"save": ("",)}, "its command before a restart is empty"),
    ("a relative directory", {"cwd": "work"}, "its directory is not an absolute path"),
    ("a zero byte in the directory", {"cwd": "/a\0"}, "its directory is not an absolute path"),
    ("a long directory", {"cwd": "/" * 4097}, "its directory is not an absolute path"),
    ("10 MB of environment", {"env": {"A": "a" * 10_000_000}}, "its environment is too large"),
    ("many variables", {"env": {f"A{number}": "" for number in range(257)}}, "its environment is too large"),
    # The kernel takes at most 128 KiB of NAME=VALUE.
    ("a long variable", {"env": {"A": "a" * 65_536}}, "its environment is too large"),
    ("a zero byte in a value", {"env": {"A": "\0"}}, "the value of A has a zero byte"),
    ("a surrogate in a value", {"env": {"A": "\ud800"}}, "the value of A has a character that is not Unicode"),
    ("an assignment as a name", {"env": {"A=B": "c"}}, "'A=B' is not a valid variable name"),
    ("an empty name", {"env": {"": "c"}}, "'' is not a valid variable name"),
    ("a line end in a name", {"env": {"A\n": "c"}}, "is not a valid variable name"),
    ("a digit in front", {"env": {"1A": "c"}}, "'1A' is not a valid variable name"),
    *((f"the variable {name}", {"env": {name: "0"}}, f"{name} is set by the launcher") for name in sorted(GIVEN)),
    ("more ranks than workers", {"world_size": 5}, "a world size of 5 with 4 workers"),
    ("no ranks", {"world_size": 0}, "a world size of 0 with 4 workers"),
    ("port 0", {"master_port": 0}, "0 is not a port"),
    ("port 65536", {"master_port": 65_536}, "65536 is not a port"),
    ("no backend", {"backend": ""}, "its backend has no valid name"),
    ("a backend with a blank", {"backend": "gloo nccl"}, "its backend has no valid name"),
    ("-1 restarts", {"max_restarts": -1}, "-1 restarts an hour"),
    ("101 restarts", {"max_restarts": 101}, "101 restarts an hour"),
    ("more nodes than there are", {"min_nodes": 3}, "at least 3 of 2 nodes"),
    ("-1 nodes", {"min_nodes": -1}, "at least -1 of 2 nodes"),
    *(
        (f"{name} of {value}", {f"{name}_s": value}, f"its {name} time is {value} s")
        for name in ("grace", "fence", "save")
        for value in (NAN, INF, -INF, -1.0, 0.0, 3600.5)
    ),
    ("a small log", {"log_bytes": 4095}, "its logs are rotated at 4095 bytes"),
    ("a log of any size", {"log_bytes": 1 << 64}, "its logs are rotated at"),
    ("version 0", {"version": 0}, "its owner, version or node is malformed"),
    # Tables have no larger numbers.
    ("a huge version", {"version": 1 << 53}, "its owner, version or node is malformed"),
    ("a huge uid", {"uid": 1 << 32}, "its owner, version or node is malformed"),
    ("uid -1", {"uid": -1}, "its owner, version or node is malformed"),
    ("no owner", {"owner": ""}, "its owner, version or node is malformed"),
    ("an escape sequence as owner", {"owner": "a\x1b[2J"}, "its owner, version or node is malformed"),
    ("a surrogate as owner", {"owner": "\udc80"}, "its owner, version or node is malformed"),
    ("a surrogate as id", {"id": "\udc80"}, "its owner, version or node is malformed"),
    ("a long id", {"id": "a" * 65}, "its owner, version or node is malformed"),
    ("a path as node", {"signed_on": "/gn6"}, "its owner, version or node is malformed"),
)


@pytest.mark.parametrize(("fields", "problem"), [case[1:] for case in REFUSED], ids=[case[0] for case in REFUSED])
def test_a_rule_refuses_and_says_why(fields: dict[str, Any], problem: str) -> None:
    with pytest.raises(UsageError) as refused:
        checked(spec_of(**fields))
    assert problem in refused.value.message
    assert refused.value.hint
    assert refused.value.message.isprintable()


@pytest.mark.parametrize(
    "fields",
    [
        {"env": {"NOTE": "a\nb\r\t\x1b"}, "command": ("python", "-c", "print(1)\nprint(2)\n")},
        {"env": {"A": "\u4f60\u597d \U0001f600"}, "cwd": "/home/ada/mod\u00e8les"},
        {"env": {"A": "a" * 65_535}},
        {"env": {f"A{number}": "a" * 500 for number in range(256)}},
        {"world_size": 1, "min_nodes": 2, "max_restarts": 100, "log_bytes": 1 << 40},
        {"master_port": 65_535, "grace_s": 3600.0, "fence_s": 1e-3, "save": ("SIGUSR1",)},
        {"workers": ("gn-6-0", "gn-6-1", "gn-0"), "master": "gn-6"},
        {"name": "Llama.3_8b-x"},
    ],
)
def test_a_specification_is_the_same_after_json(fields: dict[str, Any]) -> None:
    spec = checked(spec_of(**fields))
    assert Spec.from_json(spec.to_json()) == spec
    # What is signed does not depend on the order in which variables were given.
    mixed = spec_of(**{**fields, "env": dict(reversed(list(fields.get("env", {}).items())))})
    assert mixed.to_json() == spec.to_json()


def test_an_ipv6_address_is_the_masters_address() -> None:
    assert {rank.master_addr for rank in table(spec_of(), address="fd00::6")} == {"fd00::6"}


def test_the_master_moves_to_the_first_node_that_is_left() -> None:
    spec = spec_of(workers=("gn6-0", "gn9-0", "gn7-0"), master="gn6-0")
    assert [rank.worker for rank in table(spec, ("gn6",))] == ["gn7-0", "gn9-0"]
    with pytest.raises(UsageError, match="no node is left"):
        table(spec, ("gn6", "gn7", "gn9"))


def _calls(function: Callable[[], object]) -> int:
    """Returns how many functions of C are called, without those that another function of C calls."""
    number = 0

    def note(_frame: object, event: str, _argument: object) -> None:
        nonlocal number
        number += event in ("c_call", "call")

    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(None)
    return number


def test_the_work_for_a_specification_grows_with_its_workers() -> None:
    class Workers(tuple[str, ...]):
        looked = 0

        def count(self, value: object) -> int:
            raise AssertionError("a look at all workers for a worker")

        def index(self, *_: object) -> int:
            raise AssertionError("a look at all workers for a worker")

        def __contains__(self, value: object) -> bool:
            Workers.looked += 1
            return super().__contains__(value)

    few = _calls(lambda: checked(spec_of(workers=Workers(MANY[:1024]), master="gn5")))
    many = _calls(lambda: checked(spec_of(workers=Workers(MANY), master="gn5")))
    assert many <= 17 * few
    assert Workers.looked <= 4
    twice = spec_of(workers=Workers((*MANY[:-1], "gn5-0")), master="gn5")
    with pytest.raises(UsageError, match="worker gn5-0 occurs twice"):
        checked(twice)


def test_all_workers_fit_into_a_specification() -> None:
    spec = spec_of(workers=MANY, master="gn2047")
    assert len(spec.to_json()) <= MAX_SPEC
    assert Spec.from_json(spec.to_json()) == spec


JSON = {**asdict(spec_of()), "workers": list(BASE["workers"]), "command": ["python"]}


def _text(**fields: Any) -> bytes:
    return json.dumps({**JSON, **fields}).encode()


HOSTILE: tuple[tuple[str, bytes], ...] = (
    ("nothing", b""),
    ("bytes", b"\xff\xfe\x80"),
    ("null", b"null"),
    ("a list", b"[]"),
    ("a number", b"1"),
    ("an open object", b'{"name":'),
    ("no fields", b"{}"),
    ("10,000 lists", b"[" * 10_000),
    ("10,000 objects", b'{"env":' * 10_000),
    ("10,000 lists in a field", _text(name="x").replace(b'"x"', b"[" * 10_000 + b"]" * 10_000)),
    ("5,000 digits", _text(version=7).replace(b": 7", b": " + b"9" * 5_000)),
    ("400 digits", _text(grace_s=7).replace(b": 7", b": " + b"9" * 400)),
    ("a huge exponent", _text(grace_s=7).replace(b": 7", b": 1e999")),
    ("a text as number", _text(master_port="29500")),
    ("a fraction as port", _text(master_port=29500.5)),
    ("true as port", _text(master_port=True)),
    ("true as time", _text(grace_s=True)),
    ("null as command", _text(command=None)),
    ("a text as command", _text(command="python")),
    ("numbers in the command", _text(command=[1])),
    ("null in the command", _text(command=[None])),
    ("a list as environment", _text(env=[["A", "b"]])),
    ("a number as value", _text(env={"A": 1})),
    ("an object as name", _text(name={})),
    ("an unknown restart", _text(restart="sometimes")),
    ("an unknown on_hang", _text(on_hang="explode")),
    ("half of a surrogate pair", _text(owner="x").replace(b'"x"', b'"\\ud800"')),
    ("10 MB", _text(cwd="/" + "a" * 10_000_000)),
)


@pytest.mark.parametrize("data", [case[1] for case in HOSTILE], ids=[case[0] for case in HOSTILE])
def test_hostile_json_is_refused(data: bytes) -> None:
    with pytest.raises(UsageError) as refused:
        Spec.from_json(data)
    assert refused.value.message.isprintable()
    assert len(refused.value.message) < 5_000


def test_unknown_fields_of_a_newer_version_are_left_out() -> None:
    assert Spec.from_json(_text(colour="red")) == spec_of(command=("python",))


@given(st.binary(max_size=400) | st.text(max_size=200).map(str.encode))
def test_any_bytes_are_refused_with_a_sentence(data: bytes) -> None:
    with pytest.raises(UsageError):
        Spec.from_json(data)


_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


@given(st.sampled_from(sorted(JSON)), _VALUES)
def test_a_field_of_any_type_is_refused_or_is_the_same_after_json(name: str, value: Any) -> None:
    try:
        spec = Spec.from_json(json.dumps({**JSON, name: value}).encode())
    except UsageError:
        return
    assert Spec.from_json(spec.to_json()) == spec
