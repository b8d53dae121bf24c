"""Next steps have commands that can be typed: probingctl takes them, and they name job, rank and pid of a culprit."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from diagnosis_cases import ago, elsewhere, facts, history, in_collective, op, rank

from probing.client.main import main
from probing.diagnosis.activity.kinds import ACTIVITIES
from probing.diagnosis.facts import Exit
from probing.diagnosis.ladder import RULES, diagnose
from probing.diagnosis.supplements import filled_in
from probing.diagnosis.verdict import CANNOT_TELL, Culprit

_COMMANDS = re.compile("`(probingctl [^`]*)`")
_CULPRIT = Culprit(3, "b", 4003, "it sleeps", "sleeping")


def steps() -> Iterator[str]:
    for verdict in (CANNOT_TELL, *(verdict for rule in RULES for verdict in rule.VERDICTS)):
        yield from verdict.next_steps
    for kind in ACTIVITIES.values():
        yield from kind.next_steps


@pytest.mark.parametrize("step", sorted({step for step in steps() if _COMMANDS.search(step)}))
@pytest.mark.parametrize("culprits", [(), (_CULPRIT,), (_CULPRIT, replace(_CULPRIT, rank=5, pid=4005))])
def test_probingctl_takes_each_command(
    step: str, culprits: tuple[Culprit, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    filled = filled_in(step, "n1/127.0.0.1:29500; x", culprits, many_nodes=True)
    for line in _COMMANDS.findall(filled):
        assert not re.search(r" (?:J|R|PID)\b", line), line
        # It asks a node that is not there; wrong use would be 2.
        code = main([*shlex.split(line)[1:], "--target", f"unix:{tmp_path}/none.sock"])
        assert code == 1, (line, capsys.readouterr().err)
        assert ("--job" in line) == ("'n1/127.0.0.1:29500; x'" in line)


def hung() -> Any:
    """Rank 1 of 3 on two nodes is elsewhere."""
    waiting = (rank(r, *history(6, ago=40), op(7, ago=39), stack=in_collective(), node="b") for r in (0, 2))
    return facts(*waiting, rank(1, *history(6, ago=40), stack=elsewhere()))


def test_the_steps_of_a_hang_name_job_and_pid() -> None:
    (finding,) = diagnose(hung()).findings
    commands = [line for step in finding.next_steps for line in _COMMANDS.findall(step)]
    assert "probingctl stacks --job job --all-nodes 4001 --native" in commands
    here = replace(hung(), ranks=tuple(replace(one, node="a") for one in hung().ranks))
    (finding,) = diagnose(here).findings
    assert any("`probingctl stacks --job job 4001 --native`" in step for step in finding.next_steps)


def test_the_steps_of_a_death_name_job_and_rank() -> None:
    died = rank(1, *history(6, ago=40), state="exited", exit=Exit(ago(20), 3))
    alive = rank(0, *history(6, ago=40), op(7, ago=39), stack=in_collective())
    (finding,) = diagnose(facts(alive, died)).findings
    assert any("`probingctl logs --job job --rank 1`" in step for step in finding.next_steps)
