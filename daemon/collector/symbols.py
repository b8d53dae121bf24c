"""What the parser says of a library, as sources that place probes want it."""

from __future__ import annotations

from collections.abc import Sequence

from probing.daemon.elf.symbols import Symbol, SymbolFinder
from probing.daemon.processes.parser_pool import ParserPool

__all__ = ("symbols_by",)

PARSE_TIMEOUT_S = 5.0


def symbols_by(parsers: ParserPool) -> SymbolFinder:
    """A function: the symbols of the ELF file at a descriptor whose names match patterns."""

    def find(fd: int, patterns: Sequence[str]) -> list[Symbol]:
        answer = parsers.symbols(fd, patterns, PARSE_TIMEOUT_S)
        return [
            Symbol(s["name"], s["address"], s["file_offset"], s["size"], bytes.fromhex(s["head"]))
            for s in answer["symbols"]
        ]

    return find
