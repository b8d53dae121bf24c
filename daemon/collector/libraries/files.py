"""Registers files with probes, the processes that map them, and refused files. All are limited, in sum and by user.

/proc/PID/maps shows the device and inode of a mount, and each overlay mount has its own; probes belong to the inode of
the lower file system.
"""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from dataclasses import dataclass, field

from probing.api.errors import AttachError

__all__ = ("Files", "Holder", "Identity", "Key", "ProbedFile", "Refusal")

Key = tuple[int, int]
"""Device and inode as /proc/PID/maps shows them."""
Identity = tuple[int, int]
"""st_dev and st_ino of the file that the probes belong to."""
MAX_FILES = 256
MAX_FILES_OF_USER = 64
MAX_REFUSALS = 1_024
# The pause before a refused file is tried again: 60, 120, 240 ... s; for a file that did not answer 2, 4, 8 ... s.
FIRST_PAUSE_S, FIRST_SILENT_PAUSE_S, LAST_PAUSE_S = 60.0, 2.0, 3_600.0
# How long after the last try a refusal is shown, s.
SHOWN_S = 600.0


@dataclass(slots=True)
class ProbedFile:
    """A file with probes. ``reasons``: by library, why rows of processes that mapped the file before are missing.
    ``probed_ns``: by library, since when rows are complete, ns since boot. ``users``: pids of the processes that map
    the file.

    ``held``: the key of the mount through which the file was opened; its probes keep this mount in use.
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
    """A process that maps files of interest. ``reported``: (library, reason) of the losses that were
    reported for it.
    """

    start_ns: int
    keys: set[Key] = field(default_factory=set)
    reported: set[tuple[str, str]] = field(default_factory=set)


@dataclass(slots=True)
class Refusal:
    """Why a file has no probes. ``until``: no new try before this time; ``at``: the last try; both on
    time.monotonic().
    """

    path: str
    reason: str
    at: float
    until: float
    pause: float
    silent: bool


class Files:
    """The register, for one thread; ``attached`` and ``refused`` are safe for any thread."""

    def __init__(self) -> None:
        self._by_key: dict[Key, ProbedFile] = {}
        self._by_identity: dict[Identity, ProbedFile] = {}
        self._refusals: OrderedDict[tuple[str, Key, int], Refusal] = OrderedDict()
        self.holders: dict[int, Holder] = {}

    def find(self, key: Key) -> ProbedFile | None:
        return self._by_key.get(key)

    def admit(self, identity: Identity, uid: int) -> None:
        """Raises AttachError if one more probed file is too many for the user, or for all users."""
        if identity in self._by_identity:
            return
        hint = "libraries that no process maps any more make room"
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
        """Registers that a process maps exactly the files ``keys``. Returns whether one of them is new
        for the process.
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
        """Returns files that no registered process maps through the mount that their probes keep in use."""
        return [file for file in self._by_identity.values() if not self.is_held(file)]

    def is_held(self, file: ProbedFile) -> bool:
        return any(file.held in self.holders[pid].keys for pid in file.users)

    def drop(self, file: ProbedFile) -> set[int]:
        """Drops a file whose probes were ended. Returns the processes that still map it."""
        del self._by_identity[file.identity]
        for key in file.keys:
            del self._by_key[key]
        return file.users

    def forget_source(self, source: str) -> None:
        """Drops the probes and refusals of a library, whose probes are attached again."""
        for file in self._by_identity.values():
            file.reasons.pop(source, None)
            file.probed_ns.pop(source, None)
        for known in [known for known in self._refusals if known[0] == source]:
            del self._refusals[known]

    @property
    def identities(self) -> set[Identity]:
        return set(self._by_identity)

    def refuse(self, source: str, key: Key, uid: int, path: str, reason: str, *, silent: bool) -> Refusal:
        """Registers that a file was refused, or did not answer (``silent``). Each refusal in a row doubles the pause
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
        """Returns the refusal that keeps a file from being tried now; None: the file may be tried."""
        found = self._refusals.get((source, key, uid))
        return found if found is not None and found.until > time.monotonic() else None

    def accept(self, source: str, key: Key, uid: int) -> None:
        self._refusals.pop((source, key, uid), None)

    def refused_to(self, uid: int, *, silent: bool = False) -> int:
        """Returns the number of a user's files that were refused lately; ``silent``: only files that did not answer."""
        since = time.monotonic() - SHOWN_S
        return sum(known[2] == uid and r.at > since and (r.silent or not silent) for known, r in self._refusals.items())

    def attached(self) -> Counter[str]:
        """Returns the number of probed files by path; the path that was probed last comes first."""
        return Counter(file.path for file in reversed(list(self._by_identity.values())))

    def refused(self) -> list[str]:
        """Returns why files could not be probed at the last try, the newest first, each reason once."""
        since = time.monotonic() - SHOWN_S
        newest = [r for r in reversed(list(self._refusals.values())) if r.at > since]
        return list(dict.fromkeys(f"{r.path} cannot be probed: {r.reason}" for r in newest))
