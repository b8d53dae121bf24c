"""Writes the sampler's maps: processes with their rates and layouts, and the PyThreadState of each thread.

The maps are defined in bpf/python_walk.bpf.h, their values in bpf/python.bpf.h.
"""

from __future__ import annotations

import errno
from collections.abc import Mapping
from typing import Any

import numpy as np

from probing.api.errors import AttachError, UnsupportedTarget
from probing.daemon.bpf.maps import Map
from probing.daemon.bpf.session import Session
from probing.daemon.python_stack.walk.layouts import Layout
from probing.daemon.source import ProcessKey

__all__ = ("SampledProcesses",)

_ABSENT = 0xFFFF
_NO_SHIMS = 0xFF
# The bytes of a frame, or of a code object, that the programs read at once. They must contain all fields.
_WINDOW = 128
_INSTR = {"lasti_bytes": 1, "lasti_units": 2, "previous": 3, "current": 3}
_GIL_UNKNOWN, _GIL_CURRENT, _GIL_STRUCT = 0, 1, 2
_HINT = "its stacks can be read on demand, with `probingctl stacks`"

# One process may use 1/_SHARES of the map of threads, and the processes of one owner may use all but 1/_SHARES of each
# map, so that other owners have room.
_SHARES = 4


class SampledProcesses:
    """The processes that ``session`` (with object ``python``) samples. Not thread-safe.

    Entries of an earlier daemon stay in the maps until ``clear``.
    """

    def __init__(self, session: Session) -> None:
        self._processes, self._threads = session.maps["python_processes"], session.maps["python_threads"]
        self._seen = session.maps["python_seen"]
        # By pid: the start time, the value in the map, and the owner.
        self._written: dict[int, tuple[int, Any, int]] = {}
        self._tids: dict[ProcessKey, dict[int, tuple[int, int]]] = {}

    @property
    def room(self) -> int:
        """Returns the number of threads that one process may have in the map, a quarter of the map."""
        return max(self._threads.max_entries // _SHARES, 1)

    def add(
        self,
        pid: int,
        start_ns: int,
        layout: Layout,
        runtime: int,
        gil: int,
        rate: int,
        off_rate: int,
        owner: int = 0,
    ) -> None:
        """Samples ``pid``, of user ``owner``, ``rate`` times a second on each CPU. The stack of a thread that leaves
        the CPU is walked up to ``off_rate`` times a second.

        ``runtime`` is the address of ``_PyRuntime``. Up to CPython 3.11, ``gil`` is the address of the pointer to the
        thread state that holds the GIL; 0 means the place according to ``layout``. From 3.12 on it is the address of
        the GIL's struct, 0 if unknown. Raises UnsupportedTarget for a layout that the programs cannot follow,
        AttachError when there is no room.
        """
        if not gil and layout.runtime_current is not None and runtime:
            gil = runtime + layout.runtime_current
        value = np.zeros((), self._processes.value)
        value["start_ns"], value["gil"] = start_ns, gil
        value["rate"], value["off_rate"] = rate, off_rate
        for name, field in _fields(layout, gil).items():
            value["layout"][name] = field
        self._write(pid, start_ns, value, owner)

    def set_rate(self, pid: int, start_ns: int, rate: int, off_rate: int) -> None:
        """Changes the rates of a process that was added; any other process is ignored."""
        written = self._written.get(pid)
        if written is None or written[0] != start_ns:
            return
        value = written[1].copy()
        value["rate"], value["off_rate"] = rate, off_rate
        self._write(pid, start_ns, value, written[2])

    def set_threads(self, pid: int, start_ns: int, threads: Mapping[int, tuple[int, int]]) -> int:
        """Sets the threads of the process: tid -> (address of its PyThreadState, its thread_id).

        A thread with address 0 runs no Python and gives no samples; a thread that is not listed gives unresolved
        samples. Returns the number of threads for which there was no room.
        """
        written = self._written.get(pid)
        if written is None or written[0] != start_ns:
            return 0
        key = ProcessKey(pid, start_ns)
        room = min(self.room, _of_owner(self._threads) - self._threads_of(written[2], key))
        before = self._tids.get(key, {})
        self._forget(key, before.keys() - threads.keys())
        now: dict[int, tuple[int, int]] = {}
        value = np.zeros((), self._threads.value)
        value["start_ns"] = start_ns
        for tid, thread in threads.items():
            if before.get(tid) != thread:
                value["state"], value["thread_id"] = thread
                if len(now) >= room or not _put(self._threads, tid, value):
                    # The entry with the thread's earlier state is wrong now, and would not be deleted later.
                    self._forget(key, before.keys() & {tid})
                    continue
            now[tid] = thread
        self._tids[key] = now
        return len(threads) - len(now)

    def remove(self, pid: int, start_ns: int) -> None:
        """Stops sampling the process; does nothing if it is not sampled."""
        key = ProcessKey(pid, start_ns)
        self._forget(key, self._tids.pop(key, {}))
        written = self._written.get(pid)
        if written is not None and written[0] == start_ns:
            del self._written[pid]
            self._processes.delete(pid)

    def clear(self) -> None:
        """Empties the maps, including entries of earlier daemons. Every stack counts as new again."""
        for bpf_map in (self._processes, self._threads, self._seen):
            for key in bpf_map.items()[0]:
                bpf_map.delete(key)
        self._written.clear()
        self._tids.clear()

    def _threads_of(self, owner: int, without: ProcessKey) -> int:
        """Returns how many threads of an owner's processes are in the map, not counting the process ``without``."""
        owners = {(pid, start): of for pid, (start, _, of) in self._written.items()}
        return sum(len(tids) for key, tids in self._tids.items() if key != without and owners.get(key) == owner)

    def _write(self, pid: int, start_ns: int, value: Any, owner: int) -> None:
        written = self._written.get(pid)
        if written is not None and written[0] != start_ns:
            self.remove(pid, written[0])
        own = sum(of == owner for _, _, of in self._written.values())
        if pid not in self._written and own >= _of_owner(self._processes):
            raise AttachError(
                f"process {pid} is not sampled: {own} processes of its user already are",
                hint="set sampling.hz to 0 for jobs that need no samples",
            )
        if not _put(self._processes, pid, value):
            raise AttachError(
                f"process {pid} is not sampled: {self._processes.max_entries} processes already are",
                hint="set sampling.hz to 0 for jobs that need no samples",
            )
        self._written[pid] = (start_ns, value, owner)

    def _forget(self, key: ProcessKey, tids: Any) -> None:
        for tid in tids:
            # The tid may belong to another process now.
            value = self._threads.lookup(tid)
            if value is not None and int(value["start_ns"]) == key[1]:
                self._threads.delete(tid)


def _of_owner(bpf_map: Map) -> int:
    """Returns the number of entries that the processes of one owner may have in a map."""
    return max(bpf_map.max_entries - bpf_map.max_entries // _SHARES, 1)


def _put(into: Map, key: int, value: Any) -> bool:
    try:
        into.update(key, value.tobytes())
    except OSError as e:
        # The map is full.
        if e.errno in (errno.E2BIG, errno.ENOMEM, errno.ENOSPC):
            return False
        raise
    return True


def _fields(layout: Layout, gil: int) -> dict[str, int]:
    """Returns the members of struct python_layout."""
    frame = (layout.frame_previous + 8, layout.frame_code + 8, layout.frame_instr + 8, (layout.frame_owner or 0) + 1)
    pointers = (layout.code_filename, layout.code_name, layout.code_short_name, layout.code_linetable)
    code = (*pointers, layout.code_firstlineno)
    words = (layout.frame_previous, layout.frame_code, layout.frame_instr, *pointers, layout.code_firstlineno * 2)
    if max(frame) > _WINDOW or max(code) + 8 - min(code) // 8 * 8 > _WINDOW or any(offset % 8 for offset in words):
        raise UnsupportedTarget("frames or code objects of this CPython have an unknown layout", hint=_HINT)
    fields = {
        "thread_id": layout.thread_id,
        "thread_frame": layout.thread_frame,
        "cframe_frame": layout.cframe_frame,
        "frame_previous": layout.frame_previous,
        "frame_code": layout.frame_code,
        "frame_instr": layout.frame_instr,
        "frame_owner": layout.frame_owner,
        "code_firstlineno": layout.code_firstlineno,
        "code_filename": layout.code_filename,
        "code_name": layout.code_name,
        "code_short_name": layout.code_short_name,
        "code_linetable": layout.code_linetable,
        "code_adaptive": layout.code_adaptive,
        "gil_holder": layout.gil_holder,
        "gil_locked": layout.gil_locked,
    }
    numbers = {name: _ABSENT if offset is None else offset for name, offset in fields.items()}
    if any(offset > _ABSENT for offset in numbers.values()):
        raise UnsupportedTarget("this CPython cannot be sampled: some struct offsets are too large", hint=_HINT)
    numbers["instr"] = _INSTR[layout.instr]
    numbers["gil_kind"] = _gil_kind(layout, gil)
    numbers["shim_owner"] = _NO_SHIMS if layout.is_shim_from is None else layout.is_shim_from
    numbers["tag_mask"] = layout.tag_mask
    return numbers


def _gil_kind(layout: Layout, gil: int) -> int:
    if not gil:
        return _GIL_UNKNOWN
    return _GIL_STRUCT if layout.runtime_current is None else _GIL_CURRENT
