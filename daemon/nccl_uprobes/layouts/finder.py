"""Finds the layouts of unknown builds of NCCL in the library's own DWARF, while the probes run.

The BPF programs try each layout of the map ``nccl_layouts`` on a communicator and use the layout at whose offsets they
find NCCL's two magic words, so an added layout serves all processes. Programs remember a layout by its index, which
never changes.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from probing.api.errors import InternalError, ProbingError, TargetTimeout, UnsupportedTarget
from probing.daemon.bpf.maps import Map
from probing.daemon.fairness import Turns
from probing.daemon.nccl_uprobes.layouts.nccl import (
    ABSENT,
    MAX_LAYOUTS,
    NCCL_LAYOUTS,
    UNGUARDED_LAYOUTS,
    NcclLayout,
)
from probing.daemon.processes.parsers import ParserPool

__all__ = ("LayoutFinder",)

_ONLY_MADE = "only communicators whose creation was seen are known"
_UNGUARDED = f"NCCL before 2.21 has no magic words in its communicators: {_ONLY_MADE}"
# The maximum numbers of waiting files of all owners, of waiting files of one owner, and of layouts from files of one
# user other than root. Limits for each user are needed, since any user can make a library with any debugging
# information.
_MAX_WAITING, _MAX_WAITING_OF_OWNER, _MAX_OF_USER = 256, 64, 8
_MAX_FILES = 4096
_TRIES = 3
_STOP_S = 5.0
# The timeout for parsing a libnccl with debug information, s; a parser needs seconds.
_PARSE_S = 15.0
_MAX_REASONS = 256
_MAX_CACHE = 1 << 20
_BUILD_ID = re.compile("[0-9a-f]{8,128}")
# The size in bytes of commHash and the fields that follow: rank, nRanks, cudaDev and nvmlDev.
_ROW = 24
# The value that marks the end of the layouts for the programs, and the value of a layout that fits no communicator.
_END, _NONE = bytes(len(NCCL_LAYOUTS[0].pack())), NcclLayout((), (), ABSENT, ABSENT).pack()
_log = logging.getLogger(__name__)


class LayoutFinder:
    """Adds layouts to the map ``layouts`` after the shipped ones, and keeps them in the file ``cache``.

    Call ``start`` before the first ``attach``. Thread-safe.
    """

    def __init__(self, parsers: ParserPool, layouts: Map, cache: Path | None = None) -> None:
        self._parsers = parsers
        self._layouts = layouts
        self._cache = cache
        # The entries of the map with the owners of their files; shipped layouts belong to root. None: an entry that an
        # earlier daemon wrote, and that this daemon does not know.
        self._slots: list[tuple[NcclLayout, int] | None] = []
        self._reasons: dict[str, str] = {}
        self._files: dict[tuple[int, ...], None] = {}
        self._stopped = False
        self._lock = threading.Lock()
        # Descriptors of the waiting files by the owner of the file; the owners take turns.
        self._waiting: dict[int, deque[int]] = {}
        self._turns: Turns[int] = Turns()
        self._more = threading.Condition(self._lock)
        self._thread = threading.Thread(target=self._run, name="nccl-layouts", daemon=True)

    @property
    def reasons(self) -> dict[str, str]:
        """Returns why communicators cannot be read, by build id (or device and inode of a file without a build id)."""
        with self._lock:
            return dict(self._reasons)

    @property
    def added(self) -> tuple[NcclLayout, ...]:
        """Returns the layouts in the map beside the shipped ones."""
        with self._lock:
            return tuple(layout for layout, _ in self._added)

    def start(self) -> None:
        """Writes the shipped layouts and the cached layouts into the map. Layouts that an earlier daemon wrote keep
        their indexes, even if this daemon ships other layouts.
        """
        wanted = {layout.pack(): (layout, 0) for layout in NCCL_LAYOUTS}
        for layout, owner in self._load():
            with contextlib.suppress(UnsupportedTarget):
                self._check(layout, owner, list(wanted.values()))
                wanted.setdefault(layout.pack(), (layout, owner))
        with self._lock:
            self._slots = [wanted.pop(value, None) for value in self._held()]
            self._slots = [*self._slots, *wanted.values()][:MAX_LAYOUTS]
            values = [slot[0].pack() if slot is not None else _NONE for slot in self._slots]
            for index in range(MAX_LAYOUTS):
                self._layouts.update(index, values[index] if index < len(values) else _END)
        self._thread.start()

    def _held(self) -> list[bytes]:
        """Returns the layouts that an earlier daemon left in the map."""
        held: list[bytes] = []
        for index in range(MAX_LAYOUTS):
            value = self._layouts.lookup(index)
            if value is None or value.tobytes()[:4] == _END[:4]:
                break
            held.append(value.tobytes())
        return held

    def stop(self) -> None:
        """Drops the waiting files, and waits for the thread, 5 s at most."""
        with self._lock:
            self._stopped = True
            for fd in (fd for fds in self._waiting.values() for fd in fds):
                os.close(fd)
            self._waiting.clear()
            self._more.notify()
        if self._thread.is_alive():
            self._thread.join(_STOP_S)

    def attach(self, fd: int) -> None:
        """Examines the libnccl at ``fd`` in the background, if its build is unknown. The caller keeps ``fd``."""
        status = os.fstat(fd)
        file = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
        with self._lock:
            if file in self._files or self._stopped:
                return
            waiting = self._waiting.get(status.st_uid, deque())
            if len(waiting) >= _MAX_WAITING_OF_OWNER or sum(map(len, self._waiting.values())) >= _MAX_WAITING:
                self._explain(_name(fd, None), "too many builds of NCCL wait to be examined")
                return
            self._files[file] = None
            if len(self._files) > _MAX_FILES:
                del self._files[next(iter(self._files))]
            waiting.append(os.dup(fd))
            self._waiting[status.st_uid] = waiting
            self._more.notify()

    def _next(self) -> int | None:
        """Waits for a file, and returns its descriptor; None once the object is stopped."""
        with self._lock:
            self._more.wait_for(lambda: self._stopped or any(self._waiting.values()))
            if self._stopped:
                return None
            owner = min((owner for owner, fds in self._waiting.items() if fds), key=self._turns.of)
            self._turns.took(owner)
            fd = self._waiting[owner].popleft()
            if not self._waiting[owner]:
                del self._waiting[owner]
            return fd

    def _run(self) -> None:
        while (fd := self._next()) is not None:
            try:
                self._examine_with_retries(fd)
            except (ProbingError, OSError) as e:
                with self._lock:
                    self._explain(_name(fd, None), str(e))
            finally:
                os.close(fd)

    def _examine_with_retries(self, fd: int) -> None:
        for left in reversed(range(_TRIES)):
            try:
                self._examine(fd)
            except (TargetTimeout, InternalError) as e:
                if not left or self._stopped:
                    raise
                # The error is transient, for example while the parsers are starting.
                _log.info("a build of NCCL is examined again: %s", e.message)
            else:
                return

    def _examine(self, fd: int) -> None:
        owner = os.fstat(fd).st_uid
        unguarded = {build: layout.version for layout in UNGUARDED_LAYOUTS for build in layout.build_ids}
        with self._lock:
            # Any user can give a library the build id of another library. So a build id counts as known only if its
            # layout is from a file of root or of this file's owner; otherwise this file is examined, too. If it is
            # stripped, no reason is reported, because the file may really be of the known build.
            entries = self._entries
        known = [build for layout, user in entries if user in (0, owner) for build in layout.build_ids]
        all_builds = {build for layout, _ in entries for build in layout.build_ids}
        answer = self._parsers.call("nccl_layout", fds=[fd], timeout=_PARSE_S, known=[*known, *unguarded])
        build = answer.get("build_id")
        if not isinstance(build, str) or not _BUILD_ID.fullmatch(build):
            build = None
        comm = {} if build in unguarded else answer.get("comm")
        if build in known or (build in all_builds and comm is None):
            return
        why = self._use(comm, build, owner) if isinstance(comm, dict) else _stripped(answer.get("version"))
        if why:
            with self._lock:
                self._explain(_name(fd, build), why)

    def _use(self, comm: Mapping[str, int], build: str | None, owner: int) -> str | None:
        """Adds the layout of ``comm``, from a file of the user ``owner``; returns None, or why the layout cannot be
        used.
        """
        if "end_magic" not in comm:
            return _UNGUARDED
        try:
            self._add(NcclLayout.of(comm, (), (build,) if build else ()), owner)
        except UnsupportedTarget as e:
            return f"{e.message}: {_ONLY_MADE}"
        self._save()
        return None

    @property
    def _entries(self) -> list[tuple[NcclLayout, int]]:
        """Returns the layouts in the map, with their owners. The caller holds the lock, as for ``_added``."""
        return [slot for slot in self._slots if slot is not None]

    @property
    def _added(self) -> list[tuple[NcclLayout, int]]:
        return [(layout, owner) for layout, owner in self._entries if layout not in NCCL_LAYOUTS]

    def _check(self, layout: NcclLayout, owner: int, entries: Sequence[tuple[NcclLayout, int]]) -> None:
        """Raises UnsupportedTarget if ``layout`` must not be in the map beside ``entries``, or if too many layouts are
        from files of the user ``owner``.
        """
        if layout.end_magic % 8 or not 8 <= layout.comm_hash <= layout.end_magic - _ROW or layout.end_magic == ABSENT:
            raise UnsupportedTarget("struct ncclComm of this library has impossible offsets")
        if any(other.offsets == layout.offsets for other, _ in entries):
            return
        # The programs tell layouts apart by the offset of the second magic word. Any user can make a library with wrong
        # offsets, so only a library of root may replace the layout of another user.
        if any(other.end_magic == layout.end_magic and (owner or not user) for other, user in entries):
            raise UnsupportedTarget("another build has a struct ncclComm of this size, laid out in another way")
        if owner and sum(user == owner for _, user in entries) >= _MAX_OF_USER:
            raise UnsupportedTarget(
                f"{_MAX_OF_USER} builds of NCCL, the maximum for one user, are already known for uid {owner}"
            )

    def _add(self, layout: NcclLayout, owner: int) -> None:
        """Adds ``layout`` to the map, or replaces a user's layout with the same second magic word. Raises
        UnsupportedTarget like ``_check``, and if the map is full.
        """
        with self._lock:
            self._check(layout, owner, self._entries)
            if any(other.offsets == layout.offsets for other, _ in self._entries):
                return
            same = [at for at, slot in enumerate(self._slots) if slot and slot[0].end_magic == layout.end_magic]
            index = same[0] if same else len(self._slots)
            if index >= MAX_LAYOUTS:
                raise UnsupportedTarget("too many builds of NCCL are known")
            self._layouts.update(index, layout.pack())
            self._slots[index : index + 1] = [(layout, owner)]

    def _explain(self, name: str, why: str) -> None:
        if name not in self._reasons:
            self._reasons[name] = why
            _log.warning("NCCL %s: %s", name, why)
            if len(self._reasons) > _MAX_REASONS:
                del self._reasons[next(iter(self._reasons))]

    def _load(self) -> list[tuple[NcclLayout, int]]:
        if self._cache is None:
            return []
        try:
            with self._cache.open("rb") as file:
                entries = json.loads(file.read(_MAX_CACHE))
            return [
                (NcclLayout.of(entry, (), tuple(map(str, entry["build_ids"]))), int(entry.get("owner", 0)))
                for entry in entries
            ]
        except FileNotFoundError:
            return []
        except (OSError, ValueError, TypeError, KeyError, RecursionError, UnsupportedTarget) as e:
            _log.warning("the layouts in %s cannot be used: %s", self._cache, e)
            return []

    def _save(self) -> None:
        if self._cache is None:
            return
        with self._lock:
            entries = [
                {
                    **{
                        name: value
                        for name, value in layout._asdict().items()
                        if value != ABSENT and name != "versions"
                    },
                    "owner": owner,
                }
                for layout, owner in self._added
            ]
        new = self._cache.with_suffix(".new")
        try:
            new.write_text(json.dumps(entries))
            new.replace(self._cache)
        except OSError as e:
            _log.warning("the layouts cannot be kept in %s: %s", self._cache, e)


def _stripped(version: Any) -> str | None:
    """Returns why a build without debugging information cannot be read; None for a version with a published layout."""
    if any(version in layout.versions for layout in NCCL_LAYOUTS):
        return None
    if any(version in layout.versions for layout in UNGUARDED_LAYOUTS):
        return _UNGUARDED
    return f"this build of NCCL is unknown and stripped: {_ONLY_MADE}"


def _name(fd: int, build: str | None) -> str:
    if build:
        return build
    status = os.fstat(fd)
    return f"file {status.st_dev}:{status.st_ino}"
