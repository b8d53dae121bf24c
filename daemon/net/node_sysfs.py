"""Finds processes and directories that show the network of the node: a reader may be in a private network namespace."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

__all__ = ("node_processes", "node_sysfs")


def node_processes() -> list[int]:
    """Returns the pids of processes that should be in the network namespace of the node, the likeliest first.

    Pid 1 is in that namespace if it is the first process of the node, that is, if this process runs under systemd or in
    the host's PID namespace. This process is in the namespace in which the daemon was started.
    """
    return [1, os.getpid()]


def node_sysfs(name: str, processes: Iterable[int] = ()) -> Path:
    """Returns /sys/class/NAME in the root of the first of ``processes`` whose root may be read, or else in the root of
    this process. A sysfs shows the network namespace of the process that mounted it.
    """
    for pid in processes:
        path = Path(f"/proc/{pid:d}/root/sys/class")
        try:
            if path.is_dir():
                return path / name
        except OSError:
            continue
    return Path("/sys/class") / name
