"""``balance``: how the time of a training step divides among computing, communication, waiting and IO, by rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from probing.api.text import age, escape, numbers_text, plural, share_text, sql_text
from probing.client.absence import claim
from probing.client.collectives.standing import LAST_SEEN, Run, state_lines, states
from probing.client.options import Job, Since, Until
from probing.client.render.output import write_objects
from probing.client.render.rows import Row, rows_of
from probing.client.render.table import Field, render, terminal_width, wrapped
from probing.client.session import job_named, opened, pause_lines, require_live, shown_pauses, warn
from probing.client.settings import Settings
from probing.client.times import Interval, interval
from probing.diagnosis.balance import EVEN, Balance, Pair, RankTimes, balance, reads_or_writes

if TYPE_CHECKING:
    from probing.client.cluster import Cluster

__all__ = ("EXAMPLES", "Options", "collect", "run")

EXAMPLES = ("probingctl balance --all-nodes --job 4711", "probingctl balance --job 4711 --since 10m -f json")
_STEPS = """
SELECT job, run, node, pid, start_ns, rank, count(*) AS steps, sum(duration_ns) AS step_ns,
  CASE WHEN count(comm_ns) = count(*) THEN sum(comm_ns) END AS comm_ns, min(epoch_ns(t_start)) AS t_from,
  max(epoch_ns(t_end)) AS t_to, epoch_ns(now()) - max(epoch_ns(t_end)) AS quiet_ns
FROM train.steps WHERE {during} AND {where}
GROUP BY job, run, node, pid, start_ns, rank
"""
# If an operation ends on all ranks at once, the rank with the shortest duration arrived last.
_WAITS = """
WITH timed AS (
  SELECT job, run, comm, seq, rank, comm_size, duration_ns,
    min(duration_ns) OVER (PARTITION BY job, run, comm, seq) AS least,
    arg_min(rank, duration_ns) OVER (PARTITION BY job, run, comm, seq) AS last,
    count(*) OVER (PARTITION BY job, run, comm, seq) AS members
  FROM comm.ops
  WHERE state = 'done' AND duration_ns IS NOT NULL AND seq IS NOT NULL AND rank IS NOT NULL
    AND op NOT IN ('send', 'recv', 'broadcast', 'reduce', 'gather', 'scatter') AND {window}
)
SELECT job, run, comm, rank, last, count(*) AS ops, sum(duration_ns) AS comm_ns, sum(duration_ns - least) AS wait_ns
FROM timed WHERE members > 1 AND members = comm_size GROUP BY job, run, comm, rank, last
"""
_ROLES = """
SELECT job, run, comm, arg_max(parallel_role, ts) AS role FROM comm.communicators WHERE {where} GROUP BY job, run, comm
"""
_SAMPLES = """
SELECT node, pid, start_ns, stack_id, sum(duration_ns) AS ns FROM python.samples
WHERE coalesce(trains, tid = pid) AND {window} GROUP BY node, pid, start_ns, stack_id ORDER BY ns DESC LIMIT {most}
"""
_SYNCS = """
SELECT node, pid, start_ns, sum(duration_ns) AS ns FROM cuda.syncs WHERE {window} GROUP BY node, pid, start_ns
"""
_FOUND = {"waits": _WAITS, "roles": _ROLES, "samples": _SAMPLES, "syncs": _SYNCS}
_STACKS = "SELECT stack_id, any_value(frames) AS frames FROM python.stacks WHERE stack_id IN ({ids}) GROUP BY stack_id"
_RECOGNISED = "Steps are recognised after 10 s of repetition."
# A line warns if no step has ended for this many times the usual duration of a step, and for at least this many ns.
_USUAL, _LONG_NS = 5, 5_000_000_000
# The maximum number of (process, stack) pairs that are read; the rarest are left out.
_MOST_SAMPLES = 20_000
# The maximum number of stacks in one query, and in all queries; samples of further stacks count as computing.
_CHUNK, _MOST_STACKS = 1000, 5000


_FIELDS = (
    Field("RANK", "rank", right=True),
    Field("NODE", "node", flex=True),
    Field("PID", "pid", right=True),
    Field("STEP", "step_ns", age, right=True),
    Field("COMPUTE", "compute", share_text, right=True),
    Field("COMM", "communication", share_text, right=True),
    Field("WAIT", "wait", share_text, right=True),
    Field("IO", "io", share_text, right=True),
    Field("LAST", "last_share", share_text, right=True),
    Field("WAITS FOR", "waits_for", right=True),
)
_GPU = Field("GPU WAIT", "gpu_wait", share_text, right=True)
_ROLE_FIELDS = (
    Field("ROLE", "role"),
    Field("COMMUNICATORS", "comms", right=True),
    Field("RANKS", "ranks", numbers_text, flex=True),
    Field("COMM", "communication", share_text, right=True),
    Field("WAIT", "wait", share_text, right=True),
    Field("MOSTLY LAST", "last", right=True),
    Field("OF", "last_share", share_text, right=True),
)


@dataclass(frozen=True, slots=True)
class Options:
    job: Job = None
    since: Since = "1m"
    until: Until = None


def run(settings: Settings, options: Options) -> None:
    during = interval(options.since, options.until)
    with opened(settings) as cluster:
        job = job_named(cluster, options.job)
        found = collect(cluster, job, during)
        of_job = "true" if job is None else f"job = {sql_text(job)}"
        runs = states(cluster, of_job, during)
        if not found and job is not None and during.open:
            require_live(cluster, job)
        paused = shown_pauses(settings, pause_lines(cluster))
    width = terminal_width() if settings.output is None else None
    head = ("job", "run")
    flat = [{**{name: own[name] for name in head}, **rank} for own in found for rank in own["ranks"]]
    text = "\n".join(_text(own, state_lines(runs, own["job"], own["run"]), width) for own in found)
    write_objects(settings, found, paused + (text or _no_step(runs, during, width)), flat)


def _no_step(runs: Mapping[Run, Row], during: Interval, width: int | None) -> str:
    """Returns the text for an interval in which no step ended: the states of the jobs, and how steps are recognized."""
    lines = [f"job {run[0]}  run {run[1]}: {line}" for run in runs for line in state_lines(runs, *run)]
    lines += [f"(no step ended {during.text()}; `probingctl nccl` shows the operations. {_RECOGNISED})"]
    return "".join(part + "\n" for line in lines for part in wrapped(escape(line), width))


def collect(cluster: Cluster, job: str | None, during: Interval) -> list[Row]:
    """Returns each run with its ``ranks``, ``roles`` and ``sentences``, as docs/json.md describes."""
    where = "true" if job is None else f"job = {sql_text(job)}"
    steps = rows_of(cluster.query(_STEPS.format(during=during.sql(), where=where)))
    if not steps:
        return []
    begin, end = min(row["t_from"] for row in steps), max(row["t_to"] for row in steps)
    window = f"ts >= make_timestamp_ns({begin}) AND ts <= make_timestamp_ns({end}) AND {where}"
    given = {"window": window, "where": where, "most": _MOST_SAMPLES}
    tables = cluster.query_all({name: sql.format(**given) for name, sql in _FOUND.items()})
    waits, roles, samples, syncs = (rows_of(tables[name]) for name in _FOUND)
    if len(samples) == _MOST_SAMPLES:
        warn(
            f"IO counts only the {_MOST_SAMPLES:,} most frequent stacks of ranks: "
            "ask for one job, or for a shorter time with --since"
        )
    io = _io_shares(cluster, samples)
    gpu = {_process(row): row["ns"] for row in syncs}
    role = {(row["job"], row["run"], row["comm"]): row["role"] or "unknown" for row in roles}
    runs: dict[tuple[str, str], list[Row]] = {}
    for row in sorted(steps, key=lambda row: (row["rank"] is None, row["rank"] or 0, row["node"], row["pid"])):
        runs.setdefault((row["job"], row["run"]), []).append(row)
    found = []
    for name, rows in sorted(runs.items()):
        times = [
            RankTimes(
                row["rank"],
                row["node"],
                row["pid"],
                row["steps"],
                row["step_ns"],
                row["comm_ns"],
                io.get(_process(row)),
                gpu.get(_process(row)),
            )
            for row in rows
        ]
        pairs = [
            Pair(
                row["comm"],
                role.get((*name, row["comm"]), "unknown"),
                row["rank"],
                row["last"],
                row["ops"],
                row["comm_ns"],
                row["wait_ns"],
            )
            for row in waits
            if (row["job"], row["run"]) == name
        ]
        quiet = min(row["quiet_ns"] for row in rows) if during.open else None
        found.append({**_object(*name, balance(times, pairs)), "last_step_age_ns": quiet})
    return found


def _process(row: Row) -> tuple[object, ...]:
    return row["node"], row["pid"], row["start_ns"]


def _io_shares(cluster: Cluster, samples: Sequence[Row]) -> dict[tuple[object, ...], float]:
    """Returns for each process the share of its training thread's samples that load data or use a checkpoint."""
    times: dict[int, int] = {}
    for row in samples:
        times[row["stack_id"]] = times.get(row["stack_id"], 0) + row["ns"]
    if len(times) > _MOST_STACKS:
        warn(
            f"IO counts only the {_MOST_STACKS:,} most frequent of {len(times):,} stacks: "
            "ask for a shorter time with --since"
        )
    wanted = sorted(times, key=lambda stack: -times[stack])[:_MOST_STACKS]
    io: set[int] = set()
    for start in range(0, len(wanted), _CHUNK):
        ids = ", ".join(map(str, wanted[start : start + _CHUNK]))
        for row in rows_of(cluster.query(_STACKS.format(ids=ids))):
            if reads_or_writes((str(frame["func"]), str(frame["file"])) for frame in row["frames"]):
                io.add(row["stack_id"])
    whole: dict[tuple[object, ...], int] = {}
    part: dict[tuple[object, ...], int] = {}
    for row in samples:
        own = _process(row)
        whole[own] = whole.get(own, 0) + row["ns"]
        part[own] = part.get(own, 0) + (row["ns"] if row["stack_id"] in io else 0)
    return {own: part[own] / whole[own] for own in whole if whole[own]}


def _object(job: str, run: str, found: Balance) -> Row:
    roles = [{**asdict(role), "ranks": list(role.ranks)} for role in found.roles]
    ranks = [asdict(shares) for shares in found.ranks]
    return {
        "job": job,
        "run": run,
        "ranks": ranks,
        "roles": roles,
        "uneven": found.uneven,
        "sentences": list(found.sentences),
    }


def _said(sentence: str) -> str:
    """Returns ``sentence``; if a node did not answer, "work is even" is limited to the nodes that did."""
    return claim(sentence) if sentence.startswith(EVEN) else sentence


def _text(own: Row, lines_above: Sequence[str], width: int | None) -> str:
    steps = max(rank["steps"] for rank in own["ranks"])
    told = [*lines_above, *_still(own, lines_above), *map(_said, own["sentences"])]
    head = [f"job {own['job']}  run {own['run']}  {plural(steps, 'step')}", *(f"  {text}" for text in told)]
    lines = "".join(part + "\n" for line in head for part in wrapped(escape(line), width))
    gpu = any(rank["gpu_wait"] is not None for rank in own["ranks"])
    text = lines + render((*_FIELDS, _GPU) if gpu else _FIELDS, own["ranks"], width)
    # A table of one role would repeat the table of ranks.
    return text + ("\n" + render(_ROLE_FIELDS, own["roles"], width) if len(own["roles"]) > 1 else "")


def _still(own: Row, lines_above: Sequence[str]) -> list[str]:
    """Returns a line if a job still runs but no step has ended for a long time, because the shares then describe old
    steps."""
    usual = max((rank["step_ns"] or 0 for rank in own["ranks"]), default=0)
    quiet = own["last_step_age_ns"]
    if quiet is None or quiet < max(_LONG_NS, _USUAL * usual) or LAST_SEEN in lines_above:
        return []
    return [f"no step has ended for {age(quiet)}: the shares are those of earlier steps"]
