"""Writes entries of the map ``python_off`` (bpf/python_off.bpf.c) for threads that left the CPU unseen.

The programs then report the thread like any other thread: at each flush while the thread is off the CPU, and when it
switches back, which deletes the entry.
"""

from __future__ import annotations

import errno
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from probing.daemon.bpf.session import Session
from probing.daemon.python_stack.sampling.codes import CodeKey
from probing.daemon.python_stack.sampling.off_cpu.stacks import MAX_FRAMES, OffCpuThread

__all__ = ("OffCpuEntries", "frames_hash")

# Values of enum python_sample_kind and python_sample_flags of bpf/python.bpf.h.
_OFF_CPU, _CUT, _GIL_UNKNOWN = 2, 1, 8
_U64 = (1 << 64) - 1
# One process may use 1/_SHARES of the map (AWAY_SHARE of bpf/python_off.bpf.c).
_SHARES = 4


class OffCpuEntries:
    """The entries of the map ``python_off``. Not thread-safe. ``session`` has the object ``python_off``."""

    def __init__(self, session: Session) -> None:
        self._entries, self._control = session.maps["python_off"], session.maps["control"]

    @property
    def room(self) -> int:
        """The number of entries that one process may have."""
        return self._entries.max_entries // _SHARES

    @property
    def generation(self) -> int | None:
        """Returns the pause generation for new entries; None while the programs pause."""
        control = self._control.lookup(0)
        return None if control["paused"] else int(control["generation"])

    def lacking(self, start_ns: int, tids: Iterable[int]) -> list[int]:
        """Returns the tids without a valid entry. Entries of another process or generation are deleted."""
        generation, without = self.generation, []
        for tid in tids:
            entry = self._entries.lookup(tid)
            if entry is not None:
                if int(entry["sample"]["start_ns"]) == start_ns and int(entry["generation"]) == generation:
                    continue
                self._entries.delete(tid)
            without.append(tid)
        return without

    def put(
        self, pid: int, start_ns: int, generation: int, threads: Sequence[OffCpuThread], checks: Mapping[int, int]
    ) -> tuple[list[OffCpuThread], int]:
        """Inserts the entries that ``threads`` lack. Returns the threads that got an entry, and the number of threads
        for which the map had no room.

        ``generation``: the pause generation before the threads were read; ``checks``: address of a code object ->
        check.
        """
        made: list[OffCpuThread] = []
        for number, thread in enumerate(threads):
            try:
                if self._entries.insert(thread.tid, self._entry(pid, start_ns, generation, thread, checks).tobytes()):
                    made.append(thread)
            except OSError as e:
                if e.errno not in (errno.E2BIG, errno.ENOMEM, errno.ENOSPC):
                    raise
                return made, len(threads) - number
        return made, 0

    def drop(self, tid: int, switches: int) -> None:
        """Deletes the entry of a thread that has run since the entry was made.

        ``switches``: the thread's count of context switches when the entry was made. An entry with another count is
        newer and stays.
        """
        entry = self._entries.lookup(tid)
        if entry is not None and int(entry["switches"]) == switches:
            self._entries.delete(tid)

    def clear(self) -> None:
        """Deletes all entries. Called after a time in which no program saw switches, so that entries may be invalid."""
        for tid in self._entries.items()[0]:
            self._entries.delete(tid)

    def _entry(self, pid: int, start_ns: int, generation: int, thread: OffCpuThread, checks: Mapping[int, int]) -> Any:
        entry = np.zeros((), self._entries.value)
        entry["since"], entry["switches"], entry["generation"] = thread.seen_ns, thread.switches, generation
        # The entry counts as one sample.
        entry["weight"] = 1
        sample, frames = entry["sample"], thread.frames[:MAX_FRAMES]
        keys = [(code, checks[code]) for code, _ in frames]
        offsets = [offset for _, offset in frames]
        sample["start_ns"], sample["tgid"], sample["tid"] = start_ns, pid, thread.tid
        sample["ktime"], sample["kind"], sample["depth"] = thread.seen_ns, _OFF_CPU, len(frames)
        sample["flags"] = _GIL_UNKNOWN | (_CUT if thread.cut else 0)
        sample["hash"] = frames_hash(keys, offsets)
        sample["frames"]["code"][: len(frames)] = np.array([code for code, _ in keys], np.uint64)
        sample["frames"]["check"][: len(frames)] = np.array([check for _, check in keys], np.uint32)
        sample["frames"]["offset"][: len(frames)] = np.array(offsets, np.int32)
        return entry


def frames_hash(keys: Iterable[CodeKey], offsets: Iterable[int]) -> int:
    """Returns the ``hash`` of a sample with these frames, innermost first, as python_walk computes it."""
    hashed = 0
    for (code, check), offset in zip(keys, offsets, strict=True):
        hashed = _mixed(_mixed(hashed, code), offset << 32 & _U64 | check)
    return hashed


def _mixed(hashed: int, value: int) -> int:
    hashed = (hashed ^ value) * 0x9E3779B97F4A7C15 & _U64
    return hashed ^ hashed >> 29
