"""Reads the rows of all nodes into the files of an export, day by day, in bounded memory."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypedDict

from probing.api.errors import PartialAnswer, PeerError, ProbingError
from probing.api.text import sql_table
from probing.client.export.files import Counts, Directory, OneFile, Place
from probing.client.export.plan import COLUMNS, TABLES, Day, Found, Plan, Wanted
from probing.client.render.progress import Progress
from probing.client.version import program
from probing.client.wire.loop import wait
from probing.client.wire.node import Node
from probing.client.wire.stream import Room, batches
from probing.federation.execution.answer import FailedReport, Reply, twice

if TYPE_CHECKING:
    from probing.client.cluster import Cluster

__all__ = ("Export", "NodeReport", "Report", "TableReport")

# The timeout of a stream, the longest that nodes allow, because writing a day of a busy table takes long.
_STREAM_S = 3600.0
_DAY_OF_STREAMS_S = 24 * _STREAM_S
_AT_ONCE = 4
_STOP_S = 5.0
_MAX_BYTES = 64 << 20


class TableReport(TypedDict):
    rows: int
    files: int
    bytes: int


class NodeReport(TypedDict):
    """The part of one node in the report. ``left_out``: tables without a column ``job``, if one job is exported."""

    node: str
    address: str
    version: str
    tables: dict[str, TableReport]
    left_out: list[str]
    warnings: list[str]


class Report(Plan):
    """The content of export.json, except the format."""

    export_version: int
    by: str
    nodes: list[NodeReport]
    failed: list[FailedReport]


@dataclass(slots=True)
class _Written:
    """The export of one node: its name, the tables so far, and warnings."""

    node: Node
    name: str
    tables: dict[str, Counts] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)


class Export:
    """The export of all nodes of ``cluster``."""

    def __init__(self, cluster: Cluster, wanted: Wanted, progress: Progress) -> None:
        self._cluster = cluster
        self._wanted = wanted
        self._progress = progress
        self._few = threading.Semaphore(_AT_ONCE)
        self._addresses: dict[str, str] = {}
        self._lock = threading.Lock()
        self._stopped = False
        self._broken: ProbingError | None = None

    def run(self, place: Place) -> Report:
        """Writes all rows to ``place``. Raises the nodes' errors if no node answers, or under --strict if any node
        fails.
        """
        cluster = self._cluster

        async def ask(node: Node, _seconds: float) -> tuple[str, NodeReport]:
            return await asyncio.to_thread(self._node, node, place)

        try:
            gathered = cluster.ask(cluster.addresses(), ask, _DAY_OF_STREAMS_S)
        except BaseException:
            self._stop()
            raise
        cluster.outcomes.append(gathered)
        if self._broken is not None:
            raise self._broken
        gathered.require(strict=cluster.strict)
        return {
            "export_version": 1,
            "by": program(),
            **self._wanted.plan(),
            "nodes": [answered.value for answered in gathered.answered],
            "failed": gathered.report()["failed"],
        }

    def _stop(self) -> None:
        """Stops the export, and waits for the threads of nodes to end, at most 5 s for each thread."""
        self._stopped = True
        self._cluster.cancel()
        for _ in range(_AT_ONCE):
            self._few.acquire(timeout=_STOP_S)

    def _node(self, node: Node, place: Place) -> tuple[str, NodeReport]:
        with self._few:
            status = wait(node.status(self._cluster.timeout))
            self._claim(status.node, node.address)
            known = [self._query(node, sql, self._cluster.timeout) for sql in (TABLES, COLUMNS)]
            chosen, left_out = self._wanted.choose(*known)
            written = _Written(node, status.node)
            try:
                for table in chosen:
                    written.tables[table.name] = Counts()
                    days = self._days(written, table)
                    if not days and isinstance(place, OneFile):
                        nothing = f"SELECT * FROM {sql_table(table.name)} WHERE false"
                        place.expect(self._query(node, nothing, self._cluster.timeout).table.schema)
                    for day in days:
                        self._day(written, place, table, day)
            except BaseException as e:
                self._forget(written, place, e)
                raise
        tables: dict[str, TableReport] = {
            name: {"rows": c.rows, "files": c.files, "bytes": c.bytes} for name, c in written.tables.items()
        }
        return written.name, {
            "node": written.name,
            "address": node.address,
            "version": status.version,
            "tables": tables,
            "left_out": left_out,
            "warnings": list(dict.fromkeys(written.warnings)),
        }

    def _forget(self, written: _Written, place: Place, error: BaseException) -> None:
        rows = sum(counts.rows for counts in written.tables.values())
        for counts in written.tables.values():
            Directory.forget(counts)
        if isinstance(error, PartialAnswer):
            # Raised only under --strict: the node itself lacks rows, so the whole export fails.
            self._broken = error
        elif rows and isinstance(place, OneFile) and isinstance(error, ProbingError):
            # In one file the rows that the node has already sent cannot be removed again.
            self._broken = PeerError(f"{written.node.address} broke off: {error.message}", hint=error.hint)

    def _claim(self, name: str, address: str) -> None:
        with self._lock:
            other = self._addresses.setdefault(name, address)
        if other != address:
            raise twice(name, other)

    def _query(self, node: Node, sql: str, seconds: float) -> Reply:
        return wait(node.replies({"": sql}, seconds, Room(_MAX_BYTES), strict=self._cluster.strict))[0]

    def _days(self, written: _Written, table: Found) -> list[Day]:
        if table.live or not table.timed:
            return self._wanted.days(table, None)
        reply = self._query(written.node, self._wanted.days_sql(table), _STREAM_S)
        # A day whose rows are all missing gets no query of its own, so only this answer can warn about that day.
        written.warnings.extend(f"{table.name}: {warning}" for warning in reply.warnings)
        return self._wanted.days(table, reply)

    def _day(self, written: _Written, place: Place, table: Found, day: Day) -> None:
        if self._stopped:
            raise PeerError("the export was ended")
        stream = wait(written.node.stream(day.sql, _STREAM_S, strict=self._cluster.strict))
        try:
            rows: Iterator[Any] = self._progress.counting(batches(stream), to_terminal=False)
            name = (table.name, day.date, written.name)
            written.tables[table.name].add(place.day(name, wait(stream.schema()), rows))
            written.warnings.extend(f"{table.name}: {warning}" for warning in stream.warnings)
        finally:
            stream.close()
