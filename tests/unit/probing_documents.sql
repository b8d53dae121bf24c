-- Every shape of SQL in Probing's README, guides, design notes and bundled skills, and the statements of its founding
-- documents: its tables, columns, tags and functions. A statement after `-- refused: TEXT` is refused with that text.

-- README, quick start, guides: python.torch_trace
SELECT * FROM python.torch_trace LIMIT 10;
SELECT * FROM python.torch_trace WHERE step = (SELECT MAX(step) FROM python.torch_trace);
SELECT local_step, AVG(allocated) AS mb FROM python.torch_trace GROUP BY local_step ORDER BY local_step;
SELECT local_step, AVG(allocated_delta) AS d, MAX(max_allocated_delta) AS m FROM python.torch_trace GROUP BY 1 ORDER BY 1;
SELECT rank, AVG(allocated) avg_memory, MAX(allocated) peak_memory FROM python.torch_trace GROUP BY rank;
SELECT module, stage, AVG(duration) AS sec, COUNT(*) AS n FROM python.torch_trace
  WHERE stage IN ('post forward', 'post step') GROUP BY module, stage ORDER BY sec DESC LIMIT 10;
SELECT module, SUM(duration) * 100.0 / SUM(SUM(duration)) OVER () AS pct FROM python.torch_trace
  WHERE step > (SELECT MAX(step) - 10 FROM python.torch_trace) GROUP BY module ORDER BY pct DESC LIMIT 15;
SELECT step, SUM(CASE WHEN stage = 'post step' THEN duration ELSE 0 END) AS optimizer FROM python.torch_trace
  WHERE step > (SELECT MAX(step) - 5 FROM python.torch_trace) GROUP BY step ORDER BY step;
SELECT module, AVG(allocated) / AVG(duration) AS rate FROM python.torch_trace WHERE duration > 0.001 GROUP BY module;
SELECT module, AVG(duration) FROM python.torch_trace WHERE module LIKE '%attn%' OR module LIKE '%attention%' GROUP BY 1;
SELECT AVG(duration) FROM python.torch_trace WHERE step BETWEEN 100 AND 110;
WITH trend AS (SELECT step, MAX(allocated) AS peak, LAG(MAX(allocated)) OVER (ORDER BY step) AS prev
  FROM python.torch_trace GROUP BY step) SELECT step, peak - prev AS growth FROM trend WHERE peak > prev ORDER BY step;
SELECT step, max(allocated) - min(allocated) AS growth FROM python.torch_trace
  WHERE step > (SELECT max(step) - 10 FROM python.torch_trace) GROUP BY step HAVING max(allocated) - min(allocated) > 50;
SELECT module, stage, stddev(allocated) AS v FROM python.torch_trace GROUP BY module, stage HAVING stddev(allocated) > 10;
SELECT stage, avg(max_allocated), avg(cached), avg(max_cached), avg(time_offset) FROM python.torch_trace GROUP BY stage;
SELECT local_step, AVG(duration) OVER (PARTITION BY module ORDER BY local_step, seq ROWS BETWEEN 4 PRECEDING AND
  CURRENT ROW) AS mean FROM python.torch_trace WHERE local_step > (SELECT max(local_step) - 5 FROM python.torch_trace);
SELECT module, percentile_cont(0.95) WITHIN GROUP (ORDER BY duration) AS p95 FROM python.torch_trace GROUP BY module;
SELECT allocated, LAG(allocated) OVER (ORDER BY local_step, seq), LEAD(allocated) OVER (ORDER BY local_step, seq),
  ROW_NUMBER() OVER (ORDER BY allocated DESC) FROM python.torch_trace;
SELECT _rank, module, stage, AVG(duration) AS s FROM global.python.torch_trace GROUP BY _rank, module, stage;
SELECT MIN(local_step), MAX(local_step), COUNT(*) FROM python.torch_trace;

-- python.torch_step_timing
WITH b AS (SELECT GREATEST(COALESCE(MAX(CAST(local_step AS BIGINT)), 0) - 80, 1) AS first FROM python.torch_step_timing)
  SELECT round((median(CASE WHEN CAST(is_shadow AS BIGINT) = 0 THEN CAST(step_duration_sec AS DOUBLE) END)
  / nullif(median(CASE WHEN CAST(is_shadow AS BIGINT) = 1 THEN CAST(step_duration_sec AS DOUBLE) END), 0) - 1) * 100, 2),
  sum(CASE WHEN CAST(sampled AS BIGINT) = 0 THEN 1 ELSE 0 END), max(CAST(shadow_baseline AS BIGINT))
  FROM python.torch_step_timing, b WHERE CAST(local_step AS BIGINT) >= b.first;

-- python.comm_collective, its tags
SELECT op, AVG(duration_ms) AS ms, MAX(duration_ms), COUNT(*) AS calls FROM python.comm_collective GROUP BY op
  ORDER BY ms DESC LIMIT 5;
SELECT role, AVG(duration_ms) FROM python.comm_collective GROUP BY role;
SELECT _role, _rank, op, AVG(duration_ms) AS ms FROM global.python.comm_collective GROUP BY _role, _rank, op
  ORDER BY ms DESC LIMIT 10;
SELECT _host, _node_rank, count(DISTINCT _rank) AS ranks, avg(duration_ms) AS ms FROM global.python.comm_collective
  WHERE global_step >= (SELECT max(global_step) - 100 FROM global.python.comm_collective) GROUP BY _host, _node_rank;
SELECT global_step, rank, role, op, duration_ms, bytes, tensor_shape FROM python.comm_collective
  WHERE global_step > (SELECT max(global_step) - 20 FROM python.comm_collective) ORDER BY duration_ms DESC LIMIT 20;
WITH r AS (SELECT global_step, _rank, max(duration_ms) AS ms FROM global.python.comm_collective
  WHERE global_step >= (SELECT max(global_step) - 500 FROM global.python.comm_collective) GROUP BY global_step, _rank),
  s AS (SELECT global_step, avg(ms) / NULLIF(min(ms), 0) AS ratio FROM r GROUP BY global_step)
  SELECT avg(ratio), count(*) FILTER (WHERE ratio > 1.1) FROM s;
SELECT c.global_step, c.rank, sum(c.duration_ms), sum(CASE WHEN t.stage LIKE 'post %' THEN t.duration ELSE 0 END)
  FROM python.comm_collective c JOIN python.torch_trace t
  ON c.global_step = t.global_step AND c.rank = t.rank AND c.role = t.role GROUP BY c.global_step, c.rank, c.role;
SELECT _host, _rank, _local_rank, max(global_step) AS last FROM global.python.comm_collective
  GROUP BY _host, _rank, _local_rank
  HAVING max(global_step) < (SELECT max(global_step) - 5 FROM global.python.comm_collective);
WITH b AS (SELECT max(global_step) AS top FROM global.python.comm_collective)
  SELECT _host, _rank, (SELECT top FROM b) - max(global_step) AS behind FROM global.python.comm_collective, b
  WHERE global_step >= (SELECT top - 200 FROM b) GROUP BY _host, _rank, b.top ORDER BY behind DESC;
SELECT rank, world_size, group_rank, group_size, participate_ranks, tensor_dtype, async_op, micro_step, micro_batches
  FROM python.comm_collective LIMIT 5;

-- nccl
SELECT operation, src_rank, dst_rank, bytes_transferred, duration_ms FROM python.nccl_trace
  WHERE step = (SELECT MAX(step) FROM python.nccl_trace) ORDER BY duration_ms DESC;
SELECT coll_func, msg_size_bytes, timing_source, count(*), avg(algobw_gbps), avg(exec_time_ns) / 1e6 AS ms
  FROM nccl.coll_perf GROUP BY coll_func, msg_size_bytes, timing_source ORDER BY ms LIMIT 15;
SELECT seq, coll_func, _rank, sum(send_gpu_wait_ns), sum(recv_wait_ns) FROM global.nccl.proxy_ops
  WHERE seq >= (SELECT max(seq) - 50 FROM global.nccl.proxy_ops) GROUP BY seq, coll_func, _rank;
SELECT pp_rank, tp_rank, dp_rank, rank, sum(send_gpu_wait_ns) FROM global.nccl.proxy_ops GROUP BY 1, 2, 3, 4;
SELECT rank, qp_num, device, opcode, length, duration_ns FROM nccl.net_qp LIMIT 20;
SELECT rank, comm_hash, coll_func, seq, kind, peer, is_send, age_ns FROM nccl.inflight_ops ORDER BY age_ns DESC;
SELECT ts, rank, pool_exhausted, write_errors, ring_rows_overwritten, coll_live, coll_cap, proxy_live, proxy_cap
  FROM nccl.profiler_counters ORDER BY ts DESC LIMIT 1;
WITH last AS (SELECT rank, max(snapshot_id) AS id FROM global.python.torch_nccl_pg_status GROUP BY rank)
  SELECT s.rank, s.pg_name, s.last_enqueued_collective, s.last_started_collective, s.last_completed_collective
  FROM global.python.torch_nccl_pg_status s JOIN last l ON s.rank = l.rank AND s.snapshot_id = l.id;
SELECT rank, collective_seq_id, state, profiling_name, top_frame FROM global.python.torch_nccl_flight_record
  WHERE state <> 'completed' ORDER BY collective_seq_id;

-- stacks, spans, variables, nodes, processes
SELECT func, file, lineno, depth, frame_type FROM python.backtrace ORDER BY depth LIMIT 10;
SELECT func, file, lineno FROM python.backtrace WHERE func LIKE '%collective%' OR func LIKE '%allreduce%';
SELECT _host, _rank, func, file, lineno FROM global.python.backtrace WHERE func LIKE '%nccl%';
SELECT s.attributes, s.time, CAST((e.time - s.time) / 1000 AS DOUBLE) AS us FROM python.trace_event s
  JOIN python.trace_event e ON s.span_id = e.span_id AND e.record_type = 'span_end'
  WHERE s.record_type = 'span_start' AND s.name = 'train.step';
SELECT micro_step, func, name, value FROM python.variables;
SELECT function_name, filename, lineno, variable_name, value, value_type FROM python.trace_variables;
SELECT node, rank, step, loss FROM python.training_metrics ORDER BY step;
SELECT rank, host, addr, status, role, role_name FROM cluster.nodes ORDER BY rank;
SELECT count(*), count(*) FILTER (WHERE status = 'running'), count(*) FILTER (WHERE status = 'dead') FROM cluster.nodes;
SELECT name, value FROM process.envs;

-- metadata
SELECT * FROM information_schema.df_settings WHERE name LIKE 'probing.%';
SELECT table_schema, table_name, table_type FROM information_schema.tables
  WHERE table_schema NOT IN ('information_schema') ORDER BY table_schema, table_name;
SELECT column_name, data_type FROM information_schema.columns WHERE table_name = 'torch_trace';
SELECT table_schema, table_name, description, synonyms, notes, global_name FROM probe.probing.table_docs;
SELECT table_schema, table_name, column_name, description FROM probe.probing.column_docs;

-- what only code inside a job can answer, and what is no query
-- refused: which a node does not do in a query
SELECT * FROM python.`time.time()`;
-- refused: which a node does not do in a query
SELECT * FROM python.`torch.cuda.memory_stats()`;
-- refused: once the job has written a row (ExternalTable)
SELECT * FROM python.test;
-- refused: once the job has written a row (ExternalTable)
SELECT name, capture_id FROM python.profile_hotspot;
-- refused: `probingctl config KEY=VALUE`
SET probing.torch.profiling = 'on';
-- refused: probing.table_docs
SHOW TABLES;
