"""``export``: writes stored rows as Parquet, CSV or JSON lines, day by day, in bounded memory.

The directory has files ``TABLE/date=YYYY-MM-DD/NODE-N.parquet``, which DuckDB, Spark and Trino can read in place, and a
table of contents ``export.json``, which is written last.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import typer

from probing.api.errors import UsageError
from probing.api.text import count, size
from probing.client.export.files import Directory, OneFile
from probing.client.export.nodes import Export, Report, TableReport
from probing.client.export.plan import Wanted, wanted
from probing.client.options import Job, Until
from probing.client.render.output import replacing, write_report
from probing.client.render.progress import Progress
from probing.client.render.table import Field, render
from probing.client.session import job_named, opened, warn
from probing.client.settings import Settings

__all__ = ("EXAMPLES", "Options", "run")

EXAMPLES = ("probingctl export --since 2h --job 4711 -o DIR", "probingctl export --tables comm.ops -o ops.parquet")
_KINDS = ("parquet", "csv", "jsonl")
_FIELDS = (
    Field("TABLE", "table"),
    Field("ROWS", "rows", count, right=True),
    Field("FILES", "files", count, right=True),
    Field("SIZE", "bytes", size, right=True),
)


@dataclass(frozen=True, slots=True)
class Options:
    since: Annotated[
        str | None, typer.Option(metavar="TIME", help="Start: how long before now, or an instant; default: all rows.")
    ] = None
    until: Until = None
    tables: Annotated[str | None, typer.Option(metavar="A,B,C", help="The tables; default: all stored tables.")] = None
    job: Job = None


def run(settings: Settings, options: Options) -> None:
    if settings.output is None:
        raise UsageError("export needs a directory or a file to write", hint="name a directory with -o DIR")
    what = wanted(options.since, options.until, options.tables, options.job)
    kind, single = _kind(settings, what)
    with opened(settings) as cluster, Progress() as progress:
        what = replace(what, job=job_named(cluster, what.job))
        work = Export(cluster, what, progress)
        if single:
            with replacing(settings.output) as file:
                place = OneFile(file, kind)
                report = work.run(place)
                place.end()
        else:
            with Directory.replacing(settings.output, kind) as (directory, aside):
                report = work.run(directory)
                write_report(aside / "export.json", {**report, "format": kind})
    for node in report["nodes"]:
        for warning in node["warnings"]:
            warn(f"{node['node']}: {warning}")
    sys.stdout.write(_summary(report, settings.output if single else None))


def _kind(settings: Settings, what: Wanted) -> tuple[str, bool]:
    """Returns the format, and whether -o names a single file. It does if only one table is exported and the suffix of
    -o is a format.
    """
    assert settings.output is not None
    suffix = settings.output.suffix.removeprefix(".")
    single = suffix in _KINDS and len(what.tables) == 1
    chosen = settings.format if settings.format != "table" else suffix if single else "parquet"
    if chosen not in _KINDS:
        raise UsageError(f"export cannot write {chosen}", hint=f"use one of {', '.join(_KINDS)}")
    if single and chosen != suffix:
        raise UsageError(
            f"{settings.output.name} is not a name for {chosen}", hint=f"use -o NAME.{chosen}, or another -f"
        )
    return chosen, single


def _summary(report: Report, file: Path | None) -> str:
    """Returns a line for each table. ``file``: the single file to which all rows were written; None if there are
    several."""
    totals: dict[str, TableReport] = {}
    for node in report["nodes"]:
        for name, counts in node["tables"].items():
            sums = totals.setdefault(name, {"rows": 0, "files": 0, "bytes": 0})
            sums["rows"] += counts["rows"]
            sums["files"] += counts["files"]
            sums["bytes"] += counts["bytes"]
    if file is not None:
        for sums in totals.values():
            sums["files"], sums["bytes"] = 1, file.stat().st_size
    return render(_FIELDS, [{"table": name, **totals[name]} for name in sorted(totals)], None)
