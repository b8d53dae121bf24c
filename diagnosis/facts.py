"""The facts of a job: what nodes recorded about its ranks, at one moment. They are the only input of the rules.

All values are plain, so facts can be written to a file and read back (``facts_file``). Times are UTC ns on the clock of
the rank's node; ``Case`` corrects them. Tuples are ordered from old to new unless a field says otherwise. The gatherer
limits each sequence, so that the facts of a rank stay below 64 KB.
"""

from __future__ import annotations

from dataclasses import dataclass

from probing.diagnosis.hardware_facts import NO_HARDWARE, Hardware

__all__ = (
    "MAX_RANKS",
    "VERSION",
    "Communicator",
    "Condition",
    "Endpoint",
    "Exit",
    "Facts",
    "Frame",
    "Helper",
    "Member",
    "Missing",
    "NodeFacts",
    "Operation",
    "Phase",
    "Process",
    "Progress",
    "Rank",
    "Sample",
    "Series",
    "Step",
    "Thread",
    "TimeOut",
    "Witness",
)

VERSION = 1
MAX_RANKS = 16384
"""The maximum number of ranks in facts. A larger world size is ignored: it comes from a target's environment."""


@dataclass(frozen=True, slots=True)
class Operation:
    """A collective or point-to-point operation of one rank.

    ``t_done_ns``: None while it is in flight, or if its end was not recorded. ``op``, ``dtype``, ``redop``, ``state``:
    as in comm.ops and comm.inflight. ``source``: ``probe``, ``stack`` (a Python or native stack shows the call; ``seq``
    is then None), ``ras`` or ``flight_recorder``. ``launched``: False if the operation was called in a group of NCCL
    that has not ended; None if this is unknown.
    """

    comm: str
    seq: int | None
    op: str | None
    t_call_ns: int | None
    t_done_ns: int | None = None
    state: str | None = None
    dtype: str | None = None
    count: int | None = None
    bytes: int | None = None
    redop: str | None = None
    root: int | None = None
    peer: int | None = None
    tid: int | None = None
    async_op: bool | None = None
    error: str | None = None
    source: str = "probe"
    launched: bool | None = None


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a rank has come on a communicator: its last operation, in flight or completed.

    ``seq``: the highest sequence number that the rank has called. ``calls``: the number of recorded operations.
    """

    comm: str
    seq: int | None
    op: str | None
    calls: int
    last_call_ns: int | None
    last_done_ns: int | None = None


@dataclass(frozen=True, slots=True)
class Frame:
    """A frame of a stack. ``values``: names and texts of its local variables, if they were read."""

    func: str
    file: str = ""
    line: int | None = None
    native: bool = False
    values: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Thread:
    """A thread and its stack, innermost frame first. ``main``: this thread trains. It issues the collectives of its
    process; if no thread was seen to issue any, it is the process's main thread.

    ``since_ns``: the time of the first of the latest samples that all show this innermost Python frame; None without
    samples. ``moving``: whether the stack differed between two readings; None after one reading. ``native_missing``:
    why there are no native frames. The fields from ``wchan`` on are as in ``Condition``.
    """

    tid: int
    name: str
    main: bool
    state: str | None
    gil: bool | None
    frames: tuple[Frame, ...]
    since_ns: int | None = None
    moving: bool | None = None
    native_missing: str = ""
    wchan: str | None = None
    syscall: str | None = None
    target: str | None = None
    target_kind: str | None = None
    file_system: str | None = None


@dataclass(frozen=True, slots=True)
class Condition:
    """The kernel's view of a process. Values that could not be read are None.

    About the thread that trains: ``state``, the kernel's letter (R, S, D, T, t, Z); ``wchan``, the kernel function in
    which it waits; ``syscall``, the system call in which it waits; ``target``, the file, pipe or socket of that call (a
    path, pipe:[INODE] or socket:[INODE]); ``target_kind``: file, fifo, pipe, socket, listener (a socket that listens),
    tty, directory, device, child or other; ``target_fd``, its descriptor; ``file_system``, its type and mount point,
    such as "fuse /mnt/ckpt"; ``lock_holder``, the pid of the process that holds the file lock that it waits for;
    ``asleep_since_ns``: the thread has not run since then; it may have stopped running earlier. ``children``: name, pid
    and state of the child processes.

    The fields after ``interval_ns`` are differences over that time: ``cpu_ns``, ``run_delay_ns`` (runnable without a
    CPU) and ``switches`` are about the thread that trains, the other fields about the process. ``read_bytes`` and
    ``write_bytes`` count all read and write calls, including calls on pipes and cached files; ``storage_read_bytes``
    counts the bytes that came from storage or a file server.
    """

    state: str | None = None
    wchan: str | None = None
    syscall: str | None = None
    target: str | None = None
    target_kind: str | None = None
    target_fd: int | None = None
    file_system: str | None = None
    lock_holder: int | None = None
    asleep_since_ns: int | None = None
    tracer_pid: int | None = None
    tracer: str | None = None
    threads: int | None = None
    cpus_allowed: int | None = None
    cpu_list: str | None = None
    cgroup: str | None = None
    frozen: bool | None = None
    cpu_quota: float | None = None
    memory_limit_bytes: int | None = None
    memory_used_bytes: int | None = None
    shm_used_bytes: int | None = None
    shm_size_bytes: int | None = None
    rss_bytes: int | None = None
    swap_bytes: int | None = None
    oom_kills: int | None = None
    children: tuple[tuple[str, int, str], ...] = ()
    interval_ns: int | None = None
    cpu_ns: int | None = None
    process_cpu_ns: int | None = None
    run_delay_ns: int | None = None
    read_bytes: int | None = None
    write_bytes: int | None = None
    storage_read_bytes: int | None = None
    switches: int | None = None
    major_faults: int | None = None
    throttled: int | None = None
    throttled_ns: int | None = None
    neighbours: tuple[tuple[str, int, int], ...] = ()
    """Other processes on the CPUs of the main thread: name, pid, CPU ns in ``interval_ns``; the busiest first."""


@dataclass(frozen=True, slots=True)
class Exit:
    """How a process ended. ``oom``: killed by the OOM killer of the kernel or of a cgroup."""

    ts_ns: int
    code: int | None = None
    signal: int | None = None
    oom: bool = False


@dataclass(frozen=True, slots=True)
class Helper:
    """A process that works for a rank: a data-loader worker, or another child process of the rank."""

    pid: int
    start_ns: int
    role: str
    state: str | None
    exit: Exit | None = None
    threads: tuple[Thread, ...] = ()
    condition: Condition | None = None


@dataclass(frozen=True, slots=True)
class Sample:
    """A stack of the main thread. ``share``: the share of the window in which samples showed it, 0 to 1."""

    frames: tuple[Frame, ...]
    share: float
    on_cpu: bool


@dataclass(frozen=True, slots=True)
class Step:
    """A training step of a rank. ``comm_ns`` is None if unknown."""

    step: int
    t_start_ns: int
    duration_ns: int
    comm_ns: int | None = None
    wait_ns: int | None = None


@dataclass(frozen=True, slots=True)
class Series:
    """Values over time. ``name``: ``rss_bytes``, ``device_bytes`` or the name of a watched variable. ``values`` may
    contain NaN and infinity.

    ``limit``: the largest possible value, such as the size of the device's memory; None if unknown.
    """

    name: str
    ts_ns: tuple[int, ...]
    values: tuple[float, ...]
    limit: float | None = None


@dataclass(frozen=True, slots=True)
class Witness:
    """A report about a rank on a communicator, from another source than the probes of operations.

    ``source``: ``ras`` (NCCL's RAS), ``flight_recorder`` (a dump of PyTorch's flight recorder), or ``probe`` (the error
    and state of the communicator in the library). ``ts_ns``: when the report was made, or for ``probe``, when the error
    was first seen; None if unknown. ``launched``, from ``ras``: names of operations, and the number of each that the
    rank has launched. ``operations``, from ``flight_recorder``: the rank's last operations. Their ``seq`` counts
    differently from the ``seq`` of the probes; their ``count`` is the size of the input. ``time_out_ns``: the time-out
    of the last operation. ``missing``: RAS could not reach the rank. ``dead``: RAS considers the rank dead.
    """

    source: str
    comm: str
    ts_ns: int | None = None
    launched: tuple[tuple[str, int], ...] = ()
    operations: tuple[Operation, ...] = ()
    missing: bool = False
    dead: bool = False
    async_error: str | None = None
    aborted: bool | None = None
    state: str | None = None
    time_out_ns: int | None = None


@dataclass(frozen=True, slots=True)
class Endpoint:
    """The local end of a TCP socket of a rank, or an address on which it listens. ``closed``: the socket was closed
    lately.
    """

    address: str
    port: int
    closed: bool = False

    @property
    def text(self) -> str:
        """The address and port, such as "127.0.0.1:49552"."""
        return f"[{self.address}]:{self.port}" if ":" in self.address else f"{self.address}:{self.port}"


@dataclass(frozen=True, slots=True)
class TimeOut:
    """The time-out after which the library ends an operation on a communicator, from the options of the process
    group.
    """

    comm: str
    ns: int


@dataclass(frozen=True, slots=True)
class Rank:
    """A rank of the job. ``state``: ``running``, ``stopped``, ``blocked``, ``zombie``, ``exited`` or ``unknown``.

    ``seen_from_ns``: operations that began before this time were not recorded; None: all were recorded. ``lost``: the
    number of operations lost lately. ``open`` and ``done``: its operations that are in flight, and that have ended, at
    most the last 64 of each communicator.
    ``env``: MASTER_ADDR, MASTER_PORT, WORLD_SIZE and others that ``ranks check`` compares. ``logs``: its last stored
    lines. ``witnesses``: reports of RAS and the flight recorder, and errors of communicators. ``endpoints``: its
    sockets that were seen, including those that it closed in the last ten minutes. ``time_outs``: the time-outs of the
    communicators in which it has operations in flight, while the job stands still.
    """

    rank: int
    node: str
    pid: int
    start_ns: int
    state: str = "running"
    local_rank: int | None = None
    node_rank: int | None = None
    world_size: int | None = None
    seen_from_ns: int | None = None
    lost: int = 0
    exit: Exit | None = None
    started_ns: int | None = None
    open: tuple[Operation, ...] = ()
    done: tuple[Operation, ...] = ()
    progress: tuple[Progress, ...] = ()
    threads: tuple[Thread, ...] = ()
    condition: Condition | None = None
    helpers: tuple[Helper, ...] = ()
    samples: tuple[Sample, ...] = ()
    past_samples: tuple[Sample, ...] = ()
    steps: tuple[Step, ...] = ()
    series: tuple[Series, ...] = ()
    logs: tuple[str, ...] = ()
    env: tuple[tuple[str, str], ...] = ()
    witnesses: tuple[Witness, ...] = ()
    endpoints: tuple[Endpoint, ...] = ()
    time_outs: tuple[TimeOut, ...] = ()


@dataclass(frozen=True, slots=True)
class Process:
    """A process of the job that is not a rank: the launcher, or a process whose rank is unknown."""

    node: str
    pid: int
    start_ns: int
    role: str
    state: str | None = None
    exit: Exit | None = None


@dataclass(frozen=True, slots=True)
class Member:
    """A member of a communicator: ``rank`` in the job, ``comm_rank`` in the communicator."""

    comm_rank: int
    rank: int


@dataclass(frozen=True, slots=True)
class Communicator:
    """A communicator. ``members``: the known members, at most ``size``. ``witness``: the source that showed it:
    ``probe``, ``ras`` or ``stack``.
    """

    comm: str
    name: str | None
    backend: str | None
    size: int | None
    members: tuple[Member, ...]
    role: str | None = None
    async_error: str | None = None
    aborted: bool | None = None
    state: str | None = None
    witness: str = "probe"


@dataclass(frozen=True, slots=True)
class Missing:
    """A gap in the facts. ``kind``: ``node``, ``rank``, ``operations``, ``stacks``, ``condition``, ``rule``, ``clock``,
    ``history``, ``pause``, ``size`` or ``claim``.

    ``history``: rows that could not be read. ``pause``: the probes of a node are paused. ``size``: facts that were
    read, but left out since facts are limited. ``claim``: a node that is not proven to take part in the job.
    """

    kind: str
    text: str
    rank: int | None = None
    node: str | None = None


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """A node that answered. Subtract ``clock_offset_ns``, which is exact to ``clock_error_ns``, from its times.

    ``watching_since_ns``: the start of its daemon. ``advanced_ns``: when an operation of the job last began or ended on
    it. ``memory_available_bytes``: MemAvailable of /proc/meminfo. ``idle_cpus``: the CPUs that were idle for at least
    30 % of the time between the readings of conditions; None if unknown.
    """

    node: str
    taken_ns: int
    watching_since_ns: int | None = None
    advanced_ns: int | None = None
    clock_offset_ns: int = 0
    clock_error_ns: int = 0
    memory_total_bytes: int | None = None
    memory_available_bytes: int | None = None
    hardware: Hardware = NO_HARDWARE
    idle_cpus: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class Phase:
    """The label ``phase`` of a rank, with which the job's user or an administrator says what the rank does.

    ``since_ns``: when it was set; ``limit_s``: the seconds that this phase may last before the job can count as
    stalled, 0 for a phase without a limit of its own.
    """

    name: str
    rank: int
    since_ns: int
    limit_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Facts:
    """The facts of one run of a job. ``stall_s``: W, the time without progress after which a job counts as stalled.

    ``usual_gap_ns``: the longest usual time between two operations of a rank; None if unknown. ``step_history``: end
    and duration of past steps of the job, measured on one rank; a long history has medians of groups of steps.
    ``owner``: the uid of the job's user on the node; None if a peer's version does not send it. ``phase``: if several
    ranks have a phase, the phase that may last longest.
    """

    job: str
    run: str
    world_size: int | None
    stall_s: float
    taken_ns: int
    nodes: tuple[NodeFacts, ...]
    ranks: tuple[Rank, ...]
    communicators: tuple[Communicator, ...] = ()
    processes: tuple[Process, ...] = ()
    missing: tuple[Missing, ...] = ()
    usual_gap_ns: int | None = None
    step_history: tuple[tuple[int, int], ...] = ()
    owner: int | None = None
    phase: Phase | None = None
    version: int = VERSION
