"""Reads and clears the entries of a process in BPF maps."""

from __future__ import annotations

from collections.abc import Mapping

from probing.daemon.bpf.interfaces import Map

__all__ = ("Maps", "drop_process", "processes_in")

Maps = Mapping[str, Map]


def drop_process(found: Map, pid: int, start_ns: int) -> list[bytes]:
    """Delete the entries of a process from a map whose keys have tgid and start_ns. Returns their keys."""
    keys, _ = found.items()
    chosen = [key.tobytes() for key in keys[(keys["tgid"] == pid) & (keys["start_ns"] == start_ns)]]
    for key in chosen:
        found.delete(key)
    return chosen


def processes_in(found: Map) -> set[tuple[int, int]]:
    """Returns (pid, start_ns) of the processes that have entries in such a map."""
    keys, _ = found.items()
    return {(int(key["tgid"]), int(key["start_ns"])) for key in keys}
