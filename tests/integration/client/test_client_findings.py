"""Findings of the daemon: as lines in ``ps``, ``top`` and ``nccl``, and in ``diagnose --history``."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from client_fake_node import SECOND, FakeNode

Run = Callable[..., tuple[int, str, str]]
SENTENCE = "rank 2 (node beta, pid 1002) holds up 3 ranks for 35 s: it reads in read_batch, train.py:31"
LISTS = ("culprits", "evidence", "missing", "refuted_by", "next_steps", "stacks")


def finding(node: str, name: str, age_s: float, **more: Any) -> dict[str, Any]:
    """A row of diagnosis.findings, written ``age_s`` ago by a finding that was opened a minute ago."""
    now = time.time_ns()
    return {
        "node": node,
        "ts": now - round(age_s * SECOND),
        "job": "j1",
        "run": "r1",
        "finding_id": name,
        "verdict": "not_joined",
        "severity": "error",
        "state": "open",
        "confidence": 0.9,
        "sentence": SENTENCE,
        "ranks": "2",
        "nodes": "beta",
        "victims": "0,1,3",
        "about": "default_pg:50",
        "opened": now - 60 * SECOND,
        **dict.fromkeys(LISTS, "[]"),
        **more,
    }


@pytest.fixture
def found(pair: tuple[FakeNode, FakeNode]) -> tuple[FakeNode, FakeNode]:
    """One finding that both nodes have and that has changed, one of the past, a note, one of a job that is gone."""
    now = time.time_ns()
    closed = {"state": "closed", "closed": now - 20 * SECOND, "sentence": "rank 1 was slow", "severity": "warning"}
    pair[0].insert(
        "diagnosis.findings",
        [
            finding("alpha", "a", 50, sentence="rank 2 may hold up 3 ranks", confidence=0.5),
            finding("alpha", "a", 30),
            finding("alpha", "b", 50),
            finding("alpha", "b", 20, **closed),
            finding("alpha", "n", 9, severity="note", sentence="rank 0 has the most memory"),
            finding("alpha", "g", 9, job="gone", run="r0", sentence="\x1b[31mrank 0\x1b[0m died"),
        ],
    )
    pair[1].insert("diagnosis.findings", [finding("beta", "a", 31)])
    return pair


@pytest.mark.parametrize("words", [("ps",), ("top", "--once"), ("nccl",)])
def test_open_findings_are_a_line(ctl: Run, found: tuple[FakeNode, FakeNode], words: tuple[str, ...]) -> None:
    code, out, err = ctl(*words, "--all-nodes")
    assert (code, err) == (0, "")
    assert [line.partition("Z: ")[2] for line in out.splitlines() if "DIAGNOSIS" in line] == [SENTENCE]
    assert "memory" not in out
    assert "died" not in out


@pytest.mark.parametrize("words", [("top", "--once"), ("nccl",)])
def test_a_finding_says_what_its_culprit_does_and_nothing_else_does(
    ctl: Run, pair: tuple[FakeNode, FakeNode], words: tuple[str, ...]
) -> None:
    state, gap = "rank 2: no collective on its stacks", "rank 2: operations before"
    late = {"node": "beta", "ts": 0, "table_name": "comm.ops", "ts_from": 0, "ts_to": time.time_ns(), "pid": 1002}
    pair[1].insert("probing.losses", [{**late, "reason": "late"}])
    out = ctl(*words, "--all-nodes")[1]
    assert state in out
    assert gap in out
    pair[1].insert("diagnosis.findings", [finding("beta", "w", 9, severity="warning", verdict="slow_rank")])
    assert state in ctl(*words, "--all-nodes")[1]
    pair[1].insert("diagnosis.findings", [finding("beta", "a", 9)])
    out = ctl(*words, "--all-nodes")[1]
    assert state not in out
    assert gap in out


@pytest.mark.parametrize("words", [("top", "--once"), ("nccl",)])
def test_a_death_is_a_finding_or_the_first_failure(
    ctl: Run, pair: tuple[FakeNode, FakeNode], words: tuple[str, ...]
) -> None:
    pair[1].insert(
        "process.events",
        [
            {
                "node": "beta",
                "ts": time.time_ns(),
                "job": "j1",
                "run": "r1",
                "pid": 1002,
                "start_ns": 1002 * SECOND,
                "event": "exit",
                "role": "trainer",
                "rank": 2,
                "signal": 9,
            }
        ],
    )
    assert "FAILED FIRST: rank 2 " in ctl(*words, "--all-nodes")[1]
    pair[1].insert("diagnosis.findings", [finding("beta", "d", 9, verdict="rank_died")])
    out = ctl(*words, "--all-nodes")[1]
    assert "DIAGNOSIS" in out
    assert "FAILED FIRST" not in out


def test_the_first_failure_is_the_rank_that_the_daemon_found(ctl: Run, pair: tuple[FakeNode, FakeNode]) -> None:
    now = time.time_ns()
    who = {"node": "beta", "job": "j1", "run": "r1", "event": "exit", "role": "trainer"}
    ends = [{**who, "pid": 1000 + r, "rank": r, "start_ns": r, "exit_code": 1, "ts": now + r} for r in (2, 3)]
    pair[1].insert("process.events", ends)
    assert [row["rank"] for row in json.loads(ctl("events", "-f", "json", "--all-nodes")[1]) if row["first"]] == [2]
    # Its error in the log, which the daemon reads, shows that rank 2 ended for lack of rank 3.
    closed = {"verdict": "rank_died", "ranks": "3", "state": "closed", "closed": now}
    pair[1].insert("diagnosis.findings", [finding("beta", "d", 0, **closed)])
    for words in (("events",), ("ps", "--ended")):
        rows = json.loads(ctl(*words, "-f", "json", "--all-nodes")[1])
        assert [row["rank"] for row in rows if row["first"]] == [3]
    for words in (("top", "--once"), ("nccl",)):
        out = ctl(*words, "--all-nodes")[1]
        assert "FAILED FIRST: rank 3 " in out
        assert "DIAGNOSIS" not in out


def test_no_finding_no_line(ctl: Run, pair: tuple[FakeNode, FakeNode]) -> None:
    for words in (("ps",), ("top", "--once"), ("nccl",)):
        assert "DIAGNOSIS" not in ctl(*words, "--all-nodes")[1]


def test_findings_in_json(ctl: Run, found: tuple[FakeNode, FakeNode]) -> None:
    (own,) = json.loads(ctl("nccl", "--all-nodes", "-f", "json")[1])
    assert [(row["finding_id"], row["sentence"]) for row in own["findings"]] == [("a", SENTENCE)]
    ranks = json.loads(ctl("top", "--once", "--all-nodes", "-f", "json")[1])
    assert {rank["diagnosis"] for rank in ranks} == {SENTENCE}


def test_more_findings_than_lines(ctl: Run, pair: tuple[FakeNode, FakeNode]) -> None:
    pair[0].insert("diagnosis.findings", [finding("alpha", str(n), n, sentence=f"sentence {n}") for n in range(5)])
    out = ctl("ps")[1]
    assert out.count("DIAGNOSIS") == 3
    assert "job j1: and 2 more: see `probingctl diagnose`\n" in out


def test_the_history_of_all_jobs(ctl: Run, found: tuple[FakeNode, FakeNode]) -> None:
    code, out, err = ctl("diagnose", "--history", "--all-nodes")
    assert (code, err) == (0, "")
    lines = [line[21:] for line in out.splitlines()]
    assert sorted(lines) == sorted(
        [
            f"still open  job j1: {SENTENCE} (not_joined, high confidence, finding a)",
            "for 40.0 s  job j1: rank 1 was slow (not_joined, high confidence, finding b)",
            "still open  job j1: rank 0 has the most memory (not_joined, high confidence, finding n)",
            "still open  job gone: \\x1b[31mrank 0\\x1b[0m died (not_joined, high confidence, finding g)",
        ]
    )


def test_the_history_of_a_job_that_is_gone_as_json(ctl: Run, found: tuple[FakeNode, FakeNode]) -> None:
    found[0].insert(
        "process.events",
        [{"node": "alpha", "ts": time.time_ns(), "job": "gone", "run": "r0", "pid": 1, "event": "exit"}],
    )
    (row,) = json.loads(ctl("diagnose", "--history", "--job", "gone", "-f", "json")[1])
    assert (row["finding_id"], row["state"], row["ranks"]) == ("g", "open", "2")
    assert [row[name] for name in LISTS] == [[]] * 6
    # It is open still; before it was opened there is none.
    assert "finding g" in ctl("why", "--history", "--job", "gone", "--since", "1s")[1]
    assert ctl("why", "--history", "--job", "gone", "--since", "2h", "--until", "1h")[1] == (
        "(nothing was found of job gone from 2h00m ago until 1h00m ago)\n"
    )
    code, _, err = ctl("diagnose", "--history", "--job", "nobody")
    assert (code, err.splitlines()[0]) == (1, "error: there is no job nobody")


def stuck(node: str, name: str, **more: Any) -> dict[str, Any]:
    """A finding of a rank that was stuck for 11 s when the row was written, and is now for two minutes."""
    now = time.time_ns()
    more = {"ts": now - 109 * SECOND, "since": now - 120 * SECOND, **more}
    sentence = "rank 2 (node beta, pid 1002) holds up 3 ranks for 11 s: it reads in read_batch, train.py:31"
    frame = {"func": "read_batch", "file": "/home/user/train.py", "lineno": 31, "frame_type": "Python"}
    thread = {"tid": 1002, "thread": "python", "state": "R", "gil": True, "since": None, "moving": False}
    who = {"role": "culprit", "node": "beta", "rank": 2, "pid": 1002, "native_missing": None, "frames": [frame]}
    lists = {
        "culprits": json.dumps([{"rank": 2, "node": "beta", "pid": 1002, "why": "it reads", "activity": "io"}]),
        "evidence": json.dumps(["rank 2 has called 50 operations, the others 51"]),
        "next_steps": json.dumps(["Look at `probingctl stacks PID --job J`."]),
        "stacks": json.dumps([{**thread, **who}]),
    }
    return finding(node, name, 0, sentence=sentence, **lists, **more)


@pytest.mark.parametrize("words", [("ps",), ("top", "--once"), ("nccl",)])
def test_how_long_it_is_so_is_counted_when_it_is_shown(
    ctl: Run, pair: tuple[FakeNode, FakeNode], words: tuple[str, ...]
) -> None:
    pair[0].insert("diagnosis.findings", [stuck("alpha", "a")])
    out = ctl(*words, "--all-nodes")[1]
    assert "holds up 3 ranks for 2 min: it reads in read_batch" in out
    assert "for 11 s" not in out


@pytest.mark.parametrize(
    ("row", "shown"),
    [
        ({}, "for 2 min"),
        # A closed one lasted until it was closed.
        ({"state": "closed", "closed": -44}, "for 76 s"),
        # What is not counted from `since`, or not known, stays as it was written.
        ({"since": None}, "for 11 s"),
        ({"since": -112}, "for 11 s"),
        ({"severity": "warning"}, "for 11 s"),
        # The clock was set back: nothing lasts less than nothing.
        ({"since": 3600}, "for 11 s"),
    ],
)
def test_the_history_counts_the_same_time(
    ctl: Run, pair: tuple[FakeNode, FakeNode], row: dict[str, Any], shown: str
) -> None:
    now = time.time_ns()
    row = {name: now + value * SECOND if isinstance(value, int) else value for name, value in row.items()}
    pair[0].insert("diagnosis.findings", [stuck("alpha", "a", **row)])
    out = ctl("diagnose", "--history")[1]
    assert f"holds up 3 ranks {shown}: it reads" in out


def test_the_whole_page_of_an_old_finding(ctl: Run, pair: tuple[FakeNode, FakeNode], tmp_path: Path) -> None:
    closed = {"state": "closed", "closed": time.time_ns() - 44 * SECOND, "found_by": "beta"}
    pair[0].insert("diagnosis.findings", [stuck("alpha", "5f3a01", **closed), finding("alpha", "5f99", 30)])
    code, out, err = ctl("diagnose", "5f3a")
    assert (code, err) == (0, "")
    head, sentence, *_ = out.splitlines()
    assert head.startswith("finding 5f3a01  opened ")
    assert head.endswith(", for 16.0 s; by node beta")
    assert sentence == "Rank 2 (node beta, pid 1002) holds up 3 ranks for 76 s: it reads in read_batch, train.py:31"
    assert "Evidence:\n  - rank 2 has called 50 operations, the others 51\n" in out
    assert "Stack of rank 2 (culprit), main thread:\n    read_batch (/home/user/train.py:31)\n" in out
    assert "Do next:\n  - Look at `probingctl stacks 1002 --job j1`.\n" in out
    (row,) = json.loads(ctl("diagnose", "5f3a01", "-f", "json")[1])
    assert (row["finding_id"], row["evidence"]) == ("5f3a01", ["rank 2 has called 50 operations, the others 51"])
    assert ctl("diagnose", "5f3a01", "-o", str(tmp_path / "x.html"))[:2] == (0, "")
    page = (tmp_path / "x.html").read_text()
    assert head in page
    assert f">{sentence}</h1>" in page
    # AND the history has the page of each
    pages = ctl("diagnose", "--history", "--full")[1]
    assert [pages.count(text) for text in ("finding 5f3a01", "finding 5f99", "Evidence:", "Confidence:")] == [
        1,
        1,
        1,
        2,
    ]
    code, _, err = ctl("diagnose", "5f")
    assert (code, err.splitlines()[0]) == (2, "error: 5f fits several findings: 5f3a01, 5f99")


def test_a_finding_of_another_node(ctl: Run, pair: tuple[FakeNode, FakeNode]) -> None:
    pair[1].insert("diagnosis.findings", [stuck("beta", "0b77")])
    code, out, err = ctl("diagnose", "0b77")
    assert (code, out) == (1, "")
    assert err == (
        "error: there is no finding 0b77 on this node\n"
        "hint: --all-nodes asks the other nodes, and `probingctl diagnose --history` shows the ids of findings\n"
    )
    assert ctl("diagnose", "0b77", "--all-nodes")[0] == 0
    for unknown in ("zzz", "'; --", "%"):
        assert ctl("diagnose", unknown, "--all-nodes")[0] == 1
    # While that node does not answer, it may have it.
    pair[1].stop()
    code, _, err = ctl("diagnose", "0b77", "--all-nodes")
    assert (code, err.splitlines()[0]) == (4, "error: finding 0b77 is not on the nodes that answered")


def test_a_finding_of_another_version(ctl: Run, pair: tuple[FakeNode, FakeNode]) -> None:
    odd = {"verdict": "of_a_later_version", "stacks": '[{"rank": "x"}, 7]', "culprits": "{}", "evidence": "[", "ts": 1}
    pair[0].insert("diagnosis.findings", [{**stuck("alpha", "77"), **odd, "opened": 1, "since": None}])
    code, out, _ = ctl("diagnose", "77")
    assert (code, "verdict of_a_later_version" in out) == (0, True)


def test_what_was_found_at_an_hour_of_the_night(ctl: Run, pair: tuple[FakeNode, FakeNode]) -> None:
    two, three = 1795744800 * SECOND, 1795748400 * SECOND  # 2026-11-27, 02:00 and 03:00 UTC
    closed = {"state": "closed", "closed": two + 600 * SECOND, "ts": two + 600 * SECOND, "opened": two - 60 * SECOND}
    pair[0].insert(
        "diagnosis.findings",
        [
            # Open since before, and closed later: the row of then holds.
            finding("alpha", "long", 0, ts=two - 600 * SECOND, opened=two - 600 * SECOND),
            finding("alpha", "long", 0, ts=three, opened=two - 600 * SECOND, state="closed", closed=three),
            finding("alpha", "short", 0, **closed),
            finding("alpha", "later", 0, ts=three, opened=three),
        ],
    )
    night = ("--since", "2026-11-27 02:05:00Z", "--until", "2026-11-27T02:30:00.000000000Z")
    rows = json.loads(ctl("diagnose", "--history", *night, "-f", "json")[1])
    assert [(row["finding_id"], row["state"]) for row in rows] == [("long", "open"), ("short", "closed")]
    # In the zone of who was on call it is the same, typed as it is printed there.
    local = ("--tz", "Asia/Shanghai", "--since", "2026-11-27 10:05", "--until", "2026-11-27 10:30:00+08:00")
    out = ctl("diagnose", "--history", *local)[1]
    assert [line.split("  ")[0] for line in out.splitlines()] == [
        "2026-11-27 09:50:00+08:00 still open",
        "2026-11-27 09:59:00+08:00 for 11m00s",
    ]
