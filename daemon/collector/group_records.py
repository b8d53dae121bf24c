"""Keeps the records of groups in the state directory, which the service may not enter.

A record is on disk before the service answers another node, since an answer is a promise that a power cut must not
undo. The collector does not read the records.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from pathlib import Path

from probing.api.errors import StoreError, UsageError
from probing.api.typed import typed_json
from probing.daemon.ipc import Header

__all__ = ("GroupRecords",)

MAX_GROUPS, MAX_RECORD = 1024, 1 << 20
_log = logging.getLogger(__name__)


class GroupRecords:
    """The records in ``directory``, by name of the group. Handlers of the control socket; safe for many threads."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def keep(self, group: str, record: str) -> tuple[Header, bytes]:
        """Writes the record of a group. Raises UsageError for a record that is too large, and StoreError."""
        if len(record) > MAX_RECORD:
            raise UsageError(f"the record of a group has {len(record):,} characters", hint=f"at most {MAX_RECORD:,}")
        path = self._directory / f"{hashlib.sha256(group.encode('utf-8', 'replace')).hexdigest()}.json"
        partial = path.with_suffix(f".{os.urandom(8).hex()}.new")
        try:
            self._directory.mkdir(mode=0o700, exist_ok=True)
            if not path.exists() and len(self._files()) >= MAX_GROUPS:
                raise UsageError(f"this node has {MAX_GROUPS} groups", hint="delete groups that nobody uses")
            with partial.open("x") as file:
                json.dump({"group": group, "record": record}, file)
                file.flush()
                os.fsync(file.fileno())
            partial.replace(path)
            self._sync()
        except OSError as e:
            partial.unlink(missing_ok=True)
            raise StoreError(f"the record of a group cannot be written to {path}: {e.strerror}") from e
        return {}, b""

    def kept(self) -> tuple[Header, bytes]:
        """Returns all records, a dict by name of the group, as JSON. A file that cannot be read is logged."""
        records: dict[str, str] = {}
        for path in self._files():
            try:
                with path.open("rb") as file:
                    entry = typed_json(dict[str, str], file.read(4 * MAX_RECORD))
                records[entry["group"]] = entry["record"]
            except (OSError, ValueError, KeyError) as e:
                _log.warning("the record of a group in %s is ignored, since it cannot be read: %s", path, e)
        return {}, json.dumps({"records": records}).encode()

    def _files(self) -> list[Path]:
        return sorted(self._directory.glob("*.json"))

    def _sync(self) -> None:
        fd = os.open(self._directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
