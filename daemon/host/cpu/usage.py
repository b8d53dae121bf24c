"""Compares a reading with the previous reading of each process and thread, to make rows of cpu.utilization and to find
busy processes and threads.

A key contains the start time, so two tasks with the same number are never compared. A counter that decreases has no
difference.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from probing.api.tables.cpu import UTILIZATION
from probing.daemon.clock import ClockPair
from probing.daemon.columns import batch, identities, identity_columns, named, number_columns, numbers, texts, times
from probing.daemon.host.cpu.reading import FIELDS, PROCESS, THREAD
from probing.daemon.host.cpu.selection import LEAST_SHARE
from probing.daemon.host.cpu.task_files import ABSENT
from probing.daemon.source import Processes

__all__ = ("ROW", "Ledger", "Rows", "Usage", "differences", "rows_of", "state_columns")

ROW = np.dtype([(name, "<i8") for name in FIELDS])
Rows = npt.NDArray[Any]
MOST = 32_768
FORGET_NS = 900_000_000_000
_FIRST = 256
# A full ledger drops at least 1/_DROPPED of its rows at once, so that not every reading has to drop some.
_DROPPED = 8


class Ledger:
    """Keeps the last row of up to ``most`` processes and threads. If there are more, it drops the rows of threads that
    were not read for the longest time, and then those of processes.
    """

    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self._slots: dict[tuple[int, ...], int] = {}
        self._rows = np.zeros(_FIRST, ROW)
        self._free: list[int] = list(range(_FIRST))[::-1]
        self._forgot_ns = 0

    def __len__(self) -> int:
        return len(self._slots)

    def exchange(self, rows: Rows) -> Rows:
        """Stores ``rows``. Returns the previous row of each process or thread, with ``mono_ns`` 0 if there is none."""
        before = np.zeros(len(rows), ROW)
        if not len(rows):
            return before
        self._forget(int(rows["mono_ns"].max()))
        # A reading of only the CPU time of a process (GLANCE) has the same key as a full reading of the process. The
        # main thread, which has the same number, has another key.
        names = (rows["scope"] == THREAD, *(rows[name] for name in ("pid", "start_ns", "tid", "task_start_ns")))
        keys = list(zip(*(column.tolist() for column in names), strict=True))
        self._make_room(keys)
        slots = np.array([self._slots.get(key, -1) for key in keys], np.intp)
        known = slots >= 0
        before[known] = self._rows[slots[known]]
        for place in np.flatnonzero(~known).tolist():
            slots[place] = self._new(keys[place])
        kept = slots >= 0
        self._rows[slots[kept]] = rows[kept]
        return before

    def _make_room(self, keys: Sequence[tuple[int, ...]]) -> None:
        """Drops old rows of other keys until there is a slot for each of ``keys``. The number of slots is limited
        because any user can start very many threads.
        """
        wanted = set(keys)
        over = len(self._slots) + len(wanted - self._slots.keys()) - self._most
        if over <= 0:
            return
        read_ns = self._rows["mono_ns"]
        others = (key for key in self._slots if key not in wanted)
        oldest = sorted(others, key=lambda key: (not key[0], read_ns[self._slots[key]]))
        # More than needed are dropped, so that not every reading has to sort.
        for key in oldest[: max(over, self._most // _DROPPED)]:
            self._free.append(self._slots.pop(key))

    def _new(self, key: tuple[int, ...]) -> int:
        if key in self._slots or len(self._slots) >= self._most:
            return -1  # if a reader names a task twice, only the first gets a slot
        if not self._free:
            size = len(self._rows)
            self._rows = np.concatenate([self._rows, np.zeros(size, ROW)])
            self._free = list(range(size, 2 * size))[::-1]
        self._slots[key] = slot = self._free.pop()
        return slot

    def _forget(self, now_ns: int) -> None:
        if now_ns - self._forgot_ns < FORGET_NS // 15:
            return
        self._forgot_ns = now_ns
        old = now_ns - FORGET_NS
        for key in [key for key, slot in self._slots.items() if self._rows["mono_ns"][slot] < old]:
            self._free.append(self._slots.pop(key))


def rows_of(payload: bytes) -> Rows:
    """Returns the rows of a reader's answer; bytes after the last whole row are left out."""
    return np.frombuffer(payload, ROW, len(payload) // ROW.itemsize)


def differences(now: Rows, before: Rows) -> Rows:
    """Returns the growth of each counter; ABSENT if a value is missing, or the counter decreased."""
    ours, old = (np.ascontiguousarray(rows).view(np.int64).reshape(len(rows), len(FIELDS)) for rows in (now, before))
    grown = ours - old
    unknown = (ours == ABSENT) | (old == ABSENT) | (grown < 0) | (before["mono_ns"] == 0)[:, None]
    grown[unknown] = ABSENT
    return grown.view(ROW).reshape(len(now))


_SCOPES = ("process", "thread")
_STATES = {
    "R": "running",
    "S": "sleeping",
    "D": "blocked",
    "T": "stopped",
    "t": "stopped",
    "Z": "zombie",
    "X": "exited",
    "I": "idle",
}
_BLOCKED = ord("D")
# A thread counts as idle below this share of a CPU: idle threads wake up now and then.
_IDLE_SHARE = 0.001
# PF_KTHREAD, include/linux/sched.h.
_KERNEL_THREAD = 0x0020_0000
_Key = tuple[int, int]
_Numbers = npt.NDArray[np.int64]


class Usage:
    """The differences of ``now`` to ``before``, the result of ``Ledger.exchange``."""

    def __init__(self, now: Rows, before: Rows) -> None:
        self._now = now
        self._grown = grown = differences(now, before)
        self._wall, self._delay = grown["mono_ns"], grown["run_delay_ns"]
        user, system = grown["user_ns"], grown["sys_ns"]
        ticks = np.where((user == ABSENT) | (system == ABSENT), ABSENT, user + system)
        self._total = np.where(now["scope"] == THREAD, grown["exec_ns"], ticks)

    def threads(self) -> dict[_Key, dict[int, float]]:
        """Returns the share of a CPU that each thread used or waited for, by process, busiest first, without idle
        threads.
        """
        share = self._share(np.maximum(self._grown["exec_ns"], 0) + np.maximum(self._delay, 0))
        rows = np.flatnonzero((self._now["scope"] == THREAD) & (share >= _IDLE_SHARE))
        found: dict[_Key, dict[int, float]] = {}
        for row in rows[np.argsort(-share[rows], kind="stable")].tolist():
            found.setdefault(self._key(row), {})[int(self._now["tid"][row])] = float(share[row])
        return found

    def shares(self) -> dict[_Key, float]:
        """Returns the share of a CPU that each process used; processes whose share is unknown are left out."""
        share = self._share(self._total)
        rows = np.flatnonzero((self._now["scope"] != THREAD) & (self._total >= 0))
        return {self._key(row): float(share[row]) for row in rows.tolist()}

    def thread_counts(self) -> dict[_Key, int]:
        rows = np.flatnonzero(self._now["scope"] == PROCESS)
        return {self._key(row): int(self._now["threads"][row]) for row in rows.tolist()}

    def batch(self, node: str, clocks: ClockPair, processes: Processes, names: Sequence[str]) -> pa.RecordBatch | None:
        """Returns rows of cpu.utilization, or None if there are none; ``names``: the answer's ``texts``."""
        who, which = identities(processes, self._now["pid"], self._now["start_ns"])
        keep = self._shown(np.array([one is not None for one in who], bool)[which])
        if not keep.any():
            return None
        now, grown, delays, which = self._now[keep], self._grown[keep], self._delays(which)[keep], which[keep]
        threads = now["scope"] == THREAD
        rss_kb = np.where(now["rss_bytes"] < 0, ABSENT, now["rss_bytes"] // 1024)
        counts = {
            "wall_ns": grown["mono_ns"],
            "delta_user_ns": grown["user_ns"],
            "delta_sys_ns": grown["sys_ns"],
            "delta_total_ns": self._total[keep],
            "cum_user_ns": now["user_ns"],
            "cum_sys_ns": now["sys_ns"],
            "rss_kb": rss_kb,
            "delta_vol_ctxt": grown["voluntary"],
            "delta_invol_ctxt": grown["involuntary"],
            "run_delay_ns": np.where(threads, grown["run_delay_ns"], delays),
            "major_faults": grown["major_faults"],
            "throttled_periods": grown["throttled"],
            "throttled_ns": grown["throttled_ns"],
        }
        table = np.stack(list(counts.values()), axis=1)
        kernel = (now["flags"] & _KERNEL_THREAD) != 0
        roles = [None if one is None else one.role for one in who]
        role = texts(
            [*roles, "other", "kernel"],
            np.where(np.array([one is None for one in roles], bool)[which], len(roles) + kernel, which),
        )
        columns = {
            **identity_columns(node, who, which, now["pid"], now["start_ns"]),
            "ts": times(np.full(len(now), clocks.real_ns, np.int64)),
            "role": role,
            "scope": named(threads.astype(np.int32), _SCOPES),
            "tid": numbers(now["tid"].astype(np.int32), ~threads),
            **state_columns(now, names),
            **dict(zip(counts, number_columns(table, table == ABSENT), strict=True)),
            "thread_count": _known(now["threads"], np.int32),
            "cpu_quota": numbers(now["quota_millis"] / 1000, now["quota_millis"] < 0),
        }
        return batch(UTILIZATION.name, columns)

    def _shown(self, watched: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
        """Returns the mask of the rows to show: watched processes, other busy processes, and threads of watched
        processes that ran or wanted to run.
        """
        scope, known = self._now["scope"], self._wall > 0
        busy = self._share(self._total) >= LEAST_SHARE
        active = (self._total > 0) | (self._delay > 0) | (self._now["state"] == _BLOCKED)
        thread = (scope == THREAD) & (self._now["state"] != ABSENT) & watched & active
        return np.asarray(known & (thread | ((scope == PROCESS) & (watched | busy))))

    def _share(self, spent: _Numbers) -> npt.NDArray[np.float64]:
        return np.where((spent > 0) & (self._wall > 0), spent / np.maximum(self._wall, 1), 0.0)

    def _delays(self, process: npt.NDArray[np.intp]) -> _Numbers:
        """Returns for each row the sum of the delays of all threads of its process. ``process``: for each row a number
        that identifies its process.
        """
        known = (self._now["scope"] == THREAD) & (self._delay >= 0)
        delays = np.zeros(len(process), np.int64)
        np.add.at(delays, process[known], self._delay[known])
        return np.where(np.bincount(process[known], minlength=len(process)) > 0, delays, ABSENT)[process]

    def _key(self, row: int) -> _Key:
        return int(self._now["pid"][row]), int(self._now["start_ns"][row])


def state_columns(rows: Rows, names: Sequence[str]) -> dict[str, pa.Array[Any]]:
    """Returns the columns comm, state, wchan, processor and cpu_list; ``names``: the answer's ``texts``."""
    states = tuple(_STATES.values())
    place = {ord(letter): states.index(state) for letter, state in _STATES.items()}
    letters, which = np.unique(rows["state"], return_inverse=True)
    state = np.array([place.get(int(letter), -1) for letter in letters], np.int32)[which]
    return {
        "comm": _text(rows["comm"], names),
        "state": named(state, states),
        "wchan": _text(rows["wchan"], names),
        "processor": _known(rows["processor"], np.int32),
        "cpu_list": _text(rows["cpus"], names),
    }


def _text(index: _Numbers, names: Sequence[str]) -> pa.Array[Any]:
    which, inverse = np.unique(index, return_inverse=True)
    return texts([names[i] if 0 <= i < len(names) else None for i in which.tolist()], inverse)


def _known(values: _Numbers, kind: type[np.signedinteger[Any]] = np.int64) -> pa.Array[Any]:
    return numbers(values.astype(kind, copy=False), values == ABSENT)
