"""Lists the threads of a process from /proc, and matches them with Python threads."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import NamedTuple

from probing.api.errors import CorruptTarget, ProcessGone
from probing.daemon.processes.procfs import clean_text, parse_stat, parse_status
from probing.daemon.python_stack.walk.walker import RawThread

__all__ = ("KernelThread", "check_process", "match_threads", "read_start_ns", "read_thread", "read_threads")

MAX_THREADS = 4096
MAX_LISTED = 16_384
_STATES = {"R": "running", "D": "blocked", "T": "stopped", "t": "stopped", "Z": "zombie", "X": "zombie", "x": "zombie"}


class KernelThread(NamedTuple):
    """A thread. ``tid``: its id in our PID namespace; ``own_tid``: its id in the process's own PID namespace;
    ``state``: a state word of ``python.backtrace``.
    """

    tid: int
    own_tid: int
    name: str
    state: str


def read_start_ns(pid: int) -> int:
    """Returns the start of process ``pid``, in ns since boot with the resolution of a tick. Raises ProcessGone."""
    return parse_stat(_read(pid, "stat")).start_ns


def check_process(pid: int, start_ns: int) -> None:
    """Raises ProcessGone if ``pid`` now belongs to another process. With ``start_ns`` 0 any process is accepted."""
    if start_ns not in (0, read_start_ns(pid)):
        raise ProcessGone(f"process {pid} exited, and its number belongs to another process")


def read_threads(pid: int) -> list[KernelThread]:
    """Returns the threads of process ``pid``, at most 16,384, the main thread first. Raises ProcessGone."""
    namespaced = len(_own_tids(_read(pid, "status"))) > 1
    try:
        with os.scandir(f"/proc/{pid}/task") as entries:
            tids = sorted(int(entry.name) for entry in entries)
    except OSError as e:
        raise ProcessGone(f"process {pid} exited") from e
    tids.sort(key=lambda tid: tid != pid)
    threads = []
    for tid in tids[:MAX_LISTED]:
        try:
            threads.append(read_thread(pid, tid, namespaced=namespaced))
        except (CorruptTarget, ProcessGone):
            continue  # the thread ended after it was listed
    if not threads:
        raise ProcessGone(f"process {pid} exited")
    return threads


def read_thread(pid: int, tid: int, *, namespaced: bool = True) -> KernelThread:
    """Returns a thread of process ``pid``. ``namespaced``: whether its id may differ in the process's own namespace.

    Raises ProcessGone when the thread ended, CorruptTarget.
    """
    stat = parse_stat(_read(pid, f"task/{tid}/stat"))
    own = (_own_tids(_read(pid, f"task/{tid}/status"))[-1] if namespaced else 0) or tid
    return KernelThread(tid, own, clean_text(stat.comm, 64), _STATES.get(stat.state, "sleeping"))


def match_threads(threads: Sequence[RawThread], kernel: Sequence[KernelThread]) -> list[int | None]:
    """Returns the tid of each Python thread, None for a thread that the kernel does not list.

    ``native_thread_id`` (3.11+) can be wrong after a fork, and older versions lack it. The C library keeps the tid in a
    structure at pthread_self(), at an offset that depends on the library. The offset whose values match most of the
    kernel's threads is used.
    """
    tids = {k.own_tid: k.tid for k in kernel}
    candidates = [[t.pthread_tids[i] for t in threads] for i in range(len(threads[0].pthread_tids))] if threads else []
    from_libc = max(candidates, key=lambda own: len(tids.keys() & set(own)), default=[0] * len(threads))
    matched = []
    for thread, libc in zip(threads, from_libc, strict=True):
        native = tids.get(thread.native_id) if thread.native_id is not None else None
        matched.append(native if native is not None else tids.get(libc))
    return matched


def _own_tids(status: bytes) -> list[int]:
    return parse_status(status).get("NSpid") or [0]


def _read(pid: int, name: str) -> bytes:
    try:
        fd = os.open(f"/proc/{pid}/{name}", os.O_RDONLY | os.O_CLOEXEC)
        try:
            return os.read(fd, 16_384)
        finally:
            os.close(fd)
    except (FileNotFoundError, ProcessLookupError) as e:
        raise ProcessGone(f"process {pid} exited") from e
