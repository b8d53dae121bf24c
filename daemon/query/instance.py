"""Keeps the DuckDB of a worker from one request to the next: making one takes longer than most queries."""

from __future__ import annotations

from collections.abc import Collection

import duckdb

from probing.daemon.query.views import quoted_list

__all__ = ("Instance",)


class Instance:
    """Gives each request a connection without tables. For one request at a time.

    A locked connection sets nothing, and opens files only in folders that a request had until then.
    """

    def __init__(self, memory_bytes: int, threads: int) -> None:
        self._memory_bytes = memory_bytes
        self._threads = threads
        self._folders: frozenset[str] = frozenset()
        self._kept: duckdb.DuckDBPyConnection | None = None

    def prepare(self) -> duckdb.DuckDBPyConnection:
        """Returns the kept DuckDB, and makes it if there is none: ahead of a request, so that none waits for it."""
        if self._kept is None:
            made = self.unlocked()
            self.lock(made, self._folders)
            self._kept = made
        return self._kept

    def connect(self, folders: Collection[str]) -> duckdb.DuckDBPyConnection:
        """Returns a locked connection to the kept DuckDB, which may open files in ``folders``."""
        if not self._folders.issuperset(folders):
            self._folders |= frozenset(folders)
            self.discard()
        return self.prepare().cursor()

    def unlocked(self) -> duckdb.DuckDBPyConnection:
        """Returns the only connection to a DuckDB of its own, which loads no extension and sees no Python variable."""
        connection = duckdb.connect(
            ":memory:",
            config={
                "threads": str(self._threads),
                "async_threads": str(self._threads),
                "memory_limit": f"{self._memory_bytes // 1_000_000}MB",
                "temp_directory": "",
                "autoinstall_known_extensions": "false",
                "autoload_known_extensions": "false",
                "python_enable_replacements": "false",
                # Its memory would be held from one request to the next.
                "enable_external_file_cache": "false",
            },
        )
        connection.execute("SET GLOBAL TimeZone = 'UTC'")
        return connection

    def lock(self, connection: duckdb.DuckDBPyConnection, folders: Collection[str]) -> None:
        """From now on ``connection`` opens files in ``folders`` alone, and sets nothing."""
        if folders:
            connection.execute(f"SET allowed_directories = {quoted_list(sorted(folders))}")
        connection.execute("SET enable_external_access = false")
        connection.execute("SET lock_configuration = true")

    def release(self, connection: duckdb.DuckDBPyConnection, schemas: Collection[str]) -> None:
        """Closes ``connection``, after it dropped ``schemas``; after an error the next request gets a new DuckDB."""
        try:
            for schema in schemas:
                connection.execute(f'DROP SCHEMA IF EXISTS "{schema}" CASCADE')
        except duckdb.Error:
            self.discard()
        connection.close()

    def discard(self) -> None:
        """Closes the kept DuckDB, which an error may have left in any state."""
        kept, self._kept = self._kept, None
        if kept is not None:
            kept.close()
