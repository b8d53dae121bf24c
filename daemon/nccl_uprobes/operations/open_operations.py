"""Closes open operations whose end the probes can no longer see. The BPF programs then report them as finished
records.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from probing.daemon.bpf.probe_slots import SLOTS
from probing.daemon.bpf.session import Session
from probing.daemon.nccl_uprobes.records.names import STATE_ABANDONED

__all__ = ("MAP", "SHARE", "OpenOperations", "abandoned")

MAP = "operations"
_SHARES = "operation_shares"
# The slot has this name in bpf/collectives.bpf.h.
(_OPEN,) = SLOTS.reserve("OPEN_SLOT", 253)
SHARE = {_OPEN: "this process has reached its limit of operations in flight"}
_ABANDON = struct.Struct("<QQQQ")
_CLOSE = struct.Struct("<QQQQQ")
# Values of enum communicator_event of communicators.bpf.h.
_DESTROYED, _ABORTED = 4, 5
_KEY = ("object", "position", "start_ns", "tgid")
_Array = npt.NDArray[Any]


class OpenOperations:
    """The open operations, entries of the map ``operations``. Thread-safe. The methods ``close_*`` return the number of
    closed operations.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        # pid -> time: the arguments of the calls of ``close_before`` that could not close all their operations.
        self._missed: dict[int | None, int] = {}
        self._missing = threading.Lock()

    def records(self) -> _Array:
        """Returns the records of all open operations."""
        return self._session.maps[MAP].items()[1]

    def close_communicators(self, events: _Array) -> int:
        """Closes operations on communicators that were destroyed or aborted; after an abort they count as failed.

        ``events`` are records of the ring ``communicators``.
        """
        gone = events[np.isin(events["event"], (_DESTROYED, _ABORTED))]
        if not len(gone):
            return 0
        ended = {(int(r["tgid"]), int(r["start_ns"]), int(r["comm"])): r for r in gone}
        keys, values = self._session.maps[MAP].items()
        chosen = np.flatnonzero(np.isin(values["comm"], gone["comm"]))
        closed = 0
        for key, value in zip(keys[chosen], values[chosen], strict=True):
            record = ended.get((int(key["tgid"]), int(key["start_ns"]), int(value["comm"])))
            if record is not None and value["t_call"] <= record["t"]:
                context = _CLOSE.pack(*(int(key[field]) for field in _KEY), int(record["event"] == _ABORTED))
                closed += self._session.run_program("nccl_close", context)
        return closed

    def close_process(self, pid: int, start_ns: int) -> int:
        """Closes the operations of a process that has ended."""
        closed = self._abandon(lambda keys, _: (keys["tgid"] == pid) & (keys["start_ns"] == start_ns))
        self._session.maps[_SHARES].delete((start_ns, pid))
        return closed

    def close_ended(self, alive: Callable[[int, int], bool]) -> int:
        """Closes the operations of processes whose exit was not seen."""

        def ended(keys: _Array, _: _Array) -> npt.NDArray[np.bool_]:
            processes, inverse = np.unique(keys[["tgid", "start_ns"]], return_inverse=True)
            gone = np.array([not alive(int(p["tgid"]), int(p["start_ns"])) for p in processes], bool)
            return gone[inverse]

        closed = self._abandon(ended)
        shares = self._session.maps[_SHARES]
        for key in shares.items()[0]:
            if not alive(int(key["tgid"]), int(key["start_ns"])):
                shares.delete(key)
        return closed

    def close_before(self, mono_ns: int, pid: int | None = None) -> int:
        """Closes operations that ``pid``, or any process, called before ``mono_ns``, since the probes may have missed
        their ends. Operations that do not fit into the ring now are left to ``close_missed``.
        """

        def called(keys: _Array, values: _Array) -> npt.NDArray[np.bool_]:
            chosen: npt.NDArray[np.bool_] = values["t_call"] < mono_ns
            return chosen if pid is None else chosen & (keys["tgid"] == pid)

        closed = self._abandon(called)
        if called(*self._session.maps[MAP].items()).any():
            with self._missing:
                self._missed[pid] = max(mono_ns, self._missed.get(pid, 0))
        return closed

    def close_missed(self) -> int:
        """Closes the operations that ``close_before`` could not close."""
        with self._missing:
            missed, self._missed = self._missed, {}
        return sum(self.close_before(mono_ns, pid) for pid, mono_ns in missed.items())

    def _abandon(self, which: Callable[[_Array, _Array], npt.NDArray[np.bool_]]) -> int:
        keys, values = self._session.maps[MAP].items()
        if not len(keys):
            return 0
        contexts = [_ABANDON.pack(*(int(key[field]) for field in _KEY)) for key in keys[which(keys, values)]]
        return sum(self._session.run_program("collectives_abandon", context) for context in contexts)


def abandoned(values: _Array) -> _Array:
    """Returns open operations of another version of the daemon as abandoned: no probe will see their ends."""
    records = values.copy()
    records["state"] = STATE_ABANDONED
    return records
