"""The gate's worker: several statements of one request, and the tables and views that it asks for."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest

from probing.api.tables.user import user_table, user_table_to
from probing.api.typed import typed
from probing.daemon.confined import sql_checker
from probing.daemon.ipc import Message
from probing.daemon.store.needs import Need

NOW_NS = 1_795_000_000_000_000_000
READS = user_table("reads", "Reads.", [("size", "i64", "Bytes.")])
LONG = {"name": "view.long", "doc": "", "sql": "SELECT * FROM user.reads WHERE job = 'a'", "problem": ""}


def ask(*statements: str, **known: Any) -> Message:
    asked = {"statements": statements, "now_ns": NOW_NS, **known}
    return sql_checker._answer(Message({"op": "check"}, json.dumps(asked).encode()))


def test_each_statement_has_its_own_answer() -> None:
    answer = ask("SELECT 1", "DROP TABLE x", "SELECT op FROM comm.ops WHERE job = 'a'", "SELECT * FROM nope")
    assert answer.header == {"end": {}}
    one, drop, ops, nope = json.loads(answer.payload)
    assert (one["sql"], one["needs"]) == ("SELECT 1", {})
    assert (drop["error"]["kind"], nope["error"]["message"]) == ("QueryRejected", "there is no table nope")
    assert {name: typed(Need, need) for name, need in ops["needs"].items()} == {"comm.ops": Need(jobs=frozenset("a"))}


def test_what_any_statement_needs_is_asked_for_once() -> None:
    statements = ("SELECT 1", "SELECT size FROM view.long", "SELECT size FROM user.reads")
    assert ask(*statements).header == {"end": {"needs": "views"}}
    assert ask(*statements, views=[LONG]).header == {"end": {"needs": "users"}}
    answer = ask(*statements, views=[LONG], users=[user_table_to(READS)])
    assert [one["users"] for one in json.loads(answer.payload)] == [[], ["user.reads"], ["user.reads"]]


def test_a_bug_is_the_answer_of_its_statement(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(sql: str, *_: object) -> object:
        raise MemoryError if "memory" in sql else ValueError("bug")

    monkeypatch.setattr(sql_checker, "check", fails)
    with caplog.at_level(logging.ERROR):
        answers = json.loads(ask("SELECT 'memory'", "SELECT 'bug'").payload)
    assert [one["error"]["kind"] for one in answers] == ["QueryMemory", "InternalError"]
    assert len(caplog.records) == 1
