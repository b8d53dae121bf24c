"""Attaches probes to libc's write functions, process by process, and detaches them."""

from __future__ import annotations

import logging
import os
import queue
import re
import threading
import time
from typing import NamedTuple

from probing.api.errors import InternalError, ProbingError, ProcessGone, TargetTimeout, UnsupportedTarget
from probing.daemon.backoff import doubled
from probing.daemon.bpf.probe_points import point_of
from probing.daemon.bpf.probe_slots import SLOTS
from probing.daemon.bpf.session import Link, Session
from probing.daemon.elf.symbols import SymbolFinder
from probing.daemon.processes.procfs import parse_maps
from probing.daemon.processes.reader_pool import ReaderPool
from probing.daemon.source import ProcessKey

__all__ = ("FUNCTIONS", "Attachments", "is_libc")

_WRITE, _WRITEV = SLOTS.reserve("logs", 60, 2)
# Function of libc -> (program, slot). musl's stdio does not call these functions: it makes the system calls itself.
FUNCTIONS = {"write": ("log_write", _WRITE), "writev": ("log_writev", _WRITEV)}
READ_TIMEOUT_S = 2.0
# The maximum time for which one process may block a reader, s. Processes of other users wait during that time.
PATIENCE_S = 0.5
# The first and the longest pause before a process that did not answer is tried again, s.
RETRY_S, MAX_RETRY_S = 1.0, 60.0
MAX_FILES = 256
MAX_LIBRARIES = 4
# File names of glibc, which before 2.34 may contain its version, and of musl, whose loader is also its libc.
_LIBC = re.compile(rb"libc\.so\.6|libc-2\.\d+\.so|libc\.musl-\w+\.so\.1|ld-musl-\w+\.so\.1|libc\.so")
_log = logging.getLogger(__name__)


class _Point(NamedTuple):
    program: str
    slot: int
    offset: int


class _Retry(NamedTuple):
    """The next try of a process that did not answer, ``due`` on time.monotonic(). ``failures``: how many tries in a row
    have failed.
    """

    failures: int
    due: float


class Attachments:
    """Attaches and detaches in its own thread; ``want`` and ``drop`` are thread-safe.

    ``symbols`` finds symbols by name in a file, given as a descriptor. ``fuse``: whether files of FUSE mounts are
    probed.
    """

    def __init__(self, session: Session, readers: ReaderPool, symbols: SymbolFinder, *, fuse: bool = False) -> None:
        self._fuse = fuse
        self._session, self._readers, self._symbols = session, readers, symbols
        self._work: queue.SimpleQueue[tuple[ProcessKey, bool] | None] = queue.SimpleQueue()
        # Only the thread uses the following attributes; ``reasons`` may be read by any thread.
        self._links: dict[ProcessKey, list[Link]] = {}
        self._points: dict[tuple[int, ...], list[_Point]] = {}
        self._retries: dict[ProcessKey, _Retry] = {}
        self._thread = threading.Thread(target=self._run, name="logs", daemon=True)
        self.reasons: dict[ProcessKey, str] = {}

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Stops the thread and detaches all probes."""
        if self._thread.is_alive():
            self._work.put(None)
            self._thread.join()
        for key in list(self._links):
            self._detach(key)

    def want(self, pid: int, start_ns: int) -> None:
        self._work.put((ProcessKey(pid, start_ns), True))

    def drop(self, pid: int, start_ns: int) -> None:
        self._work.put((ProcessKey(pid, start_ns), False))

    @property
    def watched(self) -> int:
        """Returns the number of processes that have probes."""
        return len(self._links)

    def _run(self) -> None:
        while True:
            try:
                asked = self._work.get(timeout=self._pause_s())
            except queue.Empty:
                now = time.monotonic()
                for key in [key for key, retry in self._retries.items() if retry.due <= now]:
                    self._change(key, True)
                continue
            if asked is None:
                return
            self._change(*asked)

    def _pause_s(self) -> float | None:
        """Returns the seconds until the next try of a process that did not answer; None if there is none."""
        due = min((retry.due for retry in self._retries.values()), default=None)
        return None if due is None else max(0.0, due - time.monotonic())

    def _change(self, key: ProcessKey, wanted: bool) -> None:
        try:
            if wanted and key not in self._links:
                self._attach(key)
            elif not wanted:
                self._detach(key)
        except Exception:  # an error with one process must not end the thread
            _log.exception("the output of process %d cannot be watched", key[0])

    def _attach(self, key: ProcessKey) -> None:
        retry = self._retries.pop(key, None)
        try:
            self._links[key] = self._place(key)
            self.reasons.pop(key, None)
        except ProcessGone:
            self.reasons.pop(key, None)
        except ProbingError as e:
            reason = f"the output of process {key[0]} cannot be watched: {e.message}"
            if reason != self.reasons.get(key):
                _log.warning("%s", reason)
            self.reasons[key] = reason
            if isinstance(e, (TargetTimeout, InternalError)):
                self._retries[key] = self._next_try(key, 0 if retry is None else retry.failures)

    def _next_try(self, key: ProcessKey, failures: int) -> _Retry:
        # A read during a quarantine fails at once. It says nothing about the process, so it does not count as a
        # failure.
        pause_s = self._readers.quarantine_s(*key)
        if not pause_s:
            pause_s, failures = doubled(RETRY_S, failures, MAX_RETRY_S), failures + 1
        return _Retry(failures, time.monotonic() + pause_s)

    def _place(self, key: ProcessKey) -> list[Link]:
        pid, start_ns = key
        answer = self._readers.call(
            "maps", pid=pid, start_ns=start_ns, timeout=READ_TIMEOUT_S, patience=PATIENCE_S, files=True
        )
        libraries = {m.inode: m for m in parse_maps(answer.payload) if m.executable and m.inode and is_libc(m.path)}
        links: list[Link] = []
        try:
            for mapping in list(libraries.values())[:MAX_LIBRARIES]:
                opened = self._readers.call(
                    "open",
                    pid=pid,
                    start_ns=start_ns,
                    timeout=READ_TIMEOUT_S,
                    patience=PATIENCE_S,
                    start=mapping.start,
                    served=self._fuse,
                )
                fd = opened.take_fd()
                try:
                    for program, slot, offset in self._points_of(fd):
                        link = self._session.attach_uprobe(program, fd, [offset], slot, f"logs-{start_ns}", pid=pid)
                        links.append(link)
                finally:
                    os.close(fd)
        except BaseException:
            for link in links:
                self._session.detach(link)
            raise
        if not links:
            raise UnsupportedTarget(
                "it maps no libc with the function write", hint="the output of a statically linked program is not seen"
            )
        return links

    def _points_of(self, fd: int) -> list[_Point]:
        status = os.fstat(fd)
        identity = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
        if identity not in self._points:
            if len(self._points) >= MAX_FILES:
                self._points.clear()
            points = []
            for symbol in self._symbols(fd, list(FUNCTIONS)):
                if symbol.file_offset is not None and symbol.name in FUNCTIONS:
                    offset = symbol.file_offset + point_of(symbol).offset
                    points.append(_Point(*FUNCTIONS[symbol.name], offset))
            self._points[identity] = points
        return self._points[identity]

    def _detach(self, key: ProcessKey) -> None:
        self._retries.pop(key, None)
        self.reasons.pop(key, None)
        for link in self._links.pop(key, ()):
            self._session.detach(link)


def is_libc(path: bytes) -> bool:
    """Returns whether the file name of ``path`` is that of a libc."""
    name = path.removesuffix(b" (deleted)").rpartition(b"/")[2]
    return _LIBC.fullmatch(name) is not None
