"""Attaches probes to a mapped file, and reports missing rows if the probes failed or came late."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from probing.api.errors import InternalError, ProbingError, TargetTimeout
from probing.daemon.bpf.session import Session
from probing.daemon.clock import Clock
from probing.daemon.collector.libraries.files import Files, Identity, Key, ProbedFile, Refusal
from probing.daemon.processes.liveness import ProcessNow
from probing.daemon.processes.procfs import Mapping, clean_text
from probing.daemon.source import Loss, ProbedLibrary, Sink

__all__ = (
    "LibraryProbes",
    "Mapped",
)

MAX_REPORTED = 64
MAX_SHOWN = 80
# The maximum number of refused files of a user that are logged as warnings. Further refusals are logged at debug level.
MAX_LOGGED = 8
_log = logging.getLogger(__name__)


class Mapped(NamedTuple):
    """A file of interest that a process of user ``uid`` maps; ``late``: the process may have mapped it long ago."""

    process: ProcessNow
    uid: int
    key: Key
    mapping: Mapping
    late: bool


class LibraryProbes:
    """Attaches the probes of libraries, and reports missing rows. Only ``files.attached`` and ``files.refused`` are
    thread-safe.
    """

    def __init__(self, session: Session, libraries: Sequence[ProbedLibrary], sink: Sink, clock: Clock) -> None:
        self._session = session
        self._libraries = tuple(libraries)
        self._sink = sink
        self._clock = clock
        self.files = Files()
        self.names = [name.decode() for library in self._libraries for name in library.files]

    def interesting(self, path: bytes) -> bool:
        return any(library.interesting(path) for library in self._libraries)

    def wanting(self, mapped: Mapped) -> Iterator[ProbedLibrary]:
        """Yields the libraries whose probes are not attached to the file ``mapped`` yet, except libraries that were
        refused recently.

        If a library is not yielded and rows of the process are missing, this is reported as a loss.
        """
        for library in self._libraries:
            if library.interesting(mapped.mapping.path) and not self._is_settled(mapped, library):
                yield library

    def _is_settled(self, mapped: Mapped, library: ProbedLibrary) -> bool:
        file = self.files.find(mapped.key)
        if file is not None and library.name in file.reasons:
            probed_ns = file.probed_ns[library.name]
            # A process that started after the probes were attached lacks no row, even if it is examined late.
            if file.reasons[library.name] and mapped.late and mapped.process.start_ns < probed_ns:
                self._gap(mapped.process, library, file.reasons[library.name], probed_ns)
            return True
        refusal = self.files.refusal(library.name, mapped.key, mapped.uid)
        if refusal is not None:
            self._gap(mapped.process, library, refusal.reason)
        return refusal is not None

    def attach(self, fd: int, mapped: Mapped, library: ProbedLibrary) -> Refusal | None:
        """Attaches the probes of a library to the file with descriptor ``fd``. Returns the refusal if this failed."""
        key, uid = mapped.key, mapped.uid
        try:
            identity = self._session.identity(fd)
            self.files.admit(identity, uid)
            placed = library.attach(fd, mapped.mapping.path)
        except ProbingError as e:
            return self.refuse(mapped, library, e)
        file = self.files.attached_to(identity, key, uid, _shown(mapped.mapping.path))
        file.users.add(mapped.process.pid)
        file.probed_ns.setdefault(library.name, self._clock.pair().boot_ns)
        file.reasons.setdefault(library.name, "the process had the library before it was probed" if placed else "")
        self.files.accept(library.name, key, uid)
        return None

    def refuse(self, mapped: Mapped, library: ProbedLibrary, error: ProbingError) -> Refusal:
        """Registers that a file cannot be probed, and returns the refusal. The pause before the next try grows."""
        path, uid = _shown(mapped.mapping.path), mapped.uid
        silent = isinstance(error, TargetTimeout | InternalError)
        refusal = self.files.refuse(library.name, mapped.key, uid, path, error.message, silent=silent)
        level = logging.WARNING if self.files.refused_to(uid) <= MAX_LOGGED else logging.DEBUG
        _log.log(level, "%s cannot be probed: %s; next try in %g s", path, error.message, refusal.pause)
        return refusal

    def let_go(self, file: ProbedFile) -> set[int]:
        """Detaches the probes of a file. Returns the pids of the processes that still map it."""
        self._end(file.identity)
        return self.files.drop(file)

    def end_unmapped(self) -> None:
        """Detaches probes that an earlier daemon attached to files that no process maps now."""
        for identity in self._session.probed_files() - self.files.identities:
            self._end(identity)

    def _end(self, identity: Identity) -> None:
        self._session.end_file(identity)
        for library in self._libraries:
            library.forget(identity)

    def _gap(self, process: ProcessNow, library: ProbedLibrary, reason: str, probed_ns: int | None = None) -> None:
        """Reports that rows of a process are missing, once for each reason: from the start of the process until
        ``probed_ns`` (ns since boot; None: until now).
        """
        holder = self.files.holders[process.pid]
        if (library.name, reason) in holder.reported or len(holder.reported) >= MAX_REPORTED:
            return
        holder.reported.add((library.name, reason))
        pair = self._clock.pair()
        began = process.start_ns + pair.boot_to_utc_ns
        until = pair.real_ns if probed_ns is None else probed_ns + pair.boot_to_utc_ns
        self._sink.lost(Loss(library.name, library.table, "attach", reason, began, until, None, process.pid))


def _shown(path: bytes) -> str:
    """Returns ``path``, shortened to the end of its directory and the beginning of its name."""
    folder, _, name = path.rpartition(b"/")
    cut = "…" if len(folder) > MAX_SHOWN else ""
    return f"{cut}{clean_text(folder[-MAX_SHOWN:])}/{clean_text(name, MAX_SHOWN)}"
