"""Makes rows of ``comm.communicators``: a row for each change, with all known columns of the communicator."""

from __future__ import annotations

import socket
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from typing import TypedDict, cast

import numpy as np
import pyarrow as pa

from probing.api.text import escape
from probing.daemon.arrow import batch_of
from probing.daemon.clock import ClockPair
from probing.daemon.columns import Array
from probing.daemon.nccl_uprobes.communicators.parallel_roles import Facts, Key, Role, Use, Uses, conclude
from probing.daemon.nccl_uprobes.records.entities import Entity
from probing.daemon.nccl_uprobes.records.names import NCCL, NCCL_RESULTS
from probing.daemon.nccl_uprobes.records.operations import Operations
from probing.daemon.processes.ranking import Membership
from probing.daemon.source import Processes

__all__ = ("RING", "TABLE", "Communicators")

RING = "communicators"
TABLE = "comm.communicators"
# The maximum number of communicators that are kept; each takes about a kilobyte of memory.
_MAX_KNOWN = 16384
# The maximum number of names of replaced communicators that are kept for each process. A communicator is replaced when
# another communicator has its address.
_MAX_REPLACED = 256
_MAX_BACKENDS = 65536
_UNKNOWN_BYTE, _UNKNOWN_WORD = 0xFF, (1 << 64) - 1
# Values of enum communicator_event, communicator_maker and communicator_identity of communicators.bpf.h.
_SEEN, _MADE, _FINALIZED, _DESTROYED, _ABORTED, _ERROR = range(1, 7)
_STATES = {_FINALIZED: "finalized", _DESTROYED: "destroyed", _ABORTED: "aborted"}
_MAKERS = (None, "init_rank", "init_rank_config", "init_rank_scalable", "init_all", "split", "shrink", "grow")
_IDENTITIES = ("none", "struct", "unique_id", "derived")
# ncclResult_t
_SUCCESS, _IN_PROGRESS = 0, 7
_Place = tuple[int, int, int | str]
"""(pid, start_ns, address of the communicator, or its name if the address is not known)."""


class _Row(TypedDict, total=False):
    node: str
    ts: int
    job: str | None
    run: str | None
    pid: int
    start_ns: int
    comm: str | None
    name: str | None
    backend: str | None
    size: int | None
    rank: int | None
    job_rank: int | None
    cuda_device: int | None
    node_index: int | None
    nodes: int | None
    async_error: str | None
    aborted: bool | None
    created: int
    state: str
    made_by: str | None
    init_ns: int | None
    parent: str | None
    color: int | None
    bus_id: str | None
    root_address: str | None
    identity: str | None
    parallel_role: str
    parallel_role_why: str | None


@dataclass(slots=True)
class _Process:
    """The communicators of a process. ``rows`` holds the newest row of each communicator, by its address, or by its
    name if the address is not known. ``named``: name -> key in ``rows``. ``replaced`` holds the latest names of
    communicators whose address another communicator has now.
    """

    rows: dict[int | str, _Row] = field(default_factory=dict)
    named: dict[str, int | str] = field(default_factory=dict)
    replaced: dict[str, None] = field(default_factory=dict)

    def put(self, address: int | str, row: _Row) -> None:
        before = self.rows.pop(address, None)
        self.rows[address] = row
        if before is not None and before["comm"] != row["comm"]:
            self._forget_name(before["comm"], address)
        if row["comm"] is not None:
            self.named[row["comm"]] = address
            self.replaced.pop(row["comm"], None)

    def drop_oldest(self) -> None:
        address = next(iter(self.rows))
        comm = self.rows.pop(address)["comm"]
        if comm is not None and self.named.get(comm) == address:
            del self.named[comm]

    def _forget_name(self, comm: str | None, address: int | str) -> None:
        if comm is not None and self.named.get(comm) == address:
            del self.named[comm]
            self.replaced[comm] = None
            if len(self.replaced) > _MAX_REPLACED:
                del self.replaced[next(iter(self.replaced))]


class Communicators:
    """The communicators of this node's processes. Not thread-safe, except the methods that say so.

    Once there are more than 16,384 communicators, the process with the most communicators loses the communicator whose
    last event is the oldest. ``joined(pid, start_ns, membership)`` is called for communicators of processes whose rank
    is unknown.
    """

    def __init__(
        self, node: str, processes: Processes, joined: Callable[[int, int, Membership], None] | None = None
    ) -> None:
        self._node = node
        self._processes = processes
        self._joined = joined
        self._uses = Uses(processes)
        self._known: dict[tuple[int, int], _Process] = {}
        self._count = 0
        self._backends: dict[tuple[int, int], frozenset[str]] = {}

    def rows(self, records: Array, pair: ClockPair) -> pa.RecordBatch:
        """Returns a row of ``comm.communicators`` for each of ``records``, which come from the ring
        ``communicators``.
        """
        return batch_of(TABLE, [self._change(record, pair) for record in records])

    def follow(self, operations: Operations, pair: ClockPair) -> pa.RecordBatch | None:
        """Returns rows of communicators first seen in ``operations``, and of communicators whose role has changed; None
        if there are no rows. A communicator's role is concluded at most every two seconds.
        """
        self._note_backends(operations)
        rows = [*self._first_seen(operations, pair)]
        self._uses.observe(operations)
        for row in rows:
            self._uses.describe((row["pid"], row["start_ns"], row["comm"] or ""), row["name"], row["size"], row["rank"])
        changed = (self._with_role(key, use, role, pair) for key, use, role in self._uses.changed(pair.mono_ns))
        rows += [row for row in changed if row is not None]
        return batch_of(TABLE, rows) if rows else None

    def processes_of(self, comm: str) -> list[tuple[int, int]]:
        """Returns (pid, start_ns) of the processes that have a communicator of this name. Thread-safe."""
        return [key for key, process in list(self._known.items()) if comm in process.named]

    def backends_of(self, pid: int, start_ns: int) -> frozenset[str]:
        """Returns the backends whose operations the process has called: "gloo", "nccl". Thread-safe."""
        return self._backends.get((pid, start_ns), frozenset())

    def processes(self) -> set[tuple[int, int]]:
        """Returns (pid, start_ns) of the processes whose communicators or backends are kept. Thread-safe."""
        return {*list(self._known), *list(self._backends)}

    def forget_backends(self, pid: int, start_ns: int) -> None:
        """Drops the backends of a process that called exec. Thread-safe."""
        self._backends.pop((pid, start_ns), None)

    def forget(self, ended: Collection[tuple[int, int]]) -> None:
        """Drops the communicators of processes that have ended."""
        self._uses.forget(ended)
        for key in ended:
            self._backends.pop(key, None)
            if (process := self._known.pop(key, None)) is not None:
                self._count -= len(process.rows)

    def _note_backends(self, operations: Operations) -> None:
        if len(self._backends) > _MAX_BACKENDS:
            self._backends.clear()
        for entity in operations.entities:
            if name := entity.backend_name:
                self._backends[entity.process] = self._backends.get(entity.process, frozenset()) | {name}

    def _first_seen(self, operations: Operations, pair: ClockPair) -> Iterator[_Row]:
        first = np.unique(operations.entity_of, return_index=True)[1]
        called = operations.called[first].tolist()
        for mono_ns, entity in sorted(zip(called, operations.entities, strict=True), key=lambda each: each[0]):
            # The ring ``communicators`` has NCCL's communicators, with more details.
            if entity.comm is None or entity.backend == NCCL:
                continue
            place, ts = (*entity.process, entity.comm), mono_ns + pair.mono_to_utc_ns
            before = self._row(place)
            if before is None or _is_made_again(before, entity, ts):
                row = self._seen_row(entity, ts)
                self._keep(place, row)
                yield row

    def _seen_row(self, entity: Entity, ts: int) -> _Row:
        place = (*entity.process, entity.comm or "")
        row: _Row = {
            **self._identity(place),
            "ts": ts,
            "comm": entity.comm,
            "name": entity.comm_name,
            "backend": entity.backend_name,
            "size": entity.comm_size,
            "rank": entity.comm_rank,
            "cuda_device": entity.cuda_device,
            "created": ts,
        }
        who = entity.who
        spans = who is not None and who.world_size is not None and who.world_size == entity.comm_size
        row["parallel_role"] = "world" if spans else "unknown"
        row["parallel_role_why"] = f"has all {entity.comm_size} ranks of the job" if spans else None
        return row

    def _row(self, place: _Place) -> _Row | None:
        process = self._known.get(place[:2])
        return process.rows.get(place[2]) if process is not None else None

    def _keep(self, place: _Place, row: _Row) -> None:
        process = self._known.setdefault(place[:2], _Process())
        self._count -= len(process.rows)
        process.put(place[2], row)
        self._count += len(process.rows)
        if row["comm"] is not None:
            self._report(row, row["comm"])
        if self._count > _MAX_KNOWN:
            key = max(self._known, key=lambda key: len(self._known[key].rows))
            self._known[key].drop_oldest()
            self._count -= 1

    def _report(self, row: _Row, comm: str) -> None:
        rank, size = row.get("rank"), row.get("size")
        if self._joined is not None and row.get("job_rank") is None and rank is not None and size is not None:
            membership = Membership(comm, row.get("name"), row.get("backend"), rank, size)
            self._joined(row["pid"], row["start_ns"], membership)

    def _change(self, record: np.void, pair: ClockPair) -> _Row:
        place = int(record["tgid"]), int(record["start_ns"]), int(record["comm"])
        when = int(record["t"]) + pair.mono_to_utc_ns
        recorded = _recorded(record)
        event = int(record["event"])
        before = self._row(place)
        if before is None or _is_another(before, recorded, event):
            before = {"comm": None, "created": when, "state": "active", "identity": "none", "aborted": None}
        row: _Row = {**before, **self._identity(place), **recorded, "ts": when}
        row.update(_outcome(record, event))
        if "parallel_role" not in row:
            role = self._first_role(row)
            row |= {"parallel_role": role.name, "parallel_role_why": role.why}
        # A call that failed made no communicator: its record has the address 0.
        if place[2]:
            self._keep(place, row)
        return row

    def _identity(self, place: _Place) -> _Row:
        who = self._processes.identity(*place[:2])
        return {
            "node": self._node,
            "job": who.job if who else None,
            "run": who.run if who else None,
            "pid": place[0],
            "start_ns": place[1],
            "job_rank": who.rank if who else None,
        }

    def _first_role(self, row: _Row) -> Role:
        who = self._processes.identity(row["pid"], row["start_ns"])
        world = who.world_size if who is not None else None
        return conclude(Facts(row.get("size"), world, row.get("name"), {}, {}, {}), ())

    def _with_role(self, key: Key, use: Use, role: Role, pair: ClockPair) -> _Row | None:
        process = self._known.get(key[:2], _Process())
        if key[2] in process.replaced:
            return None
        place = (*key[:2], process.named.get(key[2], key[2]))
        before = process.rows.get(place[2])
        if before is None:
            # The communicator has no record, or its record was lost: only the operations describe the communicator.
            before = {"comm": key[2], "name": use.name, "backend": use.backend, "size": use.size, "rank": use.rank}
            before |= {"created": use.first_seen + pair.mono_to_utc_ns, "state": "active"}
        elif (before.get("parallel_role"), before.get("parallel_role_why")) == (role.name, role.why):
            return None
        row: _Row = {**before, **self._identity(place), "comm": key[2], "ts": pair.real_ns}
        row |= {"parallel_role": role.name, "parallel_role_why": role.why}
        self._keep(place, row)
        return row


def _recorded(record: np.void) -> _Row:
    """Returns the columns whose values are in the record."""
    identity, maker = int(record["identity"]), int(record["maker"])
    color = int(record["color"])
    bus = int(record["bus_id"])
    found: _Row = {
        "comm": f"{int(record['hash']):016x}" if identity else None,
        "name": _text(bytes(record["name"])),
        "backend": "nccl",
        "size": _known(record, "size"),
        "rank": _known(record, "rank"),
        "cuda_device": _known(record, "cuda_device"),
        "node_index": _known(record, "node"),
        "nodes": _known(record, "nodes"),
        "aborted": None if record["aborted"] > 1 else bool(record["aborted"]),
        "made_by": _MAKERS[maker] if maker < len(_MAKERS) else None,
        "init_ns": int(record["duration_ns"]) if record["event"] == _MADE else None,
        "parent": f"{int(record['parent']):016x}" if record["parent"] not in (0, _UNKNOWN_WORD) else None,
        "color": color if color >= 0 else None,
        "bus_id": _bus_id(bus) if bus != _UNKNOWN_WORD else None,
        "root_address": _address(bytes(record["root_address"].tobytes())),
        "identity": _IDENTITIES[identity] if 0 < identity < len(_IDENTITIES) else None,
    }
    return cast(_Row, {name: value for name, value in found.items() if value is not None})


def _outcome(record: np.void, event: int) -> _Row:
    """Returns the columns that the event changes. The result "in progress" is not an error."""
    result = int(record["result"])
    failed = result not in (_SUCCESS, _IN_PROGRESS, _UNKNOWN_BYTE)
    name = NCCL_RESULTS[result] if result < len(NCCL_RESULTS) else f"ncclResult_t {result}"
    if event == _MADE:
        return {"state": "failed", "async_error": name} if failed else {"state": "active"}
    if event in (_SEEN, _ERROR):
        return {} if result == _UNKNOWN_BYTE else {"async_error": name if failed else None}
    # A call that did not succeed changed nothing.
    found: _Row = {} if failed or event not in _STATES else {"state": _STATES[event]}
    return {**found, "aborted": True} if found and event == _ABORTED else found


def _is_another(before: _Row, recorded: _Row, event: int) -> bool:
    """Returns whether the address now belongs to a communicator other than the one in ``before``."""
    if event == _MADE or (event == _SEEN and before["state"] in ("destroyed", "aborted", "failed")):
        return True
    return None not in (before["comm"], recorded.get("comm")) and before["comm"] != recorded["comm"]


def _is_made_again(before: _Row, entity: Entity, ts: int) -> bool:
    """Returns whether ``entity`` is a later process group than the one in ``before``: it has the same name and another
    number of ranks. Names recur, because torch numbers its groups from the start again after destroy_process_group.
    ``ts``: the time of a call on ``entity``, UTC ns.
    """
    return entity.comm_size not in (None, before["size"]) and ts > before["created"]


def _known(record: np.void, field: str) -> int | None:
    value = int(record[field])
    return value if value >= 0 else None


def _bus_id(number: int) -> str:
    """Returns DOMAIN:BUS:DEVICE.FUNCTION, with the digits of NCCL's hex number (src/misc/utils.cc, int64ToBusId)."""
    return f"{number >> 20 & 0xFFFF_FFFF:04x}:{number >> 12 & 0xFF:02x}:{number >> 4 & 0xFF:02x}.{number & 0xF:x}"


def _address(raw: bytes) -> str | None:
    """Returns HOST:PORT of a sockaddr_in or sockaddr_in6 (linux/in.h, linux/in6.h)."""
    family, port = int.from_bytes(raw[:2], "little"), int.from_bytes(raw[2:4], "big")
    if family == socket.AF_INET:
        return f"{socket.inet_ntop(family, raw[4:8])}:{port}"
    if family == socket.AF_INET6:
        return f"[{socket.inet_ntop(family, raw[8:24])}]:{port}"
    return None


def _text(raw: bytes) -> str | None:
    return escape(raw.partition(b"\0")[0]) or None
