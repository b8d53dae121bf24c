"""Every node reaches every other one, and none is much further away than the rest."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median

from probing.api.text import age
from probing.diagnosis.preflight.facts import Case, NodeFacts
from probing.diagnosis.preflight.result import FAIL, PASS, WARN, Result, names, skipped

__all__ = ("Cell", "check", "matrix")

NAME = "round_trips"
# So many times the median, and at least so much more than it.
FACTOR, LEAST_NS = 5.0, 1e6
_LOOPBACK = ("127.", "localhost:", "[::1]:")
# Round trip in ns from the first node to the second, or None and why.
Cell = tuple[str, str, int | None, str]


def check(case: Case) -> Iterator[Result]:
    """Fails for pairs that do not reach each other, and warns for round trips far above the median."""
    if len(case.nodes) < 2:
        if case.nodes:
            yield skipped(NAME, "there is one node")
        return
    cells = matrix(case)
    unknown = [cell for cell in cells if cell[2] is None and cell[3].startswith("not measured")]
    lost = [cell for cell in cells if cell[2] is None and cell not in unknown]
    for source, target, _, why in lost:
        hint = "look at routes and firewalls between the two"
        yield Result(NAME, FAIL, f"{source} does not reach {target}: {why}", (source, target), hint)
    known = [(source, target, ns) for source, target, ns, _ in cells if ns is not None]
    if unknown:
        why = unknown[0][3].removeprefix("not measured: ")
        pairs = f"{len(unknown)} of {len(cells)} pairs were not measured, such as {unknown[0][0]} to {unknown[0][1]}"
        yield skipped(NAME, f"{pairs}: {why}", sorted({cell[1] for cell in unknown}))
    if not known:
        return
    middle = median(ns for *_, ns in known)
    far = [(source, target, ns) for source, target, ns in known if ns > FACTOR * middle and ns - middle > LEAST_NS]
    for source, target, ns in far:
        text = f"{source} to {target} takes {age(ns)}, the median is {age(middle)}"
        yield Result(NAME, WARN, text, (source, target), "is the way between them congested, or longer?")
    if not lost and not far:
        ends = {name for source, target, _ in known for name in (source, target)}
        text = f"{len(known)} pairs of {names(ends)}: median {age(middle)}"
        yield Result(NAME, PASS, f"{text}, longest {age(max(ns for *_, ns in known))}")


def matrix(case: Case) -> list[Cell]:
    """Returns the round trip of each ordered pair of nodes."""
    return [_cell(case, a, b) for a in case.nodes for b in case.nodes if a.node != b.node]


def _cell(case: Case, source: NodeFacts, target: NodeFacts) -> Cell:
    address = case.addresses.get(target.node, "")
    if not address:
        return source.node, target.node, None, f"not measured: {target.node} has no TCP address (listen)"
    if address.startswith(_LOOPBACK) and source.boot_id != target.boot_id:
        return source.node, target.node, None, f"not measured: {address} is a loopback address"
    found = next((one for one in source.reached if one.address == address), None)
    if found is None:
        return source.node, target.node, None, "not measured: the node did not try"
    return source.node, target.node, found.round_trip_ns, found.why or "no answer"
