"""What to do with a job: one case for each reason."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from diagnosis_cases import ago, elsewhere, facts, history, in_collective, op, rank

from probing.diagnosis.facts import Condition, Exit, Facts, Missing, Rank
from probing.diagnosis.ladder import diagnose
from probing.diagnosis.supplements import ACTIONS
from probing.diagnosis.verdict import Advice

STILL: dict[str, Any] = {"state": "S", "interval_ns": 10**9, "cpu_ns": 0, "switches": 0, "asleep_since_ns": ago(39)}


PEER_GONE = "RuntimeError: Connection closed by peer [127.0.0.1]:7"


def advice(found: Facts) -> Advice:
    (finding, *_) = diagnose(found).findings
    assert finding.advice is not None
    assert finding.advice.action in ACTIONS
    return finding.advice


def waits(number: int, name: str = "all_reduce") -> Rank:
    return rank(number, *history(6, ago=40), op(7, name, ago=39), stack=in_collective(name))


def held_up(text: str = "load data.py:12", **fields: Any) -> Facts:
    late = rank(1, *history(6, ago=40), stack=elsewhere(text, moving=False), condition=Condition(**{**STILL, **fields}))
    return facts(waits(0), late, waits(2))


def died(**end: Any) -> Facts:
    logs = end.pop("logs", ())
    return facts(waits(0), rank(1, *history(6, ago=40), state="exited", exit=Exit(ago(39), **end), logs=logs), waits(2))


@pytest.mark.parametrize(
    ("found", "action", "reason"),
    [
        (held_up(syscall="clock_nanosleep"), "restart", "it does not go on by itself"),
        (held_up(state="T"), "restart", "it does not go on until somebody continues it"),
        (held_up(syscall="read", target_fd=0, target_kind="tty"), "do_not_restart", "it waits for input"),
        (
            held_up(syscall="recvfrom", target="socket:[5]", target_kind="socket"),
            "restart",
            "once the other end answers",
        ),
        (died(signal=9, oom=True), "do_not_restart", "it needs more memory than there is"),
        (died(signal=9), "restart", "it has lost a rank"),
        (died(signal=11), "do_not_restart", "crashed by itself: was killed by SIGSEGV, read its core dump first"),
        (died(signal=6, logs=(PEER_GONE,)), "restart", "no error of the program is known"),
        (died(code=1, logs=("ValueError: no label",)), "do_not_restart", "the rank failed by itself"),
        (died(code=0), "do_not_restart", "the rank had less to do than the others"),
        (facts(waits(0), waits(1), waits(2, "broadcast")), "do_not_restart", "find the line first"),
        (facts(waits(0), waits(1), waits(2)), "restart", "leave out half of the nodes"),
    ],
    ids=[
        "asleep",
        "stopped",
        "input",
        "network",
        "memory",
        "signal",
        "crash",
        "abort after a peer",
        "error",
        "less",
        "mismatch",
        "none completes",
    ],
)
def test_what_to_do_follows_from_the_cause(found: Facts, action: str, reason: str) -> None:
    given = advice(found)
    assert given.action == action
    assert reason in given.reason


def test_a_node_that_does_not_answer_is_left_out() -> None:
    gone = Missing("node", "no answer in time", rank=2, node="b")
    given = advice(replace(facts(waits(0), waits(1)), world_size=3, missing=(gone,)))
    assert given.action in ("restart_without", "restart")
