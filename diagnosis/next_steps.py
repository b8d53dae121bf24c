"""Fills the commands in next steps in: the job, and the rank and pid of a single culprit.

Texts of the vocabulary have ``--job J``, ``--rank R`` and ``PID`` in their place.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import replace

from probing.diagnosis.case import Case
from probing.diagnosis.verdict import Culprit, Finding

__all__ = ("filled_in", "with_commands")

_COMMAND = re.compile(r"`probingctl ([a-z]+)[^`]*`")
_OF_JOB = "--job J"
# What they show of a job is on the nodes of its ranks.
_ON_NODES = ("stacks", "logs", "events", "profile", "balance")


def filled_in(step: str, job: str, culprits: Sequence[Culprit], *, many_nodes: bool = False) -> str:
    """Returns ``step`` with commands that can be typed; with several culprits or none they are about the whole job.

    ``many_nodes``: the job has ranks on more nodes than one, and each is asked.
    """
    culprit = culprits[0] if len(culprits) == 1 else None

    def command(match: re.Match[str]) -> str:
        text = match[0].replace(" --rank R", f" --rank {culprit.rank}" if culprit else "")
        text = text.replace(" PID", f" {culprit.pid}" if culprit and culprit.pid else "")
        place = " --all-nodes" if many_nodes and match[1] in _ON_NODES and _OF_JOB in text else ""
        return text.replace(_OF_JOB, f"--job {shlex.quote(job)}{place}")

    step = _COMMAND.sub(command, step)
    return step.replace(" PID", f" {culprit.pid}") if culprit and culprit.pid else step


def with_commands(case: Case, finding: Finding) -> Finding:
    """Returns ``finding`` with next steps, its own or those of its verdict, whose commands can be typed."""
    many = len({rank.node for rank in case.facts.ranks}) > 1
    steps = finding.next_steps or finding.verdict.next_steps
    filled = [filled_in(step, case.facts.job, finding.culprits, many_nodes=many) for step in steps]
    return replace(finding, next_steps=tuple(dict.fromkeys(filled)))
