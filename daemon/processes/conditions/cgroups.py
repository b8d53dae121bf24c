"""Reads limits and counters of a process's control groups: CPU quota, throttling, memory limit, OOM kills, freezer.

Both versions 1 and 2 are read. A limit of a group also limits all groups below it, so every level is read. A value is
None if the kernel lacks its file. Formats: Documentation/admin-guide/cgroup-v2.rst, cgroup-v1/memory.rst,
scheduler/sched-bwc.rst.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from probing.daemon.processes.conditions.mounts import Mount
from probing.daemon.processes.procfs import clean_text

__all__ = ("Group", "cpu_limits", "first_number", "group_of", "number_in", "read_cgroups", "read_group_file")

MAX_LEVELS = 32
MAX_FILE = 4_096
MAX_LINES = 64
# Version 1 shows "no limit" as a number near 2 ** 63.
_UNLIMITED = 1 << 60
_V2 = "cgroup2"


class Group(NamedTuple):
    """The directories of a process's group and of the groups above it, innermost first."""

    version: int
    path: str
    directories: tuple[bytes, ...]


def read_cgroups(cgroup: bytes, mounts: list[Mount]) -> dict[str, object]:
    """Returns cgroup, frozen, cpu_quota (CPUs), memory_limit_bytes, memory_used_bytes, oom_kills, throttled and
    throttled_ns of a process. A value is None if the value is unknown or there is no limit.

    ``cgroup``: the text of /proc/PID/cgroup. ``mounts``: the mounts that this process, the reader, sees.
    """
    groups = {name: group for name in ("cpu", "memory", "freezer") if (group := group_of(name, cgroup, mounts))}
    frozen, cpu = _frozen(groups.get("freezer")), cpu_limits(groups.get("cpu"))
    # In version 1 a process is in a group of each hierarchy. The group that limits the process most is shown.
    first = "freezer" if frozen else "cpu" if cpu["cpu_quota"] is not None else "memory"
    shown = groups.get(first) or next(iter(groups.values()), None)
    return {
        "cgroup": shown.path if shown else None,
        "frozen": frozen,
        **cpu,
        **_memory(groups.get("memory")),
    }


def group_of(controller: str, cgroup: bytes, mounts: list[Mount]) -> Group | None:
    """Returns the group of a process in the version 1 hierarchy with ``controller``, or else in the version 2
    hierarchy; None if the process is in neither hierarchy.
    """
    unified = None
    for line in cgroup[: 64 << 10].split(b"\n")[:MAX_LINES]:
        number, _, rest = line.partition(b":")
        names, _, path = rest.partition(b":")
        if controller.encode() in names.split(b","):
            return _first(1, (m for m in mounts if m.kind == "cgroup" and controller in m.options.split(",")), path)
        if number == b"0" and not names:
            unified = path
    return _first(2, (m for m in mounts if m.kind == _V2), unified) if unified is not None else None


def _first(version: int, mounts: Iterable[Mount], path: bytes) -> Group | None:
    return next((found for mount in mounts if (found := _below(version, mount, path))), None)


def _below(version: int, mount: Mount, path: bytes) -> Group | None:
    """Returns the group ``path`` below ``mount``; None if the mount does not contain it.

    A container has a private control group namespace. Inside it, groups outside the namespace, and the root of a mount
    of the whole node, have paths that begin with ``/../..``: cgroup_namespaces(7).
    """
    root = mount.root.rstrip(b"/")
    if not path.startswith(b"/") or not (path + b"/").startswith(root + b"/"):
        return None
    parts = [part for part in path[len(root) :].split(b"/") if part][:MAX_LEVELS]
    if b".." in parts:
        return None
    directories = [b"/".join((mount.point, *parts[:n])) for n in range(len(parts), -1, -1)]
    shown = b"/" + b"/".join(parts) if root.startswith(b"/..") else path
    return Group(version, clean_text(shown, 256), tuple(directories))


def _frozen(group: Group | None) -> bool | None:
    if group is None:
        return None
    if group.version == 1:
        state = read_group_file(group.directories[0], "freezer.state")
        return None if state is None else state.strip() in (b"FROZEN", b"FREEZING")
    value = number_in(read_group_file(group.directories[0], "cgroup.events"), b"frozen")
    return None if value is None else bool(value)


def cpu_limits(group: Group | None) -> dict[str, float | int | None]:
    """Returns cpu_quota (CPUs), and throttled and throttled_ns since the groups were created. A value is None if it is
    unknown or there is no limit.
    """
    quotas, counts, times = [], [], []
    for directory in group.directories if group else ():
        if (quota := _quota(directory)) is not None:
            quotas.append(quota)
        stat = read_group_file(directory, "cpu.stat")
        count = number_in(stat, b"nr_throttled")
        time, time_us = number_in(stat, b"throttled_time"), number_in(stat, b"throttled_usec")
        counts += [count] if count is not None else []
        times += [time] if time is not None else [time_us * 1000] if time_us is not None else []
    return {
        "cpu_quota": min(quotas, default=None),
        "throttled": sum(counts) if counts else None,
        "throttled_ns": sum(times) if times else None,
    }


def _quota(directory: bytes) -> float | None:
    both = (read_group_file(directory, "cpu.max") or b"").split()
    if not both:
        both = [read_group_file(directory, f"cpu.cfs_{name}_us") or b"" for name in ("quota", "period")]
    numbers = [_number(word) for word in both]
    if len(numbers) != 2 or numbers[0] is None or not numbers[1] or numbers[0] <= 0:
        return None
    return numbers[0] / numbers[1]


def _memory(group: Group | None) -> dict[str, object]:
    """Returns limit and use of memory at the level with the least memory left."""
    levels, kills = [], None
    for directory in group.directories if group else ():
        used = first_number(directory, "memory.current", "memory.usage_in_bytes")
        limit = first_number(directory, "memory.max", "memory.limit_in_bytes")
        if used is not None and limit is not None and 0 < limit < _UNLIMITED:
            levels.append((limit - used, limit, used))
        if kills is None:
            text = read_group_file(directory, "memory.events") or read_group_file(directory, "memory.oom_control")
            kills = number_in(text, b"oom_kill")
    _, limit, used = min(levels, default=(None, None, None))
    return {"memory_limit_bytes": limit, "memory_used_bytes": used, "oom_kills": kills}


def first_number(directory: bytes, *names: str) -> int | None:
    """Returns the number in the first of the files ``names`` that contains a number; "max" is not a number."""
    return next(
        (value for name in names if (value := _number(read_group_file(directory, name) or b"")) is not None), None
    )


def number_in(text: bytes | None, name: bytes) -> int | None:
    """Returns the number after ``name`` in ``text``, whose lines have a name and a number."""
    return next((_number(words[1]) for words in _words(text) if words[0] == name), None)


def _words(text: bytes | None) -> Iterator[list[bytes]]:
    for line in (text or b"").split(b"\n")[:MAX_LINES]:
        if len(words := line.split()) == 2:
            yield words


def _number(word: bytes) -> int | None:
    word = word.strip()
    return int(word) if word.isdigit() and len(word) <= 20 else None


def read_group_file(directory: bytes, name: str) -> bytes | None:
    """Returns the first MAX_FILE bytes of a file of a group; None if the file cannot be read."""
    try:
        fd = os.open(os.path.join(directory, name.encode()), os.O_RDONLY | os.O_CLOEXEC)  # noqa: PTH118
    except OSError:
        return None
    try:
        return os.read(fd, MAX_FILE)
    except OSError:
        return None
    finally:
        os.close(fd)
