"""Where the network of the node can be read: a reader may be in a private network namespace."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

__all__ = ("node_processes", "node_sysfs")


def node_processes() -> list[int]:
    """Returns processes in whose network namespace the node's interfaces should be, the best first.

    The node's first process is in the node's namespace where the daemon sees it, as it does under systemd and with the
    PIDs of the host; this process is in the namespace in which the daemon was started.
    """
    return [1, os.getpid()]


def node_sysfs(name: str, processes: Iterable[int] = ()) -> Path:
    """Returns /sys/class/NAME as the first of ``processes`` whose root may be read sees it, else as this process does.

    A sysfs shows the network namespace of the process that mounted it.
    """
    for pid in processes:
        path = Path(f"/proc/{pid:d}/root/sys/class")
        try:
            if path.is_dir():
                return path / name
        except OSError:
            continue
    return Path("/sys/class") / name
