"""CPU time of the processes that train, of their busiest threads, and of those that compete with them.

Sources: /proc/PID/stat, status and wchan (proc(5)), schedstat (Documentation/scheduler/sched-stats.rst), cpu.stat and
cpu.max of control groups (Documentation/admin-guide/cgroup-v2.rst).
"""

from __future__ import annotations

from probing.api.tables.comm import IDENTITY
from probing.api.tables.schema import F64, I32, I64, NAME, Column, Table, stored

__all__ = ("TASKS", "UTILIZATION")

_PLATFORM = Column("platform", NAME, "Always linux.", "'linux'")
_STATE = Column("state", NAME, "running, sleeping, blocked (uninterruptible), stopped, zombie, exited or idle.")
_WCHAN = Column(
    "wchan", NAME, "Function of the kernel in which it waits; NULL while it runs, and where the kernel does not say."
)
_USER = Column("delta_user_ns", I64, "CPU time outside of the kernel in the interval, counted in ticks of 10 ms.")
_SYS = Column("delta_sys_ns", I64, "CPU time in the kernel in the interval, counted in ticks of 10 ms.")
_TOTAL = Column(
    "delta_total_ns",
    I64,
    "CPU time in the interval: of a thread as the scheduler counts it, ns; of a process in ticks of 10 ms.",
)

_UTILIZATION = (
    *IDENTITY,
    Column("rank", I32, "Rank in the job, for a trainer."),
    Column(
        "role", NAME, "trainer, data_loader or launcher; for the busiest other processes of the node other or kernel."
    ),
    Column("scope", NAME, "process (all threads together) or thread (the main thread and the busiest of a trainer)."),
    _PLATFORM,
    Column("tid", I32, "The thread; NULL for a process."),
    Column("comm", NAME, "Name of the thread, or of the process: that of its main thread."),
    Column("wall_ns", I64, "Length of the interval that ends at ts, ns."),
    _USER,
    _SYS,
    _TOTAL,
    Column("cpu_user_pct", F64, "Part of one CPU used outside of the kernel, %.", "100.0 * delta_user_ns / wall_ns"),
    Column("cpu_sys_pct", F64, "Part of one CPU used in the kernel, %.", "100.0 * delta_sys_ns / wall_ns"),
    Column("cpu_total_pct", F64, "Part of one CPU used, %; above 100 for several.", "100.0 * delta_total_ns / wall_ns"),
    Column("cum_user_ns", I64, "CPU time outside of the kernel since its start."),
    Column("cum_sys_ns", I64, "CPU time in the kernel since its start."),
    Column("rss_kb", I64, "Resident memory, KiB; of a process only."),
    Column("thread_count", I32, "Threads; of a process only."),
    Column(
        "delta_vol_ctxt",
        I64,
        "Times that it went to sleep in the interval; of a process: its main thread. NULL for other processes.",
    ),
    Column(
        "delta_invol_ctxt",
        I64,
        "Times that it had to leave its CPU to another one; of a process: its main thread. NULL for other processes.",
    ),
    _STATE,
    _WCHAN,
    Column(
        "run_delay_ns",
        I64,
        "Time in the interval in which it could run and had no CPU; of a trainer: of its threads together, so above"
        " wall_ns where several wait, those of idle ones some seconds late; of another process: of its main thread."
        " NULL without CONFIG_SCHED_INFO.",
    ),
    Column("major_faults", I64, "Page faults in the interval that waited for a disk."),
    Column("processor", I32, "CPU on which it last ran; of a process: its main thread."),
    Column("cpu_list", NAME, "CPUs on which it may run, e.g. 0-3,8; NULL for other processes."),
    Column(
        "throttled_periods",
        I64,
        "Periods in the interval in which its control groups, also those above, used up their quota; NULL without.",
    ),
    Column(
        "throttled_ns", I64, "Time in the interval for which the threads of these groups were held up by the quota."
    ),
    Column("cpu_quota", F64, "CPUs that the closest of these groups may use; NULL without a limit."),
)

UTILIZATION = Table(
    "cpu.utilization",
    "CPU of the processes that train and of their busiest threads, each host.cpu_interval_s, or in every eighth"
    " interval while they use less than 2 %; beside them the busiest other processes of the node, at most 16, those"
    " that use 1 % of a CPU or more.",
    _UTILIZATION,
    stored(_UTILIZATION),
    sort_by=("job", "rank", "pid", "tid", "ts"),
)

TASKS = Table(
    "cpu.tasks",
    "All threads of the processes that train, as they are now (live); two looks a tenth of a second apart give the"
    " differences.",
    (
        *IDENTITY,
        Column("rank", I32, "Rank in the job, for a trainer."),
        Column("role", NAME, "trainer, data_loader or launcher."),
        Column("platform", NAME, "Always linux."),
        Column("tid", I32, "The thread."),
        Column("comm", NAME, "Name of the thread."),
        _STATE,
        _WCHAN,
        Column("wall_ns", I64, "Time between the two looks, ns."),
        _USER,
        _SYS,
        Column("delta_total_ns", I64, "CPU time between the two looks as the scheduler counts it, ns."),
        Column(
            "run_delay_ns",
            I64,
            "Time between them in which it could run and had no CPU; NULL without CONFIG_SCHED_INFO.",
        ),
        Column("processor", I32, "CPU on which it last ran."),
        Column("cpu_list", NAME, "CPUs on which it may run."),
    ),
)
