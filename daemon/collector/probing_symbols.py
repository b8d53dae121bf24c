"""What the parser says of a library, as sources that place probes want it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from probing.daemon.bpf.probe_points import probe_point
from probing.daemon.processes.pool import ParserPool

__all__ = ("FoundSymbol", "SymbolsOfFile", "offset_of_point")

PARSE_TIMEOUT_S = 20.0


@dataclass(frozen=True, slots=True)
class FoundSymbol:
    """``address`` is before relocation; ``file_offset`` None for what lies in no segment; ``head``: its first bytes."""

    name: str
    address: int
    file_offset: int | None
    head: bytes


class SymbolsOfFile:
    """Callable: the symbols of the ELF file at a descriptor whose names match patterns."""

    def __init__(self, parsers: ParserPool) -> None:
        self._parsers = parsers
        self.machine = 0

    def __call__(self, fd: int, patterns: Sequence[str]) -> list[FoundSymbol]:
        answer = self._parsers.symbols(fd, patterns, PARSE_TIMEOUT_S)
        self.machine = int(answer["machine"])
        return [
            FoundSymbol(s["name"], s["address"], s["file_offset"], bytes.fromhex(s["head"])) for s in answer["symbols"]
        ]


def offset_of_point(symbols: SymbolsOfFile, head: bytes) -> int:
    """How far into a function to attach: at the first instruction that is cheap and leaves the arguments in place."""
    return probe_point(head, symbols.machine).offset
