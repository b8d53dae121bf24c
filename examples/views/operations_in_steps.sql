-- Operations with the training step of their rank in which they were called, how far into it that was, and what share
-- of it they took. A step that has not ended has no row yet: its operations have none either.
SELECT
  o.node, o.ts, o.job, o.rank, o.comm, o.op, o.bytes, o.duration_ns,
  s.step, s.source, s.confidence,
  epoch_ns(o.ts) - epoch_ns(s.ts) AS into_step_ns,
  o.duration_ns / s.duration_ns AS share_of_step
FROM comm.ops AS o
ASOF JOIN train.steps AS s
  ON o.node = s.node AND o.pid = s.pid AND o.start_ns = s.start_ns AND o.ts >= s.ts
WHERE o.ts <= s.t_end
