"""The gate takes a part of the random examples, and leaves out tests that are marked ``long``."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import long
import pytest
from _pytest.mark import ParameterSet

TESTS = Path(__file__).resolve().parents[1]


def test_the_gate_takes_a_fifth_of_the_examples_but_ten(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = (1000, 60, 50, 49, 11, 10, 3)
    monkeypatch.setattr(long, "LONG", False)
    assert [long.examples(number) for number in numbers] == [200, 12, 10, 10, 10, 10, 3]
    monkeypatch.setattr(long, "LONG", True)
    assert [long.examples(number) for number in numbers] == list(numbers)


def test_parameters_outside_the_gate_are_marked() -> None:
    inside, outside = long.long_unless(True, 1, "a"), long.long_unless(False, 2, "b")
    assert isinstance(inside, ParameterSet)
    assert isinstance(outside, ParameterSet)
    assert (inside.values, list(inside.marks)) == ((1, "a"), [])
    assert (outside.values, [mark.name for mark in outside.marks]) == ((2, "b"), ["long"])


@pytest.mark.parametrize(("at_length", "kept"), [(False, ["plain"]), (True, ["plain", "marked"])])
def test_what_is_marked_runs_at_length_only(
    pytestconfig: pytest.Config, monkeypatch: pytest.MonkeyPatch, at_length: bool, kept: list[str]
) -> None:
    conftest = pytestconfig.pluginmanager.get_plugin(str(TESTS / "conftest.py"))
    assert conftest is not None
    monkeypatch.setattr(conftest, "LONG", at_length)
    deselected: list[Any] = []
    config = SimpleNamespace(hook=SimpleNamespace(pytest_deselected=lambda items: deselected.extend(items)))
    marks = {"plain": {"timeout"}, "marked": {"timeout", "long"}}
    items = [
        SimpleNamespace(name=name, get_closest_marker=lambda mark, name=name: mark in marks[name]) for name in marks
    ]
    conftest.pytest_collection_modifyitems(config, items)
    assert [item.name for item in items] == kept
    assert {item.name for item in deselected} == set(marks) - set(kept)
