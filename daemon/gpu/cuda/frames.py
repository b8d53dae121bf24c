"""Converts return addresses of processes to names: the mapped file and the offset in the file."""

from __future__ import annotations

import time
from bisect import bisect_right
from collections import OrderedDict
from typing import NamedTuple

from probing.api.errors import ProbingError
from probing.daemon.processes.procfs import Mapping, clean_text, parse_maps
from probing.daemon.processes.reader_pool import ReaderPool
from probing.daemon.source import ProcessKey

__all__ = ("Frames",)

# Timeouts, s: of one read of maps, including the wait for a free reader; of the part of a read in which the process
# blocks the reader; and of all reads of a round together. The rows of all processes wait for these reads.
READ_TIMEOUT_S, PATIENCE_S, ROUND_S = 2.0, 0.5, 2.0
MAX_PROCESSES = 64
MAX_NAME = 80


class _Code(NamedTuple):
    """A mapping of code of the file ``name``."""

    start: int
    end: int
    offset: int
    name: str

    @classmethod
    def of(cls, mapping: Mapping) -> _Code:
        name = clean_text(mapping.path.rpartition(b"/")[2], MAX_NAME)
        return cls(mapping.start, mapping.end, mapping.offset, name)


class Frames:
    """Converts addresses to names, from cached maps of processes. For one thread; ``name`` may wait for a reader."""

    def __init__(self, readers: ReaderPool) -> None:
        self._readers = readers
        self._maps: OrderedDict[ProcessKey, list[_Code]] = OrderedDict()
        self._read: set[ProcessKey] = set()
        self._spent_s = 0.0

    def begin_round(self) -> None:
        """Begins a round. In each round the maps of a process are read at most once, and none after ROUND_S."""
        self._read.clear()
        self._spent_s = 0.0

    def forget(self, pid: int, start_ns: int) -> None:
        self._maps.pop(ProcessKey(pid, start_ns), None)

    def knows(self, pid: int, start_ns: int) -> bool:
        """Returns whether the maps of a process were read, so that its frames have their final names."""
        return ProcessKey(pid, start_ns) in self._maps

    def name(self, pid: int, start_ns: int, addresses: list[int]) -> list[str]:
        """Returns each address as ``library+0xoffset``, or as ``0xaddress`` if no visible file is mapped there."""
        key = ProcessKey(pid, start_ns)
        found = [self._find(key, address) for address in addresses]
        if None in found and key not in self._read and self._spent_s < ROUND_S:
            began = time.monotonic()
            self._refresh(key)
            self._spent_s += time.monotonic() - began
            found = [self._find(key, address) for address in addresses]
        return [
            f"0x{address:x}" if mapping is None else f"{mapping.name}+0x{address - mapping.start + mapping.offset:x}"
            for address, mapping in zip(addresses, found, strict=True)
        ]

    def _find(self, key: ProcessKey, address: int) -> _Code | None:
        mappings = self._maps.get(key, [])
        index = bisect_right(mappings, address, key=lambda mapping: mapping.start) - 1
        return mappings[index] if index >= 0 and address < mappings[index].end else None

    def _refresh(self, key: ProcessKey) -> None:
        self._read.add(key)
        try:
            # The reader returns only mappings of code, where return addresses are, and at most 1,024. A process can
            # have 65,536 mappings, and all of them would fill the collector's memory.
            answer = self._readers.call(
                "maps", pid=key[0], start_ns=key[1], timeout=READ_TIMEOUT_S, patience=PATIENCE_S, names=[""]
            )
            mappings = [_Code.of(mapping) for mapping in parse_maps(answer.payload) if mapping.path.startswith(b"/")]
        except ProbingError:
            # The process has ended or cannot be read now: its frames stay plain addresses.
            return
        self._maps[key] = sorted(mappings)
        self._maps.move_to_end(key)
        while len(self._maps) > MAX_PROCESSES:
            self._maps.popitem(last=False)
