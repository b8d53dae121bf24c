"""What of BPF maps and sessions is needed here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy.typing as npt

__all__ = ("Features", "Link", "Map", "Maps", "Session", "drop_process", "processes_in")


class Map(Protocol):
    def lookup(self, key: Any) -> Any: ...

    def update(self, key: Any, value: Any) -> None: ...

    def delete(self, key: Any) -> bool: ...

    def items(self) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]: ...


Maps = Mapping[str, Map]


class Link(Protocol):
    @property
    def adopted(self) -> bool: ...

    @property
    def program(self) -> str: ...


class Features(Protocol):
    @property
    def uprobe_multi(self) -> bool: ...


class Session(Protocol):
    """What of ``probing.daemon.bpf.session.Session`` is needed here."""

    @property
    def features(self) -> Features: ...

    @property
    def maps(self) -> Maps: ...

    @property
    def programs(self) -> Mapping[str, int]: ...

    @property
    def links(self) -> Mapping[str, Link]: ...

    def attach_uprobe(
        self, program: str, fd: int, offsets: Sequence[int], cookie: Sequence[int], key: str, *, on_return: bool
    ) -> Link: ...

    def detach(self, link: Any) -> None: ...

    def identity(self, fd: int) -> tuple[int, int]: ...

    def run_program(self, name: str, context: bytes) -> int: ...


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
