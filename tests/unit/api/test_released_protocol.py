"""Clients of the last release understand today's protocol."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
from released_protocol import breaks, described, released

NODE, QUERY = "probing.v1.Node", "probing.v1.QueryRequest"
Protocol = dict[str, dict[str, str]]


def test_nothing_that_was_released_changed() -> None:
    assert breaks(released(), described()) == []


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda p: p.pop(QUERY), f"{QUERY} is gone"),
        (lambda p: p[NODE].pop("Vars"), f"{NODE}.Vars is gone"),
        (lambda p: p[NODE].update(Vars="VarsRequest -> stream VarsReply"), f"{NODE}.Vars was"),
        (lambda p: p[QUERY].pop("sql"), f"{QUERY}.sql is gone"),
        (lambda p: p[QUERY].update(sql="9 string"), f"{QUERY}.sql was '1 string' and is '9 string'"),
        (lambda p: p[QUERY].update(sql="1 bytes"), f"{QUERY}.sql was '1 string' and is '1 bytes'"),
        (lambda p: p[QUERY].update(sql="1 repeated string"), f"{QUERY}.sql was"),
        (lambda p: p[QUERY].update(other=p[QUERY].pop("sql")), f"{QUERY}.sql is gone"),
        (lambda p: p[QUERY].update(other="2 uint32"), f"{QUERY}.other takes the number 2 of timeout_ms"),
    ],
)
def test_a_break_is_found(change: Callable[[Protocol], object], why: str) -> None:
    new = copy.deepcopy(released())
    change(new)
    assert breaks(released(), new)[0].startswith(why)


def test_an_addition_is_no_break() -> None:
    new = copy.deepcopy(released())
    new[QUERY]["more"] = "99 string"
    new[NODE]["More"] = "QueryRequest -> QueryReply"
    new["probing.v1.More"] = {}
    assert breaks(released(), new) == []
