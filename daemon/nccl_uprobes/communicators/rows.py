"""Rows of ``comm.communicators``: a row a change, which repeats what is known of the communicator from before."""

from __future__ import annotations

import socket
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from probing.daemon.arrow import batch_of
from probing.daemon.clock import ClockPair
from probing.daemon.nccl_uprobes.communicators.parallel_roles import Facts, Role, conclude
from probing.daemon.nccl_uprobes.communicators.usage import Key, Use, Uses
from probing.daemon.nccl_uprobes.operations.names import NCCL_RESULTS
from probing.daemon.source import Processes

__all__ = ("RING", "Communicators")

RING = "communicators"
_TABLE = "comm.communicators"
# A row is about a kilobyte here.
_MAX_KNOWN = 16384
_UNKNOWN_BYTE, _UNKNOWN_WORD = 0xFF, (1 << 64) - 1
# enum communicator_event, communicator_maker and communicator_identity of communicators.bpf.h
_SEEN, _MADE, _FINALIZED, _DESTROYED, _ABORTED, _ERROR = range(1, 7)
_STATES = {_FINALIZED: "finalized", _DESTROYED: "destroyed", _ABORTED: "aborted"}
_MAKERS = (None, "init_rank", "init_rank_config", "init_rank_scalable", "init_all", "split", "shrink", "grow")
_IDENTITIES = ("none", "struct", "unique_id", "derived")
# ncclResult_t
_SUCCESS, _IN_PROGRESS = 0, 7
_Place = tuple[int, int, int | str]
_Row = dict[str, Any]


class Communicators:
    """The communicators of the processes of one node. One thread."""

    def __init__(self, node: str, processes: Processes) -> None:
        self._node = node
        self._processes = processes
        self._uses = Uses(processes)
        # By (pid, start_ns, address of the communicator, or its name where the address is not known).
        self._known: OrderedDict[_Place, _Row] = OrderedDict()
        self._named: dict[Key, _Place] = {}

    def rows(self, records: npt.NDArray[Any], pair: ClockPair) -> dict[str, pa.RecordBatch]:
        """``records`` of the ring ``communicators`` -> a batch of ``comm.communicators``, a row each."""
        if not len(records):
            return {}
        rows = [self._change(record, pair) for record in records]
        return {_TABLE: batch_of(_TABLE, rows)}

    def follow(self, batches: Mapping[str, pa.RecordBatch], pair: ClockPair) -> dict[str, pa.RecordBatch]:
        """What ``Rows.finished`` made, with rows for the communicators that have found another role by it.

        A communicator is looked at every two seconds at most.
        """
        made = dict(batches)
        seen = _plain(made.pop(_TABLE)) if _TABLE in made else []
        for row in seen:
            self._keep((row["pid"], row["start_ns"], row["comm"]), row)
        operations = made.get("comm.ops")
        if operations is not None:
            self._uses.observe(operations)
        changed = (self._with_role(key, use, role, pair) for key, use, role in self._uses.changed(pair.mono_ns))
        if rows := seen + [row for row in changed if row is not None]:
            made[_TABLE] = batch_of(_TABLE, rows)
        return made

    def processes_of(self, comm: str) -> list[tuple[int, int]]:
        """(pid, start_ns) of those that have a communicator of this name. From any thread."""
        return [(pid, start_ns) for pid, start_ns, name in list(self._named) if name == comm]

    def forget(self, pid: int, start_ns: int) -> None:
        """The process has ended."""
        self._uses.forget(pid, start_ns)
        for place in [place for place in self._known if place[:2] == (pid, start_ns)]:
            del self._known[place]
        for key in [key for key in self._named if key[:2] == (pid, start_ns)]:
            del self._named[key]

    def _keep(self, place: _Place, row: _Row) -> None:
        self._known[place] = row
        self._known.move_to_end(place)
        if row["comm"] is not None:
            self._named[place[0], place[1], row["comm"]] = place
        if len(self._known) > _MAX_KNOWN:
            old, gone = self._known.popitem(last=False)
            self._named.pop((old[0], old[1], str(gone["comm"])), None)

    def _change(self, record: np.void, pair: ClockPair) -> _Row:
        place = int(record["tgid"]), int(record["start_ns"]), int(record["comm"])
        when = int(record["t"]) + pair.mono_to_utc_ns
        told = {name: value for name, value in _told(record).items() if value is not None}
        event = int(record["event"])
        before = self._known.get(place)
        if before is None or _is_another(before, told, event):
            before = {"comm": None, "created": when, "state": "active", "identity": "none", "aborted": None}
        row = {**before, **self._identity(place), **told, "ts": when}
        row.update(_outcome(record, event))
        if "parallel_role" not in row:
            role = self._first_role(row)
            row.update(parallel_role=role.name, parallel_role_why=role.why)
        # A call that failed leaves no communicator behind.
        if place[2]:
            self._keep(place, row)
        return row

    def _identity(self, place: _Place) -> _Row:
        who = self._processes.identity(*place[:2])
        return {
            "node": self._node,
            "job": who and who.job,
            "run": who and who.run,
            "pid": place[0],
            "start_ns": place[1],
            "job_rank": who and who.rank,
        }

    def _first_role(self, row: _Row) -> Role:
        who = self._processes.identity(row["pid"], row["start_ns"])
        world = who.world_size if who is not None else None
        return conclude(Facts(row.get("size"), world, row.get("name"), {}, {}, {}), ())

    def _with_role(self, key: Key, use: Use, role: Role, pair: ClockPair) -> _Row | None:
        place = self._named.get(key, key)
        before = self._known.get(place)
        if before is None:
            # Its own record was lost, or there is none: what the operations say is what is known.
            before = {"comm": key[2], "name": use.name, "backend": use.backend, "size": use.size, "rank": use.rank}
            before |= {"created": use.first_seen, "state": "active"}
        elif (before.get("parallel_role"), before.get("parallel_role_why")) == (role.name, role.why):
            return None
        row = {**before, **self._identity(place), "comm": key[2], "ts": pair.real_ns}
        row |= {"parallel_role": role.name, "parallel_role_why": role.why}
        self._keep(place, row)
        return row


def _told(record: np.void) -> _Row:
    """What a record says; None for what it does not know."""
    identity, maker = int(record["identity"]), int(record["maker"])
    color = int(record["color"])
    bus = int(record["bus_id"])
    return {
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


def _outcome(record: np.void, event: int) -> _Row:
    """What an event makes of the communicator. A result that says "in progress" is no error."""
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


def _is_another(before: _Row, told: _Row, event: int) -> bool:
    """Whether the address holds a communicator that is not the one known by it."""
    if event == _MADE or (event == _SEEN and before["state"] in ("destroyed", "aborted", "failed")):
        return True
    return None not in (before["comm"], told.get("comm")) and before["comm"] != told["comm"]


def _known(record: np.void, field: str) -> int | None:
    value = int(record[field])
    return value if value >= 0 else None


def _bus_id(number: int) -> str:
    """NCCL keeps it as the hexadecimal number that its digits make (src/misc/utils.cc, int64ToBusId)."""
    return f"{number >> 20 & 0xFFFF_FFFF:04x}:{number >> 12 & 0xFF:02x}:{number >> 4 & 0xFF:02x}.{number & 0xF:x}"


def _address(raw: bytes) -> str | None:
    """HOST:PORT of a sockaddr_in or sockaddr_in6 (linux/in.h, linux/in6.h)."""
    family, port = int.from_bytes(raw[:2], "little"), int.from_bytes(raw[2:4], "big")
    if family == socket.AF_INET:
        return f"{socket.inet_ntop(family, raw[4:8])}:{port}"
    if family == socket.AF_INET6:
        return f"[{socket.inet_ntop(family, raw[8:24])}]:{port}"
    return None


def _text(raw: bytes) -> str | None:
    text = raw.partition(b"\0")[0].decode(errors="replace")
    return "".join(c if c.isprintable() else "?" for c in text) or None


def _plain(batch: pa.RecordBatch) -> list[_Row]:
    columns = [c.cast(pa.int64()) if pa.types.is_timestamp(c.type) else c for c in batch.columns]
    values = zip(*(column.to_pylist() for column in columns), strict=True)
    return [dict(zip(batch.schema.names, row, strict=True)) for row in values]
