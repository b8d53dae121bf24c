"""``ranks check``: checks whether the ranks of jobs are numbered and placed as they must be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from probing.api.errors import QueryRejected, UsageError
from probing.api.text import escape, numbers_text, plural, sql_text
from probing.client.absence import claim
from probing.client.options import Job
from probing.client.render.output import write_objects, write_table
from probing.client.render.rows import Row, rows_of
from probing.client.render.table import Field, terminal_width, wrapped
from probing.client.session import job_named, opened, require_live
from probing.client.settings import Settings
from probing.diagnosis.ranks import Placed, Violation, Worker, check_ranks, check_workers, launched

if TYPE_CHECKING:
    from probing.client.cluster import Cluster

__all__ = ("EXAMPLES", "RANK_FIELDS", "Options", "run")

EXAMPLES = (
    "probingctl ranks check --all-nodes --job 4711",
    "probingctl ranks check --workers gn6-0,gn39-0,gn7-0 --master gn6-0",
)
_WRONG, _UNDECIDED = 3, 4
_MOST_BYTES = 1 << 20
_TRAINERS = """
SELECT node, job, run, pid, start_ns, rank, local_rank, node_rank, world_size, coalesce(pod, container) AS box
FROM process.processes WHERE role = 'trainer' AND state <> 'exited' AND {where}
"""
_ENVS = """
SELECT node, job, run, pid, start_ns, name, value FROM process.envs
WHERE name IN ('MASTER_ADDR', 'MASTER_PORT', 'LOCAL_WORLD_SIZE') AND {where}
"""
# Ranks without a recent step are left out; ``diagnose`` says why they stand still.
_STEPS = """
SELECT node, job, run, pid, start_ns, max(step) AS step, arg_max(source, step) AS source FROM train.steps
WHERE ts > now() - INTERVAL 10 MINUTE AND {where} GROUP BY node, job, run, pid, start_ns
"""
# A seed that has not answered has no name.
_MEMBERS = "SELECT DISTINCT member FROM cluster.members WHERE member <> ''"
_STATEMENTS = {"trainers": _TRAINERS, "envs": _ENVS, "steps": _STEPS}
RANK_FIELDS = (
    Field("WORKER", "worker", flex=True),
    Field("RANK", "rank", right=True),
    Field("LOCAL_RANK", "local_rank", right=True),
    Field("NODE_RANK", "node_rank", right=True),
    Field("WORLD_SIZE", "world_size", right=True),
    Field("MASTER", "master"),
)


@dataclass(frozen=True, slots=True)
class Options:
    job: Job = None
    workers: Annotated[
        str | None, typer.Option(metavar="A,B,C|FILE", help="Workers NODE-N: show their ranks; with --job, check them.")
    ] = None
    master: Annotated[
        str | None, typer.Option(metavar="NAME", help="The master: a worker of --workers, or a worker's node.")
    ] = None


def run(settings: Settings, options: Options) -> None:
    if (options.workers is None) != (options.master is None):
        raise UsageError("--workers and --master must be given together", hint="name the master among the workers")
    workers = [] if options.workers is None or options.master is None else _workers(options.workers, options.master)
    if workers and options.job is None:
        _write_workers(settings, workers)
        return
    with opened(settings) as cluster:
        job = job_named(cluster, options.job)
        found = _jobs(cluster, job, workers)
        if not found and job is not None:
            require_live(cluster, job)
        silent = any(outcome.failed for outcome in cluster.outcomes)
    width = terminal_width() if settings.output is None else None
    flat = [{**{name: own[name] for name in ("job", "run")}, **v} for own in found for v in own["violations"]]
    write_objects(settings, found, _text(found, width), flat)
    raise typer.Exit(_WRONG if flat else _UNDECIDED if silent else 0)


def _workers(text: str, master: str) -> list[Worker]:
    path = Path(text)
    if "," not in text and path.is_file():
        try:
            with path.open(encoding="utf-8") as file:
                text = ",".join(line.partition("#")[0] for line in file.read(_MOST_BYTES).splitlines())
        except (OSError, UnicodeDecodeError) as e:
            reason = e.strerror if isinstance(e, OSError) else "it is not UTF-8 text"
            raise UsageError(f"cannot read the list of workers {path}: {reason}") from None
    try:
        return launched([name for part in text.split(",") if (name := part.strip())], master)
    except ValueError as e:
        raise UsageError(str(e), hint="give workers as NODE-N, and one of them as --master") from None


def _write_workers(settings: Settings, workers: Sequence[Worker]) -> None:
    rows: list[Row] = [{**asdict(worker), "master": f"{worker.master_addr}:{worker.master_port}"} for worker in workers]
    write_table(settings, RANK_FIELDS, rows)


def _jobs(cluster: Cluster, job: str | None, workers: Sequence[Worker]) -> list[Row]:
    """Returns each run of each job with its ``violations``, as docs/json.md describes."""
    where = "true" if job is None else f"job = {sql_text(job)}"
    answers = cluster.query_all({name: sql.format(where=where) for name, sql in _STATEMENTS.items()})
    trainers, envs, steps = (rows_of(answers[name]) for name in _STATEMENTS)
    known = {_process(row): row for row in steps}
    env: dict[tuple[object, ...], dict[str, str]] = {}
    for row in envs:
        env.setdefault(_process(row), {})[row["name"]] = row["value"]
    runs: dict[tuple[str, str], list[Row]] = {}
    for row in trainers:
        runs.setdefault((row["job"], row["run"]), []).append(row)
    everywhere = _everywhere(cluster)
    found = []
    for (name, incarnation), rows in sorted(runs.items()):
        members = [_placed(row, env.get(_process(row), {}), known.get(_process(row))) for row in rows]
        # A job in which no process has RANK or WORLD_SIZE is left out: it is not distributed.
        if all(m.rank is None and m.world_size is None for m in members):
            continue
        local = all(_local(row, env.get(_process(row), {})) for row in rows)
        violations = [*check_ranks(members, whole=everywhere or local), *check_workers(members, workers)]
        found.append(_run(name, incarnation, members, violations))
    return found


def _everywhere(cluster: Cluster) -> bool:
    """Returns whether every node that the asked nodes know was asked and answered."""
    if not cluster.many or any(outcome.failed for outcome in cluster.outcomes):
        return False
    asked = {answered.node for outcome in cluster.outcomes for answered in outcome.answered}
    try:
        answers = cluster.of_nodes(asked).query_each(_MEMBERS)
    except QueryRejected:
        # A token that is limited to jobs has no access to the list of nodes.
        return False
    return asked.issuperset(row["member"] for answer in answers for row in rows_of(answer))


def _run(job: str, run: str, members: Sequence[Placed], violations: Sequence[Violation]) -> Row:
    worlds = {m.world_size for m in members if m.world_size is not None}
    return {
        "job": job,
        "run": run,
        "ranks": sorted(m.rank for m in members if m.rank is not None),
        "world_size": worlds.pop() if len(worlds) == 1 else None,
        "ok": not violations,
        "violations": [{**asdict(violation), "ranks": list(violation.ranks)} for violation in violations],
    }


def _process(row: Row) -> tuple[object, ...]:
    return row["node"], row["pid"], row["start_ns"]


def _placed(row: Row, env: dict[str, str], steps: Row | None) -> Placed:
    address, port = env.get("MASTER_ADDR"), env.get("MASTER_PORT")
    master = f"{address or '?'}:{port or '?'}" if address or port else None
    # Step numbers of different nodes are comparable only if the job itself counts steps: a node counts from the first
    # step that it saw.
    counted = "" if steps is None or steps["source"] == "variable" else row["node"]
    return Placed(
        rank=row["rank"],
        local_rank=row["local_rank"],
        world_size=row["world_size"],
        node=row["node"],
        pid=row["pid"],
        box=row["box"] or "",
        node_rank=row["node_rank"],
        master=master,
        step=None if steps is None else steps["step"],
        counted_by=counted,
    )


def _local(row: Row, env: dict[str, str]) -> bool:
    """Returns whether all ranks of the job run on the node of ``row``."""
    return row["world_size"] is not None and env.get("LOCAL_WORLD_SIZE") == str(row["world_size"])


def _text(found: Sequence[Row], width: int | None) -> str:
    lines = []
    for own in found:
        world = own["world_size"]
        number = plural(len(own["ranks"]), "rank") + ("" if world in (None, len(own["ranks"])) else f" of {world}")
        state = claim("in order") if own["ok"] else plural(len(own["violations"]), "violation")
        lines.append(f"job {own['job']}  run {own['run']}  {number} ({numbers_text(own['ranks'])}): {state}")
        lines += [f"  {violation['text']}" for violation in own["violations"]]
    return "".join(part + "\n" for line in lines for part in wrapped(escape(line), width)) or "(no job with ranks)\n"
