"""What a launcher keeps of its owner's groups: bounded, and never in the way of an order."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from group_records import key_of, newer, ordered, record

from probing.groups.group import Group
from probing.launcher import launcher as module
from probing.launcher.allowed import Rules
from probing.launcher.held import Held
from probing.launcher.launcher import Launcher
from probing.launcher.processes import Clock
from probing.launcher.reports import Refusals
from probing.launcher.state import History, State

KEY = key_of().public


class Watched:
    """In place of what runs: nothing."""

    due = False

    def ranks(self, _held: Held) -> list[object]:
        return []


@pytest.fixture
def launcher(tmp_path: Path) -> Launcher:
    made = Launcher.__new__(Launcher)
    made.node, made.workers, made._directory = "gn6", ("gn6-0",), tmp_path
    made._rules = Rules(frozenset({KEY}), os.getuid(), "ada", ("*",))
    made._state, made._held, made._refusals, made._clock = State(), {}, Refusals(("gn6-0",)), Clock()
    made._watch, made._dirty = Watched(), False  # type: ignore[assignment]
    return made


def large(name: str, size: int = 1000) -> Group:
    return record(name=name, uid=os.getuid(), env={"NOTE": '"' * size})


def test_an_order_for_a_group_finds_room(launcher: Launcher, monkeypatch: pytest.MonkeyPatch) -> None:
    first = large("first")
    monkeypatch.setattr(module, "_MAX_RECORDS", 2 * len(first.to_json()))
    assert launcher.apply(first) == ""
    assert launcher.apply(large("second")) == ""
    assert launcher.apply(large("third")).endswith("are too large: delete some")
    started = ordered(first, "start")
    for group in (started, ordered(started, "stop"), ordered(ordered(started, "stop"), "delete")):
        assert launcher.apply(group) == ""
    # Only a larger specification needs more.
    grown = first.renewed(newer(first, name="first", uid=os.getuid(), env={"NOTE": "x" * 10_000}))
    history = History("first", KEY, record=first.to_json().decode(), version=1)
    launcher._state.groups[0] = history
    launcher._held["first"] = Held(history, launcher.workers, launcher._directory)
    assert launcher.apply(grown).endswith("are too large: delete some")
