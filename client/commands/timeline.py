"""``timeline``: writes a range of a job's time as a trace for Perfetto, Chrome, or Holistic Trace Analysis (HTA), or as
an HTML file that shows the timeline of the page.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any

import typer

from probing.api.errors import NotFound, UsageError
from probing.api.numpy_import import allow_numpy
from probing.api.text import count, escape, plural, size, utc
from probing.client.options import Job
from probing.client.render.output import replacing, write_objects
from probing.client.render.progress import StatusLine
from probing.client.session import opened
from probing.client.settings import Settings
from probing.client.zone import when

if TYPE_CHECKING:
    from probing.client.timeline.reading import Timeline

__all__ = ("EXAMPLES", "Options", "run")

EXAMPLES = (
    "probingctl timeline --all-nodes --job 4711 --since 2m -o job.pftrace",
    "probingctl timeline --all-nodes --job 4711 --from 08:15Z --to 08:20Z -o DIR",
    "probingctl timeline --all-nodes --job 4711 --since 10m -o job.html",
)
_PERFETTO = (".pftrace", ".perfetto-trace")
_NAMES = f"-o NAME{_PERFETTO[0]} for Perfetto, NAME.json for Chrome, NAME.html for a browser, or a directory for HTA"


@dataclass(frozen=True, slots=True)
class Options:
    job: Job = None
    since: Annotated[
        str, typer.Option("--since", "--from", metavar="TIME", help="Start: how long before now, or an instant.")
    ] = "5m"
    until: Annotated[
        str | None,
        typer.Option("--until", "--to", metavar="TIME", help="End, given as for --since; default: now."),
    ] = None


def run(settings: Settings, options: Options) -> None:
    if options.job is None:
        raise UsageError("timeline needs a job", hint="name it with --job; `probingctl ps` lists the jobs")
    write = _writer(settings.output)
    # Comes before the import of pyarrow, because pyarrow looks for numpy only at that time.
    allow_numpy()
    from probing.client.timeline.reading import timeline as timeline_of

    with opened(settings) as cluster:
        timeline = timeline_of(cluster, options.job, options.since, options.until)
        with StatusLine(lambda past: _progress(timeline, past)):
            files = write(timeline)
        report = _report(timeline, files)
    # -f is the format of the report; the name of the file decides the format of the trace.
    shown = replace(settings, output=None, format=settings.format if settings.named else "table")
    write_objects(shown, report, _text(report), report["files"])


def _writer(output: Path | None) -> Callable[[Timeline], list[Path]]:
    """Returns the function that writes a timeline to ``output``. The suffix of ``output`` decides the format."""
    if output is None:
        raise UsageError("timeline needs a file or a directory to write", hint=_NAMES)
    suffix = output.suffix.lower()
    if output.is_dir() or not suffix:
        return lambda timeline: _directory(timeline, output)
    if suffix not in (*_PERFETTO, ".json", ".html"):
        raise UsageError(f"-o {output.name}: unknown suffix of a trace file: {suffix}", hint=_NAMES)
    return lambda timeline: _file(timeline, output)


def _file(timeline: Timeline, output: Path) -> list[Path]:
    from probing.client.timeline.chrome import write_chrome
    from probing.client.timeline.html import write_html
    from probing.client.timeline.perfetto import write_perfetto

    writers: dict[str, Callable[[Timeline, IO[bytes]], None]] = {".json": write_chrome, ".html": write_html}
    with replacing(output) as file:
        writers.get(output.suffix.lower(), write_perfetto)(timeline, file)
        _require(timeline)
    return [output]


def _directory(timeline: Timeline, output: Path) -> list[Path]:
    from probing.client.export.files import Directory
    from probing.client.timeline.kineto import write_kineto

    with Directory.replacing(output, "json") as (_, aside):
        written = write_kineto(timeline, aside)
        _require(timeline)
        if not written:
            raise NotFound(
                f"no process of job {timeline.job} in this range has a rank",
                hint="HTA needs ranks; -o NAME.pftrace does not",
            )
    return [output / path.relative_to(aside) for path in written]


def _require(timeline: Timeline) -> None:
    if not any(timeline.counts[name] for name in ("operations", "steps", "samples")):
        begin, end = when(utc(timeline.begin)), when(utc(timeline.end))
        hint = "`probingctl ps --ended` shows when jobs ended; --since and --until name another range"
        raise NotFound(f"there are no rows of job {timeline.job} from {begin} until {end}", hint=hint)


def _progress(timeline: Timeline, past: float) -> str:
    expected = count(max(timeline.rows, timeline.expected))
    return f"{plural(timeline.rows, 'row')} of about {expected}, {past:.1f} s, Ctrl-C ends it"


def _report(timeline: Timeline, files: Sequence[Path]) -> dict[str, Any]:
    processes = timeline.names.processes.values
    return {
        "job": timeline.job,
        "from": utc(timeline.begin),
        "to": utc(timeline.end),
        "files": [{"file": str(path), "bytes": path.stat().st_size} for path in files],
        "nodes": len({process.node for process in processes}),
        "processes": len(processes),
        **timeline.counts,
        "findings": len(timeline.findings),
        "gaps": sum(1 for _ in timeline.losses_of_job()),
        "clocks": [clock._asdict() for clock in timeline.clocks],
        "notes": timeline.notes,
    }


def _text(report: dict[str, Any]) -> str:
    """Returns lines about the files, the rows in them, and the gaps of the trace."""
    files = report["files"]
    name = files[0]["file"] if len(files) == 1 else f"{len(files)} files, the first is {files[0]['file']}"
    counts = [
        f"{count(report[key])} {key.replace('_', ' ')}" for key in ("operations", "steps", "samples", "counter_values")
    ]
    whole = f"{plural(report['processes'], 'process')} on {plural(report['nodes'], 'node')}"
    lines = [
        f"{name}: {size(sum(file['bytes'] for file in files))}",
        f"job {report['job']} from {when(report['from'])} until {when(report['to'])}: {whole}",
        f"{', '.join(counts)}, {plural(report['findings'], 'finding')}",
    ]
    if report["gaps"]:
        lines.append(f"{plural(report['gaps'], 'gap')}, in which rows may be missing, are marked as gaps")
    return "".join(f"{escape(line)}\n" for line in [*lines, *report["notes"]])
