"""Counts the calls and bytes of each communicator of each process; the parallel roles follow from them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from probing.daemon.nccl_uprobes.communicators.parallel_roles import Facts, Role, conclude
from probing.daemon.nccl_uprobes.records.names import OPS
from probing.daemon.nccl_uprobes.records.operations import Operations
from probing.daemon.source import Identity, Processes

__all__ = ("Key", "Use", "Uses")

Key = tuple[int, int, str]
"""(pid, start_ns, comm)."""
_MAX_USES = 8192
# The shortest time between two conclusions about a communicator.
_REST_NS = 2_000_000_000
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
    """The uses of communicators by the processes of this node; the least recently added are dropped. One thread."""

    def __init__(self, processes: Processes) -> None:
        self._processes = processes
        self._uses: OrderedDict[Key, Use] = OrderedDict()

    def observe(self, operations: Operations) -> None:
        """Count ``operations``."""
        for row, op, calls, size in _counted(operations):
            entity = operations.entities[operations.entity_of[row]]
            if entity.comm is None:
                continue
            key = (*entity.process, entity.comm)
            use = self._uses.get(key)
            if use is None:
                use = self._uses[key] = Use(
                    entity.backend_name,
                    entity.comm_name,
                    entity.comm_size,
                    entity.comm_rank,
                    int(operations.called[row]),
                )
                if len(self._uses) > _MAX_USES:
                    self._uses.popitem(last=False)
            use.calls[op] = use.calls.get(op, 0) + calls
            use.sizes[op] = use.sizes.get(op, 0) + size
            use.fresh = True

    def changed(self, now: int) -> list[tuple[Key, Use, Role]]:
        """The communicators whose role has changed since it was last concluded. ``now``: CLOCK_MONOTONIC ns."""
        due = [key for key, use in self._uses.items() if use.fresh and now - use.looked >= _REST_NS]
        if not due:
            return []
        who = {key[:2]: self._processes.identity(*key[:2]) for key in self._uses}
        ranks = self._ranks(who)
        found = []
        for key in due:
            use = self._uses[key]
            use.looked, use.fresh = now, False
            others = [self._facts(k, u, who, ranks) for k, u in self._uses.items() if k[:2] == key[:2] and k != key]
            role = conclude(self._facts(key, use, who, ranks), others)
            if use.role is None or role.name != use.role.name:
                use.role = role
                found.append((key, use, role))
        return found

    def forget(self, pid: int, start_ns: int) -> None:
        """Drops the uses of a process that has ended."""
        for key in [key for key in self._uses if key[:2] == (pid, start_ns)]:
            del self._uses[key]

    def _ranks(self, who: dict[tuple[int, int], Identity | None]) -> _Members:
        """(job, run, comm) -> rank in the communicator -> rank in the job."""
        found: _Members = {}
        for key, use in self._uses.items():
            identity = who[key[:2]]
            if identity is not None and identity.rank is not None and use.rank is not None:
                found.setdefault((identity.job, identity.run, key[2]), {})[use.rank] = identity.rank
        return found

    def _facts(self, key: Key, use: Use, who: dict[tuple[int, int], Identity | None], ranks: _Members) -> Facts:
        identity = who[key[:2]]
        members = ranks.get((identity.job, identity.run, key[2]), {}) if identity is not None else {}
        world = identity.world_size if identity is not None else None
        return Facts(use.size, world, use.name, members, use.calls, use.sizes)


def _counted(operations: Operations) -> Iterator[tuple[int, str, int, int]]:
    """(index of the first, name, number, bytes) of the operations of each entity and kind."""
    cells = operations.entity_of * (len(OPS) + 1) + operations.op + 1
    distinct, first, inverse, calls = np.unique(cells, return_index=True, return_inverse=True, return_counts=True)
    sizes = np.bincount(inverse, np.maximum(operations.size, 0), len(distinct))
    for row, number, size in zip(first.tolist(), calls.tolist(), sizes.tolist(), strict=True):
        if (op := int(operations.op[row])) >= 0:
            yield row, OPS[op], number, int(size)
