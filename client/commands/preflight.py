"""``preflight``: checks whether the nodes are fit for a job before it starts."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from probing.api.errors import UsageError
from probing.client.options import Job
from probing.client.preflight.asking import Wanted, gathered, results_text, with_bandwidth
from probing.client.render.output import write_objects
from probing.client.render.rows import Row
from probing.client.render.table import terminal_width
from probing.client.session import job_named, opened, require_live
from probing.client.settings import Settings
from probing.diagnosis.preflight.env_file import MAX_BYTES, Plan, parse
from probing.diagnosis.preflight.facts import Case
from probing.diagnosis.preflight.network import matrix
from probing.diagnosis.preflight.result import Result
from probing.diagnosis.preflight.run import failed, results

if TYPE_CHECKING:
    from probing.client.cluster import Cluster

__all__ = ("EXAMPLES", "Options", "collect", "run")

EXAMPLES = (
    "probingctl preflight --nodes n1:7070,n2:7070 --env-file job.env --iface ib0",
    "probingctl preflight --python /opt/venv/bin/python",
)
_WRONG = 3


@dataclass(frozen=True, slots=True)
class Options:
    python: Annotated[
        str | None,
        typer.Option(metavar="PATH", help="Compare Python, torch, CUDA and NCCL of this interpreter."),
    ] = None
    env_file: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="NAME=VALUE lines for all ranks, then one [NODE] section per rank."),
    ] = None
    iface: Annotated[str | None, typer.Option(metavar="IF", help="A network interface that every node must have.")] = (
        None
    )
    bandwidth: Annotated[
        bool, typer.Option("--bandwidth", help="Also measure bandwidth between nodes that allow it.")
    ] = False
    job: Job = None


def run(settings: Settings, options: Options) -> None:
    if options.python is not None and not options.python.startswith("/"):
        raise UsageError(f"--python {options.python} is not a path", hint="give the absolute path on the nodes")
    plan = _plan(options.env_file)
    with opened(settings) as cluster:
        job = job_named(cluster, options.job)
        if job is not None:
            require_live(cluster, job)
        case = gathered(cluster, Wanted(options.python or "", options.iface or "", job or ""), plan)
        if options.bandwidth:
            case = with_bandwidth(cluster, case)
    found = results(case)
    terminal = terminal_width() if settings.output is None else None
    text = results_text(found, matrix(case), terminal, colour=terminal is not None)
    write_objects(settings, _report(case, found), text, [_flat(result) for result in found])
    raise typer.Exit(_WRONG if failed(found) else 0)


def collect(cluster: Cluster) -> Row:
    """Returns the report of the checks that need no plan, as ``preflight -f json`` prints it."""
    case = gathered(cluster, Wanted(), Plan())
    return _report(case, results(case))


def _plan(path: Path | None) -> Plan:
    if path is None:
        return Plan()
    try:
        with path.open(encoding="utf-8") as file:
            text = file.read(MAX_BYTES + 1)
    except (OSError, UnicodeDecodeError) as e:
        reason = e.strerror if isinstance(e, OSError) else "it is not UTF-8 text"
        raise UsageError(f"cannot read --env-file {path}: {reason}") from None
    if len(text) > MAX_BYTES:
        raise UsageError(f"--env-file {path} has more than {MAX_BYTES} characters")
    return parse(text)


def _flat(result: Result) -> Row:
    return {**asdict(result), "nodes": ",".join(result.nodes), "hint": result.hint or None}


def _report(case: Case, found: list[Result]) -> Row:
    """Returns the report that docs/json.md describes."""
    names = ("from", "to", "round_trip_ns", "why")
    return {
        "ok": not failed(found),
        "results": [{**asdict(result), "nodes": list(result.nodes), "hint": result.hint or None} for result in found],
        "round_trips": [
            dict(zip(names, (*cell[:3], cell[3] if cell[2] is None else None), strict=True)) for cell in matrix(case)
        ],
        "clocks": [
            {"node": node, "offset_ns": round(offset), "uncertainty_ns": round(error)}
            for node, (offset, error) in sorted(case.offsets.items())
        ],
        "nodes": [asdict(node) for node in case.nodes],
    }
