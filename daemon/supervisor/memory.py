"""Finds the memory limit that killed a process of ours, by the kernel's counters of cgroups.

Version 2 counts in ``memory.events``, ``oom`` where the limit was reached and in all cgroups above; version 1 in
``memory.oom_control``, in the cgroup of the process alone (Documentation/admin-guide/cgroup-v{1/memory,2}.rst).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

__all__ = ("MemoryLimits",)

_ROOT = Path("/sys/fs/cgroup")
_NO_LIMIT = 1 << 60


class MemoryLimits:
    """The memory limits above this process and its children; ``root`` is where cgroups are mounted."""

    def __init__(self, root: Path = _ROOT, own: Path = Path("/proc/self/cgroup")) -> None:
        # From the process upwards.
        self._groups = list(_groups(root, own))
        self._kills = self._count()

    def reached(self) -> str:
        """Describes the limit reached since the last call; empty when none was."""
        before, self._kills = self._kills, self._count()
        grown = [group for group, old, new in zip(self._groups, before, self._kills, strict=True) if new > old]
        if not grown:
            return ""
        place, size = _limit(grown[0])
        return f"the memory of cgroup {place} ended" + (f", {size >> 20} MiB" if size < _NO_LIMIT else "")

    def _count(self) -> list[int]:
        return [
            _field(group / "memory.events", "oom") + _field(group / "memory.oom_control", "oom_kill")
            for group in self._groups
        ]


def _groups(root: Path, own: Path) -> Iterator[Path]:
    for line in _lines(own):
        _, controllers, path = line.split(":", 2)
        if controllers == "memory":
            top = root / "memory"
        elif not controllers:
            top = root / "unified" if (root / "unified").is_dir() else root
        else:
            continue
        group = top / path.strip("/")
        yield from (place for place in (group, *group.parents) if place.is_relative_to(top))


def _limit(group: Path) -> tuple[Path, int]:
    """Returns the nearest cgroup from ``group`` upwards that has a limit, and its bytes."""
    for place in (group, *group.parents):
        for name in ("memory.max", "memory.limit_in_bytes"):
            text = next(iter(_lines(place / name)), "")
            if text.isdigit() and int(text) < _NO_LIMIT:
                return place, int(text)
    return group, _NO_LIMIT


def _field(path: Path, name: str) -> int:
    return next((int(line.split()[1]) for line in _lines(path) if line.startswith(f"{name} ")), 0)


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
