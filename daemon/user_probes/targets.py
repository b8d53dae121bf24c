"""Finds the places of a user's probe in a process: the mapped files that match, and the offset of a symbol in them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import Any

from probing.api.errors import ConfigError, UnsupportedTarget
from probing.daemon.elf.symbols import SymbolFinder
from probing.daemon.processes.procfs import Mapping, clean_text, parse_maps
from probing.daemon.processes.reader_pool import ReaderPool
from probing.daemon.source import Identity
from probing.daemon.user_probes.spec import Attach

__all__ = ("Targets",)

READ_TIMEOUT_S = 2.0
# The maximum time for which one process may block a reader, s. Processes of other users wait during that time.
PATIENCE_S = 0.5
MAX_FILES = 16
MAX_KNOWN = 4096


class Targets:
    """Finds the places of probes in processes. Not thread-safe. Readers open the files of targets, and parsers read
    these files. Files on FUSE are opened only with ``fuse``.
    """

    def __init__(self, readers: ReaderPool, symbols: SymbolFinder, *, fuse: bool = False) -> None:
        self._fuse = fuse
        self._readers = readers
        self._symbols = symbols
        # Offsets by device, inode, size, time of change and symbol.
        self._known: dict[tuple[int, int, int, int, str], int | None] = {}

    def files(self, who: Identity) -> list[Mapping]:
        """Returns the executable mappings of files of a process. Raises TargetError, InternalError."""
        answer = self._readers.call(
            "maps", pid=who.pid, start_ns=who.start_ns, timeout=READ_TIMEOUT_S, patience=PATIENCE_S, files=True
        )
        return [mapping for mapping in parse_maps(answer.payload) if mapping.executable and mapping.inode]

    def matching(self, files: Sequence[Mapping], library: str) -> list[Mapping]:
        """Returns one mapping of each file that matches ``library``: by its path, or by its name if ``library`` has no
        slash.
        """
        by_file: dict[tuple[Any, int], Mapping] = {}
        for mapping in files:
            path = clean_text(mapping.path)
            if fnmatchcase(path if "/" in library else path.rpartition("/")[2], library):
                by_file.setdefault((mapping.device, mapping.inode), mapping)
        return list(by_file.values())[:MAX_FILES]

    @contextmanager
    def opened(self, who: Identity, mapping: Mapping) -> Iterator[int]:
        """Opens the file of a mapping, as the process sees it."""
        answer = self._readers.call(
            "open",
            pid=who.pid,
            start_ns=who.start_ns,
            timeout=READ_TIMEOUT_S,
            patience=PATIENCE_S,
            start=mapping.start,
            served=self._fuse,
        )
        fd = answer.take_fd()
        try:
            yield fd
        finally:
            os.close(fd)

    def offset(self, fd: int, place: Attach) -> int:
        """Returns the offset of the function in the file with descriptor ``fd``. Raises UnsupportedTarget if the file
        lacks the function.
        """
        status = os.fstat(fd)
        key = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, place.symbol)
        if key not in self._known:
            if len(self._known) >= MAX_KNOWN:
                self._known.clear()
            matches = [s for s in self._symbols(fd, [place.symbol]) if s.name == place.symbol]
            self._known[key] = matches[0].file_offset if matches else None
        offset = self._known[key]
        if offset is None:
            raise UnsupportedTarget(f"no function {place.symbol} in {place.library}", hint="`nm -D` lists functions")
        return offset

    def host_offset(self, place: Attach) -> tuple[int, int]:
        """Opens the file of ``place`` on the host, for a probe that covers all processes. Returns its descriptor, which
        the caller closes, and the offset of the symbol.
        """
        try:
            fd = os.open(place.library, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
        except OSError as e:
            raise ConfigError(f"{place.library} cannot be opened: {e.strerror}", hint="check the path") from e
        try:
            return fd, self.offset(fd, place)
        except BaseException:
            os.close(fd)
            raise
