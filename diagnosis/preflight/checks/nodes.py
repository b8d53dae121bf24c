"""Every node that was asked answers, and no two have the same name."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from probing.diagnosis.preflight.facts import Case
from probing.diagnosis.preflight.result import FAIL, PASS, Result, names

__all__ = ("check",)

NAME = "nodes"


def check(case: Case) -> Iterator[Result]:
    """Fails for nodes that do not answer, and for names that occur twice."""
    for node, why in sorted(case.silent.items()):
        yield Result(NAME, FAIL, f"{node} does not answer: {why}", (node,), "is probingd running there?")
    counted = Counter(node.node for node in case.nodes)
    if twice := [name for name, count in counted.items() if count > 1]:
        hint = "give each daemon a node_name of its own"
        yield Result(NAME, FAIL, f"several nodes call themselves {names(twice)}", tuple(sorted(twice)), hint)
    elif case.nodes and not case.silent:
        text = f"all {len(case.nodes)} nodes answer" if len(case.nodes) > 1 else f"{case.nodes[0].node} answers"
        yield Result(NAME, PASS, text)
