"""Settings that can be changed while the daemon runs: for all processes, for a job, or for one process.

The most specific change applies: the change for the process, or else for its job, or else for all processes, or else
the configuration. A change can expire, and can be kept across a restart.
"""

from __future__ import annotations

import contextlib
import difflib
import json
import logging
import os
import threading
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import msgspec

from probing.api.errors import ConfigError, ProbingError, StoreError, UsageError
from probing.api.typed import typed_json
from probing.daemon.collector.settings import check_setting
from probing.daemon.config import Config, checked_text, is_collected, options, text_of
from probing.daemon.source import Identity
from probing.daemon.store.maintenance.grace import Deletion

__all__ = ("SETTINGS", "Changes")

# The settings that can be changed. True: the setting can also be changed for a single job or process.
SETTINGS = {
    "sampling.hz": True,
    "sampling.off_cpu": True,
    "sampling.torch_modules": True,
    "sampling.torch_modules_interval_s": False,
    "variables.watch": True,
    "variables.interval_s": False,
    "cuda.syncs": False,
    "cuda.memory": False,
    "cuda.launches": False,
    "logs.enabled": True,
    "job_rows.enabled": True,
    "labels.enabled": True,
    "store.max_bytes": False,
    "store.keep_free_bytes": False,
    "store.max_age_days": False,
    "store.table_max_bytes": False,
    "store.table_max_age_days": False,
}
MAX_CHANGES = 1024
_MAX_FILE = 1 << 20
_log = logging.getLogger(__name__)
_Scope = tuple[str, str, int, int]


class _Change(msgspec.Struct, frozen=True):
    """A changed setting. ``until_ns``: when the change expires, UTC ns; 0: never."""

    key: str
    text: str
    job: str
    pid: int
    start_ns: int
    until_ns: int
    persisted: bool

    @property
    def scope(self) -> _Scope:
        return self.key, self.job, self.pid, self.start_ns


class Changes:
    """The changed settings. Thread-safe. ``listeners`` are called, without arguments, after every change.

    ``path``: the file of changes that outlive the daemon. ``now_ns`` returns UTC ns. ``deletes`` returns the stored
    rows that given values would delete; ``waiting`` returns, by key, the rows that the current values will delete.
    """

    def __init__(self, config: Config, path: Path, now_ns: Callable[[], int]) -> None:
        self.listeners: list[Callable[[], None]] = []
        self.deletes: Callable[[Callable[[str], Any]], Deletion] = lambda _: Deletion()
        self.waiting: Callable[[], Mapping[str, Deletion]] = dict
        self._config = config
        self._path = path
        self._now_ns = now_ns
        self._lock = threading.Lock()
        self._changes: dict[_Scope, _Change] = {c.scope: c for c in self._read()}

    def value(self, key: str, who: Identity | None = None) -> Any:
        """Returns the value of a setting for the process ``who``; None: for all processes."""
        scopes: list[_Scope] = [(key, "", 0, 0)]
        if who is not None:
            scopes = [(key, "", who.pid, who.start_ns), (key, who.job, 0, 0), *scopes]
        now = self._now_ns()
        with self._lock:
            for scope in scopes:
                found = self._changes.get(scope)
                if found is not None and not _over(found, now):
                    return checked_text(key, found.text)
        return checked_text(key, text_of(self._config, key))

    def change(
        self,
        key: str,
        text: str,
        *,
        job: str = "",
        process: tuple[int, int] = (0, 0),
        for_ms: int = 0,
        persist: bool = False,
        confirmed: bool = False,
    ) -> None:
        """Changes a setting. Raises UsageError or ConfigError for a wrong value, UsageError if the value would delete
        rows and the change is not ``confirmed``, StoreError if the file cannot be written.
        """
        self._check(key, bool(job or process[0]))
        self._require(key, text, confirmed=confirmed)
        if persist and process[0]:
            raise UsageError("a change for one process cannot outlive the process", hint="persist it for the job")
        until = self._now_ns() + for_ms * 1_000_000 if for_ms else 0
        made = _Change(key, text, job, *process, until, persist)
        with self._lock:
            if len(self._changes) >= MAX_CHANGES and made.scope not in self._changes:
                raise ConfigError(f"there are {MAX_CHANGES} changes already", hint="undo some with --reset")
            self._put({**self._changes, made.scope: made})
        self._notify()

    def reset(self, key: str, *, job: str = "", process: tuple[int, int] = (0, 0), confirmed: bool = False) -> None:
        """Removes a change, if there is one. Raises StoreError, and UsageError in the same cases as ``change``."""
        self._check(key, bool(job or process[0]))
        self._require(key, text_of(self._config, key), confirmed=confirmed)
        with self._lock:
            self._put({s: c for s, c in self._changes.items() if s != (key, job, *process)})
        self._notify()

    def effect(self, key: str, text: str | None) -> Deletion:
        """Returns the rows that would be deleted if ``key`` were set to ``text``, or reset to the configuration's value
        (None).

        Raises UsageError or ConfigError for a wrong value, StoreError.
        """
        self._check(key, particular=False)
        value = checked_text(key, text_of(self._config, key) if text is None else text)
        check_setting(key, value)
        if is_collected(key):
            return Deletion()
        return self.deletes(lambda name: value if name == key else self.value(name))

    def forget(self, pid: int, start_ns: int) -> None:
        """Drops the changes for a process that ended."""
        with self._lock:
            self._changes = {s: c for s, c in self._changes.items() if s[2:] != (pid, start_ns)}

    def tick(self) -> None:
        """Removes changes that have expired."""
        now = self._now_ns()
        with self._lock:
            over = [c for c in self._changes.values() if _over(c, now)]
            if over:
                with contextlib.suppress(StoreError):
                    self._put({s: c for s, c in self._changes.items() if c not in over})
        if over:
            self._notify()

    def to_list(self, key: str = "") -> list[dict[str, object]]:
        """Returns the values of the setting ``key`` (empty: of all settings), as dicts with the fields of
        probing.v1.Setting: the value for all processes, and a value for each changed job or process. Raises UsageError.
        """
        if key:
            self._check(key, particular=False)
        docs = {name: option.doc for name, option in options()}
        found = []
        waiting = self._waiting()
        with self._lock:
            changes = list(self._changes.values())
        for name in [key] if key else SETTINGS:
            common: dict[str, object] = {"key": name, "default": text_of(self._config, name), "doc": docs[name]}
            if name in waiting:
                common["deletes"] = self.described(waiting[name])
            own = [c for c in changes if c.key == name]
            if not any(c.scope[1:] == ("", 0, 0) for c in own):
                found.append({**common, "value": common["default"]})
            found += [{**common, **_shown(c)} for c in sorted(own, key=lambda c: (c.job, c.pid))]
        return found

    def described(self, deletion: Deletion) -> dict[str, int]:
        """Returns ``deletion`` as fields of probing.v1.Deletion."""
        begins_ns = self._now_ns() + int(deletion.left_s * 1e9)
        return {
            "segments": deletion.segments,
            "rows": deletion.rows,
            "bytes": deletion.size,
            "begins_ns": begins_ns,
        }

    def _waiting(self) -> Mapping[str, Deletion]:
        try:
            return self.waiting()
        except StoreError as e:
            _log.warning("cannot compute which rows the limits will delete: %s", e.message)
            return {}

    def _require(self, key: str, text: str, *, confirmed: bool) -> None:
        check_setting(key, checked_text(key, text))
        if is_collected(key) or confirmed:
            return
        effect = self.effect(key, text)
        if effect.segments:
            rows = f"{effect.rows} row{'s' if effect.rows != 1 else ''}"
            raise UsageError(
                f"{key} = {text[:80]} would delete {rows} ({effect.size} bytes in {effect.segments} segments)",
                hint=f"confirm with --yes: the rows are deleted {effect.left_s:.0f} s later, unless the limit is reset",
            )

    def _check(self, key: str, particular: bool) -> None:
        if key not in SETTINGS:
            raise _unknown(key[:80], {name for name, _ in options()})
        if particular and not SETTINGS[key]:
            raise UsageError(f"{key} can only be set for all processes", hint="leave --job and --pid out")

    def _notify(self) -> None:
        for listener in self.listeners:
            listener()

    def _put(self, changes: dict[_Scope, _Change]) -> None:
        before, after = (sorted((c for c in g.values() if c.persisted), key=repr) for g in (self._changes, changes))
        if before != after:
            self._write(after)
        self._changes = changes

    def _write(self, kept: list[_Change]) -> None:
        partial = self._path.with_suffix(".new")
        try:
            with partial.open("w") as file:
                json.dump([msgspec.structs.asdict(c) for c in kept], file, indent=1)
                file.flush()
                os.fsync(file.fileno())
            partial.replace(self._path)
        except OSError as e:
            raise StoreError(f"the change cannot be written to {self._path}: {e.strerror}") from e

    def _read(self) -> list[_Change]:
        try:
            with self._path.open("rb") as file:
                found = typed_json(list[_Change], file.read(_MAX_FILE))
            for change in found:
                self._check(change.key, bool(change.job or change.pid))
                check_setting(change.key, checked_text(change.key, change.text))
        except FileNotFoundError:
            return []
        except (OSError, ValueError, ProbingError) as e:
            # A damaged file must not prevent the start; its changes are lost and have to be made again.
            _log.warning("the changed settings in %s are ignored, since the file cannot be read: %s", self._path, e)
            return []
        return found[:MAX_CHANGES]


def _over(change: _Change, now_ns: int) -> bool:
    return bool(change.until_ns) and change.until_ns <= now_ns


def _shown(change: _Change) -> dict[str, object]:
    return {
        "value": change.text,
        "job": change.job,
        "pid": change.pid,
        "until_ns": change.until_ns,
        "persisted": change.persisted,
    }


def _unknown(key: str, known: Collection[str]) -> UsageError:
    """Returns an error that says why ``key`` cannot be changed. ``known``: all keys of the configuration file."""
    if key in known:
        hint = "set it in the configuration file and restart; `probingctl config` lists what can be changed at run time"
        return UsageError(f"{key} cannot be changed while the daemon runs", hint=hint)
    near = difflib.get_close_matches(key, [*SETTINGS, *known], n=1)
    guess = f"did you mean {near[0]}? " if near else ""
    return UsageError(f"there is no setting {key!r}", hint=f"{guess}`probingctl config` lists all")
