-- What the threads of a rank did in the seconds in which one of its operations took more than 100 ms: a row for each
-- stack that was sampled, with its innermost frame.
SELECT
  o.node, o.ts, o.job, o.rank, o.op, o.seq, o.duration_ns AS operation_ns,
  s.thread, s.on_cpu, s.gil, s.duration_ns AS sampled_ns,
  k.frames[1].func AS func, k.frames[1].file AS file, k.frames[1].lineno AS lineno
FROM comm.ops AS o
JOIN python.samples AS s
  ON o.node = s.node AND o.pid = s.pid AND o.start_ns = s.start_ns
  AND s.ts > o.ts - INTERVAL 1 SECOND AND s.ts <= o.t_done_hi
LEFT JOIN (SELECT node, stack_id, any_value(frames) AS frames FROM python.stacks GROUP BY node, stack_id) AS k
  ON s.node = k.node AND s.stack_id = k.stack_id
WHERE o.duration_ns > 100_000_000
