"""Checks how the ranks of a job are numbered, placed and claimed; numbers workers in the way the launcher does."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from probing.api.text import numbers_text, ranks_of

__all__ = ("DEFAULT_PORT", "Placed", "Violation", "Worker", "check_ranks", "check_workers", "companions", "launched")

DEFAULT_PORT = 29500
_MOST_NAMED = 16
_WORKER = re.compile(r"(.+)-(\d{1,9})", re.DOTALL)
_K = TypeVar("_K", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Placed:
    """A trainer of a job. ``box``: its pod or container; LOCAL_RANKs must differ within a node and box.

    ``master``: MASTER_ADDR:MASTER_PORT. ``step``: the number of its last step; only steps with the same ``counted_by``
    are compared. None: unknown.
    """

    rank: int | None
    local_rank: int | None
    world_size: int | None
    node: str
    pid: int
    box: str = ""
    node_rank: int | None = None
    master: str | None = None
    step: int | None = None
    counted_by: str = ""


@dataclass(frozen=True, slots=True)
class Violation:
    """A broken rule. ``rule``: ``rank``, ``local_rank``, ``world_size``, ``master``, ``steps`` or ``launcher``.
    ``ranks``: the ranks that break it.
    """

    rule: str
    text: str
    ranks: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Worker:
    """A worker, and the environment that the launcher gives it."""

    worker: str
    node: str
    rank: int
    local_rank: int
    node_rank: int
    world_size: int
    master_addr: str
    master_port: int = DEFAULT_PORT
    backend: str = "nccl"


def companions(processes: Sequence[tuple[int | None, Collection[Hashable]]]) -> list[int]:
    """Returns, for each process, the number of its companions: other ranks with which it shares a communicator, parent
    or container.

    ``processes``: for each process its rank, and its ties, which are its communicators, parent and container. If two
    processes claim a rank, the process with more companions is taken for the rank.
    """
    places = {rank: place for place, rank in enumerate(dict.fromkeys(rank for rank, _ in processes))}
    # A set of ranks is an int used as a bit mask. Python sets would be large, because most ranks share a communicator
    # with all others.
    ranks: dict[Hashable, int] = defaultdict(int)
    for rank, ties in processes:
        if rank is not None:
            for tie in ties:
                ranks[tie] |= 1 << places[rank]
    found = []
    for rank, ties in processes:
        others = 0
        for tie in ties:
            others |= ranks[tie]
        found.append((others & ~(1 << places[rank])).bit_count())
    return found


def check_ranks(members: Sequence[Placed], *, whole: bool = True) -> list[Violation]:
    """Returns the rules that the trainers of one run of a job break.

    ``whole``: all members are listed, so missing ranks may be reported.
    """
    return [
        *_world(members),
        *_ranks(members, whole),
        *_local_ranks(members),
        *_masters(members),
        *_steps(members),
    ]


def _world(members: Sequence[Placed]) -> Iterator[Violation]:
    sizes = _by((m.world_size, m) for m in members if m.world_size is not None)
    if len(sizes) > 1:
        yield Violation("world_size", f"WORLD_SIZE differs: {_groups(sizes)}", _numbers(members))


def _ranks(members: Sequence[Placed], whole: bool) -> Iterator[Violation]:
    sizes = {m.world_size for m in members if m.world_size is not None}
    size = max(sizes, default=None)
    by_rank = _by((m.rank, m) for m in members if m.rank is not None)
    for rank, own in sorted(by_rank.items()):
        if len(own) > 1:
            yield Violation("rank", f"RANK {rank} occurs {len(own)} times: {_places(own)}", (rank,))
    if unknown := [m for m in members if m.rank is None]:
        yield Violation("rank", f"no RANK is known for {_places(unknown)}")
    if size is None:
        if by_rank:
            yield Violation("world_size", "no rank has a WORLD_SIZE")
        return
    if outside := sorted(rank for rank in by_rank if not 0 <= rank < size):
        named = numbers_text(outside, _MOST_NAMED)
        text = f"RANK {named} is outside of 0 to {size - 1}: {_places([by_rank[r][0] for r in outside])}"
        yield Violation("rank", text, tuple(outside))
    # The world size comes from a target's environment: it may be any number.
    left = size - sum(0 <= rank < size for rank in by_rank)
    if whole and left > 0 and len(sizes) == 1:
        missing = [rank for rank in range(min(size, len(by_rank) + _MOST_NAMED)) if rank not in by_rank]
        shown = missing[:_MOST_NAMED]
        more = f" and {left - len(shown)} more" if left > len(shown) else ""
        have = "has" if left == 1 else "have"
        yield Violation("rank", f"RANK {numbers_text(shown)}{more} of {size} {have} no process", tuple(shown))


def _local_ranks(members: Sequence[Placed]) -> Iterator[Violation]:
    places = _by(((m.node, m.box, m.local_rank), m) for m in members if m.local_rank is not None)
    for (node, _, local), own in sorted(places.items()):
        if len(own) > 1:
            text = f"LOCAL_RANK {local} occurs {len(own)} times on {node}: {_places(own)}"
            yield Violation("local_rank", text, _numbers(own))


def _masters(members: Sequence[Placed]) -> Iterator[Violation]:
    masters = _by((m.master, m) for m in members if m.master is not None)
    if len(masters) > 1:
        yield Violation("master", f"MASTER_ADDR:MASTER_PORT differs: {_groups(masters)}", _numbers(members))


def _steps(members: Sequence[Placed]) -> Iterator[Violation]:
    for own in _by((m.counted_by, m) for m in members if m.step is not None).values():
        by_step = _by((m.step, m) for m in own if m.step is not None)
        if max(by_step) - min(by_step) > 1:
            text = _groups(by_step, "step ")
            behind = [m for m in own if m.step is not None and m.step < max(by_step) - 1]
            yield Violation("steps", f"steps differ by more than 1: {text}", _numbers(behind))


def check_workers(members: Sequence[Placed], workers: Sequence[Worker]) -> list[Violation]:
    """Returns the differences between ``members`` and the environment that the launcher gives ``workers``; empty
    without workers.
    """
    found = []
    by_rank = {worker.rank: worker for worker in workers}
    for member in sorted(members, key=lambda m: -1 if m.rank is None else m.rank):
        own = by_rank.get(-1 if member.rank is None else member.rank)
        if own is None or member.rank is None:
            continue
        given = {
            "node": own.node,
            "LOCAL_RANK": own.local_rank,
            "NODE_RANK": own.node_rank,
            "WORLD_SIZE": own.world_size,
        }
        has = {
            "node": member.node,
            "LOCAL_RANK": member.local_rank,
            "NODE_RANK": member.node_rank,
            "WORLD_SIZE": member.world_size,
        }
        wrong = [name for name in given if has[name] not in (None, given[name])]
        differs = [f"{name} {has[name]} instead of {given[name]}" for name in wrong]
        if wrong:
            text = f"RANK {member.rank} (pid {member.pid} on {member.node}) has {', '.join(differs)}"
            found.append(Violation("launcher", f"{text}, which the launcher gives {own.worker}", (member.rank,)))
    return found


def launched(workers: Sequence[str], master: str, port: int = DEFAULT_PORT) -> list[Worker]:
    """Returns the workers (``NODE-N``) in the order of their ranks. ``master``: a worker, or the node of a worker.

    The master's node comes first, the other nodes in alphabetical order, the workers of a node in the order of N.
    Raises ValueError for a name without a number, a number that occurs twice, and a master that is not among them.
    """
    nodes: dict[str, dict[int, str]] = {}
    for worker in workers:
        node, number = _split(worker)
        if number in nodes.setdefault(node, {}):
            raise ValueError(f"{worker} occurs twice")
        nodes[node][number] = worker
    if master not in nodes and master not in workers:
        raise ValueError(f"the master {master} is not among the workers")
    first = master if master in nodes else _split(master)[0]
    order = [first, *sorted(node for node in nodes if node != first)]
    found: list[Worker] = []
    for node_rank, node in enumerate(order):
        for local, number in enumerate(sorted(nodes[node])):
            found.append(Worker(nodes[node][number], node, len(found), local, node_rank, len(workers), first, port))
    return found


def _split(worker: str) -> tuple[str, int]:
    match = _WORKER.fullmatch(worker)
    if match is None or not match[2].isascii():
        raise ValueError(f"{worker} is not a worker: its name is NODE-NUMBER")
    return match[1], int(match[2])


def _by(pairs: Iterator[tuple[_K, Placed]]) -> Mapping[_K, list[Placed]]:
    found: dict[_K, list[Placed]] = {}
    for key, member in pairs:
        found.setdefault(key, []).append(member)
    return found


def _numbers(members: Sequence[Placed]) -> tuple[int, ...]:
    return tuple(sorted({m.rank for m in members if m.rank is not None}))


def _names(members: Sequence[Placed]) -> str:
    numbers = _numbers(members)
    return ranks_of(numbers) if numbers else _places(members)


def _groups(found: Mapping[_K, list[Placed]], name: str = "") -> str:
    named = [f"{name}{value} on {_names(own)}" for value, own in sorted(found.items())[:_MOST_NAMED]]
    return "; ".join(named + [f"{len(found) - _MOST_NAMED} more"] * (len(found) > _MOST_NAMED))


def _places(members: Sequence[Placed]) -> str:
    more = f" and {len(members) - _MOST_NAMED} more" if len(members) > _MOST_NAMED else ""
    return ", ".join(f"pid {m.pid} on {m.node}" for m in members[:_MOST_NAMED]) + more
