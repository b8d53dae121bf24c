"""Keeps the records of groups in the state directory, which the service may not enter.

A record is on disk before the service answers another node, since an answer is a promise that a power cut must not
undo. The collector does not read the records.
"""

from __future__ import annotations

import json
import logging
import os
import threading
from contextlib import suppress
from pathlib import Path

from probing.api.errors import StoreError, UsageError
from probing.api.typed import typed_json
from probing.daemon.ipc import Header
from probing.groups.spec import stem_of

__all__ = ("GroupRecords",)

MAX_GROUPS, MAX_RECORD = 1024, 4 << 20
_log = logging.getLogger(__name__)


class GroupRecords:
    """The records in ``directory``, by name of the group. Handlers of the control socket; safe for many threads."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._lock = threading.Lock()
        # The number of the last record of each group.
        self._numbers: dict[str, int] = {}

    def keep(self, group: str, number: int, payload: bytes) -> tuple[Header, bytes]:
        """Writes the record of a group, the payload in UTF-8. ``number`` grows with each request: a request that was
        given up may come after its successor, and must not undo it.

        Raises UsageError for a record that is too large or too old, and StoreError.
        """
        if len(payload) > MAX_RECORD:
            raise UsageError(f"the record of a group has {len(payload):,} bytes", hint=f"at most {MAX_RECORD:,}")
        text = json.dumps({"group": group, "record": payload.decode("utf-8", "replace")}).encode()
        path = self._directory / f"{stem_of(group)}.json"
        with self._lock:
            if number <= self._numbers.get(group, 0):
                raise UsageError("a newer record of the group was kept meanwhile")
            if not path.exists() and len(self._files()) >= MAX_GROUPS:
                raise UsageError(f"this node has {MAX_GROUPS} groups", hint="give a group of yours a new specification")
            self._write(path, text)
            self._numbers[group] = number
        return {}, b""

    def _write(self, path: Path, text: bytes) -> None:
        partial = path.with_suffix(".new")
        try:
            if not self._directory.exists():
                self._directory.mkdir(mode=0o700)
                _sync(self._directory.parent)
            with partial.open("wb") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            partial.replace(path)
            _sync(self._directory)
        except OSError as e:
            with suppress(OSError):
                partial.unlink()
            raise StoreError(f"the record of a group cannot be written to {path}: {e.strerror}") from e

    def kept(self) -> tuple[Header, bytes]:
        """Returns all records as JSON: ``records``, a dict by name of the group; and ``unreadable``, ``stem_of`` each
        group whose file cannot be read.
        """
        records: dict[str, str] = {}
        unreadable: list[str] = []
        for path in self._files():
            try:
                with path.open("rb") as file:
                    entry = typed_json(dict[str, str], file.read(8 * MAX_RECORD))
                records[entry["group"]] = entry["record"]
            except (OSError, ValueError, KeyError) as e:
                _log.error("the record of a group in %s cannot be read: %s", path, e)
                unreadable.append(path.stem)
        return {}, json.dumps({"records": records, "unreadable": unreadable}).encode()

    def _files(self) -> list[Path]:
        return sorted(self._directory.glob("*.json"))


def _sync(directory: Path) -> None:
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
