"""Finds the libraries that sources put probes on, wherever a process maps one, and has each file attached once.

New mappings come from the kernel as they happen; what was mapped before is found by a scan of all processes. A file is
opened by a reader, as its process sees it, and handed to the source as a descriptor.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from probing.api.errors import InternalError, ProbingError, TargetTimeout
from probing.daemon.clock import Clock
from probing.daemon.processes.pool import ReaderPool
from probing.daemon.processes.procfs import Mapping, clean_text, parse_maps, parse_stat
from probing.daemon.source import Loss, Sink

__all__ = ("LibraryWatch", "ProbedLibrary", "ProcessNow", "is_alive", "process_now")

READ_TIMEOUT_S = 2.0
# When a process whose libraries could not be read is looked at again, s.
RETRY_S = 1.0
_log = logging.getLogger(__name__)


class ProbedLibrary(Protocol):
    """A source that puts probes on libraries."""

    @property
    def name(self) -> str: ...

    def interesting(self, path: bytes) -> bool: ...

    def attach(self, fd: int, path: bytes) -> int:
        """Put the probes on the file open at ``fd``. How many were placed now, 0 when they were there.

        Raises AttachError, UnsupportedTarget.
        """


@dataclass(frozen=True, slots=True)
class ProcessNow:
    """A process that lives."""

    pid: int
    start_ns: int


class LibraryWatch:
    """One thread that attaches; ``seen`` may be called from any.

    ``sources`` come with the table whose rows are missing where a library could not be probed in time.
    """

    def __init__(
        self, readers: ReaderPool, sources: Sequence[tuple[ProbedLibrary, str]], sink: Sink, clock: Clock
    ) -> None:
        self._readers = readers
        self._sources = tuple(source for source, _ in sources)
        self._tables = {source.name: table for source, table in sources}
        self._sink = sink
        self._clock = clock
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        # (source, device, inode) of files that were attached or refused -> why rows of older processes are missing.
        self._known: dict[tuple[str, int, int], str] = {}
        self._thread = threading.Thread(target=self._run, name="libraries", daemon=True)
        # Of the thread only: processes to look at again.
        self._later: set[int] = set()
        self.reasons: dict[str, str] = {}
        self.attached: dict[str, int] = {}

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        if self._thread.is_alive():
            self._work.put(None)
            self._thread.join()

    def interesting(self, path: bytes) -> bool:
        return any(source.interesting(path) for source in self._sources)

    def seen(self, pid: int) -> None:
        """A process has mapped an interesting file a moment ago."""
        self._work.put(lambda: self._look_at(pid, fresh=True))

    def scan(self, pids: Iterable[int]) -> None:
        """Attach what these processes have mapped. Returns when it is done."""
        done = threading.Event()
        for pid in pids:
            self._work.put(lambda pid=pid: self._look_at(pid, fresh=False))  # type: ignore[misc]
        self._work.put(done.set)
        done.wait()

    def look_again(self, source: str) -> None:
        """A source has let go of its libraries, and wants them once more."""

        def forget() -> None:
            self._known = {known: reason for known, reason in self._known.items() if known[0] != source}
            for path in Path("/proc").iterdir():
                if path.name.isdigit():
                    self._look_at(int(path.name), fresh=True)

        self._work.put(forget)

    def _run(self) -> None:
        while True:
            try:
                job = self._work.get(timeout=RETRY_S)
            except queue.Empty:
                job = self._retry
            if job is None:
                return
            try:
                job()
            except Exception:  # one strange process must not end the watch
                _log.exception("looking for libraries failed")

    def _retry(self) -> None:
        later, self._later = self._later, set()
        for pid in later:
            self._look_at(pid, fresh=False)

    def _look_at(self, pid: int, *, fresh: bool) -> None:
        try:
            self._look(pid, fresh=fresh)
        except (TargetTimeout, InternalError) as e:
            # Of the moment: the reader or the parser did not answer.
            _log.warning("the libraries of process %d are looked at again: %s", pid, e.message)
            self._later.add(pid)
        except ProbingError as e:
            _log.debug("process %d could not be looked at: %s", pid, e.message)

    def _look(self, pid: int, *, fresh: bool) -> None:
        process = process_now(pid)
        if process is None:
            return
        answer = self._readers.call("maps", pid=pid, start_ns=process.start_ns, timeout=READ_TIMEOUT_S, files=True)
        for mapping in parse_maps(answer.payload):
            if not mapping.executable or not mapping.inode:
                continue
            for source in self._sources:
                if source.interesting(mapping.path):
                    self._consider(process, mapping, source, fresh=fresh)

    def _consider(self, process: ProcessNow, mapping: Mapping, source: ProbedLibrary, *, fresh: bool) -> None:
        device = mapping.device[0] << 20 | mapping.device[1]
        known = (source.name, device, mapping.inode)
        if known not in self._known:
            self._known[known] = self._attach(process, mapping, source)
        if (reason := self._known[known]) and not fresh:
            self._gap(process, source, reason)

    def _attach(self, process: ProcessNow, mapping: Mapping, source: ProbedLibrary) -> str:
        """Gives why operations of processes that have the library already are missing; empty: none are."""
        path = clean_text(mapping.path)
        answer = self._readers.call(
            "open", pid=process.pid, start_ns=process.start_ns, timeout=READ_TIMEOUT_S, start=mapping.start
        )
        fd = answer.take_fd()
        try:
            placed = source.attach(fd, mapping.path)
        except (TargetTimeout, InternalError):
            raise
        except ProbingError as e:
            self.reasons[path] = f"{path} cannot be probed: {e.message}"
            _log.warning("%s", self.reasons[path])
            return e.message
        finally:
            os.close(fd)
        self.attached[path] = self.attached.get(path, 0) + 1
        return "the process had the library before it was probed" if placed else ""

    def _gap(self, process: ProcessNow, source: ProbedLibrary, reason: str) -> None:
        pair = self._clock.pair()
        began = process.start_ns + pair.boot_to_utc_ns
        table = self._tables[source.name]
        self._sink.lost(Loss(source.name, table, "attach", reason, began, pair.real_ns, None, process.pid))


def process_now(pid: int) -> ProcessNow | None:
    """Who has this pid; None: nobody, or a kernel thread."""
    try:
        stat = parse_stat(Path(f"/proc/{pid}/stat").read_bytes())
    except (OSError, ProbingError):
        return None
    return None if stat.kernel_thread else ProcessNow(pid, stat.start_ns)


def is_alive(pid: int, start_ns: int) -> bool:
    """Whether the process runs; also True where that cannot be read. One that only waits for its parent has ended."""
    try:
        stat = parse_stat(Path(f"/proc/{pid}/stat").read_bytes())
    except (FileNotFoundError, ProcessLookupError):
        return False
    except (OSError, ProbingError):
        return True
    # The leader of a process whose other threads run can have ended.
    return stat.start_ns == start_ns and (stat.state not in "ZX" or stat.threads > 1)
