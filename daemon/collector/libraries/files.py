"""Registers files with probes, the processes that map them, and refused files. The number of files with probes is
limited for each user and for all users together; the number of refusals is limited, too.

/proc/PID/maps shows the device and inode that a file has in its mount. These differ between overlay mounts of the same
file, whereas probes belong to the inode of the lower file system.
"""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from dataclasses import dataclass, field

from probing.api.errors import AttachError

__all__ = ("Files", "Holder", "Identity", "Key", "ProbedFile", "Refusal")

Key = tuple[int, int]
"""Device and inode of a file as /proc/PID/maps shows them."""
Identity = tuple[int, int]
"""st_dev and st_ino of the file that the probes belong to."""
MAX_FILES = 256
MAX_FILES_OF_USER = 64
MAX_REFUSALS = 1_024
# The pause before a refused file is tried again: 60, 120, 240 ... s; for a file that did not answer 2, 4, 8 ... s.
FIRST_PAUSE_S, FIRST_SILENT_PAUSE_S, LAST_PAUSE_S = 60.0, 2.0, 3_600.0
# A refusal is shown for this many seconds after the last try.
SHOWN_S = 600.0


@dataclass(slots=True)
class ProbedFile:
    """A file with probes. ``probed_ns``: when the probes of each library were attached, ns since boot. ``reasons``: by
    library, why processes that mapped the file earlier have gaps. ``users``: pids of the processes that map the file.

    ``held``: the key under which the file was opened; the probes keep the mount of this key in use.
    """

    identity: Identity
    uid: int
    path: str
    held: Key
    reasons: dict[str, str] = field(default_factory=dict)
    probed_ns: dict[str, int] = field(default_factory=dict)
    keys: set[Key] = field(default_factory=set)
    users: set[int] = field(default_factory=set)


@dataclass(slots=True)
class Holder:
    """A process that maps files of interest. ``reported``: (library, reason) of each reported loss of the process."""

    start_ns: int
    keys: set[Key] = field(default_factory=set)
    reported: set[tuple[str, str]] = field(default_factory=set)


@dataclass(slots=True)
class Refusal:
    """Why a file has no probes. ``at``: the last try; ``until``: when the file may be tried again; both on
    time.monotonic(). ``pause``: the time from ``at`` to ``until``, s. ``silent``: the file or process did not answer.
    """

    path: str
    reason: str
    at: float
    until: float
    pause: float
    silent: bool


class Files:
    """The register of probed and refused files. Only ``attached`` and ``refused`` are thread-safe."""

    def __init__(self) -> None:
        self._by_key: dict[Key, ProbedFile] = {}
        self._by_identity: dict[Identity, ProbedFile] = {}
        self._refusals: OrderedDict[tuple[str, Key, int], Refusal] = OrderedDict()
        self.holders: dict[int, Holder] = {}

    def find(self, key: Key) -> ProbedFile | None:
        return self._by_key.get(key)

    def admit(self, identity: Identity, uid: int) -> None:
        """Raises AttachError if another probed file would exceed the limit of the user, or of all users together."""
        if identity in self._by_identity:
            return
        hint = "another library can be probed once no process maps one of these libraries any longer"
        if sum(file.uid == uid for file in self._by_identity.values()) >= MAX_FILES_OF_USER:
            raise AttachError(f"{MAX_FILES_OF_USER} libraries of user {uid} are probed already", hint=hint)
        if len(self._by_identity) >= MAX_FILES:
            raise AttachError(f"{MAX_FILES} libraries are probed already", hint=hint)

    def attached_to(self, identity: Identity, key: Key, uid: int, path: str) -> ProbedFile:
        """Registers a file that has probes now, and returns its entry."""
        file = self._by_identity.setdefault(identity, ProbedFile(identity, uid, path, key))
        file.keys.add(key)
        self._by_key[key] = file
        return file

    def holds(self, pid: int, start_ns: int, keys: set[Key]) -> bool:
        """Registers that a process maps exactly the files ``keys``. Returns whether ``keys`` has a file that the
        process did not map at the previous call.
        """
        before = self.holders.get(pid)
        if before is not None and before.start_ns != start_ns:
            self.gone(pid)
            before = None
        if not keys:
            self.gone(pid)
            return False
        holder = self.holders.setdefault(pid, Holder(start_ns))
        new = keys - holder.keys
        holder.keys = keys
        for file in self._by_identity.values():
            (file.users.discard if file.keys.isdisjoint(keys) else file.users.add)(pid)
        return bool(new)

    def gone(self, pid: int) -> None:
        """Drops a process that ended or maps no file of interest."""
        if self.holders.pop(pid, None) is not None:
            for file in self._by_identity.values():
                file.users.discard(pid)

    def idle(self) -> list[ProbedFile]:
        """Returns the files that no registered process maps under their key ``held``."""
        return [file for file in self._by_identity.values() if not self.is_held(file)]

    def is_held(self, file: ProbedFile) -> bool:
        return any(file.held in self.holders[pid].keys for pid in file.users)

    def drop(self, file: ProbedFile) -> set[int]:
        """Drops a file whose probes were detached. Returns the pids of the processes that still map it."""
        del self._by_identity[file.identity]
        for key in file.keys:
            del self._by_key[key]
        return file.users

    def forget_source(self, source: str) -> None:
        """Drops the entries and refusals of a library, so that its probes are attached again."""
        for file in self._by_identity.values():
            file.reasons.pop(source, None)
            file.probed_ns.pop(source, None)
        for known in [known for known in self._refusals if known[0] == source]:
            del self._refusals[known]

    @property
    def identities(self) -> set[Identity]:
        return set(self._by_identity)

    def refuse(self, source: str, key: Key, uid: int, path: str, reason: str, *, silent: bool) -> Refusal:
        """Registers that a file was refused, or did not answer (``silent``). Each consecutive refusal doubles the pause
        before the next try.
        """
        before = self._refusals.pop((source, key, uid), None)
        first = FIRST_SILENT_PAUSE_S if silent else FIRST_PAUSE_S
        pause = min(2 * before.pause, LAST_PAUSE_S) if before is not None else first
        now = time.monotonic()
        refusal = self._refusals[source, key, uid] = Refusal(path, reason, now, now + pause, pause, silent)
        while len(self._refusals) > MAX_REFUSALS:
            self._refusals.popitem(last=False)
        return refusal

    def refusal(self, source: str, key: Key, uid: int) -> Refusal | None:
        """Returns the refusal that forbids another attempt at a file; None if the file may be tried."""
        found = self._refusals.get((source, key, uid))
        return found if found is not None and found.until > time.monotonic() else None

    def accept(self, source: str, key: Key, uid: int) -> None:
        self._refusals.pop((source, key, uid), None)

    def refused_to(self, uid: int, *, silent: bool = False) -> int:
        """Returns the number of recently refused files of a user; ``silent``: only files that did not answer."""
        since = time.monotonic() - SHOWN_S
        return sum(known[2] == uid and r.at > since and (r.silent or not silent) for known, r in self._refusals.items())

    def attached(self) -> Counter[str]:
        """Returns the number of probed files by path, the most recently probed path first."""
        return Counter(file.path for file in reversed(list(self._by_identity.values())))

    def refused(self) -> list[str]:
        """Returns, for each recently refused file, its path and why the last try failed; the newest refusal comes
        first.
        """
        since = time.monotonic() - SHOWN_S
        newest = [r for r in reversed(list(self._refusals.values())) if r.at > since]
        return list(dict.fromkeys(f"{r.path} cannot be probed: {r.reason}" for r in newest))
