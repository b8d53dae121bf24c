"""What of BPF maps and sessions is needed here."""

from __future__ import annotations

from collections.abc import Mapping

from probing.daemon.bpf.interfaces import Map

__all__ = ("Maps", "drop_process", "processes_in")


Maps = Mapping[str, Map]


def drop_process(found: Map, pid: int, start_ns: int) -> list[bytes]:
    """Take out the elements of a process, of a map whose keys have tgid and start_ns; returns the keys."""
    keys, _ = found.items()
    chosen = [key.tobytes() for key in keys[(keys["tgid"] == pid) & (keys["start_ns"] == start_ns)]]
    for key in chosen:
        found.delete(key)
    return chosen


def processes_in(found: Map) -> set[tuple[int, int]]:
    """(pid, start_ns) of those that such a map holds elements of."""
    keys, _ = found.items()
    return {(int(key["tgid"]), int(key["start_ns"])) for key in keys}
