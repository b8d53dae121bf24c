"""Registers all tables: built-in tables, and the tables of users' probes and of jobs, which are kept in a file."""

from __future__ import annotations

import json
import logging
import os
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path

from probing.api.errors import ConfigError, FormatError, StoreError
from probing.api.tables import TABLES, Table
from probing.api.tables.user import (
    JOB_SCHEMA,
    MAX_COLUMNS,
    MAX_JOB_COLUMNS,
    UserTable,
    job_columns,
    job_table,
    user_table,
    user_table_from,
    user_table_to,
)
from probing.api.tables.views import VIEWS

__all__ = ("UserTables",)

MAX_TABLES = 256
# The maximum number of tables of jobs, and the maximum number of tables that the jobs of one user may add while the
# daemon runs. After each addition, at least as many tables must be left for others as the user's jobs have added; the
# same holds for the columns of a table. So the first user gets at most half of them, and the next user gets some.
MAX_JOB_TABLES, MAX_OF_USER = 128, 32
MAX_FILE_BYTES = 16 << 20
_log = logging.getLogger(__name__)


class UserTables(Mapping[str, Table]):
    """All tables by name, built-in tables first. Tables of users may be added at any time, from any thread.

    A table and its rows outlive its probe. A table only grows: a dropped column stays, and is NULL in new rows; a
    column never changes its type. So old and new segments form one table.
    """

    def __init__(self, file: Path) -> None:
        """Reads the tables from ``file``, which is written when a table changes. A damaged file is ignored with a
        warning.
        """
        self._file = file
        self._lock = threading.Lock()
        self._user: dict[str, Table] = self._read()
        # What jobs added since the start: the number of tables by user, and the number of columns by (table, user).
        self._made_by: Counter[int] = Counter()
        self._columns_by: Counter[tuple[str, int]] = Counter()

    def __getitem__(self, name: str) -> Table:
        known = TABLES.get(name)
        return known if known is not None else self._user[name]

    def __iter__(self) -> Iterator[str]:
        yield from TABLES
        yield from list(self._user)

    def __len__(self) -> int:
        return len(TABLES) + len(self._user)

    @property
    def folder(self) -> Path:
        """The directory of the file with the tables. The directory belongs to the daemon."""
        return self._file.parent

    def described(self) -> list[UserTable]:
        """Returns the users' tables as JSON for ``user_table_from``."""
        return [user_table_to(table) for table in list(self._user.values())]

    def define(self, wanted: Table) -> Table:
        """Returns the table of a user's probe, including its earlier columns, and writes it to disk.

        Raises ConfigError if a column had another type, or if there are too many tables or columns; StoreError if the
        file cannot be written.
        """
        with self._lock:
            older = self._user.get(wanted.name)
            if older is None and len(self._user) >= MAX_TABLES:
                hint = f"stop the daemon and remove the tables that are not needed from {self._file}"
                raise ConfigError(f"there are {MAX_TABLES} tables of probes and jobs already", hint=hint)
            return self._keep(wanted if older is None else _merged(older, wanted))

    def define_for_job(self, name: str, columns: Mapping[str, str], owner: int) -> Table:
        """Returns the table ``python.NAME`` of jobs: its earlier columns, and ``columns`` (types by name).

        ``owner``: the uid of the job. Raises FormatError for an invalid table, ConfigError if there are too many tables
        or the name is taken, StoreError if the file cannot be written.
        """
        full = f"{JOB_SCHEMA}.{name}"
        if full in TABLES or full in VIEWS:
            raise ConfigError(f"{full} is a table of the daemon", hint="give the job's table another name")
        with self._lock:
            older = self._user.get(full)
            before = {} if older is None else job_columns(older)
            merged = dict(before)
            for column, kind in columns.items():
                kinds = merged.get(column, [])
                merged[column] = kinds if kind in kinds else [*kinds, kind]
            if older is not None and merged == before:
                return older
            table = job_table(name, merged)
            if older is None:
                self._require_place(full, owner)
            added = len(merged) - len(before)
            self._require_columns(full, owner, len(merged), added)
            table = self._keep(table)
            self._made_by[owner] += older is None
            self._columns_by[full, owner] += added
            return table

    def _require_place(self, name: str, owner: int) -> None:
        free, of_owner = MAX_JOB_TABLES - len(self._of_jobs()), self._made_by[owner]
        if of_owner >= min(free - 1, MAX_OF_USER) or len(self._user) >= MAX_TABLES:
            made = f"{of_owner} of them made by uid {owner} since the start"
            raise ConfigError(f"{name} would be one table too many: there are {len(self._user)} tables, {made}")

    def _require_columns(self, name: str, owner: int, columns: int, added: int) -> None:
        of_owner = self._columns_by[name, owner] + added
        if added and of_owner > MAX_JOB_COLUMNS - columns:
            what = (
                f"{name} would have {columns} columns: {of_owner} added by uid {owner}, "
                "and fewer would be left for others"
            )
            raise ConfigError(what, hint="give the job's table another name")

    def _of_jobs(self) -> list[str]:
        return [name for name in self._user if name.startswith(f"{JOB_SCHEMA}.")]

    def drop_empty(self, stored: Callable[[], Collection[str]]) -> None:
        """Drops the tables of jobs that have no stored rows, if jobs have more than half of MAX_JOB_TABLES tables.
        ``stored`` returns the tables with stored rows. Call this before jobs are read.
        """
        with self._lock:
            if len(of_jobs := self._of_jobs()) > MAX_JOB_TABLES // 2:
                empty = {*of_jobs}.difference(stored())
                self._user = {name: table for name, table in self._user.items() if name not in empty}

    def _keep(self, table: Table) -> Table:
        older = self._user.get(table.name)
        if older is None or user_table_to(older) != user_table_to(table):
            changed = {**self._user, table.name: table}
            self._write(changed)
            self._user = changed
        return self._user[table.name]

    def _read(self) -> dict[str, Table]:
        try:
            with open(self._file, "rb") as stream:
                data = stream.read(MAX_FILE_BYTES + 1)
            tables = [user_table_from(value) for value in json.loads(data)[:MAX_TABLES]]
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, TypeError, KeyError, RecursionError, FormatError) as e:
            # These tables cannot be queried until their probes are loaded again; no row is lost.
            _log.warning("the tables of users' probes in %s cannot be read: %s", self._file, e)
            return {}
        return {table.name: table for table in tables}

    def _write(self, tables: Mapping[str, Table]) -> None:
        text = json.dumps([user_table_to(table) for table in tables.values()], indent=1)
        aside = self._file.with_suffix(".new")
        try:
            with open(aside, "w") as stream:
                stream.write(text)
                stream.flush()
                os.fsync(stream.fileno())
            aside.replace(self._file)
        except OSError as e:
            raise StoreError(f"{self._file} cannot be written: {e.strerror}") from e


def _merged(older: Table, wanted: Table) -> Table:
    """Returns ``wanted``, with the missing columns of ``older`` appended."""
    old, new = user_table_to(older), user_table_to(wanted)
    kinds = {name: kind for name, kind, _ in old["columns"]}
    for name, kind, _ in new["columns"]:
        if kinds.get(name, kind) != kind:
            what = f"{wanted.name}.{name} was {kinds[name]} and would now be {kind}"
            raise ConfigError(what, hint="give the column another name: stored rows keep its old type")
    names = {name for name, _, _ in new["columns"]}
    columns = [*new["columns"], *(column for column in old["columns"] if column[0] not in names)]
    if len(columns) > MAX_COLUMNS:
        hint = "give the probe another name: it then gets its own table"
        raise ConfigError(f"{wanted.name} would have {len(columns)} columns, including its earlier columns", hint=hint)
    return user_table(new["name"], wanted.doc, columns)
