-- A row a rank and second in which it did anything that is watched: its step, time in operations and bytes of them, time
-- on the CPU as sampled, and time in which threads waited for the GPU. What begins in a second counts there as a whole.
WITH seconds AS (
  SELECT node, job, rank, pid, start_ns, time_bucket(INTERVAL 1 SECOND, ts) AS ts,
    duration_ns AS operations_ns, bytes, 0 AS cpu_ns, 0 AS gpu_wait_ns
  FROM comm.ops
  UNION ALL
  SELECT node, job, rank, pid, start_ns, time_bucket(INTERVAL 1 SECOND, ts), 0, 0, duration_ns, 0
  FROM python.samples WHERE on_cpu
  UNION ALL
  SELECT node, job, rank, pid, start_ns, time_bucket(INTERVAL 1 SECOND, ts), 0, 0, 0, duration_ns
  FROM cuda.syncs
), sums AS (
  SELECT node, job, rank, pid, start_ns, ts,
    sum(operations_ns)::BIGINT AS operations_ns, sum(bytes)::BIGINT AS bytes, sum(cpu_ns)::BIGINT AS cpu_ns,
    sum(gpu_wait_ns)::BIGINT AS gpu_wait_ns
  FROM seconds GROUP BY ALL
)
SELECT u.node, u.ts, u.job, u.rank, s.step, u.operations_ns, u.bytes, u.cpu_ns, u.gpu_wait_ns
FROM sums AS u
ASOF LEFT JOIN train.steps AS s
  ON u.node = s.node AND u.pid = s.pid AND u.start_ns = s.start_ns AND u.ts >= s.ts
