"""``export``: writes stored rows as Parquet, CSV or JSON lines, day by day, in bounded memory.

A directory has ``TABLE/date=YYYY-MM-DD/NODE-N.parquet``, which DuckDB, Spark and Trino read where it lies, and
``export.json``, which is written last and says what is in it.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from probing.api.errors import PeerError, ProbingError, UsageError
from probing.client.export.files import Counts, Directory, OneFile, Place
from probing.client.export.plan import COLUMNS, TABLES, Day, Found, Wanted, wanted
from probing.client.options import Job
from probing.client.render.output import replacing, write_report
from probing.client.render.progress import Progress
from probing.client.render.table import Field, render
from probing.client.render.text import count, size
from probing.client.session import job_named, opened, warn
from probing.client.settings import Settings
from probing.client.version import program
from probing.federation.fanout import fan_out

if TYPE_CHECKING:
    from probing.client.cluster import Cluster
    from probing.client.connection import Connection

__all__ = ("EXAMPLES", "Options", "run")

EXAMPLES = ("probingctl export --since 2h --job 4711 -o DIR", "probingctl export --tables comm.ops -o ops.parquet")
_KINDS = ("parquet", "csv", "jsonl")
# A day of a busy table takes long to write; nodes allow a stream so much.
_STREAM_S = 3600.0
_AT_ONCE = 4
_STOP_S = 5.0
_MAX_BYTES = 64 << 20
_FIELDS = (
    Field("TABLE", "table"),
    Field("ROWS", "rows", count, right=True),
    Field("FILES", "files", count, right=True),
    Field("SIZE", "bytes", size, right=True),
)


@dataclass(frozen=True, slots=True)
class Options:
    since: Annotated[
        str | None, typer.Option(metavar="TIME", help="How far back to begin, or a time; all there is if left out.")
    ] = None
    until: Annotated[
        str | None, typer.Option(metavar="TIME", help="How far back to end, or a time; now if left out.")
    ] = None
    tables: Annotated[str | None, typer.Option(metavar="A,B,C", help="All stored tables if left out.")] = None
    job: Job = None


def run(settings: Settings, options: Options) -> None:
    if settings.output is None:
        raise UsageError("there is no place to export to", hint="name a directory with -o DIR")
    what = wanted(options.since, options.until, options.tables, options.job)
    kind, single = _kind(settings, what)
    with opened(settings) as cluster, Progress() as progress:
        what = replace(what, job=job_named(cluster, what.job))
        work = _Export(settings, cluster, what, progress)
        if single:
            with replacing(settings.output) as file:
                place = OneFile(file, kind)
                told = work.run(place)
                place.end()
        else:
            with Directory.replacing(settings.output, kind) as (directory, aside):
                told = work.run(directory)
                write_report(aside / "export.json", {**told, "format": kind})
    for node in told["nodes"]:
        for warning in node["warnings"]:
            warn(f"{node['node']}: {warning}")
    sys.stdout.write(_summary(told, settings.output if single else None))


def _kind(settings: Settings, what: Wanted) -> tuple[str, bool]:
    """The format, and whether all goes into one file: one table, and a name that ends in a format."""
    assert settings.output is not None
    suffix = settings.output.suffix.removeprefix(".")
    single = suffix in _KINDS and len(what.tables) == 1
    chosen = settings.format if settings.format != "table" else suffix if single else "parquet"
    if chosen not in _KINDS:
        raise UsageError(f"{chosen} is no format to export", hint=f"one of {', '.join(_KINDS)}")
    if single and chosen != suffix:
        raise UsageError(f"{settings.output.name} is no name for {chosen}", hint=f"-o NAME.{chosen}, or another -f")
    return chosen, single


class _Export:
    """One export of all nodes that are asked."""

    def __init__(self, settings: Settings, cluster: Cluster, what: Wanted, progress: Progress) -> None:
        self._settings = settings
        self._cluster = cluster
        self._what = what
        self._progress = progress
        self._few = threading.Semaphore(_AT_ONCE)
        self._names: dict[str, str] = {}
        self._lock = threading.Lock()
        self._stopped = False
        self._broken: ProbingError | None = None

    def run(self, place: Place) -> dict[str, Any]:
        """What export.json says."""
        cluster = self._cluster

        def ask(address: str, _seconds: float) -> tuple[str, dict[str, Any]]:
            with self._few:
                return self._node(cluster.connection(address), place)

        try:
            gathered = fan_out(cluster.addresses(), ask, _STREAM_S * 24)
        except BaseException:
            self._stop()
            raise
        cluster.outcomes.append(gathered)
        if self._broken is not None:
            raise self._broken
        gathered.require(strict=self._settings.strict)
        nodes = [answered.value for answered in gathered.answered]
        head = {"export_version": 1, "by": program(), **self._what.to_dict()}
        return {**head, "nodes": nodes, "failed": gathered.report()["failed"]}

    def _stop(self) -> None:
        """Nothing is written any more when this returns."""
        self._stopped = True
        self._cluster.cancel()
        for _ in range(_AT_ONCE):
            self._few.acquire(timeout=_STOP_S)

    def _node(self, connection: Connection, place: Place) -> tuple[str, dict[str, Any]]:
        seconds = self._settings.timeout
        status = connection.status(seconds)
        self._claim(status.node, connection.address)
        known = [connection.query(sql, seconds, _MAX_BYTES) for sql in (TABLES, COLUMNS)]
        chosen, left_out = self._what.choose(*known)
        warnings: list[str] = []
        written: dict[str, Counts] = {}
        try:
            for table in chosen:
                written[table.name] = Counts()
                for day in self._days(connection, table):
                    self._day(connection, place, table, day, status.node, written[table.name], warnings)
        except BaseException as e:
            rows = sum(counts.rows for counts in written.values())
            for counts in written.values():
                Directory.forget(counts)
            if rows and isinstance(place, OneFile) and isinstance(e, ProbingError):
                # Its rows cannot be taken out of the one file again.
                self._broken = PeerError(f"{connection.address} broke off: {e.message}", hint=e.hint)
            raise
        tables = {name: {"rows": c.rows, "files": c.files, "bytes": c.bytes} for name, c in written.items()}
        return status.node, {
            "node": status.node, "address": connection.address, "version": status.version, "tables": tables,
            "left_out": left_out, "warnings": list(dict.fromkeys(warnings)),
        }  # fmt: skip

    def _claim(self, node: str, address: str) -> None:
        with self._lock:
            other = self._names.setdefault(node, address)
        if other != address:
            raise PeerError(f"it answers as {node}, as {other} does", hint="give every daemon its own --node-name")

    def _days(self, connection: Connection, table: Found) -> list[Day]:
        if table.live or not table.timed:
            return self._what.days(table, None)
        return self._what.days(table, connection.query(self._what.days_sql(table), _STREAM_S, _MAX_BYTES))

    def _day(
        self,
        connection: Connection,
        place: Place,
        table: Found,
        day: Day,
        node: str,
        total: Counts,
        warnings: list[str],
    ) -> None:
        if self._stopped:
            raise PeerError("the export was ended")
        with connection.stream(day.sql, _STREAM_S) as stream:
            batches: Iterator[Any] = self._progress.counting(iter(stream), to_terminal=False)
            counts = place.day((table.name, day.date, node), stream.schema, batches)
            total.rows += counts.rows
            total.files += counts.files
            total.bytes += counts.bytes
            total.paths.extend(counts.paths)
            warnings.extend(f"{table.name}: {warning}" for warning in stream.warnings)


def _summary(told: dict[str, Any], file: Path | None) -> str:
    """A line a table. ``file`` has all of the only one."""
    totals: dict[str, dict[str, Any]] = {}
    for node in told["nodes"]:
        for name, counts in node["tables"].items():
            total = totals.setdefault(name, {"table": name, "rows": 0, "files": 0, "bytes": 0})
            for key in ("rows", "files", "bytes"):
                total[key] += counts[key]
    if file is not None:
        for total in totals.values():
            total |= {"files": 1, "bytes": file.stat().st_size}
    return render(_FIELDS, [totals[name] for name in sorted(totals)], None)
