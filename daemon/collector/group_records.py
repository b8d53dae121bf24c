"""Keeps the records of groups in the state directory, which the service is not allowed to enter.

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
from probing.daemon.store.files import SystemFiles
from probing.groups.spec import MAX_GROUPS, NAME

__all__ = ("GroupRecords",)

MAX_RECORD = 4 << 20
_log = logging.getLogger(__name__)


class GroupRecords:
    """The records in ``directory``, by name of the group. The methods handle requests of the control socket.
    Thread-safe.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._lock = threading.Lock()
        self._numbers: dict[str, int] = {}

    def keep(self, group: str, number: int, payload: bytes) -> tuple[Header, bytes]:
        """Writes the record of a group. ``payload``: the record, in UTF-8. ``number`` grows with each record of the
        group.

        Raises UsageError for a record that is too large, and for a record that arrives after a record with the same or
        a larger number: the sender of such a late record has stopped waiting. Raises StoreError.
        """
        with self._lock:
            if number <= self._numbers.get(group, -1):
                raise UsageError(f"a newer record of group {group[:64]} was written meanwhile")
            self._numbers[group] = number
            self._write(group, payload)
        return {}, b""

    def _write(self, group: str, record: bytes) -> None:
        if len(record) > MAX_RECORD:
            raise UsageError(f"the record of a group has {len(record):,} bytes", hint=f"at most {MAX_RECORD:,}")
        if not NAME.fullmatch(group):
            raise UsageError("the record does not have a valid group name")
        path = self._directory / f"{group}.json"
        partial = path.with_suffix(f".{os.urandom(8).hex()}.new")
        try:
            if not self._directory.exists():
                self._directory.mkdir(mode=0o700)
                SystemFiles().fsync_dir(self._directory.parent)
            if not path.exists() and len(self._files()) >= MAX_GROUPS:
                raise UsageError(f"this node has {MAX_GROUPS} groups", hint="give a group of yours a new specification")
            with partial.open("x") as file:
                json.dump({"record": record.decode("utf-8", "replace")}, file)
                file.flush()
                os.fsync(file.fileno())
            partial.replace(path)
            SystemFiles().fsync_dir(self._directory)
        except OSError as e:
            with suppress(OSError):
                partial.unlink()
            raise StoreError(f"the record of a group cannot be written to {path}: {e.strerror}") from e

    def kept(self) -> tuple[Header, bytes]:
        """Returns ``records`` by name of the group, and ``damaged``: the groups whose records cannot be read."""
        records: dict[str, str] = {}
        damaged: list[str] = []
        for path in self._files():
            try:
                with path.open("rb") as file:
                    entry = typed_json(dict[str, str], file.read(8 * MAX_RECORD))
                records[path.stem] = entry["record"]
            except (OSError, ValueError, KeyError) as e:
                _log.error("the record of a group in %s cannot be read, so this node has no vote on it: %s", path, e)
                damaged.append(path.stem)
        return {}, json.dumps({"records": records, "damaged": damaged}).encode()

    def _files(self) -> list[Path]:
        return sorted(self._directory.glob("*.json"))
