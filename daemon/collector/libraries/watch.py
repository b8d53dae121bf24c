"""Searches all processes for the libraries to probe, and attaches the probes to each file once.

The kernel reports new mappings; a scan of all processes finds earlier and missed mappings. A reader process opens the
file through /proc/PID of a process that maps it, so it opens the file that this process sees. The source that attaches
the probes gets the descriptor. The probes of a file are detached when no process maps it any more, so that they keep
neither the file nor its file system in use.

If the kernel does not report new mappings, the mappings of young processes are polled (``YoungProcesses``).
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Container
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from probing.api.errors import InternalError, ProbingError, ProcessGone, TargetTimeout
from probing.daemon.collector.libraries.files import Key, ProbedFile, Refusal
from probing.daemon.collector.libraries.probes import LibraryProbes, Mapped
from probing.daemon.collector.libraries.turns import Turn, Turns
from probing.daemon.processes.liveness import ProcessNow, owner_now, process_now
from probing.daemon.processes.procfs import Mapping, parse_maps
from probing.daemon.processes.reader_pool import ReaderPool
from probing.daemon.source import ProbedLibrary

__all__ = (
    "LibraryWatch",
    "YoungProcesses",
)

READ_TIMEOUT_S = 2.0
# A look at a process gives up after MAPS_PATIENCE_S if the maps of the process are locked, and after OPEN_PATIENCE_S if
# a file does not open, s. Otherwise other processes would wait too long for their look.
MAPS_PATIENCE_S, OPEN_PATIENCE_S = 0.5, 1.0
SCAN_INTERVAL_S = 10.0
# Libraries that are not awaited get their probes this many seconds after the first scan, so that attaching them does
# not delay the answer to the first client.
LATE_S = 1.0
# The timeout of a scan, s. A scan that takes longer is restarted, and its result is discarded.
SCAN_LIMIT_S = 120.0
# If no process seems to map a file, the probes that an earlier daemon attached to it are detached only after a
# complete scan, or after this many incomplete scans. A scan is incomplete if it left a file without its probes,
# for example because the user of the process had to pause (see ``Turns``).
MAX_ADOPTED_SCANS = 6
# The interval at which processes that map a probed file are examined, s: the kernel does not report that a process
# unmaps a file.
SWEEP_INTERVAL_S = 60.0
LOOK_S = 1.0
# A refused file costs its user as much as this many looks. A user rests for SILENT_REST_S, s, for each recent file that
# did not answer.
REFUSED_LOOKS = 10
SILENT_REST_S = 2.0
MAX_KEYS = 256
_log = logging.getLogger(__name__)


class _Look(NamedTuple):
    """The result of a look at a process. ``done``: no file of the process waits for probes. ``useful``: the look found
    something new.
    """

    done: bool
    useful: bool = False


class LibraryWatch:
    """Finds libraries, and attaches and detaches their probes in one thread. ``seen``, ``changed``, ``scan`` and
    ``look_again`` are thread-safe.

    ``fuse``: files of FUSE mounts get probes, too. ``own``: the daemon's processes, which are left out.
    """

    def __init__(
        self,
        readers: ReaderPool,
        probes: LibraryProbes,
        *,
        fuse: bool = False,
        own: Container[int] = (),
    ) -> None:
        self._readers = readers
        self._probes = probes
        self._fuse = fuse
        self._own = own
        self._files = probes.files
        self._turns = Turns(owner_now)
        self._thread = threading.Thread(target=self._run, name="libraries", daemon=True)
        self._again: list[str] = []
        self._first_scan = threading.Event()
        self._scan_wanted = True
        # Only the thread uses the following attributes.
        # The processes that the running scan still has to examine; None if no scan is running.
        self._scanning: set[int] | None = None
        self._scan_began = 0.0
        self._swept = time.monotonic()
        # The number of further incomplete scans after which the probes of an earlier daemon are detached.
        self._adopted_scans = MAX_ADOPTED_SCANS
        # Whether the running scan left out a file.
        self._left_out = False
        # Files that no process mapped when the running scan began.
        self._idle: list[ProbedFile] = []

    def start(self) -> None:
        """Starts the thread, which first scans all processes."""
        self._thread.start()

    def stop(self) -> None:
        self._turns.stop()
        if self._thread.is_alive():
            self._thread.join()

    def scanned(self, timeout: float) -> bool:
        """Waits for the first scan, which probes the awaited libraries. Returns False after ``timeout`` seconds."""
        return self._first_scan.wait(timeout)

    def interesting(self, path: bytes) -> bool:
        return self._probes.interesting(path)

    def seen(self, pid: int) -> None:
        """Requests a look at a process that has just mapped a file of interest."""
        self._turns.add([pid], fresh=True)

    def changed(self, pid: int) -> None:
        """Requests a look at a process that has ended, or runs another program."""
        if pid in self._files.holders:
            self._turns.add([pid], fresh=True)

    def scan(self) -> None:
        """Requests a scan of all processes, because new mappings may have been missed."""
        self._scan_wanted = True

    def look_again(self, source: str) -> None:
        """Requests that the probes of a library are attached to its files again, since the probes have changed."""
        self._again.append(source)
        self._turns.add(list(self._files.holders), fresh=True)

    @property
    def attached(self) -> dict[str, int]:
        """Returns the number of probed files by path, the newest path first."""
        return dict(self._files.attached())

    @property
    def reasons(self) -> list[str]:
        """Returns why files could not be probed, the newest reason first."""
        return self._files.refused()

    def _run(self) -> None:
        while not self._turns.stopped:
            try:
                self._rounds()
                if (turn := self._turns.take(LOOK_S)) is not None:
                    self._look_at(turn)
            except Exception:  # an error with one process must not end the watch
                _log.exception("the search for libraries failed")

    def _rounds(self) -> None:
        """Starts the scans and looks that are due."""
        while self._again:
            self._files.forget_source(self._again.pop())
        now = time.monotonic()
        if now - self._swept >= SWEEP_INTERVAL_S:
            self._swept = now
            self._turns.add(list(self._files.holders), fresh=False)
        if self._scanning is not None:
            if not self._scanning:
                self._end_scan()
            elif now - self._scan_began >= SCAN_LIMIT_S:
                self._scanning, self._scan_wanted = None, True
                # The wait for the first scan ends: otherwise processes that block the scan would leave the libraries of
                # other processes without probes.
                self._end_first_scan()
        elif (not self._scan_began or now - self._scan_began >= SCAN_INTERVAL_S) and self._scan_due():
            self._begin_scan(now)

    def _scan_due(self) -> bool:
        if self._turns.refused:
            self._turns.refused, self._scan_wanted = 0, True
        return self._scan_wanted or bool(self._files.idle())

    def _begin_scan(self, now: float) -> None:
        self._scan_wanted, self._scan_began = False, now
        self._idle, self._left_out = self._files.idle(), False
        self._scanning = {int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()}
        self._turns.add(self._scanning, fresh=False)

    def _end_scan(self) -> None:
        """Detaches the probes of files that no process maps, since the finished scan examined every process.

        A file that is mapped only through another mount gets its probes again, through that mount.
        """
        self._scanning = None
        for file in self._idle:
            if not self._files.is_held(file):
                self._turns.add(self._probes.let_go(file), fresh=False)
        self._idle = []
        self._end_first_scan()
        if self._adopted_scans:
            self._adopted_scans = self._adopted_scans - 1 if self._left_out else 0
            if self._adopted_scans:
                self._scan_wanted = True
            else:
                self._probes.end_unmapped()

    def _end_first_scan(self) -> None:
        """Ends the wait for the first scan: from now on, libraries that are not awaited get their probes, too."""
        if not self._first_scan.is_set():
            self._first_scan.set()
            for pid in self._files.holders if self._left_out else ():
                self._turns.later(pid, LATE_S)

    def _look_at(self, turn: Turn) -> None:
        began = time.monotonic()
        found = _Look(done=True)
        try:
            if turn.pid not in self._own:
                found = self._look(turn)
            self._turns.settled(turn.pid)
        except (TargetTimeout, InternalError) as e:
            # The reader did not answer this time, but may answer later.
            _log.warning("the libraries of process %d are searched again later: %s", turn.pid, e.message)
            self._turns.again(turn.pid)
        except ProbingError as e:
            _log.debug("the libraries of process %d cannot be searched: %s", turn.pid, e.message)
            if isinstance(e, ProcessGone):
                # A zombie has no mappings.
                self._files.gone(turn.pid)
            self._turns.settled(turn.pid)
        finally:
            if self._scanning is not None and found.done:
                self._scanning.discard(turn.pid)
        if not found.useful and (turn.fresh or not found.done):
            looks = 1 if found.done else REFUSED_LOOKS
            self._turns.waste(turn.uid, looks, time.monotonic() - began)

    def _look(self, turn: Turn) -> _Look:
        """Examines a process, and attaches the probes of at most one library to one file. For the next file the process
        is queued again.
        """
        process = process_now(turn.pid)
        if process is None:
            self._files.gone(turn.pid)
            return _Look(done=True, useful=True)
        found = self._mapped(process)
        new = self._files.holds(process.pid, process.start_ns, set(found))
        for key, mapping in found.items():
            mapped = Mapped(process, turn.uid, key, mapping, late=not turn.fresh)
            wanting = list(self._probes.wanting(mapped))
            source = next((library for library in wanting if library.awaited or self._first_scan.is_set()), None)
            if source is None:
                self._left_out |= bool(wanting)
                continue
            if not turn.may_attach:
                self._left_out = True
                self._turns.hold(turn)
                return _Look(done=True, useful=new)
            self._turns.add([process.pid], fresh=turn.fresh)
            return _Look(done=False, useful=self._attach(mapped, source))
        return _Look(done=True, useful=new)

    def _attach(self, mapped: Mapped, source: ProbedLibrary) -> bool:
        """Attaches probes to a file. Returns whether the file now has its probes. Raises ProbingError if the process or
        a reader does not answer."""
        process = mapped.process
        try:
            fd = self._readers.call(
                "open",
                pid=process.pid,
                start_ns=process.start_ns,
                timeout=READ_TIMEOUT_S,
                patience=OPEN_PATIENCE_S,
                start=mapped.mapping.start,
                served=self._fuse,
            ).take_fd()
        except (TargetTimeout, InternalError, ProcessGone):
            raise
        except ProbingError as e:
            refusal: Refusal | None = self._probes.refuse(mapped, source, e)
        else:
            try:
                refusal = self._probes.attach(fd, mapped, source)
            finally:
                os.close(fd)
        if refusal is None:
            return True
        self._turns.later(process.pid, refusal.pause)
        if refusal.silent:
            self._turns.rest(mapped.uid, SILENT_REST_S * self._files.refused_to(mapped.uid, silent=True))
        return False

    def _mapped(self, process: ProcessNow) -> dict[Key, Mapping]:
        """Returns an executable mapping of each file of interest."""
        answer = self._readers.call(
            "maps",
            pid=process.pid,
            start_ns=process.start_ns,
            timeout=READ_TIMEOUT_S,
            patience=MAPS_PATIENCE_S,
            names=self._probes.names,
        )
        found: dict[Key, Mapping] = {}
        for mapping in parse_maps(answer.payload):
            if mapping.executable and mapping.inode and self._probes.interesting(mapping.path):
                found.setdefault((mapping.device[0] << 20 | mapping.device[1], mapping.inode), mapping)
            if len(found) >= MAX_KEYS:
                break
        return found


# A process is polled up to this age, s: loading torch from a cold disk takes up to a minute.
AGE_S = 60.0
# A process is polled again after INTERVAL_S, or after SHARE of its age if that is longer, because each poll occupies a
# reader.
INTERVAL_S, SHARE = 1.0, 0.25
# The maximum number of polled processes. If more programs start, the oldest are left to the scan of all processes.
MAX_YOUNG = 256


@dataclass(slots=True)
class _Young:
    """A polled process. Times are on time.monotonic()."""

    since: float
    due: float


class YoungProcesses:
    """The processes that have run their program for less than ``AGE_S``. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # By pid, the oldest process first.
        self._young: OrderedDict[int, _Young] = OrderedDict()

    def add(self, pid: int) -> None:
        """Begins to poll a process that runs a new program."""
        now = time.monotonic()
        with self._lock:
            self._young.pop(pid, None)
            self._young[pid] = _Young(now, now)
            if len(self._young) > MAX_YOUNG:
                self._young.popitem(last=False)

    def remove(self, pid: int) -> None:
        with self._lock:
            self._young.pop(pid, None)

    def due(self) -> list[int]:
        """Returns the processes to poll now, and schedules the next poll of each."""
        now = time.monotonic()
        with self._lock:
            while self._young and next(iter(self._young.values())).since + AGE_S <= now:
                self._young.popitem(last=False)
            found = [pid for pid, young in self._young.items() if young.due <= now]
            for young in (self._young[pid] for pid in found):
                young.due = now + max(INTERVAL_S, SHARE * (now - young.since))
        return found
