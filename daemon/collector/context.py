"""What every group of sources is given."""

from __future__ import annotations

from dataclasses import dataclass

from probing.daemon.bpf.session import Session
from probing.daemon.clock import Clock
from probing.daemon.collector.live_settings import Changes
from probing.daemon.collector.row_buffer import Outbox
from probing.daemon.config import Config
from probing.daemon.processes.parser_pool import ParserPool
from probing.daemon.processes.reader_pool import ReaderPool

__all__ = ("Parsers", "Shared")

FILES_IDLE_S = 30.0


class Parsers:
    """Parsers at ``socket_path`` by what they parse: whoever keeps one busy holds up its own kind only.

    ``libraries`` are those that get probes, ``stacks`` what is asked for by a process, ``files`` what a job writes and
    what takes long: dumps, reports and debugging information.
    """

    def __init__(self, socket_path: str) -> None:
        self.libraries = ParserPool(socket_path)
        self.stacks = ParserPool(socket_path)
        self.files = ParserPool(socket_path, idle_s=FILES_IDLE_S)

    def close(self) -> None:
        for pool in (self.libraries, self.stacks, self.files):
            pool.close()



@dataclass(frozen=True, slots=True)
class Shared:
    config: Config
    node: str
    session: Session
    readers: ReaderPool
    parsers: Parsers
    outbox: Outbox
    clock: Clock
    changes: Changes
