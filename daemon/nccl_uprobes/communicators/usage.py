"""How each process uses its communicators, counted a batch at a time; what they are for follows from that."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from probing.daemon.arrow import integers, texts_and_indices
from probing.daemon.nccl_uprobes.communicators.parallel_roles import Facts, Role, conclude
from probing.daemon.source import Identity, Processes

__all__ = ("Key", "Use", "Uses")

Key = tuple[int, int, str]
"""(pid, start_ns, comm)."""
_MAX_USES = 8192
# Between two looks at the role of a communicator, ns.
_REST_NS = 2_000_000_000


@dataclass(slots=True)
class Use:
    """A communicator as one process uses it; ``calls`` and ``sizes`` by operation. Times are UTC ns."""

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
    """Of the processes of this node. One thread."""

    def __init__(self, processes: Processes) -> None:
        self._processes = processes
        self._uses: OrderedDict[Key, Use] = OrderedDict()

    def observe(self, batch: pa.RecordBatch) -> None:
        """Count the rows of a physical batch of ``comm.ops``."""
        for key, op, row, calls, size in _counted(batch):
            use = self._uses.get(key)
            if use is None:
                use = self._uses[key] = _use(batch, row)
                if len(self._uses) > _MAX_USES:
                    self._uses.popitem(last=False)
            use.calls[op] = use.calls.get(op, 0) + calls
            use.sizes[op] = use.sizes.get(op, 0) + size
            use.fresh = True

    def changed(self, now: int) -> list[tuple[Key, Use, Role]]:
        """The communicators whose role is another than it was at the last look; ``now`` in ns."""
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
        """The process has ended."""
        for key in [key for key in self._uses if key[:2] == (pid, start_ns)]:
            del self._uses[key]

    def _ranks(self, who: dict[tuple[int, int], Identity | None]) -> dict[Any, dict[int, int]]:
        """(job, run, comm) -> rank in the communicator -> rank in the job."""
        found: dict[Any, dict[int, int]] = {}
        for key, use in self._uses.items():
            identity = who[key[:2]]
            if identity is not None and identity.rank is not None and use.rank is not None:
                found.setdefault((identity.job, identity.run, key[2]), {})[use.rank] = identity.rank
        return found

    def _facts(self, key: Key, use: Use, who: dict[tuple[int, int], Identity | None], ranks: dict[Any, Any]) -> Facts:
        identity = who[key[:2]]
        members = ranks.get((identity.job, identity.run, key[2]), {}) if identity is not None else {}
        world = identity.world_size if identity is not None else None
        return Facts(use.size, world, use.name, members, use.calls, use.sizes)


def _counted(batch: pa.RecordBatch) -> list[tuple[Key, str, int, int, int]]:
    """(communicator of a process, operation, index of a row of it, how many rows, their bytes)."""
    pids, starts = (integers(batch.column(name)) for name in ("pid", "start_ns"))
    comms, comm_of = texts_and_indices(batch.column("comm"))
    ops, op_of = texts_and_indices(batch.column("op"))
    processes, place = np.unique(pids + starts * (1 << 22), return_index=True)
    process_of = np.searchsorted(processes, pids + starts * (1 << 22))
    shape = (len(place), len(comms), len(ops))
    cells = np.ravel_multi_index((process_of, comm_of, op_of), shape)
    distinct, first, inverse, calls = np.unique(cells, return_index=True, return_inverse=True, return_counts=True)
    sizes = np.bincount(inverse, np.maximum(integers(batch.column("bytes")), 0), len(distinct))
    found = []
    for row, times, size in zip(first.tolist(), calls.tolist(), sizes.tolist(), strict=True):
        comm, op = comms[comm_of[row]], ops[op_of[row]]
        if comm is not None and op is not None:
            found.append(((int(pids[row]), int(starts[row]), comm), op, row, times, int(size)))
    return found


def _use(batch: pa.RecordBatch, row: int) -> Use:
    values = {name: batch.column(name)[row].as_py() for name in ("backend", "comm_name", "comm_size", "comm_rank")}
    seen = batch.column("ts").view(pa.int64())[row].as_py()
    return Use(values["backend"], values["comm_name"], values["comm_size"], values["comm_rank"], seen)
