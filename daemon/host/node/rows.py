"""Makes rows of host.memory, host.disk and host.pressure from a reader's answer and the previous answer.

A counter that decreased, or is new, has no difference.
"""

from __future__ import annotations

import os
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from probing.api.tables.schema import Row
from probing.daemon.source import Identity

__all__ = (
    "Growth",
    "NodeRows",
)

MOST = 8_192
_FORGET_NS = 600_000_000_000


class Growth:
    """Keeps the last counters of each key. A key must never be reused for another thing, as a pid or a path can be. So
    the key of a process contains its start time, for example.
    """

    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self._last: dict[Hashable, tuple[int, Mapping[str, int]]] = {}

    def __len__(self) -> int:
        return len(self._last)

    def since(self, key: Hashable, mono_ns: int, counters: Mapping[str, int]) -> dict[str, int]:
        """Returns the growth of each counter since the last call for ``key``, and ``wall_ns``, the time since that
        call; empty at the first call.

        A counter that decreased, wrapped, or is new is left out.
        """
        before_ns, before = self._last.pop(key, (mono_ns, {}))
        if len(self._last) < self._most:
            self._last[key] = (mono_ns, counters)
        if mono_ns <= before_ns:
            return {}
        grown = {name: value - before[name] for name, value in counters.items() if value >= before.get(name, value + 1)}
        return {**grown, "wall_ns": mono_ns - before_ns}

    def forget(self, now_ns: int) -> None:
        """Drops keys that were not seen for ten minutes."""
        for key in [key for key, (at_ns, _) in self._last.items() if at_ns < now_ns - _FORGET_NS]:
            del self._last[key]


_SECTOR = 512
_MS = 1_000_000
_PAGE = os.sysconf("SC_PAGE_SIZE")
_AVERAGES = ("avg10_pct", "avg60_pct", "avg300_pct")
# Counters of /proc/PID/io and diskstats, and the columns of host.disk with their growth.
_PROCESS_COUNTERS = {
    "syscr": "reads",
    "syscw": "writes",
    "read_bytes": "read_bytes",
    "write_bytes": "write_bytes",
    "rchar": "call_read_bytes",
    "wchar": "call_write_bytes",
}
_DISK_COUNTERS = {
    "reads": ("reads", 1),
    "writes": ("writes", 1),
    "read_sectors": ("read_bytes", _SECTOR),
    "write_sectors": ("write_bytes", _SECTOR),
    "read_ms": ("read_ns", _MS),
    "write_ms": ("write_ns", _MS),
    "busy_ms": ("busy_ns", _MS),
    "queue_ms": ("queue_ns", _MS),
    "flushes": ("flushes", 1),
    "flush_ms": ("flush_ns", _MS),
}
_Found = Mapping[str, Any]


class NodeRows:
    """Makes rows without ``node`` and ``ts``. A disk, process or group has no differences when it is first seen."""

    def __init__(self) -> None:
        self._growth = Growth()

    def memory(self, found: _Found, watched: Sequence[Identity]) -> Iterator[Row]:
        """Yields a row of the node, and a row of each group."""
        mono_ns, seen, counters = found["mono_ns"], dict(found["memory"]), found["vm"]
        grown = self._growth.since("vm", mono_ns, counters)
        free = seen.pop("swap_free", None)
        used = _less(seen.get("total_bytes"), seen.get("available_bytes"))
        swap = {"swap_used_bytes": _less(seen.get("swap_total_bytes"), free)}
        pages = {name: grown.get(f"{name}_pages") for name in ("swap_in", "swap_out")}
        moved = {f"{name}_bytes": None if count is None else count * _PAGE for name, count in pages.items()}
        if seen:
            yield {
                "scope": "node",
                **seen,
                "used_bytes": used,
                **swap,
                **moved,
                **_only(grown, "wall_ns", "major_faults", "oom_kills"),
            }
        for key, who in _members(found, watched, "memory_group").items():
            yield self._group(key, found["memory_groups"][key], who, mono_ns)
        self._growth.forget(mono_ns)

    def disks(self, found: _Found, watched: Sequence[Identity]) -> Iterator[Row]:
        """Yields a row for each disk and process with I/O since the last answer."""
        mono_ns = found["mono_ns"]
        for name, counters in found["disks"].items():
            grown = self._growth.since(("disk", name, counters["life"]), mono_ns, counters)
            values = {column: grown[field] * unit for field, (column, unit) in _DISK_COUNTERS.items() if field in grown}
            if any(values.values()) or (grown and counters["in_flight"]):
                row = {"scope": "device", "device": name, "in_flight": counters["in_flight"]}
                yield {**row, **values, "wall_ns": grown["wall_ns"]}
        for who, seen in zip(watched, found["processes"], strict=False):
            if seen is None:
                continue
            counters = {**seen["io"], **_only(seen, "io_delay_ns")}
            grown = self._growth.since(("io", *who.key), mono_ns, counters)
            values = {column: grown[field] for field, column in _PROCESS_COUNTERS.items() if field in grown}
            values |= _only(grown, "io_delay_ns")
            if any(values.values()):
                yield {"scope": "process", **_identity(who), **values, "wall_ns": grown["wall_ns"]}

    def pressure(self, found: _Found, watched: Sequence[Identity]) -> Iterator[Row]:
        """Yields a row for each resource of the node, and of each group."""
        mono_ns = found["mono_ns"]
        yield from self._pressures({"scope": "node"}, found["pressure"], "", mono_ns)
        for key, who in _members(found, watched, "pressure_group").items():
            group = found["pressure_groups"][key]
            common = {"scope": "cgroup", "cgroup": group["path"], **_job(who)}
            yield from self._pressures(common, group["resources"], key, mono_ns)

    def _group(self, key: str, group: _Found, who: list[Identity], mono_ns: int) -> Row:
        grown = self._growth.since(("memory", key), mono_ns, _only(group, "limit_hits", "oom_kills"))
        kept = {
            name: value
            for name, value in group.items()
            if name not in ("path", "limit_bytes", "limit_hits", "oom_kills")
        }
        room = {"total_bytes": group.get("limit_bytes")}
        room["available_bytes"] = _less(room["total_bytes"], group.get("used_bytes"))
        return {"scope": "cgroup", "cgroup": group["path"], "processes": len(who), **_job(who), **kept, **room, **grown}

    def _pressures(self, common: Row, resources: _Found, key: str, mono_ns: int) -> Iterator[Row]:
        for resource, kinds in resources.items():
            totals = {kind: int(values[3]) * 1000 for kind, values in kinds.items()}
            grown = self._growth.since(("pressure", key, resource), mono_ns, totals)
            averages = {
                f"{kind}_{name}": value
                for kind, values in kinds.items()
                for name, value in zip(_AVERAGES, values, strict=False)
            }
            spent = {f"{kind}_ns": grown[kind] for kind in kinds if kind in grown}
            yield {**common, "resource": resource, **averages, **spent, **_only(grown, "wall_ns")}


def _members(found: _Found, watched: Sequence[Identity], name: str) -> dict[str, list[Identity]]:
    """Returns the watched processes in each group that was read, by the key of the group."""
    groups = found[f"{name}s"]
    members: dict[str, list[Identity]] = {}
    for who, seen in zip(watched, found["processes"], strict=False):
        if seen is not None and seen[name] in groups:
            members.setdefault(seen[name], []).append(who)
    return members


def _job(who: Iterable[Identity]) -> Row:
    jobs = {(one.job, one.run) for one in who}
    job, run = jobs.pop() if len(jobs) == 1 else (None, None)
    return {"job": job, "run": run}


def _identity(who: Identity) -> Row:
    return {
        "job": who.job,
        "run": who.run,
        "pid": who.pid,
        "start_ns": who.start_ns,
        "rank": who.rank,
        "role": who.role,
    }


def _only(values: _Found, *names: str) -> Row:
    return {name: values[name] for name in names if name in values}


def _less(whole: int | None, part: int | None) -> int | None:
    return None if whole is None or part is None else max(0, whole - part)
