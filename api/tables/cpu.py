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
        "process (a row for all threads of a process together) or thread (a row for the main thread or one of the"
        " busiest threads of a trainer).",
    ),
    _PLATFORM,
    Column("tid", I32, "Thread id; NULL in rows of processes."),
    Column("comm", NAME, "Name of the thread; for a process, the name of its main thread."),
    Column("wall_ns", I64, "Length of the interval that ends at ts, ns."),
    _USER,
    _SYS,
    _TOTAL,
    Column(
        "cpu_user_pct", F64, "Part of one CPU used outside of the kernel, %.", sql="100.0 * delta_user_ns / wall_ns"
    ),
    Column("cpu_sys_pct", F64, "Part of one CPU used in the kernel, %.", sql="100.0 * delta_sys_ns / wall_ns"),
    Column(
        "cpu_total_pct",
        F64,
        "Part of one CPU used, %; above 100 if several CPUs were used.",
        sql="100.0 * delta_total_ns / wall_ns",
    ),
    Column("cum_user_ns", I64, "CPU time outside of the kernel since the start of the process or thread, ns."),
    Column("cum_sys_ns", I64, "CPU time in the kernel since the start of the process or thread, ns."),
    Column("rss_kb", I64, "Resident memory, KiB; only for processes."),
    Column("thread_count", I32, "Number of threads; only for processes."),
    Column(
        "delta_vol_ctxt",
        I64,
        "How often the thread, or the main thread of the process, went to sleep in the interval (voluntary context"
        " switches); NULL for processes with the role `other` or `kernel`.",
    ),
    Column(
        "delta_invol_ctxt",
        I64,
        "How often the thread, or the main thread of the process, was preempted in the interval (involuntary context"
        " switches); NULL for processes with the role `other` or `kernel`.",
    ),
    _STATE,
    _WCHAN,
    Column(
        "run_delay_ns",
        I64,
        "Time in the interval in which the thread or process could run but had no CPU, ns. For a trainer, the sum over"
        " its threads: the sum may exceed wall_ns, and the times of idle threads are added some seconds late. For a"
        " data loader or launcher, the time of the main thread. NULL without CONFIG_SCHED_INFO.",
    ),
    Column("major_faults", I64, "Number of page faults in the interval that waited for a disk."),
    Column("processor", I32, "CPU on which the thread, or the main thread of the process, last ran."),
    Column(
        "cpu_list",
        NAME,
        "CPUs on which the thread or process is allowed to run, e.g. 0-3,8; NULL for the role `other` or `kernel`.",
    ),
    Column(
        "throttled_periods",
        I64,
        "Number of periods in the interval in which the process's control group, or a group above it, used up the CPU"
        " quota; NULL without a quota.",
    ),
    Column(
        "throttled_ns",
        I64,
        "Time in the interval for which the CPU quota stopped threads of the process's control group, or of a group"
        " above it, ns.",
    ),
    Column(
        "cpu_quota",
        F64,
        "Number of CPUs that the quota of the process's control group, or of a group above it, allows; NULL without a"
        " quota.",
    ),
)

UTILIZATION = Table(
    "cpu.utilization",
    "CPU use of the training processes and of their busiest threads, one row every host.cpu_interval_s, or every eighth"
    " interval while they use less than 2 % of a CPU. At most 16 other processes of the node also have rows, if they"
    " use 1 % of a CPU or more.",
    _UTILIZATION,
    stored(_UTILIZATION),
    sort_by=("job", "rank", "pid", "tid", "ts"),
)

TASKS = Table(
    "cpu.tasks",
    "All threads of the training processes, as of now (live). Columns with delta_ in their names are differences"
    " between two readings 0.1 s apart.",
    (
        *IDENTITY,
        Column("rank", I32, "Rank in the job; only for a trainer."),
        Column("role", NAME, "trainer, data_loader or launcher."),
        Column("platform", NAME, "Always linux."),
        Column("tid", I32, "Kernel thread id."),
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
