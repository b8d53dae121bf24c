"""The clocks of the nodes agree: times of logs, of rows and of tokens are compared across nodes."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median

from probing.api.text import age
from probing.diagnosis.preflight.facts import Case
from probing.diagnosis.preflight.result import FAIL, PASS, WARN, Result, skipped

__all__ = ("check",)

NAME = "clocks"
LOW_NS, MOST_NS = 50e6, 1e9


def check(case: Case) -> Iterator[Result]:
    """Warns above LOW_NS, fails above MOST_NS from the median clock, beyond what the measurement can be off."""
    known = {node.node: case.offsets[node.node] for node in case.nodes if node.node in case.offsets}
    if len(known) < 2:
        if case.nodes:
            yield skipped(NAME, "there is one node")
        return
    middle = median(offset for offset, _ in known.values())
    wrong = False
    for node, (offset, error) in sorted(known.items()):
        apart = abs(offset - middle)
        if apart - error > LOW_NS:
            wrong = True
            where = "ahead of" if offset > middle else "behind"
            text = f"the clock of {node} is {age(apart)} {where} the others"
            state = FAIL if apart - error > MOST_NS else WARN
            yield Result(NAME, state, text, (node,), "let chrony or ntpd set it")
    if not wrong:
        worst = max(abs(offset - middle) + error for offset, error in known.values())
        yield Result(NAME, PASS, f"the clocks of {len(known)} nodes agree to {age(worst)}")
