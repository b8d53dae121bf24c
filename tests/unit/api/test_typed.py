"""Values of JSON become objects of a type, or an error that names the place."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest

from probing.api.errors import UsageError
from probing.api.typed import typed, typed_json, with_fields


class Place(NamedTuple):
    node: str
    rank: int | None = None


@dataclass(frozen=True, slots=True)
class Job:
    name: str
    places: tuple[Place, ...] = ()
    hz: float = 19.0
    lost: frozenset[int] = frozenset()


def test_a_value_becomes_an_object_without_fields_that_the_type_lacks() -> None:
    value = {"name": "j\udc80", "places": [["a", 1], ["b"]], "hz": 7, "lost": [3, 3], "later": {}}
    assert typed(Job, value) == Job("j\udc80", (Place("a", 1), Place("b")), 7.0, frozenset({3}))


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ([], "it: no object"),
        ({}, "it: without name"),
        ({"name": 1}, "name: no text"),
        ({"name": "j", "places": {}}, "places: no list"),
        ({"name": "j", "places": [["a", "1"]]}, "places[0][1]: no integer"),
        ({"name": "j", "places": [["a", True]]}, "places[0][1]: no integer"),
        ({"name": "j", "places": [["a", 1, 2]]}, "places[0]: 3 values instead of 1 to 2"),
        ({"name": "j", "hz": "19"}, "hz: no number"),
        ({"name": "j", "\udc80": 1}, "surrogates not allowed"),
    ],
)
def test_a_wrong_value_is_named_with_its_place(value: Any, problem: str) -> None:
    with pytest.raises(ValueError, match=re.escape(problem)):
        typed(Job, value)


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"", "Expecting value"),
        (b"{", "Expecting property name"),
        (b"\xff", "can't decode"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"name": null}', "name: no text"),
    ],
)
def test_what_is_no_such_json_is_a_value_error(data: bytes, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        typed_json(Job, data)


def test_the_fields_of_a_request_are_the_arguments_of_its_answer() -> None:
    def answer(pids: tuple[int, ...], job: str = "", native: bool = False) -> tuple[object, ...]:
        return pids, job, native

    call = with_fields(answer)
    assert call({"op": "stacks", "pids": [1, 2], "native": True}) == ((1, 2), "", True)
    with pytest.raises(UsageError, match=r"the request is malformed: pids\[1\]: no integer"):
        call({"pids": [1, "2"]})
    with pytest.raises(UsageError, match="without pids"):
        call({"job": "j"})
