"""Registers all tables: the built-in tables, and those of present and former probes of users, which a file keeps."""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from probing.api.errors import ConfigError, FormatError, StoreError
from probing.api.tables import TABLES, Table
from probing.api.tables.user import MAX_COLUMNS, user_table, user_table_from, user_table_to
from probing.daemon.user_probes.spec import Spec

__all__ = ("UserTables",)

MAX_TABLES = 256
MAX_FILE_BYTES = 16 << 20
_log = logging.getLogger(__name__)


class UserTables(Mapping[str, Table]):
    """All tables by name, built-in ones first. Users' tables are added while it is in use, from any thread.

    A table outlives its probe, as its rows do. It only grows: a dropped column stays, and is NULL in new rows; a column
    never changes its type. So old and new segments form one table.
    """

    def __init__(self, file: Path) -> None:
        """Reads the tables from ``file``, which is written when a table changes. A damaged file is ignored with a
        warning.
        """
        self._file = file
        self._lock = threading.Lock()
        self._user: dict[str, Table] = self._read()

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
        """The directory of the file, which is the daemon's own."""
        return self._file.parent

    def described(self) -> list[dict[str, Any]]:
        """Returns the users' tables as JSON for ``user_table_from``."""
        return [user_table_to(table) for table in list(self._user.values())]

    def define(self, spec: Spec) -> Table:
        """Returns the table of ``spec``, including the columns that it had before, and writes it to disk.

        Raises ConfigError if a column had another type, StoreError if the file cannot be written.
        """
        wanted = spec.table
        with self._lock:
            older = self._user.get(wanted.name)
            if older is None and len(self._user) >= MAX_TABLES:
                hint = f"stop the daemon and remove those that are not needed from {self._file}"
                raise ConfigError(f"there are {MAX_TABLES} tables of probes already", hint=hint)
            table = wanted if older is None else _merged(older, wanted)
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
    """Returns ``wanted`` with the columns of ``older`` that it lacks appended."""
    old, new = user_table_to(older), user_table_to(wanted)
    kinds = {name: kind for name, kind, _ in old["columns"]}
    for name, kind, _ in new["columns"]:
        if kinds.get(name, kind) != kind:
            what = f"{wanted.name}.{name} was {kinds[name]} and would now be {kind}"
            raise ConfigError(what, hint="give the column another name: stored rows keep its old type")
    names = {name for name, _, _ in new["columns"]}
    columns = [*new["columns"], *(column for column in old["columns"] if column[0] not in names)]
    if len(columns) > MAX_COLUMNS:
        hint = "give the probe another name, and so a table of its own"
        raise ConfigError(f"{wanted.name} would have {len(columns)} columns, including its earlier columns", hint=hint)
    return user_table(new["name"], wanted.doc, columns)
