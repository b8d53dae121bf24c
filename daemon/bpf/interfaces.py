"""Interfaces of a session, its maps and its links (``bpf.session``), for the sources that use them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy.typing as npt

from probing.api.errors import ProbingError
from probing.daemon.bpf.capabilities import Features

__all__ = ("Link", "Map", "Session")


class Map(Protocol):
    """The methods of ``bpf.maps.Map``, which documents them."""

    def lookup(self, key: Any) -> Any: ...

    def update(self, key: Any, value: Any) -> None: ...

    def delete(self, key: Any) -> bool: ...

    def items(self) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]: ...


class Link(Protocol):
    """The methods of ``bpf.links.Link``: a program that is attached somewhere."""

    @property
    def program(self) -> str: ...

    @property
    def adopted(self) -> bool: ...


class Session(Protocol):
    """The methods of ``bpf.session.Session``, which documents them."""

    @property
    def features(self) -> Features: ...

    @property
    def maps(self) -> Mapping[str, Map]: ...

    @property
    def refused(self) -> Mapping[str, ProbingError]: ...

    def program(self, name: str) -> int: ...

    def load_late(self, *names: str) -> None: ...

    @property
    def links(self) -> Mapping[str, Link]: ...

    @property
    def blind(self) -> tuple[int, int] | None: ...

    def attach_uprobe(
        self,
        program: str,
        fd: int,
        offsets: Sequence[int],
        cookie: int | Sequence[int],
        key: str = "",
        *,
        on_return: bool = False,
        pid: int = 0,
    ) -> Link: ...

    def identity(self, fd: int) -> tuple[int, int]: ...

    def detach(self, link: Any) -> None: ...

    def run_program(self, name: str, context: bytes) -> int: ...
