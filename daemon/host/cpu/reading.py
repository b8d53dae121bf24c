"""Reads, in a reader, the CPU counters of many processes and threads, and the throttling of their control groups, with
one request a second.

The answer is a table of absolute counters; the collector computes their differences. In each round the throttling of a
group is read once, for all processes of the group.
"""

from __future__ import annotations

import os
import resource
import time
from array import array
from dataclasses import dataclass, field
from functools import lru_cache

from probing.api.errors import ProbingError
from probing.daemon.host.cpu.task_files import (
    ABSENT,
    StatLine,
    TaskFiles,
    name_of,
    parse_run_times,
    parse_stat_line,
    parse_status_lines,
)
from probing.daemon.ipc import Header, Message
from probing.daemon.processes.conditions.cgroups import Group, cpu_limits, group_of
from probing.daemon.processes.conditions.mounts import MAX_MOUNTINFO, Mount, parse_mounts

__all__ = (
    "FIELDS",
    "GLANCE",
    "PROCESS",
    "THREAD",
    "UsageReader",
    "answer_usage",
)

MAX_GROUPS = 1_024
# The mounts of control groups are read again only after this many rounds, because only administrators change them.
_MOUNTS_ROUNDS = 60
_NOTHING = (ABSENT, ABSENT, ABSENT)


class _Throttling:
    """Reads the throttling of control groups. ``proc``: the mount point of procfs."""

    def __init__(self, proc: str = "/proc") -> None:
        self._proc = proc
        self._round = 0
        self._mounts: list[Mount] = []
        self._groups: dict[bytes, Group | None] = {}
        self._read: dict[bytes, tuple[int, int, int]] = {}

    def begin(self) -> None:
        """Begins a round: readings of earlier rounds are dropped."""
        self._read.clear()
        if self._round % _MOUNTS_ROUNDS == 0:
            self._mounts, self._groups = _own_mounts(self._proc), {}
        self._round += 1

    def of(self, cgroup: bytes) -> tuple[int, int, int]:
        """Returns throttled periods, throttled ns and the quota (thousandths of a CPU) of a group. ``cgroup``: the text
        of /proc/PID/cgroup.

        The counters include all groups above the group. ABSENT: the kernel has no value.
        """
        if (limits := self._read.get(cgroup)) is None:
            if len(self._read) >= MAX_GROUPS:
                return _NOTHING
            limits = self._read[cgroup] = self._limits(cgroup)
        return limits

    def _limits(self, cgroup: bytes) -> tuple[int, int, int]:
        if cgroup not in self._groups:
            self._groups[cgroup] = group_of("cpu", cgroup, self._mounts)
        limits = cpu_limits(self._groups[cgroup])
        count, time_ns, quota = limits["throttled"], limits["throttled_ns"], limits["cpu_quota"]
        return (
            ABSENT if count is None else int(count),
            ABSENT if time_ns is None else int(time_ns),
            ABSENT if quota is None else min(int(quota * 1000), 1 << 40),
        )


def _own_mounts(proc: str) -> list[Mount]:
    try:
        fd = os.open(f"{proc}/self/mountinfo", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return []
    with os.fdopen(fd, "rb") as file:
        return parse_mounts(file.read(MAX_MOUNTINFO))


FIELDS = (
    "scope",
    "pid",
    "start_ns",
    "tid",
    "task_start_ns",
    "mono_ns",
    "exec_ns",
    "run_delay_ns",
    "state",
    "flags",
    "user_ns",
    "sys_ns",
    "major_faults",
    "processor",
    "comm",
    "threads",
    "rss_bytes",
    "wchan",
    "voluntary",
    "involuntary",
    "cpus",
    "throttled",
    "throttled_ns",
    "quota_millis",
)
"""The columns of the answer's payload, int64 each. ``comm``, ``wchan`` and ``cpus`` are indices of the answer's
``texts``; ``quota_millis``: thousandths of a CPU. ABSENT: the kernel has no value."""
PROCESS, THREAD, GLANCE = 0, 1, 2
"""The scopes of a row: a requested process, a thread of a requested process, or a process whose CPU time alone is
requested.
"""
MAX_TARGETS = 2_048
MAX_THREADS = 16_384
# The maximum number of threads that one answer lists; later answers list the threads of further processes.
MAX_LISTED = 32_768
MAX_GLANCES = 1_024
MAX_PIDS = 16_384
MOST_FILES = 4_096
_PAD = (ABSENT,) * len(FIELDS)
_RUNS = ord("R")


@dataclass(slots=True)
class _Answer:
    rows: array[int] = field(default_factory=lambda: array("q"))
    texts: dict[str, int] = field(default_factory=dict)

    def text(self, raw: bytes) -> int:
        return self.texts.setdefault(name_of(raw), len(self.texts)) if raw else ABSENT

    def add(self, *values: int) -> None:
        """Adds a row that begins with these values."""
        self.rows.extend(values + _PAD[len(values) :])


class UsageReader:
    """Answers the request ``usage``. ``proc``: the mount point of procfs; ``most_files``: the maximum number of files
    of procfs that stay open.
    """

    def __init__(self, proc: str = "/proc", most_files: int = MOST_FILES) -> None:
        self._proc = proc
        self._files = TaskFiles(most_files, proc)
        self._throttling = _Throttling(proc)

    def answer(self, request: Header) -> Message:
        """Answers the request ``usage``:

        * ``targets``: [[pid, start_ns, closely, list_threads, [tid, ...], [tid, ...]], ...], a list for each process.
          ``closely``: status, wchan and throttling are read, too; ``list_threads``: its tids are listed. The threads in
          the first list of tids are read closely; of the threads in the second list only the run times are read.
        * ``glances``: [pid, ...], processes of which only the CPU time is read; ``pids``: whether all pids of the node
          are listed; ``timeout_ms``.

        Header: ``texts``, ``threads`` (lists of tids by pid), ``pids``. Payload: rows of FIELDS. Processes and threads
        that ended, or were not reached in time, have no row.
        """
        deadline = time.monotonic() + min(int(request.get("timeout_ms") or 500), 30_000) / 1000
        found, threads, tids_left = _Answer(), {}, MAX_LISTED
        self._files.begin()
        self._throttling.begin()
        for pid, start_ns, closely, listed, busy, rest in request.get("targets", ())[:MAX_TARGETS]:
            if time.monotonic() > deadline:
                break
            try:
                self._process(found, int(pid), int(start_ns), bool(closely))
                if listed and tids_left > 0:
                    threads[str(pid)] = self._tids(int(pid))
                    tids_left -= len(threads[str(pid)])
                self._threads(found, int(pid), int(start_ns), busy, rest)
            except ProbingError:
                continue  # the process ended, or cannot be read
        for pid in request.get("glances", ())[:MAX_GLANCES]:
            if time.monotonic() > deadline:
                break
            self._glance(found, int(pid))
        header: Header = {"texts": list(found.texts), "threads": threads}
        if request.get("pids"):
            header["pids"] = self._pids()
        return Message(header, found.rows.tobytes())

    def _process(self, found: _Answer, pid: int, start_ns: int, closely: bool) -> None:
        stat = parse_stat_line(self._files.stat(pid, start_ns))
        if stat is None:
            return
        row = (
            PROCESS,
            pid,
            start_ns,
            pid,
            start_ns,
            time.monotonic_ns(),
            ABSENT,
            ABSENT,
            *stat[1:6],
            stat.processor,
            found.text(stat.comm),
            stat.threads,
            stat.rss_bytes,
        )
        if not closely:
            found.add(*row)
            return
        status = parse_status_lines(self._files.read(pid, start_ns, "status"))
        wchan = self._wchan(found, pid, start_ns, stat, "wchan")
        throttled = self._throttling.of(self._files.read(pid, start_ns, "cgroup"))
        found.add(*row, wchan, status.voluntary, status.involuntary, found.text(status.cpus), *throttled)

    def _threads(self, found: _Answer, pid: int, start_ns: int, busy: list[int], rest: list[int]) -> None:
        for tids, closely in ((busy, True), (rest, False)):
            for tid in tids[:MAX_THREADS]:
                try:
                    self._thread(found, pid, start_ns, int(tid), closely)
                except ProbingError:
                    continue  # the thread ended

    def _thread(self, found: _Answer, pid: int, start_ns: int, tid: int, closely: bool) -> None:
        begun, data = self._files.thread(pid, start_ns, tid)
        exec_ns, delay_ns = parse_run_times(data)
        row = (THREAD, pid, start_ns, tid, begun, time.monotonic_ns(), exec_ns, delay_ns)
        path = f"task/{tid:d}/"
        stat = parse_stat_line(self._files.read(pid, start_ns, path + "stat")) if closely else None
        if stat is None:
            found.add(*row)
            return
        status = parse_status_lines(self._files.read(pid, start_ns, path + "status"))
        found.add(
            *row,
            *stat[1:6],
            stat.processor,
            found.text(stat.comm),
            ABSENT,
            ABSENT,
            self._wchan(found, pid, start_ns, stat, path + "wchan"),
            status.voluntary,
            status.involuntary,
            found.text(status.cpus),
        )

    def _wchan(self, found: _Answer, pid: int, start_ns: int, stat: StatLine, name: str) -> int:
        if stat.state == _RUNS:
            return ABSENT
        raw = self._files.read(pid, start_ns, name)[:64]
        return found.text(raw) if raw != b"0" else ABSENT

    def _glance(self, found: _Answer, pid: int) -> None:
        try:
            fd = os.open(f"{self._proc}/{pid:d}/stat", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return  # the process ended
        try:
            stat = parse_stat_line(os.read(fd, 4_096))
        except OSError:
            stat = None
        finally:
            os.close(fd)
        if stat is not None:
            key = (GLANCE, pid, stat.start_ns, pid, stat.start_ns, time.monotonic_ns())
            found.add(*key, ABSENT, ABSENT, stat.state, stat.flags, stat.user_ns, stat.sys_ns)

    def _tids(self, pid: int) -> list[int]:
        try:
            return sorted(int(tid) for tid in os.listdir(f"{self._proc}/{pid:d}/task") if tid.isdigit())[:MAX_THREADS]  # noqa: PTH208
        except OSError:
            return []

    def _pids(self) -> list[int]:
        return sorted(int(pid) for pid in os.listdir(self._proc) if pid.isdigit())[:MAX_PIDS]  # noqa: PTH208


def answer_usage(request: Header) -> Message:
    """Returns ``UsageReader.answer`` of the only ``UsageReader`` of this process."""
    return _reader().answer(request)


@lru_cache(maxsize=1)
def _reader() -> UsageReader:
    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return UsageReader(most_files=max(64, min(MOST_FILES, allowed // 2)))
