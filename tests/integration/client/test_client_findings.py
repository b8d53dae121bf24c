"""Findings of the daemon: as lines in ``ps``, ``top`` and ``nccl``, and in ``diagnose --history``."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
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
    state, gap = "rank 2: no collective on its stacks", "rank 2: what began before"
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
            f"still open  job j1: {SENTENCE} (not_joined, high confidence)",
            "for 40.0 s  job j1: rank 1 was slow (not_joined, high confidence)",
            "still open  job j1: rank 0 has the most memory (not_joined, high confidence)",
            "still open  job gone: \\x1b[31mrank 0\\x1b[0m died (not_joined, high confidence)",
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
    assert ctl("why", "--history", "--job", "gone", "--since", "1s")[1] == (
        "(nothing was found of job gone in the last 1 s)\n"
    )
    code, _, err = ctl("diagnose", "--history", "--job", "nobody")
    assert (code, err.splitlines()[0]) == (1, "error: there is no job nobody")
