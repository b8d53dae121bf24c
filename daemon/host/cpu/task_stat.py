"""Parses the counters of a process or thread that are read each second: bytes in, plain numbers out.

Formats: proc(5), Documentation/scheduler/sched-stats.rst. The name in a stat file is the task's own choice, and may
hold blanks, brackets and lines; the kernel writes the rest.
"""

from __future__ import annotations

import os
from functools import lru_cache
from typing import NamedTuple

from probing.daemon.processes.procfs import TICK_NS, clean_text

__all__ = ("ABSENT", "StatLine", "StatusLines", "name_of", "parse_run_times", "parse_stat_line", "parse_status_lines")

ABSENT = -1
"""Stands for a number that the kernel does not show."""
_MOST = (1 << 63) - 1
_PAGE = os.sysconf("SC_PAGE_SIZE")
# Fields behind the name, counted from 0.
_FLAGS, _MAJOR_FAULTS, _USER, _SYSTEM, _THREADS, _START, _RSS, _PROCESSOR = 6, 9, 11, 12, 17, 19, 21, 36


class StatLine(NamedTuple):
    """``state`` is the kernel's letter; times are counted in ticks of 10 ms. ``start_ns`` is since boot."""

    comm: bytes
    state: int
    flags: int
    user_ns: int
    sys_ns: int
    major_faults: int
    processor: int
    threads: int
    rss_bytes: int
    start_ns: int


class StatusLines(NamedTuple):
    """Context switches of a task, and the list of CPUs on which it may run, as the kernel writes it."""

    voluntary: int
    involuntary: int
    cpus: bytes


def parse_stat_line(data: bytes) -> StatLine | None:
    """Returns the numbers of a stat file of a process or thread; None when it is cut short or holds no numbers."""
    head, _, rest = data.rpartition(b")")
    fields = rest.split(None, _PROCESSOR + 1)
    if len(fields) <= _PROCESSOR or len(rest) > 1_024:
        return None
    try:
        return StatLine(
            head[head.find(b"(") + 1 :][:64],
            fields[0][0],
            int(fields[_FLAGS]),
            _ns(fields[_USER]),
            _ns(fields[_SYSTEM]),
            min(int(fields[_MAJOR_FAULTS]), _MOST),
            int(fields[_PROCESSOR]),
            int(fields[_THREADS]),
            min(int(fields[_RSS]) * _PAGE, _MOST),
            _ns(fields[_START]),
        )
    except ValueError:
        return None


def parse_status_lines(data: bytes) -> StatusLines:
    """Returns what it finds in a status file; ABSENT and no CPUs where a line is not there."""
    # These lines are the last ones of the file, and no name comes behind them.
    at = data.rfind(b"\nCpus_allowed_list:\t")
    cpus = data[at + 20 : data.find(b"\n", at + 20)][:1_024] if at >= 0 else b""
    voluntary, involuntary = (
        _after(data, b"\nvoluntary_ctxt_switches:\t"),
        _after(data, b"\nnonvoluntary_ctxt_switches:\t"),
    )
    return StatusLines(voluntary, involuntary, cpus)


def parse_run_times(data: bytes) -> tuple[int, int]:
    """Returns the time on the CPU and the time spent runnable without one, ns, of a schedstat file; else ABSENT."""
    words = data[:64].split()
    if len(words) < 2 or not (words[0].isdigit() and words[1].isdigit()):
        return ABSENT, ABSENT
    return min(int(words[0]), _MOST), min(int(words[1]), _MOST)


@lru_cache(maxsize=4_096)
def name_of(raw: bytes) -> str:
    """Returns a name or another short text of the kernel without control characters."""
    return clean_text(raw, 128)


def _ns(ticks: bytes) -> int:
    return min(int(ticks) * TICK_NS, _MOST)


def _after(data: bytes, name: bytes) -> int:
    at = data.rfind(name)
    if at < 0:
        return ABSENT
    word = data[at + len(name) : at + len(name) + 20].partition(b"\n")[0]
    return int(word) if word.isdigit() else ABSENT
