"""Reads a process's condition once, in a reader. Counters are absolute: the caller subtracts two readings."""

from __future__ import annotations

import json
import os
import time
from typing import Any

from probing.api.errors import ProbingError, UsageError
from probing.daemon.ipc import Header, Message
from probing.daemon.processes.conditions.cgroups import read_cgroups
from probing.daemon.processes.conditions.counters import (
    asleep_ns,
    parse_io,
    parse_schedstat,
    parse_task_stat,
    read_loads,
    status_fields,
)
from probing.daemon.processes.conditions.mounts import (
    MAX_MOUNTINFO,
    Mount,
    handle_of,
    mount_of,
    parse_mounts,
    waits_for_others,
)
from probing.daemon.processes.conditions.waits import WaitReader
from probing.daemon.processes.memory import ProcessMemory
from probing.daemon.processes.procfs import clean_text
from probing.daemon.processes.target import Target

__all__ = ("answer_condition", "answer_loads", "read_condition")

MAX_THREADS = 64
MAX_CHILDREN = 16
_BYTES = 16 << 10
_SHM = b"/dev/shm"
# The state in which the kernel shows neither wchan nor system call of a thread.
_RUNS = "R"


def answer_condition(target: Target, request: Header) -> Message:
    """Answers the reader's request ``condition`` {pid, start_ns, timeout_ms, tid} with ``read_condition`` as JSON."""
    tid = request.get("tid", target.pid)
    if not isinstance(tid, int):
        raise UsageError("the tid in a request for a condition is not a number")
    return Message({}, json.dumps(read_condition(target, _deadline(request), tid)).encode())


def answer_loads(request: Header) -> Message:
    """Answers the reader's request ``loads`` {timeout_ms} with ``counters.read_loads`` as JSON."""
    return Message({}, json.dumps(read_loads(_deadline(request))).encode())


def read_condition(target: Target, deadline: float, tid: int = 0) -> Header:
    """Returns the fields of ``diagnosis.facts.Condition`` of the thread ``tid``, with absolute counters, and also:

    * ``pid``, ``start_ns``, and ``mono_ns``: CLOCK_MONOTONIC at the reading.
    * ``asleep_ns``: the thread has not run for at least this time.
    * ``last_cpu``: the CPU on which the thread last ran; ``target_fd``: the descriptor of the file ``target``.
    * ``children``: name, pid and state of up to 16 child processes.
    * ``thread_waits``: tid, name, state, cpu_ns, run_delay_ns and the fields of ``ThreadWait`` of up to 64 threads.
      Threads that are not reached by ``deadline`` (time.monotonic()) are left out.

    Values that the kernel does not show are None. ``tid`` 0, or the tid of a thread that has ended, means the main
    thread. Raises ProcessGone.
    """
    mono_ns = time.monotonic_ns()
    stat = parse_task_stat(target.read("stat", _BYTES))
    thread = parse_task_stat(_read(target, f"task/{tid}/stat")) if tid != target.pid else stat
    if thread is None:
        thread, tid = stat, target.pid
    state = target.stat.state if tid == target.pid else thread.state if thread else ""
    cpu_ns, run_delay_ns = parse_schedstat(_read(target, f"task/{tid}/schedstat"))
    read_bytes, write_bytes, storage_read_bytes = parse_io(_read(target, "io"))
    found: Header = {
        "pid": target.pid,
        "start_ns": target.start_ns,
        "mono_ns": mono_ns,
        **status_fields(_read(target, "status")),
        **_of_thread(target, tid),
        "state": state,
        "asleep_ns": asleep_ns(target, tid, thread.processor) if thread and state != _RUNS else None,
        "last_cpu": thread.processor if thread else None,
        "cpu_ns": cpu_ns,
        "run_delay_ns": run_delay_ns,
        "process_cpu_ns": stat.cpu_ns if stat else None,
        "major_faults": stat.major_faults if stat else None,
        "read_bytes": read_bytes,
        "write_bytes": write_bytes,
        "storage_read_bytes": storage_read_bytes,
        **read_cgroups(_read(target, "cgroup"), _own_cgroups()),
    }
    found["tracer"] = _name(found["tracer_pid"])
    mounts = parse_mounts(_read(target, "mountinfo", MAX_MOUNTINFO))
    return {**found, **_shared_memory(target, mounts), **_threads(target, tid, mounts, deadline)}


def _of_thread(target: Target, tid: int) -> Header:
    """Returns the context switches and allowed CPUs of a thread; empty for the main thread, whose values are those of
    the process's status file.
    """
    found = status_fields(_read(target, f"task/{tid}/status")) if tid != target.pid else {}
    return {name: found[name] for name in ("switches", "cpus_allowed", "cpu_list") if name in found}


def _threads(target: Target, first: int, mounts: list[Mount], deadline: float) -> Header:
    children: list[list[Any]] = []
    waits = WaitReader(target, ProcessMemory(target.pid, max_calls=4 * MAX_THREADS, max_bytes=1 << 20), mounts)
    found: list[Header] = []
    for tid in _tids(target, first):
        if found and time.monotonic() > deadline:
            break
        stat = parse_task_stat(_read(target, f"task/{tid}/stat"))
        if stat is None:
            continue  # the thread ended
        cpu_ns, run_delay_ns = parse_schedstat(_read(target, f"task/{tid}/schedstat"))
        wait = waits.read(tid) if stat.state != _RUNS else None
        used = {"cpu_ns": cpu_ns, "run_delay_ns": run_delay_ns}
        found.append({"tid": tid, "name": stat.name, "state": stat.state, **used, **(wait or {})})
        if len(children) < MAX_CHILDREN:
            children += _children(target, tid)
    waits_of_first = found[0] if found and found[0]["tid"] == first else {}
    own = {"target_fd": waits_of_first.get("fd"), "children": children[:MAX_CHILDREN]}
    names = ("wchan", "syscall", "target", "target_kind", "file_system", "lock_holder")
    return {**{name: waits_of_first.get(name) for name in names}, **own, "thread_waits": found}


def _tids(target: Target, first: int) -> list[int]:
    """Returns the thread ``first``, then the main thread, then the oldest threads."""
    try:
        directory = target.open("task")
    except ProbingError:
        return [target.pid]
    try:
        tids = [int(tid) for tid in os.listdir(directory) if tid.isdigit()]  # noqa: PTH208
    except OSError:
        tids = []
    finally:
        os.close(directory)
    return list(dict.fromkeys([first, target.pid, *sorted(tids)]))[:MAX_THREADS]


def _children(target: Target, tid: int) -> list[list[Any]]:
    """Returns [name, pid, state] of the processes that a thread started (CONFIG_PROC_CHILDREN)."""
    found: list[list[Any]] = []
    for word in _read(target, f"task/{tid}/children").split()[:MAX_CHILDREN]:
        try:
            with Target(int(word)) as child:
                found.append([clean_text(child.stat.comm, 32), child.pid, child.stat.state])
        except (ProbingError, ValueError):
            continue  # the child ended
    return found


def _shared_memory(target: Target, mounts: list[Mount]) -> Header:
    unknown = {"shm_used_bytes": None, "shm_size_bytes": None}
    if waits_for_others(mount_of(mounts, path=_SHM)):
        return unknown
    try:
        with handle_of(target, _SHM) as handle:
            found = os.fstatvfs(handle)
    except OSError:
        return unknown
    size = found.f_blocks * found.f_frsize
    return {"shm_used_bytes": size - found.f_bfree * found.f_frsize, "shm_size_bytes": size}


def _own_cgroups() -> list[Mount]:
    """Returns the mounts of control groups that this process sees, without its hundreds of other mounts."""
    with Target(os.getpid()) as own:
        lines = _read(own, "mountinfo", MAX_MOUNTINFO).split(b"\n")
    return parse_mounts(b"\n".join(line for line in lines if b" - cgroup" in line))


def _name(pid: int | None) -> str | None:
    if not pid:
        return None
    try:
        with Target(pid) as other:
            return clean_text(other.stat.comm, 64)
    except ProbingError:
        return None


def _read(target: Target, name: str, limit: int = _BYTES) -> bytes:
    # Each value is optional, so errors are not raised. The reader checks at the end of the request whether the process
    # has ended.
    try:
        return target.read(name, limit)
    except ProbingError:
        return b""


def _deadline(request: Header) -> float:
    return time.monotonic() + min(float(request.get("timeout_ms") or 1000), 30_000) / 1000
