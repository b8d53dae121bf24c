"""Options of ``profile``: the request that they make, and which are refused."""

from __future__ import annotations

from typing import Any

import pytest

from probing.api.errors import UsageError
from probing.client.commands.profile import Options
from probing.client.profile.request import Request


def given(**more: Any) -> Request:
    return Options(**more).request()


@pytest.mark.parametrize(
    ("asked", "where"),
    [
        ({}, "ts >= now() - INTERVAL 300000 MILLISECOND AND ts < now() AND on_cpu"),
        (
            {"since": "10m", "until": "90s", "off_cpu": True, "rank": 3, "job": "it's"},
            "ts >= now() - INTERVAL 600000 MILLISECOND AND ts < now() - INTERVAL 90000 MILLISECOND "
            "AND job = 'it''s' AND rank = 3 AND NOT on_cpu",
        ),
        ({"gil": True}, "ts >= now() - INTERVAL 300000 MILLISECOND AND ts < now() AND on_cpu AND gil"),
        (
            {
                "since": "2026-11-21T08:00:00Z",
                "until": "2026-11-21T10:30:00.500+02:00",
                "wall": True,
                "pids": ["7", "8"],
            },
            "ts >= TIMESTAMP '2026-11-21 08:00:00.000000' AND ts < TIMESTAMP '2026-11-21 08:30:00.500000' "
            "AND pid IN (7, 8)",
        ),
    ],
)
def test_a_selection_is_a_condition(asked: dict[str, Any], where: str) -> None:
    assert given(**asked).selected.where() == where


@pytest.mark.parametrize(
    ("diff", "changed"),
    [
        ("rank:0", {"rank": 0}),
        ("pid:12", {"pids": (12,), "rank": None}),
        ("job:9", {"job": "9"}),
        ("before:10m", {"shift": 600.0}),
    ],
)
def test_a_difference_changes_one_thing(diff: str, changed: dict[str, Any]) -> None:
    found = given(rank=7, job="4711", since="1m", diff=diff)
    assert found.base is not None
    fields = ("pids", "job", "rank", "state", "since", "until", "shift")
    assert {f: getattr(found.base, f) for f in fields} == {**{f: getattr(found.selected, f) for f in fields}, **changed}


def test_before_is_the_same_length_earlier() -> None:
    base = given(since="1m", diff="before:10m").base
    assert base is not None
    assert "INTERVAL 660000 MILLISECOND AND ts < now() - INTERVAL 600000 MILLISECOND" in base.where()
    assert base.interval() == "from 11m ago until 10m ago"
    assert base.span(10**18) == (10**18 - 660 * 10**9, 10**18 - 600 * 10**9)
    dated = given(since="2026-11-21T08:00", diff="before:1h").base
    assert dated is not None
    assert dated.interval() == "from 2026-11-21 07:00:00Z until 1h ago"


@pytest.mark.parametrize(
    "wrong",
    [
        {"kind": "png"},
        {"wall": True, "off_cpu": True},
        {"live": "5s", "since": "5m"},
        {"live": "5s", "until": "1s"},
        {"live": "2h"},
        {"live": "0"},
        {"since": "soon"},
        {"since": "1m", "until": "2m"},
        {"until": "5m"},
        {"since": "2026-13-01"},
        {"since": "2026-11-21T08:00", "until": "2026-11-21T07:00"},
        {"by": "colour"},
        {"diff": "rank"},
        {"diff": "rank:x"},
        {"diff": "pid:0"},
        {"diff": "job:"},
        {"diff": "before:x"},
        {"diff": "nonsense:1"},
        {"diff": "rank:0", "kind": "pprof"},
    ],
)
def test_what_makes_no_sense_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        given(**wrong)
