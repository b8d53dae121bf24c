"""What one TCP connection carries between the nodes; opt-in, and capped. It measures the hosts as much as the links."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median

from probing.diagnosis.preflight.facts import Case
from probing.diagnosis.preflight.result import PASS, WARN, Result, skipped

__all__ = ("check",)

NAME = "bandwidth"
# Of the median; the rest is what hosts that work otherwise take.
LEAST_SHARE = 0.5


def check(case: Case) -> Iterator[Result]:
    """Warns for pairs far below the median."""
    if not case.bandwidth:
        return
    by_address = {address: name for name, address in case.addresses.items()}
    pairs = [(n.node, by_address.get(t.address, t.address), t) for n in case.nodes for t in n.transfers]
    rates = [(a, b, t.sent_bytes / t.duration_ns) for a, b, t in pairs if t.duration_ns > 0 and not t.why]
    for a, b, t in pairs:
        if t.why:
            yield skipped(NAME, f"{a} to {b} was not measured: {t.why}", [a, b])
    if not rates:
        if not pairs:
            yield skipped(NAME, "there are no pairs of nodes that reach each other by TCP")
        return
    middle = median(rate for *_, rate in rates)
    slow = [(a, b, rate) for a, b, rate in rates if rate < LEAST_SHARE * middle]
    for a, b, rate in slow:
        text = f"{a} sends {b} {8 * rate:.2f} Gb/s, the median is {8 * middle:.2f}"
        yield Result(NAME, WARN, text, (a, b), "look at the link, and at what else uses it")
    if not slow:
        yield Result(NAME, PASS, f"{len(rates)} pairs: median {8 * middle:.2f} Gb/s over one connection")
