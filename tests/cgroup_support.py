"""Cgroups with little memory or CPU time, of the first version or the second."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from waiting import until

__all__ = ("cpu_group", "memory_group")


@contextlib.contextmanager
def memory_group(name: str, size: int) -> Iterator[Path]:
    """A cgroup whose processes may have ``size`` bytes."""
    first = Path("/sys/fs/cgroup/memory")
    path, limit = (first / name, "memory.limit_in_bytes") if first.is_dir() else (first.parent / name, "memory.max")
    with _group(path, {limit: str(size)}):
        yield path


@contextlib.contextmanager
def cpu_group(name: str, share: float) -> Iterator[Path]:
    """A cgroup whose processes get ``share`` of one CPU, in periods of 0.1 s."""
    first, quota = Path("/sys/fs/cgroup/cpu"), int(share * 100_000)
    if first.is_dir():
        path, limits = first / name, {"cpu.cfs_period_us": "100000", "cpu.cfs_quota_us": str(quota)}
    else:
        path, limits = first.parent / name, {"cpu.max": f"{quota} 100000"}
    with _group(path, limits):
        yield path


@contextlib.contextmanager
def _group(path: Path, limits: dict[str, str]) -> Iterator[None]:
    path.mkdir()
    try:
        for file, value in limits.items():
            (path / file).write_text(value)
        yield
    finally:
        until(lambda: not (path / "cgroup.procs").read_text(), what=f"the end of all processes in {path}")
        path.rmdir()
