"""Tables of CPU time: of the processes that train, of their busiest threads, and of processes that compete with them.

Sources: /proc/PID/stat, status and wchan (proc(5)), schedstat (Documentation/scheduler/sched-stats.rst), cpu.stat and
cpu.max of control groups (Documentation/admin-guide/cgroup-v2.rst).
"""

from __future__ import annotations

from probing.api.tables.comm import IDENTITY
from probing.api.tables.schema import F64, I32, I64, NAME, Column, Table, stored

__all__ = ("TASKS", "UTILIZATION")

_PLATFORM = Column("platform", NAME, "Always linux.", sql="'linux'")
_STATE = Column("state", NAME, "running, sleeping, blocked (uninterruptible), stopped, zombie, exited or idle.")
_WCHAN = Column(
    "wchan",
    NAME,
    "Kernel function in which the process or thread waits; NULL while it runs, and if the kernel does not say.",
)
_USER = Column("delta_user_ns", I64, "CPU time outside of the kernel in the interval, ns, counted in ticks of 10 ms.")
_SYS = Column("delta_sys_ns", I64, "CPU time in the kernel in the interval, ns, counted in ticks of 10 ms.")
_TOTAL = Column(
    "delta_total_ns",
    I64,
    "CPU time in the interval, ns: for a thread as the scheduler counts it, for a process in ticks of 10 ms.",
)

_UTILIZATION = (
    *IDENTITY,
    Column("rank", I32, "Rank in the job; only for a trainer."),
    Column(
        "role", NAME, "trainer, data_loader or launcher; for the busiest other processes of the node: other or kernel."
    ),
    Column(
        "scope",
        NAME,
        "process (all its threads together) or thread (the main thread and the busiest threads of a trainer).",
    ),
    _PLATFORM,
    Column("tid", I32, "Thread id; NULL in rows of processes."),
    Column("comm", NAME, "Name of the thread; for a process the name of its main thread."),
    Column("wall_ns", I64, "Length of the interval that ends at ts, ns."),
    _USER,
    _SYS,
    _TOTAL,
    Column(
        "cpu_user_pct", F64, "Part of one CPU used outside of the kernel, %.", sql="100.0 * delta_user_ns / wall_ns"
    ),
    Column("cpu_sys_pct", F64, "Part of one CPU used in the kernel, %.", sql="100.0 * delta_sys_ns / wall_ns"),
    Column(
        "cpu_total_pct", F64, "Part of one CPU used, %; above 100 for several.", sql="100.0 * delta_total_ns / wall_ns"
    ),
    Column("cum_user_ns", I64, "CPU time outside of the kernel since the start of the process or thread, ns."),
    Column("cum_sys_ns", I64, "CPU time in the kernel since the start of the process or thread, ns."),
    Column("rss_kb", I64, "Resident memory, KiB; only for processes."),
    Column("thread_count", I32, "Number of threads; only for processes."),
    Column(
        "delta_vol_ctxt",
        I64,
        "How often the thread, or the main thread of the process, went to sleep in the interval; NULL for"
        " other processes.",
    ),
    Column(
        "delta_invol_ctxt",
        I64,
        "How often the thread, or the main thread of the process, was preempted in the interval; NULL for"
        " other processes.",
    ),
    _STATE,
    _WCHAN,
    Column(
        "run_delay_ns",
        I64,
        "Time in the interval in which it could run but had no CPU, ns. For a trainer the sum over its"
        " threads, which may be more than wall_ns and which counts idle threads some seconds late; for"
        " another process the time of its main thread. NULL without CONFIG_SCHED_INFO.",
    ),
    Column("major_faults", I64, "Number of page faults in the interval that waited for a disk."),
    Column("processor", I32, "CPU on which the thread, or the main thread of the process, last ran."),
    Column("cpu_list", NAME, "CPUs on which it is allowed to run, e.g. 0-3,8; NULL for other processes."),
    Column(
        "throttled_periods",
        I64,
        "Number of periods in the interval in which its control group or one above used up the CPU quota;"
        " NULL without a quota.",
    ),
    Column(
        "throttled_ns",
        I64,
        "Time in the interval for which the CPU quota stopped threads of its control group or one above, ns.",
    ),
    Column(
        "cpu_quota",
        F64,
        "Number of CPUs that the quota of its control group or one above allows; NULL if there is none.",
    ),
)

UTILIZATION = Table(
    "cpu.utilization",
    "CPU use of the processes that train and of their busiest threads, every host.cpu_interval_s, or"
    " every eighth interval while they use less than 2 %; also of at most 16 other processes of the node"
    " that use 1 % of a CPU or more.",
    _UTILIZATION,
    stored(_UTILIZATION),
    sort_by=("job", "rank", "pid", "tid", "ts"),
)

TASKS = Table(
    "cpu.tasks",
    "All threads of the processes that train, as of now (live); the differences are between two readings 0.1 s apart.",
    (
        *IDENTITY,
        Column("rank", I32, "Rank in the job; only for a trainer."),
        Column("role", NAME, "trainer, data_loader or launcher."),
        Column("platform", NAME, "Always linux."),
        Column("tid", I32, "The thread."),
        Column("comm", NAME, "Name of the thread."),
        _STATE,
        _WCHAN,
        Column("wall_ns", I64, "Time between the two readings, ns."),
        _USER,
        _SYS,
        Column("delta_total_ns", I64, "CPU time between the two readings, as the scheduler counts it, ns."),
        Column(
            "run_delay_ns",
            I64,
            "Time between the two readings in which the thread could run but had no CPU, ns; NULL without"
            " CONFIG_SCHED_INFO.",
        ),
        Column("processor", I32, "CPU on which the thread last ran."),
        Column("cpu_list", NAME, "CPUs on which the thread is allowed to run."),
    ),
)
