"""Our own views about the activity of jobs, named ``views.NAME``."""

from __future__ import annotations

from probing.api.tables.schema import F64, I32, I64, NAME, TEXT, TIME, Column, view

__all__ = ("VIEWS",)

_WHO = "node, job, run, rank, pid, start_ns"
# The view shows only the last quarter of an hour: it aggregates, so the conditions of a query do not limit its reads.
_SECONDS = 900
_LONGEST = "INTERVAL 1 HOUR"
_SPINE = f"(SELECT epoch_ns(now()) // 1000000000 - i AS second FROM generate_series(0, {_SECONDS - 1}) AS g(i)) AS q"
_OVERLAP = "least({0}.ended, (q.second + 1) * 1000000000) - greatest({0}.began, q.second * 1000000000)"
_MEETS = "JOIN {1} ON {0}.began < (q.second + 1) * 1000000000 AND {0}.ended > q.second * 1000000000"
_OPERATIONS = (
    f"SELECT {_WHO}, op, epoch_ns(ts) AS began, epoch_ns(coalesce(t_done_hi, ts)) AS ended FROM comm.ops"
    f" WHERE ts > now() - {_LONGEST} AND rank IS NOT NULL"
    f" UNION ALL SELECT {_WHO}, op, epoch_ns(ts) AS began, epoch_ns(ts) + age_ns AS ended FROM comm.inflight"
    " WHERE rank IS NOT NULL"
)
# A row of on-CPU samples covers one second, a row of off-CPU samples one wait.
_SAMPLES = (
    f"SELECT {_WHO}, coalesce(trains, tid = pid) AS main, on_cpu, stack_id, epoch_ns(ts) AS began,"
    f" epoch_ns(ts) + duration_ns AS ended FROM python.samples WHERE ts > now() - {_LONGEST} AND rank IS NOT NULL"
)
# A stack is stored again in each hour in which it is seen, so 3 hours cover the stacks of all samples above.
_STACKS = (
    "SELECT stack_id, any_value(frames[1].func) AS func FROM python.stacks WHERE ts > now() - INTERVAL 3 HOUR"
    " GROUP BY stack_id"
)
_BY_OPERATION = (
    f"SELECT {_WHO}, q.second, sum({_OVERLAP.format('o')}) AS comm_ns, arg_max(o.op, o.began) AS op, NULL AS cpu_ns,"
    f" NULL AS func FROM ({_OPERATIONS}) AS o {_MEETS.format('o', _SPINE)} GROUP BY {_WHO}, q.second"
)
_BY_FUNCTION = (
    f"SELECT {_WHO}, q.second, k.func, sum({_OVERLAP.format('c')}) FILTER (WHERE c.on_cpu) AS cpu_ns,"
    f" sum({_OVERLAP.format('c')}) FILTER (WHERE c.main) AS main_ns"
    f" FROM ({_SAMPLES}) AS c {_MEETS.format('c', _SPINE)} LEFT JOIN ({_STACKS}) AS k ON c.stack_id = k.stack_id"
    f" GROUP BY {_WHO}, q.second, k.func"
)
_BY_SAMPLE = (
    f"SELECT {_WHO}, second, NULL AS comm_ns, NULL AS op, sum(cpu_ns) AS cpu_ns, arg_max(func, main_ns) AS func"
    f" FROM ({_BY_FUNCTION}) AS f GROUP BY {_WHO}, second"
)
_EACH = (
    f"SELECT {_WHO}, make_timestamp_ns(second * 1000000000) AS ts, sum(comm_ns) AS comm_ns, any_value(op) AS op,"
    f" sum(cpu_ns) AS cpu_ns, any_value(func) AS func FROM ({_BY_OPERATION} UNION ALL {_BY_SAMPLE}) AS b"
    f" GROUP BY {_WHO}, second"
)
# For each second, _WAITED uses the first interval that ends in the second or later, if it overlaps the second.
_WAITS = (
    "SELECT node, pid, start_ns, ts, wall_ns, run_delay_ns FROM cpu.utilization"
    f" WHERE scope = 'process' AND ts > now() - {_LONGEST}"
)
_WAITED = (
    "CASE WHEN epoch_ns(w.ts) - w.wall_ns < epoch_ns(u.ts) + 1000000000"
    " THEN least(1.0, w.run_delay_ns / CAST(w.wall_ns AS DOUBLE)) END"
)
_STEPS = f"SELECT node, pid, start_ns, ts, step FROM train.steps WHERE ts > now() - {_LONGEST}"

RANK_SECOND = view(
    "views.rank_second",
    "What each rank did in each second of the last 15 minutes; a row for each rank and second with operations or"
    " samples of the rank.",
    (
        Column("node", NAME, "Name of the node.", sql="u.node"),
        Column("ts", TIME, "Start of the second, UTC.", sql="u.ts"),
        Column("job", NAME, "The job of the process.", sql="u.job"),
        Column("run", NAME, "The run of the job.", sql="u.run"),
        Column("pid", I32, "Process id as seen on the host.", sql="u.pid"),
        Column("start_ns", I64, "Start of the process in ns since boot.", sql="u.start_ns"),
        Column("rank", I32, "Rank in the job.", sql="u.rank"),
        Column(
            "step",
            I64,
            "Number of the latest step that began before the end of this second. train.steps has no rows of steps that"
            " have not ended.",
            sql="s.step",
        ),
        Column(
            "comm_share",
            F64,
            "Part of the second in which operations ran, at most 1; times of simultaneous operations are added.",
            sql="least(1.0, coalesce(u.comm_ns, 0) / 1e9)",
        ),
        Column(
            "op",
            TEXT,
            "Operation that was called last, among the operations in progress during the second.",
            sql="u.op",
        ),
        Column(
            "top_func",
            TEXT,
            "Innermost Python function in which the main thread spent the most sampled time.",
            sql="u.func",
        ),
        Column(
            "cpus",
            F64,
            "Number of CPUs that Python threads used, from samples; NULL without samples.",
            sql="u.cpu_ns / 1e9",
        ),
        Column(
            "run_queue_share",
            F64,
            "Part of the second in which threads could run but had no CPU, at most 1; times of simultaneous"
            " waits are added. NULL if not recorded.",
            sql=_WAITED,
        ),
    ),
    f"({_EACH}) AS u ASOF LEFT JOIN ({_STEPS}) AS s ON u.node = s.node AND u.pid = s.pid AND u.start_ns = s.start_ns"
    " AND epoch_ns(u.ts) + 999999999 >= epoch_ns(s.ts)"
    f" ASOF LEFT JOIN ({_WAITS}) AS w ON u.node = w.node AND u.pid = w.pid AND u.start_ns = w.start_ns"
    " AND epoch_ns(u.ts) <= epoch_ns(w.ts)",
)

VIEWS = (RANK_SECOND,)
