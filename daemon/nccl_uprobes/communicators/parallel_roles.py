"""Concludes the parallel role of a communicator: world, tp, pp, dp, ep, or unknown if the evidence is not enough.

The strongest evidence is the name that a framework gave the communicator. Next come its size, its operations, and the
ranks that its members have in the job, as far as this node knows them. A job may use a group in an unusual way, so
``why`` holds the evidence for the role.

``Uses`` counts the calls and bytes of each communicator in each process, from which roles follow.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import nlargest
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from probing.daemon.fairness import in_turn
from probing.daemon.nccl_uprobes.records.names import OPS
from probing.daemon.nccl_uprobes.records.operations import Operations
from probing.daemon.source import Identity, Processes

__all__ = (
    "Facts",
    "Key",
    "Role",
    "Use",
    "Uses",
    "conclude",
    "stride_of",
)

_ENOUGH = 10
_ONLY, _MOSTLY, _HALF = 0.9, 0.8, 0.5
# A tensor-parallel group has at least _BUSIER times as many operations as a group that reduces gradients.
_BUSIER = 2
_TRANSFERS = ("send", "recv")
_REDUCTIONS = ("all_reduce", "all_gather", "reduce_scatter")
# Words in the names of groups: from Megatron-LM (parallel_state.py), torch's DeviceMesh (mesh_DIM) and their users.
_WORDS = {
    "tp": ("tp", "tensor"),
    "pp": ("pp", "pipe", "pipeline"),
    "dp": ("data", "ddp", "dp", "fsdp", "hsdp", "replicate"),
    "ep": ("ep", "expert", "moe"),
}


class Role(NamedTuple):
    name: str
    why: str | None


class Facts(NamedTuple):
    """A communicator as one process uses it. ``ranks``: rank in the communicator -> rank in the job, for the members
    that this node knows. ``calls`` and ``sizes``: number and bytes of the operations, by name of the operation."""

    size: int | None
    world_size: int | None
    name: str | None
    ranks: Mapping[int, int]
    calls: Mapping[str, int]
    sizes: Mapping[str, int]

    @property
    def total(self) -> int:
        return sum(self.calls.values())

    @property
    def stride(self) -> int | None:
        return stride_of(self.ranks, self.size, self.world_size)

    def share(self, ops: Sequence[str]) -> float:
        return sum(self.calls.get(op, 0) for op in ops) / max(self.total, 1)


def conclude(facts: Facts, others: Sequence[Facts]) -> Role:
    """Returns the role of a communicator; ``others`` are the other communicators of the same process."""
    if (named := _by_name(facts.name)) is not None:
        return Role(named, f"its name is {facts.name}")
    if facts.size is not None and facts.size == facts.world_size:
        return Role("world", f"has all {facts.size} ranks of the job")
    total = facts.total
    if total < _ENOUGH:
        return Role("unknown", f"{total} operations were seen, which is too few")
    if facts.share(_TRANSFERS) >= _ONLY:
        return Role("pp", f"{round(100 * facts.share(_TRANSFERS))} % of {total} operations are send and recv")
    if facts.share(("all_to_all",)) >= _HALF:
        return Role("ep", f"{facts.calls['all_to_all']} of {total} operations are all_to_all")
    if facts.share(_REDUCTIONS) < _MOSTLY:
        return Role("unknown", "its mix of operations fits no kind of parallelism")
    return _by_place(facts, others)


def stride_of(ranks: Mapping[int, int], size: int | None, world_size: int | None) -> int | None:
    """Returns the distance in job ranks between neighbours in a communicator; None if the distances differ or are
    unknown.

    If only one member is known, the stride can be derived only for the innermost and the outermost groups of the job's
    ranks.
    """
    if size is None or size < 2:
        return None
    if len(ranks) > 1:
        places = sorted(ranks.items())
        steps = {(b[1] - a[1]) / (b[0] - a[0]) for a, b in pairwise(places)}
        stride = steps.pop()
        return int(stride) if not steps and stride > 0 and stride == int(stride) else None
    if not ranks or not world_size or world_size % size:
        return None
    ((own, job_rank),) = ranks.items()
    inner, outer = job_rank % size == own, job_rank // (world_size // size) == own
    if inner == outer:
        return None
    return 1 if inner else world_size // size


def _by_name(name: str | None) -> str | None:
    words = set(re.split(r"[^a-z0-9]+", (name or "").lower()))
    roles = {role for role, of_role in _WORDS.items() if not words.isdisjoint(of_role)}
    if roles == {"dp", "ep"}:
        # A name with words of both roles means data parallelism between the replicas of an expert.
        return "dp"
    return roles.pop() if len(roles) == 1 else None


def _by_place(facts: Facts, others: Sequence[Facts]) -> Role:
    stride = facts.stride
    if stride is None:
        return Role("unknown", "the distance between its ranks in the job is unknown, or not always the same")
    place = "neighbours" if stride == 1 else f"{stride} apart"
    rivals = [other for other in others if _is_rival(other, stride)]
    if not rivals:
        return Role("unknown", f"its ranks are {place}, and no other communicator shows what it is for")
    rival = max(rivals, key=lambda other: other.total)
    mean, its_mean = (sum(f.sizes.values()) // max(f.total, 1) for f in (facts, rival))
    evidence = f"its ranks are {place}; {facts.total} operations of {mean} bytes"
    evidence += f", against {rival.total} of {its_mean} bytes"
    if stride == 1 and facts.total >= _BUSIER * rival.total:
        return Role("tp", f"{evidence} on ranks that are {rival.stride} apart")
    if stride > 1 and rival.total >= _BUSIER * facts.total:
        return Role("dp", f"{evidence} on neighbours")
    return Role("unknown", evidence)


def _is_rival(other: Facts, stride: int) -> bool:
    """Returns whether ``other`` can be compared with a communicator of stride ``stride``: ``other`` does not have
    all ranks of the job, has mostly reductions, enough operations and another stride, and one of the two strides is 1.
    """
    if other.size == other.world_size or other.share(_REDUCTIONS) < _MOSTLY or other.total < _ENOUGH:
        return False
    its = other.stride
    return its is not None and its != stride and 1 in (its, stride)


Key = tuple[int, int, str]
"""(pid, start_ns, comm)."""
_MAX_USES = 8192
# The minimum time between two conclusions about a communicator.
_REST_NS = 2_000_000_000
# A round makes at most _MAX_OF_ROUND conclusions. A communicator is compared with at most _MAX_RIVALS communicators:
# the busiest of its process. If there are more than _MANY communicators, rounds are at least _ROUND_NS apart.
_MAX_OF_ROUND, _MAX_RIVALS = 128, 32
_MANY, _ROUND_NS = 1_024, 250_000_000
_Members = dict[tuple[str, str, str], dict[int, int]]


@dataclass(slots=True)
class Use:
    """A communicator as one process uses it. ``first_seen`` and ``looked`` (the time of the last conclusion) are in
    CLOCK_MONOTONIC ns. ``calls`` and ``sizes`` (bytes) are by operation. ``fresh``: used since the last conclusion."""

    backend: str | None
    name: str | None
    size: int | None
    rank: int | None
    first_seen: int
    calls: dict[str, int] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)
    role: Role | None = None
    looked: int = 0
    fresh: bool = True


class Uses:
    """The uses of communicators by the processes of this node. Not thread-safe: the draining thread owns it. A process
    may have thousands of communicators, so each round concludes a limited number of roles, and the processes take
    turns.

    Once there are more than 8,192 uses, the process with the most uses loses its oldest use.
    """

    def __init__(self, processes: Processes) -> None:
        self._processes = processes
        self._uses: dict[tuple[int, int], dict[str, Use]] = {}
        self._count = 0
        self._next_round = 0

    def observe(self, operations: Operations) -> None:
        """Counts ``operations``."""
        for row, op, calls, size in _counted(operations):
            entity = operations.entities[operations.entity_of[row]]
            if entity.comm is None:
                continue
            uses = self._uses.setdefault(entity.process, {})
            use = uses.get(entity.comm)
            if use is None:
                use = uses[entity.comm] = Use(
                    entity.backend_name,
                    entity.comm_name,
                    entity.comm_size,
                    entity.comm_rank,
                    int(operations.called[row]),
                )
                self._count += 1
                if self._count > _MAX_USES:
                    self._drop_one()
            use.calls[op] = use.calls.get(op, 0) + calls
            use.sizes[op] = use.sizes.get(op, 0) + size
            use.fresh = True

    def describe(self, key: Key, name: str | None, size: int | None, rank: int | None) -> None:
        """Sets name, size and rank of a communicator. Its role is concluded again, and then counts as changed."""
        if (use := self._uses.get(key[:2], {}).get(key[2])) is not None:
            use.name, use.size, use.rank, use.role, use.looked = name, size, rank, None, 0

    def changed(self, now: int) -> list[tuple[Key, Use, Role]]:
        """Returns the communicators whose role has changed since the last conclusion. ``now``: CLOCK_MONOTONIC ns."""
        if now < self._next_round:
            return []
        due = [
            (process, comm, use.looked)
            for process, uses in self._uses.items()
            for comm, use in uses.items()
            if use.fresh and now - use.looked >= _REST_NS
        ]
        if not due:
            return []
        # Without this order, communicators of the first processes would be due again before the last processes get a
        # turn.
        due.sort(key=lambda each: each[2])
        if self._count > _MANY:
            self._next_round = now + _ROUND_NS
        who = {process: self._processes.identity(*process) for process in self._uses}
        ranks = self._ranks(who)
        busiest: dict[tuple[int, int], list[tuple[str, Facts]]] = {}
        changed = []
        for process, comm, _ in in_turn(due, lambda each: each[0])[:_MAX_OF_ROUND]:
            uses = self._uses[process]
            if process not in busiest:
                most = nlargest(_MAX_RIVALS, uses.items(), key=lambda item: sum(item[1].calls.values()))
                busiest[process] = [(name, self._facts((*process, name), use, who, ranks)) for name, use in most]
            use = uses[comm]
            use.looked, use.fresh = now, False
            others = [facts for name, facts in busiest[process] if name != comm]
            role = conclude(self._facts((*process, comm), use, who, ranks), others)
            if use.role is None or role.name != use.role.name:
                use.role = role
                changed.append(((*process, comm), use, role))
        return changed

    def forget(self, ended: Collection[tuple[int, int]]) -> None:
        """Drops the uses of processes that have ended."""
        for process in ended:
            self._count -= len(self._uses.pop(process, ()))

    def _drop_one(self) -> None:
        process = max(self._uses, key=lambda process: len(self._uses[process]))
        uses = self._uses[process]
        del uses[next(iter(uses))]
        if not uses:
            del self._uses[process]
        self._count -= 1

    def _ranks(self, who: Mapping[tuple[int, int], Identity | None]) -> _Members:
        """Returns (job, run, comm) -> rank in the communicator -> rank in the job."""
        members: _Members = {}
        for process, uses in self._uses.items():
            identity = who[process]
            if identity is None or identity.rank is None:
                continue
            for comm, use in uses.items():
                if use.rank is not None:
                    members.setdefault((identity.job, identity.run, comm), {})[use.rank] = identity.rank
        return members

    def _facts(self, key: Key, use: Use, who: Mapping[tuple[int, int], Identity | None], ranks: _Members) -> Facts:
        identity = who[key[:2]]
        members = ranks.get((identity.job, identity.run, key[2]), {}) if identity is not None else {}
        world = identity.world_size if identity is not None else None
        return Facts(use.size, world, use.name, members, use.calls, use.sizes)


def _counted(operations: Operations) -> Iterator[tuple[int, str, int, int]]:
    """Yields (index of first operation, operation name, count, total bytes) for each entity and kind of operation."""
    cells = operations.entity_of * (len(OPS) + 1) + operations.op + 1
    distinct, first, inverse, calls = np.unique(cells, return_index=True, return_inverse=True, return_counts=True)
    sizes = np.bincount(inverse, np.maximum(operations.size, 0), len(distinct))
    for row, number, size in zip(first.tolist(), calls.tolist(), sizes.tolist(), strict=True):
        if (op := int(operations.op[row])) >= 0:
            yield row, OPS[op], number, int(size)
