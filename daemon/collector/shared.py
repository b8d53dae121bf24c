"""What every group of sources is given."""

from __future__ import annotations

from dataclasses import dataclass

from probing.daemon.bpf.session import Session
from probing.daemon.clock import Clock
from probing.daemon.collector.changes import Changes
from probing.daemon.collector.outbox import Outbox
from probing.daemon.config import Config
from probing.daemon.processes.pool import ParserPool, ReaderPool

__all__ = ("Shared",)


@dataclass(frozen=True, slots=True)
class Shared:
    config: Config
    node: str
    session: Session
    readers: ReaderPool
    parsers: ParserPool
    outbox: Outbox
    clock: Clock
    changes: Changes
