"""The SQL statements that read the stored rows of one job. Messages to users quote their names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from probing.api.text import sql_text
from probing.daemon.diagnose.gather.witnesses import ERRORS_SQL, FLIGHT_SQL, RAS_SQL

__all__ = ("DAY_NS", "SECOND_NS", "Window", "events", "failed_jobs", "statements")

SECOND_NS = 1_000_000_000
HOUR_NS = 3600 * SECOND_NS
DAY_NS = 24 * HOUR_NS
# The maximum number of ended operations that are read for each rank and communicator.
_OPERATIONS = 64
_WHO = "pid, start_ns"
# The maximum number of stacks that are read for each main thread, and the maximum number of innermost frames that are
# read for each stack.
_TOP = 6
_FRAMES = 32


@dataclass(frozen=True, slots=True)
class Window:
    """The times between which rows are read, UTC ns. ``until``: now, or the end of a job that ended. ``operations``:
    operations are read from this time on. ``stalled``: samples after it are recent, samples before it are past.
    ``still``: no rank of the job advances."""

    until: int
    operations: int
    stalled: int
    still: bool = False


def failed_jobs(since_ns: int) -> str:
    """Returns the statement that lists the jobs with a failed trainer."""
    return f"""
SELECT DISTINCT job FROM process.events WHERE ts > {_at(since_ns)} AND event = 'exit' AND role = 'trainer'
  AND (signal IS NOT NULL OR exit_code <> 0) AND job IS NOT NULL LIMIT 64
"""


def events(job: str, since_ns: int) -> str:
    """Returns the statement that makes a row for each process of a job from its events."""
    # The column ``detail`` of an ``identified`` event is JSON that the daemon made.
    number = "try_cast(arg_max(detail ->> '$.{0}', ts) FILTER (WHERE event = 'identified') AS BIGINT) AS {0}".format
    return f"""
SELECT run, {_WHO}, arg_max(role, ts) AS role, arg_max(rank, ts) AS rank,
  {number("local_rank")}, {number("world_size")}, {number("node_rank")}, {number("ppid")},
  epoch_ns(min(ts) FILTER (WHERE event = 'start')) AS started_ns,
  epoch_ns(max(ts) FILTER (WHERE event = 'exit')) AS ended_ns,
  max(exit_code) FILTER (WHERE event = 'exit') AS exit_code, max(signal) FILTER (WHERE event = 'exit') AS signal,
  count(*) FILTER (WHERE event = 'oom_kill') > 0 AS oom, epoch_ns(max(ts)) AS last_ns
FROM process.events WHERE job = {sql_text(job)} AND ts > {_at(since_ns)}
GROUP BY run, {_WHO} ORDER BY last_ns DESC LIMIT 8192
"""


def statements(job: str, window: Window, pids: Sequence[int], leaders: Sequence[int], *, deep: bool) -> dict[str, str]:
    """Returns the statements by name, at most 16. ``pids``: the pids of all trainers; ``leaders``: the pid of one
    trainer of each run, whose steps are the history of the run."""
    of_job = f"job = {sql_text(job)}"
    hour = f"{of_job} AND ts > {_at(window.until - HOUR_NS)}"
    made = {
        "operations": _operations(of_job, window),
        "communicators": _communicators(of_job),
        "steps": _steps(hour),
        "history of steps": _history(hour, leaders),
        "samples": _samples(of_job, window),
        "losses": _losses(pids, window),
        "variables": _variables(hour),
        "memory": _memory(hour),
        "device memory": _device_memory(hour),
        "errors of communicators": ERRORS_SQL.format(job=sql_text(job)),
    }
    if deep:
        made["events"] = events(job, window.until - DAY_NS)
        made["frames of samples"] = _since(of_job, window)
        made["lines"] = _lines(of_job, window)
        made["RAS"] = RAS_SQL.format(job=sql_text(job))
        made["flight recorder"] = FLIGHT_SQL.format(job=sql_text(job))
    return made


def _at(ns: int) -> str:
    return f"make_timestamp_ns({max(ns, 0)})"


def _numbers(pids: Sequence[int]) -> str:
    return ", ".join(map(str, pids)) or "-1"


def _operations(of_job: str, window: Window) -> str:
    return f"""
SELECT {_WHO}, comm, comm_name, comm_rank, comm_size, backend, seq, op, epoch_ns(ts) AS called_ns,
  epoch_ns(t_done_hi) AS done_ns, state, dtype, count, bytes, redop, root, peer, tid, async_op, error
FROM comm.ops WHERE {of_job} AND ts > {_at(window.operations)}
QUALIFY row_number() OVER (PARTITION BY {_WHO}, comm ORDER BY ts DESC, seq DESC) <= {_OPERATIONS}
ORDER BY called_ns DESC LIMIT 65536
"""


def _communicators(of_job: str) -> str:
    return f"""
SELECT {_WHO}, comm, arg_max(backend, ts) AS backend, arg_max(size, ts) AS size, arg_max(name, ts) AS name,
  arg_max(rank, ts) AS comm_rank, arg_max(job_rank, ts) AS rank, arg_max(state, ts) AS state,
  arg_max(aborted, ts) AS aborted, arg_max(async_error, ts) AS async_error, arg_max(parallel_role, ts) AS role
FROM comm.communicators WHERE {of_job} AND comm IS NOT NULL GROUP BY {_WHO}, comm LIMIT 65536
"""


def _steps(where: str) -> str:
    return f"""
SELECT {_WHO}, step, epoch_ns(ts) AS started_ns, duration_ns, comm_ns, wait_ns FROM train.steps WHERE {where}
QUALIFY row_number() OVER (PARTITION BY {_WHO} ORDER BY ts DESC) <= 64 ORDER BY started_ns
"""


def _history(where: str, leaders: Sequence[int]) -> str:
    return f"""
WITH steps AS (
  SELECT run, epoch_ns(ts) + duration_ns AS ended_ns, duration_ns,
    ntile(512) OVER (PARTITION BY run ORDER BY ts) AS part
  FROM train.steps WHERE {where} AND pid IN ({_numbers(leaders)})
)
SELECT run, max(ended_ns) AS ended_ns, quantile_disc(duration_ns, 0.5) AS duration_ns FROM steps
GROUP BY run, part ORDER BY run, ended_ns
"""


def _samples(of_job: str, window: Window) -> str:
    """Returns the statement for the most frequent stacks of the threads that train, recent and past."""
    since = _at(window.stalled - 600 * SECOND_NS)
    return f"""
WITH sums AS (
  SELECT {_WHO}, ts > {_at(window.stalled)} AS recent, stack_id, on_cpu, sum(duration_ns) AS ns
  FROM python.samples WHERE {of_job} AND coalesce(trains, tid = pid) AND ts > {since}
  GROUP BY {_WHO}, recent, stack_id, on_cpu
), top AS (
  SELECT {_WHO}, recent, stack_id, on_cpu, ns::DOUBLE / nullif(sum(ns) OVER (PARTITION BY {_WHO}, recent), 0) AS share
  FROM sums
  QUALIFY row_number() OVER (PARTITION BY {_WHO}, recent ORDER BY ns DESC, stack_id, on_cpu) <= {_TOP}
), known AS (
  SELECT stack_id, any_value(frames[1:{_FRAMES}]) AS frames FROM python.stacks
  WHERE ts > {_at(window.stalled - 2 * HOUR_NS)} AND stack_id IN (SELECT stack_id FROM top) GROUP BY stack_id
)
SELECT {_WHO}, recent, on_cpu, share, frames FROM top JOIN known ON top.stack_id = known.stack_id
ORDER BY share DESC LIMIT 16384
"""


def _since(of_job: str, window: Window) -> str:
    """Returns the statement for the innermost frame of each thread that trains. ``since_ns`` in its rows is the time of
    a sample; this sample and all later samples show the frame.
    """
    return f"""
WITH own AS (
  SELECT {_WHO}, ts, stack_id FROM python.samples
  WHERE {of_job} AND coalesce(trains, tid = pid) AND ts > {_at(window.stalled - 600 * SECOND_NS)}
), known AS (
  SELECT stack_id, any_value(frames[1].func) AS func, any_value(frames[1].file) AS file FROM python.stacks
  WHERE ts > {_at(window.stalled - 2 * HOUR_NS)} AND stack_id IN (SELECT stack_id FROM own) GROUP BY stack_id
), named AS (SELECT {_WHO}, ts, func, file FROM own JOIN known ON own.stack_id = known.stack_id),
newest AS (SELECT {_WHO}, arg_max(func, ts) AS func, arg_max(file, ts) AS file FROM named GROUP BY {_WHO}),
other AS (
  SELECT o.pid, o.start_ns, max(o.ts) AS ts FROM named AS o JOIN newest AS n
    ON o.pid = n.pid AND o.start_ns = n.start_ns
  WHERE o.func IS DISTINCT FROM n.func OR o.file IS DISTINCT FROM n.file GROUP BY o.pid, o.start_ns
)
SELECT s.pid, s.start_ns, any_value(n.func) AS func, any_value(n.file) AS file, epoch_ns(min(s.ts)) AS since_ns
FROM named AS s JOIN newest AS n ON s.pid = n.pid AND s.start_ns = n.start_ns
LEFT JOIN other AS o ON s.pid = o.pid AND s.start_ns = o.start_ns
WHERE o.ts IS NULL OR s.ts > o.ts GROUP BY s.pid, s.start_ns
"""


def _losses(pids: Sequence[int], window: Window) -> str:
    return f"""
SELECT stage, reason, pid, epoch_ns(ts_to) AS until_ns, count FROM probing.losses
WHERE table_name = 'comm.ops' AND (pid IS NULL OR pid IN ({_numbers(pids)}))
  AND (stage = 'attach' OR ts_to > {_at(window.operations)}) ORDER BY ts DESC LIMIT 4096
"""


def _lines(of_job: str, window: Window) -> str:
    """Returns the statement for the newest lines of each process and kind: many other lines may follow an error."""
    return f"""
SELECT {_WHO}, left(line, 300) AS line FROM process.logs WHERE {of_job} AND ts > {_at(window.until - HOUR_NS)}
QUALIFY row_number() OVER (PARTITION BY {_WHO} ORDER BY ts DESC) <= 5
  OR row_number() OVER (PARTITION BY {_WHO}, kind ORDER BY ts DESC) <= 2
ORDER BY ts
"""


def _variables(where: str) -> str:
    return f"""
SELECT {_WHO}, name, epoch_ns(ts) AS ts_ns, number FROM python.variables WHERE {where} AND number IS NOT NULL
QUALIFY row_number() OVER (PARTITION BY {_WHO}, name ORDER BY ts DESC) <= 128 ORDER BY ts_ns DESC LIMIT 65536
"""


def _memory(where: str) -> str:
    return f"""
WITH parts AS (
  SELECT {_WHO}, ts, rss_bytes, ntile(64) OVER (PARTITION BY {_WHO} ORDER BY ts) AS part
  FROM process.memory WHERE {where} AND role = 'trainer' AND rss_bytes IS NOT NULL
)
SELECT {_WHO}, epoch_ns(max(ts)) AS ts_ns, arg_max(rss_bytes, ts) AS bytes FROM parts GROUP BY {_WHO}, part
ORDER BY ts_ns LIMIT 65536
"""


def _device_memory(where: str) -> str:
    """Returns the statement for the bytes of each allocating stack at the end of each minute in which they changed."""
    return f"""
SELECT {_WHO}, kind, size_class, stack, epoch_ns(ts) // {60 * SECOND_NS} AS minute, epoch_ns(max(ts)) AS ts_ns,
  arg_max(live_bytes, ts) AS bytes
FROM cuda.memory WHERE {where} AND kind <> 'host'
GROUP BY {_WHO}, kind, size_class, stack, minute ORDER BY ts_ns LIMIT 65536
"""
