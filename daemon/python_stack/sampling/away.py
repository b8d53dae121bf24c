"""Threads that were off the CPU before anybody looked, put into the map of the programs that tell of such threads.

The map is python_off of bpf/python_off.bpf.c. From then on a thread is told of as any other: while it is away by the
flush, and when it runs again by the switch, which takes the entry out.
"""

from __future__ import annotations

import errno
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from probing.daemon.bpf.session import Session
from probing.daemon.python_stack.sampling.blocked import MAX_FRAMES, Away
from probing.daemon.python_stack.sampling.codes import CodeKey

__all__ = ("AwayThreads", "frames_hash")

# enum python_sample_kind and python_sample_flags of bpf/python.bpf.h.
_OFF_CPU, _CUT, _GIL_UNKNOWN = 2, 1, 8
_U64 = (1 << 64) - 1
# AWAY_SHARE of bpf/python_off.bpf.c: one process must leave others room.
_SHARES = 4


class AwayThreads:
    """The entries of the map. ``session`` has the object ``python_off``. Not safe for two threads."""

    def __init__(self, session: Session) -> None:
        self._entries, self._control = session.maps["python_off"], session.maps["control"]

    @property
    def room(self) -> int:
        """How many threads of one process can be off the CPU at a time."""
        return self._entries.max_entries // _SHARES

    @property
    def generation(self) -> int | None:
        """What entries are made under that count until the programs pause; None while they do."""
        control = self._control.lookup(0)
        return None if control["paused"] else int(control["generation"])

    def lacking(self, start_ns: int, tids: Iterable[int]) -> list[int]:
        """Which of the threads of a process have no entry that counts. One that does not count is taken out."""
        generation, found = self.generation, []
        for tid in tids:
            entry = self._entries.lookup(tid)
            if entry is not None:
                if int(entry["sample"]["start_ns"]) == start_ns and int(entry["generation"]) == generation:
                    continue
                self._entries.delete(tid)
            found.append(tid)
        return found

    def put(
        self, pid: int, start_ns: int, generation: int, threads: Sequence[Away], checks: Mapping[int, int]
    ) -> tuple[list[Away], int]:
        """Make entries for threads that have none; those that were made, and for how many there was no room.

        ``generation`` is that from before the threads were looked at; ``checks``: address of a code object -> check.
        """
        made: list[Away] = []
        for number, away in enumerate(threads):
            try:
                if self._entries.insert(away.tid, self._entry(pid, start_ns, generation, away, checks).tobytes()):
                    made.append(away)
            except OSError as e:
                if e.errno not in (errno.E2BIG, errno.ENOMEM, errno.ENOSPC):
                    raise
                return made, len(threads) - number
        return made, 0

    def drop(self, tid: int, switches: int) -> None:
        """The thread has run since: its entry is void, unless it is a newer one."""
        entry = self._entries.lookup(tid)
        if entry is not None and int(entry["switches"]) == switches:
            self._entries.delete(tid)

    def clear(self) -> None:
        """Of the time when nobody saw threads switch nothing can be said."""
        for tid in self._entries.items()[0]:
            self._entries.delete(tid)

    def _entry(self, pid: int, start_ns: int, generation: int, away: Away, checks: Mapping[int, int]) -> Any:
        entry = np.zeros((), self._entries.value)
        entry["since"], entry["switches"], entry["generation"] = away.seen_ns, away.switches, generation
        # It stands for itself.
        entry["rate"] = entry["out_of"] = 1
        sample, frames = entry["sample"], away.frames[:MAX_FRAMES]
        keys = [(code, checks[code]) for code, _ in frames]
        offsets = [offset for _, offset in frames]
        sample["start_ns"], sample["tgid"], sample["tid"] = start_ns, pid, away.tid
        sample["ktime"], sample["kind"], sample["depth"] = away.seen_ns, _OFF_CPU, len(frames)
        sample["flags"] = _GIL_UNKNOWN | (_CUT if away.cut else 0)
        sample["hash"] = frames_hash(keys, offsets)
        sample["frames"]["code"][: len(frames)] = np.array([code for code, _ in keys], np.uint64)
        sample["frames"]["check"][: len(frames)] = np.array([check for _, check in keys], np.uint32)
        sample["frames"]["offset"][: len(frames)] = np.array(offsets, np.int32)
        return entry


def frames_hash(keys: Iterable[CodeKey], offsets: Iterable[int]) -> int:
    """The ``hash`` of a sample with these frames, innermost first, as python_walk computes it."""
    hashed = 0
    for (code, check), offset in zip(keys, offsets, strict=True):
        hashed = _mixed(_mixed(hashed, code), offset << 32 & _U64 | check)
    return hashed


def _mixed(hashed: int, value: int) -> int:
    hashed = (hashed ^ value) * 0x9E3779B97F4A7C15 & _U64
    return hashed ^ hashed >> 29
