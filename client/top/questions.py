"""What the screen asks each node: SELECTs by name, the tables that they need, and how often each is asked."""

from __future__ import annotations

from collections.abc import Container
from typing import NamedTuple

from probing.client.diagnosis.endings import ended_sql
from probing.client.diagnosis.findings import OPEN_COLUMNS, ROW_AGE, newest_sql
from probing.client.times import Bound, Interval

__all__ = ("ENDED_S", "MOST_RANKS", "Question", "questions", "statements")

# How long a run that has ended stays in view, s.
ENDED_S = 600.0
# Most ranks of one node.
MOST_RANKS = 1024
_SELDOM = 5
_RARELY = 60
# How far back rows of devices and processes are asked at first, and later, s.
_HISTORY_S = 120
_LATELY_S = 15
_MOST_ROWS = 20_000

_RANKS = f"""
SELECT node, job, run, rank, local_rank, world_size, pid, start_ns, state, command FROM process.processes
WHERE role = 'trainer' AND state <> 'exited' AND {{where}} ORDER BY job, run, rank, pid LIMIT {MOST_RANKS}
"""
_PROGRESS = f"""
SELECT node, job, run, rank, pid, start_ns, comm, comm_size AS size, comm_rank, seq, calls,
  epoch_ns(last_call) AS call_ns, epoch_ns(now()) AS now_ns, epoch_ns(now()) - epoch_ns(attached) AS seen_ns
FROM comm.progress WHERE ended IS NULL AND {{where}} ORDER BY last_call DESC LIMIT {_MOST_ROWS}
"""
_INFLIGHT = f"""
SELECT node, job, run, comm, comm_name, comm_size AS size, comm_rank, rank, pid, op, seq, age_ns FROM comm.inflight
WHERE {{where}} ORDER BY age_ns DESC LIMIT {_MOST_ROWS}
"""
# A step gets its row when it ends, so the last row of long steps may be old.
_STEPS = """
SELECT node, job, run, pid, max(step) AS step, arg_max(1e9 / duration_ns, step) AS steps_per_s,
  epoch_ns(now()) - epoch_ns(max(t_end)) AS step_age_ns
FROM train.steps WHERE ts > now() - INTERVAL 10 MINUTE AND {where} GROUP BY node, job, run, pid
"""
_TABLES = "SELECT table_schema || '.' || table_name AS name FROM probing.table_docs"
_MEMORY = """
SELECT node, pid, start_ns, arg_max(rss_bytes, ts) AS rss_bytes FROM process.memory
WHERE ts > now() - INTERVAL 60 SECOND AND {where} GROUP BY node, pid, start_ns
"""
_CPU = f"""
SELECT node, pid, start_ns, epoch_ns(ts) AS at, cpu_total_pct AS cpu_pct, rss_kb, thread_count,
  CASE WHEN wall_ns > 0 THEN 100.0 * run_delay_ns / wall_ns END AS delay_pct
FROM cpu.utilization
WHERE scope = 'process' AND role = 'trainer' AND ts > now() - INTERVAL {{since}} SECOND AND {{where}}
ORDER BY ts DESC LIMIT {_MOST_ROWS}
"""
_GPUS = f"""
SELECT node, epoch_ns(ts) AS at, device_id, uuid, mig, name, total_bytes, used_bytes, gpu_util_pct, sm_active_pct,
  temperature_c, power_w, power_limit_w, sm_clock_mhz, clock_event_reasons
FROM gpu.utilization WHERE ts > now() - INTERVAL {{since}} SECOND ORDER BY ts DESC LIMIT {_MOST_ROWS}
"""
_GPU_PROCESSES = f"""
SELECT node, pid, start_ns, uuid, arg_max(device_id, ts) AS device_id, arg_max(used_bytes, ts) AS used_bytes,
  arg_max(sm_pct, ts) AS sm_pct
FROM gpu.processes WHERE ts > now() - INTERVAL {_LATELY_S} SECOND AND job IS NOT NULL AND {{where}}
GROUP BY node, pid, start_ns, uuid LIMIT {_MOST_ROWS}
"""


class Question(NamedTuple):
    """``table``: what a node must have to be asked, empty if every node has it. ``every``: refreshes between two."""

    sql: str
    table: str = ""
    every: int = 1


def questions(where: str) -> dict[str, Question]:
    """Returns the questions by name; ``where`` is an SQL condition on the job. ``{since}`` is left in them."""
    findings = newest_sql(f"ts > now() - INTERVAL 7 DAY AND {where}", OPEN_COLUMNS, ROW_AGE)
    given = {"where": where, "since": "{since}"}
    return {
        "ranks": Question(_RANKS.format(**given)),
        "progress": Question(_PROGRESS.format(**given)),
        "inflight": Question(_INFLIGHT.format(**given)),
        "steps": Question(_STEPS.format(**given)),
        "findings": Question(findings, every=_SELDOM),
        "ended": Question(ended_sql(where, Interval(Bound(ENDED_S))), every=_SELDOM),
        "tables": Question(_TABLES, every=_RARELY),
        "memory": Question(_MEMORY.format(**given), every=_SELDOM),
        "cpu": Question(_CPU.format(**given), "cpu.utilization"),
        "gpus": Question(_GPUS.format(**given), "gpu.utilization"),
        "gpu_processes": Question(_GPU_PROCESSES.format(**given), "gpu.processes"),
    }


def statements(found: dict[str, Question], turn: int, tables: Container[str], *, new: bool) -> dict[str, str]:
    """Returns the SQL by name that a node is asked in refresh ``turn``; ``tables`` are those that it is known to have.

    ``new``: its history has not been asked yet. What is asked seldom is spread over the refreshes, but asked at first.
    """
    since = _HISTORY_S if new else _LATELY_S
    return {
        name: question.sql.replace("{since}", str(since))
        for spread, (name, question) in enumerate(found.items())
        if (not question.table or question.table in tables) and (turn == 0 or (turn + spread) % question.every == 0)
    }
