"""Remembers in a file which dumps were read, so that the next daemon does not report them again."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from probing.api.typed import typed_json
from probing.daemon.fairness import crowding

__all__ = ("DumpFile", "KnownDumps", "Stamp")

MAX_KNOWN = 4_096
MAX_BYTES = 1 << 20
Stamp = tuple[int, int, int, int]
_log = logging.getLogger(__name__)


class DumpFile(NamedTuple):
    """A dump file, as a reader describes it."""

    path: str
    dev: int
    inode: int
    mtime_ns: int
    size: int

    @classmethod
    def of(cls, header: Mapping[str, Any]) -> DumpFile:
        return cls(*(header[name] for name in cls._fields))

    @property
    def stamp(self) -> Stamp:
        """Returns (dev, inode, mtime_ns, size), which changes whenever the file is written."""
        return self[1:]

    @property
    def snapshot_id(self) -> int:
        """Returns a hash of the stamp, of 64 bits."""
        return int.from_bytes(hashlib.blake2b(repr(self.stamp).encode(), digest_size=8).digest(), "big")


class KnownDumps:
    """The snapshot ids of up to 4096 dumps that were read, with their users. If there are more, the user with the most
    dumps loses its oldest id. Without a path, the ids are lost when the process ends.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._known = _load(path)
        self._changed = False

    def __contains__(self, number: int) -> bool:
        return number in self._known

    def add(self, number: int, user: int) -> None:
        self._known[number] = user
        self._changed = True
        while len(self._known) > MAX_KNOWN:
            # A forgotten dump is reported again, so a user must not push out the dumps of other users.
            most = crowding(self._known.values())
            del self._known[next(number for number, user in self._known.items() if user == most)]

    def save(self) -> None:
        """Writes the file if a dump was added; a failure is logged, and the next call tries again."""
        if not self._changed or self._path is None:
            return
        fresh = self._path.with_suffix(".new")
        try:
            fresh.write_text(json.dumps(list(self._known.items())))
            fresh.replace(self._path)
            self._changed = False
        except OSError as e:
            _log.warning("cannot store which dumps were read: %s", e.strerror)


def _load(path: Path | None) -> dict[int, int]:
    if path is None:
        return {}
    try:
        with path.open("rb") as file:
            return dict(typed_json(list[tuple[int, int]], file.read(MAX_BYTES)))
    except (OSError, ValueError):
        return {}
