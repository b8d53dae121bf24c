"""The SQL statements of ``nccl``. ``{during}`` is a condition on the time, ``{where}`` a condition on job and
communicator.
"""

from __future__ import annotations

from probing.api.tables.comm import BUS_FACTOR, MOVED_BYTES

__all__ = ("COMMUNICATORS", "FAILED", "MOST_FAILED", "OPS", "RANKS", "TIMINGS", "TOTALS")

MOST_FAILED = 100
_LATELY = "{during} AND {where}"

# One row for each member. Each column has the value of the newest row in which it is not NULL.
COMMUNICATORS = """
SELECT job, run, comm, node, pid, start_ns, any_value(backend) AS backend, max(size) AS size,
  arg_max(name, ts) AS name, arg_max(job_rank, ts) AS rank, arg_max(rank, ts) AS comm_rank,
  arg_max(state, ts) AS state, arg_max(aborted, ts) AS aborted, arg_max(async_error, ts) AS async_error,
  arg_max(parallel_role, ts) AS role, arg_max(parallel_role_why, ts) AS role_why
FROM comm.communicators WHERE {where} GROUP BY job, run, comm, node, pid, start_ns
"""
OPS = f"""
SELECT job, run, comm, any_value(comm_name) AS name, any_value(backend) AS backend, max(comm_size) AS size, op,
  count(*) AS calls, sum(bytes) AS bytes, avg(duration_ns) AS avg_ns, quantile_cont(duration_ns, 0.5) AS p50_ns,
  quantile_cont(duration_ns, 0.99) AS p99_ns, max(duration_ns) AS max_ns, count(duration_ns) AS timed,
  min(algbw_gbps) AS algbw_min_gbps, avg(algbw_gbps) AS algbw_avg_gbps, min(busbw_gbps) AS busbw_min_gbps,
  avg(busbw_gbps) AS busbw_avg_gbps, count(*) FILTER (WHERE state <> 'done') AS not_done, min(seq) AS first_seq,
  max(seq) AS last_seq
FROM comm.ops WHERE {_LATELY} GROUP BY job, run, comm, op
"""
TIMINGS = f"""
SELECT job, run, comm, timing_source, count(*) AS calls FROM comm.ops
WHERE {_LATELY} GROUP BY job, run, comm, timing_source
"""
FAILED = f"""
SELECT job, run, comm, any_value(comm_name) AS name, any_value(backend) AS backend, max(comm_size) AS size, op, rank,
  node, pid, error, count(*) AS calls, max(seq) AS last_seq, max(ts) AS last
FROM comm.ops WHERE state = 'failed' AND {_LATELY} GROUP BY job, run, comm, op, rank, node, pid, error
ORDER BY last DESC LIMIT {MOST_FAILED}
"""
# Bandwidths are computed from `busy_ns`, the time in which a stream was busy with any operation. Durations of single
# operations would not do: their ends may be too inexact, and operations overlap. `before`: the latest end of earlier
# operations on the stream.
TOTALS = f"""
WITH spans AS (
  SELECT job, run, comm, node, pid, start_ns, stream, {MOVED_BYTES} AS moved, {BUS_FACTOR} AS factor,
    epoch_ns(coalesce(t_start, t_launch, t_call)) AS t_from, epoch_ns(t_done_hi) AS t_to
  FROM comm.ops WHERE state = 'done' AND t_done_hi IS NOT NULL AND bytes IS NOT NULL AND {_LATELY}
), following AS (
  SELECT *, max(t_to) OVER (PARTITION BY job, run, comm, node, pid, start_ns, stream ORDER BY t_from, t_to
    ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING) AS before
  FROM spans
)
SELECT job, run, comm, count(*) AS calls, sum(moved)::DOUBLE AS moved, sum(moved * factor) AS on_bus,
  sum(greatest(0, t_to - greatest(t_from, coalesce(before, t_from)))) AS busy_ns
FROM following GROUP BY job, run, comm
"""
# The lag is measured against the median arrival: half of the ranks arrived before it.
RANKS = f"""
WITH arrivals AS (
  SELECT job, run, comm, rank, comm_rank, node, pid, seq, epoch_ns(ts) AS t FROM comm.ops
  WHERE seq IS NOT NULL AND op <> 'send' AND op <> 'recv' AND {_LATELY}
), late AS (
  SELECT *, t - quantile_disc(t, 0.5) OVER (PARTITION BY job, run, comm, seq) AS lag FROM arrivals
)
SELECT job, run, comm, rank, comm_rank, node, pid, count(*) AS calls, max(seq) AS last_seq,
  quantile_disc(lag, 0.5) AS lag_ns, max(lag) AS max_lag_ns
FROM late GROUP BY job, run, comm, rank, comm_rank, node, pid
"""
