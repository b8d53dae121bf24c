"""Cgroups with little memory, of the first version or the second."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

__all__ = ("memory_group",)


@contextlib.contextmanager
def memory_group(name: str, size: int) -> Iterator[Path]:
    """A cgroup whose processes may have ``size`` bytes."""
    first = Path("/sys/fs/cgroup/memory")
    path, limit = (first / name, "memory.limit_in_bytes") if first.is_dir() else (first.parent / name, "memory.max")
    path.mkdir()
    try:
        (path / limit).write_text(str(size))
        yield path
    finally:
        path.rmdir()
