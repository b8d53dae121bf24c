"""``probingctl events`` and ``ps --ended`` over two nodes with known ends."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from client_fake_node import SECOND, FakeNode, operation

from probing.client.main import main

Run = Callable[..., tuple[int, str, str]]


def event(node: str, rank: int | None, second: int, kind: str, **more: Any) -> dict[str, Any]:
    """A row of process.events, ``second`` s after the first of all."""
    pid = 900 if rank is None else 1000 + rank
    return {
        "node": node,
        "ts": operation(node, 0, 0)["ts"] + second * SECOND,
        "job": "j1",
        "run": "r1",
        "pid": pid,
        "start_ns": pid * SECOND,
        "rank": rank,
        "role": "launcher" if rank is None else "trainer",
        "event": kind,
        **more,
    }


def of_a_job() -> dict[str, list[dict[str, Any]]]:
    return {
        "alpha": [
            event("alpha", None, 0, "start"),
            event("alpha", 0, 1, "start"),
            event("alpha", 0, 1, "identified", detail="{}"),
            event("alpha", 0, 9, "exit", exit_code=1),
            event("alpha", None, 10, "exit", exit_code=3),
            # Nobody saw how it ended, and the trainer itself ends what is slow to leave.
            event("alpha", 7, 2, "exit"),
            event("alpha", 8, 3, "exit", signal=15, role="data_loader"),
        ],
        "beta": [
            event("beta", 2, 1, "start"),
            event("beta", 2, 7, "oom_kill"),
            event("beta", 2, 7, "exit", signal=9),
            event("beta", 3, 5, "exit", exit_code=0),
            event("beta", 4, 6, "exit", signal=44, role="other"),
        ],
    }


@pytest.fixture
def ask(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Iterator[Callable[..., str]]:
    nodes = [FakeNode(tmp_path, name, {"process.events": rows}) for name, rows in of_a_job().items()]
    addresses = ",".join(node.address for node in nodes)

    def run(*words: str) -> str:
        assert main(["--nodes", addresses, *words]) == 0
        out, err = capsys.readouterr()
        assert err == ""
        return out

    yield run
    for node in nodes:
        node.stop()


def test_the_first_failure_of_a_job_is_marked(ask: Callable[..., str]) -> None:
    rows = json.loads(ask("events", "--job", "j1", "-f", "json"))
    assert [row["ts"] for row in rows] == sorted(row["ts"] for row in rows)
    assert "identified" not in {row["event"] for row in rows}
    (first,) = [row for row in rows if row["first"]]
    assert (first["node"], first["rank"], first["signal"], first["oom"]) == ("beta", 2, 9, True)
    assert first["detail"] == "killed by SIGKILL (OOM), first to fail"
    said = {(row["rank"], row["role"]): row["detail"] for row in rows if row["event"] == "exit"}
    assert said == {
        (0, "trainer"): "exited with code 1",
        (None, "launcher"): "exited with code 3",
        (7, "trainer"): "ended in an unknown way",
        (8, "data_loader"): "killed by SIGTERM",
        (2, "trainer"): first["detail"],
        (3, "trainer"): "exited with code 0",
        (4, "other"): "killed by signal 44",
    }


def test_events_for_people(ask: Callable[..., str]) -> None:
    lines = ask("events").splitlines()
    assert lines[0].split() == ["WHEN", "NODE", "JOB", "RUN", "RANK", "PID", "EVENT", "DETAIL"]
    assert lines[-1].split()[-10:] == ["alpha", "j1", "r1", "-", "900", "exit", "exited", "with", "code", "3"]


def test_ps_shows_those_that_have_ended(ask: Callable[..., str]) -> None:
    rows = json.loads(ask("ps", "--ended", "-f", "json"))
    assert [row["ended"] for row in rows] == sorted((row["ended"] for row in rows), reverse=True)
    assert [(row["pid"], row["how"]) for row in rows if row["first"]] == [
        (1002, "killed by SIGKILL (OOM), first to fail")
    ]
    assert "exited with code 3" in ask("ps", "--ended").splitlines()[1]


def test_a_job_that_nobody_knows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with FakeNode(tmp_path, "alpha") as node:
        assert main(["-t", node.address, "events", "--job", "j9"]) == 1
        assert "there is no job j9" in capsys.readouterr().err
        assert main(["-t", node.address, "events"]) == 0
        assert capsys.readouterr().out == "(none)\n"


def test_a_launcher_has_its_start_though_its_job_was_not_known_then(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [
        event("alpha", None, 0, "start", job=None, run=None, role="other"),
        # Of an earlier process with that pid.
        event("alpha", None, 0, "start", job="old", start_ns=7),
        event("alpha", 0, 1, "start"),
        event("alpha", None, 2, "identified", detail="{}"),
        event("alpha", 0, 9, "exit", exit_code=0),
        event("alpha", None, 10, "exit", exit_code=0),
    ]
    with FakeNode(tmp_path, "alpha", {"process.events": rows}) as node:
        assert main(["-t", node.address, "events", "--job", "j1", "-f", "json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [(row["event"], row["role"], row["job"]) for row in found] == [
        ("start", "launcher", "j1"),
        ("start", "trainer", "j1"),
        ("exit", "trainer", "j1"),
        ("exit", "launcher", "j1"),
    ]


@pytest.mark.parametrize(
    ("ends", "first"),
    [
        # A scheduler ends all of them at once.
        ([(0, 15, 0.0), (1, 15, 0.01)], None),
        ([(0, 2, 0.0), (1, 15, 0.02)], None),
        # A launcher ends the others of a rank that was ended.
        ([(0, 15, 0.0), (1, 15, 0.3)], 0),
        # Somebody ended the only one.
        ([(0, 15, 0.0)], 0),
        # One of them failed of itself.
        ([(0, 11, 0.0), (1, 15, 0.01)], 0),
        # The end of rank 1 may have been asked for as well: `diagnose` names nobody either.
        ([(0, 15, 0.0), (1, 9, 0.01)], None),
    ],
)
def test_a_job_that_was_asked_to_end_has_no_first_failure(
    tmp_path: Path, ctl: Run, monkeypatch: pytest.MonkeyPatch, ends: list[tuple[int, int, float]], first: int | None
) -> None:
    now = time.time_ns() - 60 * SECOND
    rows = [
        {
            "node": "n",
            "job": "j1",
            "run": "r1",
            "event": "exit",
            "role": "trainer",
            "start_ns": 1,
            "pid": 100 + rank,
            "rank": rank,
            "signal": number,
            "ts": now + round(at * SECOND),
        }
        for rank, number, at in ends
    ]
    with FakeNode(tmp_path, "n", {"process.events": rows}) as node:
        monkeypatch.setenv("PROBING_TARGET", node.address)
        found = json.loads(ctl("events", "-f", "json")[1])
        assert [row["rank"] for row in found if row["first"]] == ([] if first is None else [first])
        shown = ctl("top", "--once")[1]
        assert ("FAILED FIRST" in shown) == (first is not None)
        assert "ENDED " in shown
