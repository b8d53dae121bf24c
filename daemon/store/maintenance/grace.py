"""Delays new, stricter limits, so that a wrong limit can be taken back before it deletes rows.

The delay passes only while the store is open. CLOCK_BOOTTIME measures the delay, so a jump of the wall clock does not
end it. Delayed limits are kept in ``limits.json``, and stay delayed after a restart.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple, TypedDict

from probing.api.errors import FormatError
from probing.api.typed import typed_json
from probing.daemon.store.files import Files, write_all
from probing.daemon.store.limits import StoreLimits, TableLimits

__all__ = ("LIMITS_FILE", "Deletion", "Grace")

LIMITS_FILE = "limits"
_MAX_FILE = 1 << 20
# The interval at which the remaining time is written, s: a restart delays a limit by at most this time.
_WRITE_S = 60.0
# The pause before the remaining time is written again after a failure, s.
_RETRY_S = 1.0
_BYTES, _FREE, _AGE = "store.max_bytes", "store.keep_free_bytes", "store.max_age_days"
_TABLE_BYTES, _TABLE_AGE = "store.table_max_bytes", "store.table_max_age_days"
# Limits by setting, or by SETTING:TABLE for tables. A larger value keeps more rows; a missing value keeps all.
_Bounds = dict[str, float]


class Deletion(NamedTuple):
    """The rows that a limit will delete in ``left_s`` seconds. ``size``: bytes."""

    segments: int = 0
    rows: int = 0
    size: int = 0
    left_s: float = 0.0


class _Waiting(NamedTuple):
    """The limit ``kept``, which applies for ``left_s`` seconds more in place of a stricter limit."""

    kept: float
    left_s: float


class _Kept(TypedDict):
    limits: dict[str, float]
    waiting: dict[str, _Waiting]


class Grace:
    """The limits that are still delayed. ``Space`` owns this object and calls it from one thread at a time.
    ``problem``: why the file cannot be written.
    """

    def __init__(self, files: Files, root: Path, boot_ns: int) -> None:
        self._files = files
        self._path = root / f"{LIMITS_FILE}.json"
        self._wanted: _Bounds | None = None
        self._waiting: dict[str, _Waiting] = {}
        self._boot_ns = boot_ns
        self._unwritten_s = 0.0
        self._loaded = False
        self.problem = ""

    def in_force(self, wanted: StoreLimits, boot_ns: int) -> StoreLimits:
        """Returns the limits that apply now: ``wanted``, but with the previous value of each limit that became
        stricter, until the delay of that limit has passed.

        ``boot_ns`` is CLOCK_BOOTTIME. The limits of the first call apply at once, unless the file has earlier limits.
        """
        passed_s, self._boot_ns = max(0, boot_ns - self._boot_ns) / 1e9, boot_ns
        if wanted.grace_s <= 0:
            self._wanted, self._waiting = _bounds(wanted), {}
            return wanted
        if not self._loaded:
            self._loaded = True
            self._read()
            passed_s = 0.0
        before = set(self._waiting)
        self._waiting = {
            name: w._replace(left_s=w.left_s - passed_s) for name, w in self._waiting.items() if w.left_s > passed_s
        }
        changed = self._want(_bounds(wanted), wanted.grace_s)
        self._unwritten_s += passed_s
        due = self._unwritten_s >= (_RETRY_S if self.problem else _WRITE_S)
        if changed or before != set(self._waiting) or (due and (self._waiting or self.problem)):
            self._write()
        return self.without((), wanted)

    def without(self, keys: Collection[str], wanted: StoreLimits) -> StoreLimits:
        """Returns the limits that apply now, except that the settings ``keys`` have their wanted values."""
        kept = {name: w.kept for name, w in self._waiting.items() if name.partition(":")[0] not in keys}
        return _with_bounds(wanted, {**_bounds(wanted), **kept})

    def waiting(self) -> dict[str, float]:
        """Returns the seconds until a stricter limit deletes rows, by setting."""
        found: dict[str, float] = {}
        for name, waiting in self._waiting.items():
            key = name.partition(":")[0]
            found[key] = min(waiting.left_s, found.get(key, math.inf))
        return found

    def _want(self, wanted: _Bounds, grace_s: float) -> bool:
        before, self._wanted = self._wanted, wanted
        if before is None or before == wanted:
            return before is None
        for name in {*before, *wanted}:
            old, new = before.get(name, math.inf), wanted.get(name, math.inf)
            waiting = self._waiting.pop(name, None)
            kept = waiting.kept if waiting else old
            if new < kept:
                # If a limit that is still delayed becomes even stricter, its delay starts again; otherwise the delay
                # continues.
                self._waiting[name] = waiting if waiting and new >= old else _Waiting(kept, grace_s)
        return True

    def _read(self) -> None:
        try:
            found = typed_json(_Kept, self._files.read(self._path, _MAX_FILE))
            self._wanted, self._waiting = found["limits"], found["waiting"]
        except FileNotFoundError:
            return
        except (OSError, FormatError, ValueError):
            # The store opens even with a damaged file. Then the limits of the first call apply at once.
            self._wanted, self._waiting = None, {}

    def _write(self) -> None:
        self._unwritten_s = 0.0
        text = json.dumps({"limits": self._wanted, "waiting": self._waiting}, indent=1)
        partial = self._path.with_suffix(".new")
        try:
            self._files.unlink(partial)
            fd = self._files.create(partial)
            try:
                write_all(self._files, fd, text.encode())
                self._files.fsync(fd)
            finally:
                self._files.close(fd)
            self._files.rename(partial, self._path)
            self.problem = ""
        except OSError as e:
            with contextlib.suppress(OSError):
                self._files.unlink(partial)
            self.problem = f"waiting limits cannot be saved for the next start: {e.strerror or e}"


def _bounds(limits: StoreLimits) -> _Bounds:
    bounds: _Bounds = {_BYTES: limits.max_bytes, _FREE: -limits.keep_free_bytes, _AGE: limits.max_age_s}
    for table, own in limits.tables.items():
        if own.max_bytes is not None:
            bounds[f"{_TABLE_BYTES}:{table}"] = own.max_bytes
        if own.max_age_s is not None:
            bounds[f"{_TABLE_AGE}:{table}"] = own.max_age_s
    return bounds


def _with_bounds(limits: StoreLimits, bounds: Mapping[str, float]) -> StoreLimits:
    tables: dict[str, TableLimits] = {}
    for name, bound in bounds.items():
        key, colon, table = name.partition(":")
        if colon and math.isfinite(bound):
            own = tables.get(table, TableLimits())
            tables[table] = own._replace(max_bytes=int(bound)) if key == _TABLE_BYTES else own._replace(max_age_s=bound)
    return replace(
        limits,
        max_bytes=int(bounds[_BYTES]),
        keep_free_bytes=int(-bounds[_FREE]),
        max_age_s=bounds[_AGE],
        tables=tables,
    )
