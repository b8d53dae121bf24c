"""Reads users' views: a file NAME.sql has one SELECT over tables or other views, and becomes ``view.NAME``."""

from __future__ import annotations

import os
import re
import stat
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from probing.api.errors import PeerError, ProbingError, QueryRejected
from probing.api.tables import Table
from probing.api.tables.schema import View
from probing.api.text import escape
from probing.federation.sql.names import USER_VIEWS

__all__ = ("UserViews",)

MAX_VIEWS = 64
MAX_BYTES = 64 * 1024
MAX_DOC = 400
FRESH_S = 2.0
_NAME = re.compile(r"[a-z][a-z0-9_]{0,40}")
_Stamp = tuple[tuple[str, int, int, int], ...]


class UserViews:
    """The views of a directory, which is read again when a file has changed. Thread-safe.

    A file that cannot be used becomes a view with a problem; a query that names it gets the problem as its error. Files
    must belong to root or the daemon's user, and must not be writable for other users.
    """

    def __init__(
        self,
        directory: str,
        users: Callable[[], Mapping[str, Table]] = dict,
        *,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """Makes the views. ``users`` returns the tables of users' probes, which views may read, too."""
        self._directory = Path(directory)
        self._users = users
        self._now_s = now_s
        self._lock = threading.Lock()
        self._looked = -FRESH_S
        self._stamp: _Stamp | None = None
        self._unasked = False
        self._views: dict[str, View] = {}

    def views(self) -> Mapping[str, View]:
        """Returns the views by name, ``view.NAME``, read within the last FRESH_S seconds."""
        with self._lock:
            if self._now_s() - self._looked >= FRESH_S:
                stamp = self._look()
                if stamp != self._stamp:
                    self._views = self._read([name for name, *_ in stamp])
                    # If the tables of users' probes were unavailable, the next call tries again.
                    self._stamp = None if self._unasked else stamp
                self._looked = self._now_s()
            return self._views

    def rows(self) -> list[dict[str, str | None]]:
        """Returns rows of probing.views."""
        return [
            {
                "name": view.name.partition(".")[2],
                "sql": view.sql or None,
                "doc": view.doc,
                "problem": view.problem or None,
            }
            for view in self.views().values()
        ]

    def _look(self) -> _Stamp:
        found: list[tuple[str, int, int, int]] = []
        try:
            with os.scandir(self._directory) as entries:
                for entry in entries:
                    if entry.name.endswith(".sql") and len(found) < 4 * MAX_VIEWS:
                        found.append((entry.name, *_version(entry)))
        except OSError:
            return ()
        return tuple(sorted(found)[:MAX_VIEWS])

    def _read(self, files: list[str]) -> dict[str, View]:
        if not files:
            return {}
        # Imported here and below: the parser of SQL takes 10 MB, and most nodes have no views.
        from probing.federation.sql.views import base_tables

        self._unasked = False
        views = [self._load(file) for file in files]
        pending = {view.name: view for view in views if not view.problem}
        done = {view.name: view for view in views if view.problem}
        while pending:
            ready = [view for view in pending.values() if not set(base_tables(view)) & set(pending)]
            for view in ready or pending.values():
                problem = self._problem(view, done) if ready else "it reads itself, perhaps through other views"
                done[view.name] = view._replace(problem=problem, sql="" if problem else view.sql)
            pending = {name: view for name, view in pending.items() if name not in done}
        return dict(sorted(done.items()))

    def _load(self, file: str) -> View:
        from probing.federation.sql.views import base_tables

        name = file.removesuffix(".sql")
        try:
            if not _NAME.fullmatch(name):
                raise QueryRejected(
                    "a view's name has at most 41 characters of a-z, 0-9 and _, and begins with a letter"
                )
            text = _trusted_text(self._directory / file)
            view = View(f"{USER_VIEWS}.{name}", _doc(text), (), text)
            base_tables(view)
        except (OSError, ValueError, ProbingError, RecursionError) as e:
            return View(f"{USER_VIEWS}.{escape(name[:41])}", "", (), "", problem=_words(e))
        return view

    def _problem(self, view: View, others: Mapping[str, View]) -> str:
        from probing.api.tables.views import VIEWS
        from probing.daemon.query.gate import check
        from probing.federation.sql.view_lookup import known_columns, require_columns, tree_of

        try:
            checked = check(view.sql, time.time_ns(), self._users, lambda: others)
            users = {name: [column.name for column in table.columns] for name, table in checked.users.items()}
            require_columns(tree_of(view.sql), known_columns({**VIEWS, **others}, users))
        except ProbingError as e:
            self._unasked |= isinstance(e, PeerError)
            return _words(e)
        return ""


def _version(entry: os.DirEntry[str]) -> tuple[int, int, int]:
    try:
        status = entry.stat()
    except OSError:
        # A broken link is reported when the file is read.
        return 0, 0, 0
    return status.st_mtime_ns, status.st_size, status.st_ino


def _trusted_text(path: Path) -> str:
    # O_NONBLOCK, so that opening a named pipe does not block.
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(fd, "rb") as file:
        for status in (os.fstat(fd), path.parent.stat()):
            if status.st_uid not in (0, os.geteuid()) or status.st_mode & 0o022:
                raise QueryRejected(
                    "other users may write to it: give the file and its directory to root, with mode 644 and 755"
                )
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise QueryRejected("it is not a regular file")
        data = file.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        raise QueryRejected(f"it is longer than {MAX_BYTES} bytes")
    return data.decode()


def _doc(text: str) -> str:
    lines = []
    for line in text.splitlines():
        if not line.startswith("--"):
            break
        lines.append(line.removeprefix("--").strip())
    return " ".join(" ".join(lines).split())[:MAX_DOC]


def _words(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    if isinstance(error, ProbingError):
        return f"{error.message} ({error.hint})" if error.hint else error.message
    return str(getattr(error, "strerror", None) or error)
