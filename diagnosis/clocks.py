"""Estimates the offsets between the clocks of nodes from collectives, which end on all ranks at about the same time."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from probing.diagnosis.facts import Facts, NodeFacts, Rank
from probing.diagnosis.waits import is_p2p

__all__ = ("SYNCHRONIZING", "ClockOffset", "apart_ns", "clock_offsets")

SYNCHRONIZING = frozenset({"all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier"})
"""Collectives that end only after all ranks have called them, and then on all ranks within the time of a transfer."""
# The ends of one operation differ by the time of its last transfer, and by the time until each thread gets a CPU.
_FLOOR_NS = 1_000_000
_ONE_OPERATION_NS = 20_000_000
_HUBS = 4


@dataclass(frozen=True, slots=True)
class ClockOffset:
    """The offset of a node's clock. ``offset_ns`` is subtracted from the node's times; it is exact to ``error_ns``."""

    offset_ns: int = 0
    error_ns: int = 0


@dataclass(frozen=True, slots=True)
class _Instant:
    """An operation on one node: the first end and the last call among its ranks."""

    end_ns: int
    call_ns: int


def clock_offsets(facts: Facts) -> Mapping[str, ClockOffset]:
    """Returns the offset of each node, relative to the node whose clock offset was measured best.

    An offset estimated from collectives replaces a measured offset, unless the measured offset is more exact and agrees
    with the estimate.
    """
    found = {node.node: _measured(node) for node in facts.nodes}
    if len(found) < 2:
        return found
    links = _links(facts.ranks)
    waiting = dict(found)
    while waiting:
        # The node with the best clock among the nodes that no collective connects with earlier nodes.
        root = min(waiting, key=lambda name: (waiting[name].error_ns, name))
        for name, offset in _reached(root, found, links).items():
            if waiting.pop(name, None) is not None and name != root:
                found[name] = _better(found[name], offset)
    return found


def apart_ns(clocks: Mapping[str, ClockOffset], one: str, other: str) -> int:
    """Returns the largest difference between the clocks of two nodes after correction, ns; 0 within one node."""
    if one == other:
        return 0
    return sum(clocks[name].error_ns if name in clocks else 0 for name in (one, other))


def _measured(node: NodeFacts) -> ClockOffset:
    return ClockOffset(node.clock_offset_ns, node.clock_error_ns)


def _better(measured: ClockOffset, seen: ClockOffset) -> ClockOffset:
    """Returns ``measured`` if it is more exact than ``seen``, the offset estimated from collectives, and agrees with
    ``seen``; else ``seen``.
    """
    agree = abs(measured.offset_ns - seen.offset_ns) <= measured.error_ns + seen.error_ns
    # An error of 0 means that the clock was never compared.
    return measured if agree and 0 < measured.error_ns < seen.error_ns else seen


def _reached(
    root: str, found: Mapping[str, ClockOffset], links: Mapping[str, Mapping[str, ClockOffset]]
) -> dict[str, ClockOffset]:
    """Returns the offsets of ``root`` and of the nodes that links connect with it, over the most exact path to each."""
    reached: dict[str, ClockOffset] = {}
    start = found[root]
    heap = [(start.error_ns, root, start.offset_ns)]
    while heap:
        error, name, offset = heapq.heappop(heap)
        if name in reached:
            continue
        reached[name] = ClockOffset(offset, error)
        for other, link in links.get(name, {}).items():
            if other not in reached:
                heapq.heappush(heap, (error + link.error_ns, other, offset + link.offset_ns))
    return reached


def _links(ranks: Iterable[Rank]) -> Mapping[str, Mapping[str, ClockOffset]]:
    """Returns clock offsets between pairs of nodes: ``links[a][b]`` is how far the clock of node b is ahead of the
    clock of node a.
    """
    shared: dict[tuple[str, str], list[tuple[_Instant, _Instant]]] = {}
    for by_node in _instants(ranks).values():
        names = sorted(by_node)
        # Not all pairs are used, because a thousand nodes have half a million pairs.
        for one, other in ((a, b) for i, a in enumerate(names[:_HUBS]) for b in names[i + 1 :]):
            shared.setdefault((one, other), []).append((by_node[one], by_node[other]))
    links: dict[str, dict[str, ClockOffset]] = {}
    for (one, other), instants in shared.items():
        ahead = _ahead(instants)
        links.setdefault(one, {})[other] = ahead
        links.setdefault(other, {})[one] = ClockOffset(-ahead.offset_ns, ahead.error_ns)
    return links


def _instants(ranks: Iterable[Rank]) -> Mapping[tuple[str, int], Mapping[str, _Instant]]:
    """Returns the operations that ended on several nodes, by (communicator, seq), and then by node."""
    found: dict[tuple[str, int], dict[str, _Instant]] = {}
    names: dict[tuple[str, int], set[str | None]] = {}
    mixed = set[str]()
    for rank in ranks:
        for o in rank.done:
            if o.seq is None or o.t_call_ns is None or o.t_done_ns is None:
                continue
            if is_p2p(o.op):
                # On this communicator, point-to-point operations also advance the rank's sequence number, so the
                # sequence numbers of its collectives may differ from those of other ranks.
                mixed.add(o.comm)
            if o.state in ("failed", "abandoned"):
                # The operation did not end together with the operations of the other ranks.
                continue
            key = o.comm, o.seq
            names.setdefault(key, set()).add(o.op)
            by_node = found.setdefault(key, {})
            known = by_node.get(rank.node, _Instant(o.t_done_ns, o.t_call_ns))
            by_node[rank.node] = _Instant(min(known.end_ns, o.t_done_ns), max(known.call_ns, o.t_call_ns))
    agreed = {key for key, ops in names.items() if key[0] not in mixed and len(ops) == 1 and ops <= SYNCHRONIZING}
    return {key: seen for key, seen in found.items() if len(seen) > 1 and key in agreed}


def _ahead(instants: Sequence[tuple[_Instant, _Instant]]) -> ClockOffset:
    """Returns how far the clock of the second node is ahead of the first's.

    This is the median of the differences of ends. Its error is bounded, because no rank ends before the last rank has
    called.
    """
    ends = sorted(b.end_ns - a.end_ns for a, b in instants)
    middle = int(median(ends))
    tenth = len(ends) // 10
    spread = (ends[-1 - tenth] - ends[tenth]) // 2
    low = max(b.call_ns - a.end_ns for a, b in instants)
    high = min(b.end_ns - a.call_ns for a, b in instants)
    error = max(_FLOOR_NS, spread) + _ONE_OPERATION_NS // len(ends)
    if low <= high:
        middle = min(max(middle, low), high)
        error = min(error, max(high - low, _FLOOR_NS))
    return ClockOffset(middle, error)
