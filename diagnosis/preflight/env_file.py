"""Reads the file of --env-file: the planned variables of the ranks, and the nodes on which the ranks will run.

Each line is ``NAME=VALUE``; as in a shell, ``export`` may precede it, quotes may enclose the value, and ``#`` begins a
comment. Lines before the first section apply to all ranks. Each section ``[NODE]`` is one rank on that node, with its
own variables::

    MASTER_ADDR=gn6
    NCCL_SOCKET_IFNAME=bond0
    [gn6]
    RANK=0
    LOCAL_RANK=0
    [gn7]
    RANK=1
    LOCAL_RANK=0
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field

from probing.api.errors import UsageError
from probing.diagnosis.preflight.facts import NodeRank, Variable

__all__ = ("MAX_BYTES", "Plan", "parse")

MAX_BYTES = 4 << 20
MAX_RANKS = 16384
_NAME = re.compile(r"(?:export\s+)?([A-Za-z_]\w{0,255})=(.*)", re.ASCII)
_SECTION = re.compile(r"\[\s*([\w.:@-]{1,255})\s*\]")


@dataclass(frozen=True)
class Plan:
    """The planned ``variables`` of all ranks, and the ``ranks`` by node. The variables of each rank include the common
    ``variables``.
    """

    variables: Mapping[str, str] = field(default_factory=dict)
    ranks: Mapping[str, tuple[NodeRank, ...]] = field(default_factory=dict)


def parse(text: str) -> Plan:
    """Returns the plan in ``text``. Raises UsageError with the number of the wrong line."""
    common: dict[str, str] = {}
    sections: list[tuple[str, dict[str, str]]] = []
    for number, line in enumerate(text.splitlines(), 1):
        if not (bare := line.strip()) or bare.startswith("#"):
            continue
        if section := _SECTION.fullmatch(bare):
            sections.append((section[1], {}))
            continue
        found = _NAME.fullmatch(bare)
        if found is None:
            raise UsageError(f"line {number} of --env-file is wrong: {bare[:80]}", hint="write NAME=VALUE or [NODE]")
        (sections[-1][1] if sections else common)[found[1]] = _value(found[2], number)
    if len(sections) > MAX_RANKS:
        raise UsageError(f"--env-file has more than {MAX_RANKS} ranks")
    ranks: dict[str, tuple[NodeRank, ...]] = {}
    for node, own in sections:
        ranks[node] = (*ranks.get(node, ()), _rank({**common, **own}))
    return Plan(common, ranks)


def _value(text: str, number: int) -> str:
    try:
        words = shlex.split(text, comments=True)
    except ValueError:
        raise UsageError(f"line {number} of --env-file is wrong: a quote is open") from None
    return " ".join(words)


def _rank(variables: Mapping[str, str]) -> NodeRank:
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "NODE_RANK")
    rank, local, world, node = (_number(variables.get(name, "")) for name in names)
    own = tuple(Variable(name, value) for name, value in sorted(variables.items()))
    return NodeRank(rank, local, world, node, variables=own)


def _number(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdigit() and len(text) < 10 else None
