"""Reads the rows of all nodes into the files of an export, day by day, in bounded memory."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypedDict

from probing.api.errors import PeerError, ProbingError
from probing.client.export.files import Counts, Directory, OneFile, Place
from probing.client.export.plan import COLUMNS, TABLES, Day, Found, Plan, Wanted
from probing.client.render.progress import Progress
from probing.client.version import program
from probing.federation.execution.fanout import FailedReport, fan_out

if TYPE_CHECKING:
    from probing.client.cluster import Cluster
    from probing.client.wire.connection import Connection

__all__ = ("Export", "NodeReport", "Report", "TableReport")

# A day of a busy table takes long to write; nodes allow a stream so much.
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
    """``left_out``: tables without a job, where one job is exported."""

    node: str
    address: str
    version: str
    tables: dict[str, TableReport]
    left_out: list[str]
    warnings: list[str]


class Report(Plan):
    """The content of export.json, but for the format."""

    export_version: int
    by: str
    nodes: list[NodeReport]
    failed: list[FailedReport]


@dataclass(slots=True)
class _Node:
    """The export of one node: its tables so far, and warnings."""

    connection: Connection
    name: str
    tables: dict[str, Counts] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)


class Export:
    """One export of all nodes of ``cluster``."""

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
        """Writes all rows to ``place``. Raises what the nodes raise where none answers, or any under --strict."""
        cluster = self._cluster

        def ask(address: str, _seconds: float) -> tuple[str, NodeReport]:
            with self._few:
                return self._node(cluster.connection(address), place)

        try:
            gathered = fan_out(cluster.addresses(), ask, _DAY_OF_STREAMS_S)
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
        """Returns when nothing is written any more."""
        self._stopped = True
        self._cluster.cancel()
        for _ in range(_AT_ONCE):
            self._few.acquire(timeout=_STOP_S)

    def _node(self, connection: Connection, place: Place) -> tuple[str, NodeReport]:
        seconds = self._cluster.timeout
        status = connection.status(seconds)
        self._claim(status.node, connection.address)
        known = [connection.query(sql, seconds, _MAX_BYTES) for sql in (TABLES, COLUMNS)]
        chosen, left_out = self._wanted.choose(*known)
        node = _Node(connection, status.node)
        try:
            for table in chosen:
                node.tables[table.name] = Counts()
                for day in self._days(connection, table):
                    self._day(node, place, table, day)
        except BaseException as e:
            self._forget(node, place, e)
            raise
        tables: dict[str, TableReport] = {
            name: {"rows": c.rows, "files": c.files, "bytes": c.bytes} for name, c in node.tables.items()
        }
        return node.name, {
            "node": node.name,
            "address": connection.address,
            "version": status.version,
            "tables": tables,
            "left_out": left_out,
            "warnings": list(dict.fromkeys(node.warnings)),
        }

    def _forget(self, node: _Node, place: Place, error: BaseException) -> None:
        rows = sum(counts.rows for counts in node.tables.values())
        for counts in node.tables.values():
            Directory.forget(counts)
        if rows and isinstance(place, OneFile) and isinstance(error, ProbingError):
            # Its rows cannot be taken out of the one file again.
            self._broken = PeerError(f"{node.connection.address} broke off: {error.message}", hint=error.hint)

    def _claim(self, node: str, address: str) -> None:
        with self._lock:
            other = self._addresses.setdefault(node, address)
        if other != address:
            raise PeerError(f"it answers as {node}, as {other} does", hint="give every daemon its own --node-name")

    def _days(self, connection: Connection, table: Found) -> list[Day]:
        if table.live or not table.timed:
            return self._wanted.days(table, None)
        return self._wanted.days(table, connection.query(self._wanted.days_sql(table), _STREAM_S, _MAX_BYTES))

    def _day(self, node: _Node, place: Place, table: Found, day: Day) -> None:
        if self._stopped:
            raise PeerError("the export was ended")
        with node.connection.stream(day.sql, _STREAM_S) as stream:
            batches: Iterator[Any] = self._progress.counting(iter(stream), to_terminal=False)
            node.tables[table.name].add(place.day((table.name, day.date, node.name), stream.schema, batches))
            node.warnings.extend(f"{table.name}: {warning}" for warning in stream.warnings)
