"""The parsers of a collector by what they parse, and the symbols that they find."""

from __future__ import annotations

from collections.abc import Sequence

from probing.daemon.elf.symbols import Symbol, SymbolFinder
from probing.daemon.processes.parser_pool import ParserPool
from probing.daemon.processes.readers import Parsers

__all__ = ("ParserPools", "symbols_by")

FILES_IDLE_S = 30.0
PARSE_TIMEOUT_S = 5.0


class ParserPools:
    """Parsers at ``socket_path``, in three pools: a file that keeps a parser busy delays its own kind only.

    ``libraries`` parse files that get probes, ``stacks`` files of a process that somebody asks for, ``files`` what a
    job writes and what takes long: dumps, reports and debugging information.
    """

    def __init__(self, socket_path: str) -> None:
        self.libraries = ParserPool(socket_path)
        self.stacks = ParserPool(socket_path, kept=0)
        self.files = ParserPool(socket_path, kept=0, idle_s=FILES_IDLE_S)

    def close(self) -> None:
        for pool in (self.libraries, self.stacks, self.files):
            pool.close()


def symbols_by(parsers: Parsers) -> SymbolFinder:
    """Returns a function that finds the symbols of the ELF file at a descriptor whose names match patterns."""

    def find(fd: int, patterns: Sequence[str]) -> list[Symbol]:
        answer = parsers.symbols(fd, patterns, PARSE_TIMEOUT_S)
        return [
            Symbol(s["name"], s["address"], s["file_offset"], s["size"], bytes.fromhex(s["head"]))
            for s in answer["symbols"]
        ]

    return find
