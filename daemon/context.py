"""The context from which a source is built: the session, the pools, the sink and the settings of the collector."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from probing.api.errors import InternalError
from probing.daemon.bpf.session import Session
from probing.daemon.clock import Clock
from probing.daemon.config import Config
from probing.daemon.processes.discovery import Discovery
from probing.daemon.processes.parsers import ParserPools
from probing.daemon.processes.reader_pool import ReaderPool
from probing.daemon.source import Identity, Sink, Source

__all__ = ("Context", "Settings", "SourceType")

_T = TypeVar("_T")


class Settings(Protocol):
    """The part of ``collector.live_settings.Changes`` that sources use."""

    def value(self, key: str, who: Identity | None = None) -> Any:
        """Returns the value of a setting for the process ``who``; if ``who`` is None, the value for all processes."""


@dataclass(frozen=True, slots=True)
class Context:
    """``shared``: objects that sources share with later sources, by class (``find``). ``rows_read``: name of a memory
    file -> the position up to which the previous collector had read it. Jobs write the rows of their tables to these
    files."""

    config: Config
    node: str
    session: Session
    readers: ReaderPool
    parsers: ParserPools
    sink: Sink
    clock: Clock
    settings: Settings
    processes: Discovery
    rows_read: Mapping[str, int] = field(default_factory=dict)
    shared: dict[type, object] = field(default_factory=dict)

    def share(self, thing: object) -> None:
        """Makes ``thing`` available, under its class, to sources that are built later."""
        self.shared[type(thing)] = thing

    def find(self, kind: type[_T]) -> _T:
        """Returns the shared object of class ``kind``, for example an earlier source.

        Raises InternalError if there is none.
        """
        found = self.shared.get(kind)
        if not isinstance(found, kind):
            raise InternalError(
                f"a source needs {kind.__name__}, but no earlier source shares it: move the source that shares it up in"
                " SOURCES"
            )
        return found


class SourceType(Protocol):
    """A class of sources, as ``collector.source_set.SOURCES`` lists it."""

    @property
    def objects(self) -> tuple[str, ...]: ...

    @property
    def optional_objects(self) -> tuple[str, ...]: ...

    @property
    def late_objects(self) -> tuple[str, ...]: ...

    def ring_sizes(self, config: Config) -> Mapping[str, int]: ...

    def make(self, context: Context) -> Source:
        """Returns a new source, or a ``Refused`` if the kernel refused what the source needs."""
