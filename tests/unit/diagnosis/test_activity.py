"""What a rank does, from its stack and the kernel's view of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from diagnosis_cases import NOW, TORCH, ago, elsewhere, facts, frame, in_collective, node, op, rank, thread
from hypothesis import given
from hypothesis import strategies as st

from probing.diagnosis.activity.activity import Activity, activity_of
from probing.diagnosis.activity.kinds import ACTIVITIES
from probing.diagnosis.facts import Condition, Exit, Frame, Helper, Rank, Thread

LIB = "/usr/lib/python3.11"
MIB = 1 << 20
LOADER = (
    f"_try_get_data {TORCH}utils/data/dataloader.py:1283",
    f"_get_data {TORCH}utils/data/dataloader.py:1444",
    f"_next_data {TORCH}utils/data/dataloader.py:1480",
    f"__next__ {TORCH}utils/data/dataloader.py:732",
)
QUEUE = (f"get {LIB}/multiprocessing/queues.py:103",)
LOOP = (f"_worker_loop {TORCH}utils/data/_utils/worker.py:349", f"run {LIB}/multiprocessing/process.py:108")
FETCH = (f"fetch {TORCH}utils/data/_utils/fetch.py:54",)


def does(one: Rank) -> Activity:
    return activity_of(one, facts(one))


def doing(
    stack: Thread | None = None, *others: Thread, helpers: Any = (), end: Exit | None = None, **fields: Any
) -> Activity:
    """Returns what a rank does whose condition has ``fields``, read twice in a second in which it did not run."""
    own = {"state": "S", "interval_ns": 10**9, "cpu_ns": 0, "switches": 0, "asleep_since_ns": ago(39)}
    one = rank(1, stack=stack, condition=Condition(**{**own, **fields}), helpers=tuple(helpers), exit=end)
    return does(replace(one, threads=(*one.threads, *others)))


def worker(pid: int, *frames: str, end: Exit | None = None, **fields: Any) -> Helper:
    own = {"state": "S", "interval_ns": 10**9, "cpu_ns": 0, "switches": 0, "asleep_since_ns": ago(39)}
    threads = (thread(*frames, tid=pid),) if frames else ()
    return Helper(pid, 1, "data_loader", "S", end, threads, None if end else Condition(**{**own, **fields}))


def native(name: str) -> Any:
    return frame(name, native=True)


def user(*inner: Any, **fields: Any) -> Thread:
    """Returns a main thread with ``inner`` called by the user's step, train.py:40."""
    return thread(*inner, "step train.py:40", "<module> train.py:60", **fields)


# A signal's handler, dump, waits for a lock.
IN_HANDLER = (
    native("PyThread_acquire_lock_timed"),
    "dump train.py:7",
    native("PyErr_CheckSignals"),
    native("time_sleep"),
)
FUSE = {"target": "/mnt/c/a.pt", "target_kind": None, "file_system": "fuse.ckpt /mnt/c", "target_fd": 7}
WAITS: list[tuple[str, str, Activity]] = [
    ("stopped", "it is stopped by a signal in step, train.py:40", doing(user(), state="T")),
    (
        "traced",
        "it is held by gdb (pid 77) in step, train.py:40",
        doing(user(), state="t", tracer="gdb", tracer_pid=77),
    ),
    ("stopped", "it is frozen by its cgroup /jobs/7", doing(user(), frozen=True, cgroup="/jobs/7")),
    ("exited", "it was killed by SIGKILL, out of memory (OOM)", doing(end=Exit(NOW, signal=9, oom=True))),
    ("exited", "it exited with code 0", doing(end=Exit(NOW, code=0))),
    (
        "exited",
        "it was killed by SIGBUS: /dev/shm is full (64/64 MiB)",
        doing(end=Exit(NOW, signal=7), shm_used_bytes=64 * MIB, shm_size_bytes=64 * MIB),
    ),
    (
        "lock",
        "it waits for a lock in step, train.py:40",
        doing(user(native("__futex_abstimed_wait_common"), native("PyThread_acquire_lock_timed")), syscall="futex"),
    ),
    (
        "lock",
        "it waits for a lock in dump, train.py:7, in a signal handler that interrupted step, train.py:40",
        doing(user(*IN_HANDLER), thread("upload data.py:3", main=False), syscall="futex"),
    ),
    (
        "computing",
        "it matches a regular expression in step, train.py:40",
        doing(user(f"search {LIB}/re/__init__.py:177", state="R", moving=False, gil=True), state="R", cpu_ns=10**9),
    ),
    (
        "computing",
        "it matches a regular expression in step, train.py:40",
        doing(
            user(native("sre_ucs1_match"), native("pattern_search"), moving=False), state="R", run_delay_ns=9 * 10**8
        ),
    ),
    (
        "cuda_context_lock",
        "it loads code into its CUDA context in step, train.py:40 (cuLibraryLoadData), which waits for the kernels that"
        " run there",
        doing(user(native("ioctl"), native("cuLibraryLoadData")), syscall="ioctl"),
    ),
    (
        "cuda_context_lock",
        "it waits in cuMemcpyDtoHAsync_v2 in step, train.py:40 for its CUDA context: thread worker (101) loads code"
        " into it",
        doing(
            user(native("pthread_mutex_lock"), native("cuMemcpyDtoHAsync_v2")),
            thread(native("cuModuleLoadData"), "compile kernels.py:9", main=False),
            syscall="futex",
        ),
    ),
    (
        "lock",
        "it waits for a lock or condition in step, train.py:40",
        doing(user(f"wait {LIB}/threading.py:327", f"Event.wait {LIB}/threading.py:629"), syscall="futex"),
    ),
    (
        "lock",
        "it waits in a queue in step, train.py:40",
        doing(user(f"wait {LIB}/threading.py:327", f"get {LIB}/queue.py:171"), syscall="futex"),
    ),
    (
        "lock",
        "it waits for another thread to end in step, train.py:40",
        doing(user(f"_wait_for_tstate_lock {LIB}/threading.py:1132", f"join {LIB}/threading.py:1112"), syscall="futex"),
    ),
    ("lock", "it waits for a lock or condition in step, train.py:40", doing(user(), syscall="futex")),
    (
        "lock",
        "it waits for the lock of file /data/.lock in step, train.py:40",
        doing(user(), syscall="flock", target="/data/.lock", target_kind="file", target_fd=5),
    ),
    (
        "stdin",
        "it waits for input on its standard input in step, train.py:40",
        doing(user(), syscall="read", target="/dev/pts/3", target_kind="tty", target_fd=0),
    ),
    (
        "stdin",
        "it waits at a breakpoint of the debugger in step, train.py:40",
        doing(user(f"cmdloop {LIB}/cmd.py:126", f"_cmdloop {LIB}/pdb.py:363"), syscall="read", target_fd=0),
    ),
    (
        "pipe",
        "it waits for data from pipe:[12] in step, train.py:40",
        doing(user(), syscall="read", target="pipe:[12]", target_kind="pipe", target_fd=5),
    ),
    (
        "pipe",
        "it waits until another process opens the FIFO /tmp/go in step, train.py:40",
        doing(user(), syscall="openat", target="/tmp/go", target_kind="fifo", file_system="ext4 /"),
    ),
    (
        "pipe",
        "it waits until another process reads its standard output (pipe:[12]) in step, train.py:40",
        doing(user(), syscall="write", target="pipe:[12]", target_kind="pipe", target_fd=1),
    ),
    (
        "network",
        "it waits for data from 10.0.0.2:443 in step, train.py:40",
        doing(user(), syscall="recvfrom", target="socket:[5] tcp 10.0.0.1:4 -> 10.0.0.2:443", target_kind="socket"),
    ),
    (
        "network",
        "it waits for a connection to 10.0.0.2:443 in step, train.py:40",
        doing(user(), syscall="connect", target="socket:[5] tcp 10.0.0.1:4 -> 10.0.0.2:443", target_kind="socket"),
    ),
    (
        "child",
        "it waits for its child rsync (pid 9, state S) in step, train.py:40",
        doing(
            user(f"_wait {LIB}/subprocess.py:1"), syscall="wait4", target="rsync (pid 9, state S)", target_kind="child"
        ),
    ),
    (
        "garbage_collection",
        "it collects garbage in step, train.py:40",
        doing(user(native("deduce_unreachable"), native("gc_collect_main")), state="R", cpu_ns=9 * 10**8),
    ),
    (
        "lock",
        "it polls a file lock that another process holds in step, train.py:40",
        doing(user("acquire /x/site-packages/filelock/_core/_lock.py:158", moving=True), syscall="clock_nanosleep"),
    ),
    (
        "lock",
        "it polls a file lock that another process holds in step, train.py:40",
        doing(user(f"wait {TORCH}utils/file_baton.py:51", moving=True), syscall="clock_nanosleep"),
    ),
    (
        "rpc",
        "it waits for the answer of an RPC in step, train.py:40",
        doing(user(f"rpc_sync {TORCH}distributed/rpc/api.py:842"), syscall="futex"),
    ),
    (
        "rpc",
        "it waits for a future of torch in step, train.py:40",
        doing(user(native("torch::jit::PythonFutureWrapper::wait()")), syscall="futex"),
    ),
    ("sleeping", "it sleeps in step, train.py:40", doing(user(), syscall="clock_nanosleep")),
    (
        "disk_io",
        "it writes /mnt/c/a.pt (fuse.ckpt /mnt/c) in step, train.py:40",
        doing(user(), syscall="write", **FUSE),
    ),
    (
        "disk_io",
        "it syncs /mnt/c/a.pt (fuse.ckpt /mnt/c) in step, train.py:40",
        doing(user(), state="D", syscall="fsync", **FUSE),
    ),
    (
        "disk_io",
        "it is in uninterruptible I/O in step, train.py:40 (state D, kernel function folio_wait_bit)",
        doing(user(), state="D", wchan="folio_wait_bit"),
    ),
    (
        "checkpoint",
        "it writes a checkpoint in step, train.py:40: it writes /mnt/c/a.pt (fuse.ckpt /mnt/c)",
        doing(user(f"save {TORCH}serialization.py:965"), syscall="write", **FUSE),
    ),
    ("checkpoint", "it reads a checkpoint in step, train.py:40", doing(user(f"load {TORCH}serialization.py:1400"))),
    (
        "checkpoint",
        "it writes a checkpoint in save_checkpoint, train.py:9: it syncs /mnt/c/a.pt (fuse.ckpt /mnt/c)",
        doing(user("save_checkpoint train.py:9"), syscall="fsync", **FUSE),
    ),
    (
        "gil_held",
        "it holds the GIL in step, train.py:40 and waits in C (clock_nanosleep)",
        doing(user(gil=True, state="S", moving=False), syscall="clock_nanosleep"),
    ),
    (
        "gil_held",
        "it waits for the GIL: thread decode holds the GIL in shard, data.py:7",
        doing(
            user(native("take_gil")),
            thread("shard data.py:7", main=False, name="decode", gil=True, state="R", moving=False),
            thread(native("take_gil"), "log log.py:3", main=False, tid=9),
            syscall="futex",
        ),
    ),
    (
        "swapping",
        "it waits for memory that was swapped out in step, train.py:40",
        doing(user(), state="D", major_faults=997, swap_bytes=907 * MIB, wchan="folio_wait_bit"),
    ),
    (
        "throttled",
        "it is throttled in step, train.py:40: its cgroup /jobs/7 allows 0.5 CPUs",
        doing(user(state="R"), state="R", throttled_ns=6 * 10**8, cpu_quota=0.5, cgroup="/jobs/7", cpu_ns=4 * 10**8),
    ),
    (
        "starved",
        "it waits for a CPU 70% of the time in step, train.py:40",
        doing(
            user(state="R"),
            state="R",
            run_delay_ns=7 * 10**8,
            cpus_allowed=1,
            cpu_list="3",
            neighbours=(("hog", 55, 7 * 10**8),),
        ),
    ),
    (
        "compiling",
        "it compiles in step, train.py:40",
        doing(user(f"step {TORCH}_dynamo/symbolic_convert.py:1", f"_fn {TORCH}_dynamo/eval_frame.py:5"), state="R"),
    ),
    (
        "compiling",
        "it compiles in step, train.py:40",
        doing(
            user(), syscall="wait4", target="ninja (pid 9, state S)", target_kind="child", children=(("ninja", 9, "S"),)
        ),
    ),
    (
        "nccl_init",
        "it waits for other ranks to set up communication in step, train.py:40",
        doing(user(f"init_process_group {TORCH}distributed/distributed_c10d.py:1700"), syscall="poll"),
    ),
    ("computing", "it runs in step, train.py:40", doing(user(state="R"), state="R", cpu_ns=9 * 10**8)),
    # A compiled function that runs is under eval_frame.py as well.
    (
        "computing",
        "it runs in step, train.py:40",
        doing(user(f"_fn {TORCH}_dynamo/eval_frame.py:5", state="R"), state="R", cpu_ns=9 * 10**8),
    ),
    ("unknown", "it waits in step, train.py:40", doing(user(), syscall="epoll_wait", target="anon_inode:[eventpoll]")),
    ("unknown", "it does nothing that can be seen (state S)", doing()),
]


@pytest.mark.parametrize(("kind", "why", "found"), WAITS, ids=lambda x: x if isinstance(x, str) else "")
def test_a_stack_and_the_kernel_show_what_a_rank_does(kind: str, why: str, found: Activity) -> None:
    assert (found.kind, found.why) == (kind, why)
    assert found.kind in ACTIVITIES
    assert found.next_steps
    assert all(found.evidence)


def test_each_kind_is_shown_by_a_case() -> None:
    # Those of test_hardware_of_ranks.py and test_idle_servers.py, and of helpers.
    others = {"in_collective", "data_loader", "data_loader_worker", "bad_hardware", "idle"}
    assert {kind for kind, _, _ in WAITS} | others == set(ACTIVITIES)


def test_the_kernels_words_are_evidence() -> None:
    found = doing(user(), state="D", syscall="fsync", wchan="request_wait_answer", **FUSE)
    assert found.evidence == (
        "kernel: state D, in fsync on /mnt/c/a.pt (fuse.ckpt /mnt/c), kernel function request_wait_answer",
    )
    assert (found.since_ns, found.progressing) == (ago(39), False)


def test_a_rank_in_a_collective_waits_there() -> None:
    found = does(rank(1, op(7, ago=39), stack=in_collective()))
    assert (found.kind, found.since_ns) == ("in_collective", ago(39))
    assert found.why == "it waits in all_reduce (seq 7) in train, train.py:40"


def test_a_stopped_rank_is_stopped_also_in_a_collective() -> None:
    one = rank(1, op(7, ago=39), stack=in_collective(state="T"), condition=Condition(state="T"))
    assert does(one).kind == "stopped"


def test_a_data_loader_waits_where_its_worker_stands() -> None:
    busy = worker(21, "fetch_shard data.py:12", "__getitem__ data.py:30", *FETCH, *LOOP, syscall="clock_nanosleep")
    idle = worker(22, *QUEUE, *LOOP, syscall="futex")
    found = doing(user(*LOADER, moving=True), helpers=(idle, busy), syscall="poll", switches=7, cpu_ns=10**7)
    assert (found.kind, found.why) == ("data_loader_worker", "its data loader waits in fetch_shard, data.py:12")
    # That the main thread polls its queue is no progress.
    assert found.progressing is False
    assert "1 of 2 data-loader workers are at work" in found.evidence


def test_a_worker_that_runs_gets_on() -> None:
    busy = worker(21, "decode data.py:12", *FETCH, *LOOP, state="R", cpu_ns=9 * 10**8, switches=5, asleep_since_ns=None)
    busy = replace(busy, threads=(replace(busy.threads[0], moving=True, state="R"),))
    found = doing(user(*LOADER), helpers=(busy,), syscall="poll")
    assert (found.why, found.progressing) == ("its data loader runs in decode, data.py:12", True)


def test_a_worker_on_a_dead_file_system_is_named_with_it() -> None:
    stuck = worker(
        21,
        "read_shard data.py:12",
        *FETCH,
        *LOOP,
        syscall="read",
        state="D",
        target="/nfs/s",
        target_kind=None,
        file_system="nfs4 /nfs",
        target_fd=9,
    )
    found = doing(user(*LOADER), helpers=(stuck,), syscall="poll")
    assert found.why == "its data-loader worker (pid 21) reads /nfs/s (nfs4 /nfs) in read_shard, data.py:12"
    assert found.kind == "data_loader_worker"


@pytest.mark.parametrize(
    ("helper", "why"),
    [
        (worker(21, end=Exit(ago(39), signal=9, oom=True)), "was killed by SIGKILL, out of memory (OOM)"),
        (worker(21, end=Exit(ago(39), signal=7)), "was killed by SIGBUS: /dev/shm is full (64/64 MiB)"),
        (
            worker(21, "fetch_shard data.py:12", *FETCH, *LOOP, state="T"),
            "is stopped by a signal in fetch_shard, data.py:12",
        ),
    ],
)
def test_a_dead_or_stopped_worker_is_named(helper: Helper, why: str) -> None:
    idle = worker(22, *QUEUE, *LOOP, syscall="futex")
    shm = {"shm_used_bytes": 64 * MIB, "shm_size_bytes": 64 * MIB}
    found = doing(user(*LOADER), helpers=(idle, helper), syscall="poll", **shm)
    assert (found.kind, found.why) == ("data_loader_worker", f"its data-loader worker (pid 21) {why}")
    assert found.progressing is False


def test_workers_of_an_earlier_epoch_are_not_blamed() -> None:
    ended = worker(20, end=Exit(ago(500), code=0))
    busy = worker(21, "fetch_shard data.py:12", *FETCH, *LOOP, syscall="clock_nanosleep")
    assert doing(user(*LOADER), helpers=(ended, busy), syscall="poll").why.endswith("waits in fetch_shard, data.py:12")


def test_a_loader_without_workers_reads_in_the_main_thread() -> None:
    inner = ("fetch_shard data.py:12", *FETCH, f"_next_data {TORCH}utils/data/dataloader.py:788")
    found = doing(user(*inner), syscall="clock_nanosleep")
    assert (found.kind, found.why) == ("data_loader", "its data loader waits in fetch_shard, data.py:12")


def test_idle_workers_blame_nobody_in_particular() -> None:
    found = doing(user(*LOADER), helpers=(worker(22, *QUEUE, *LOOP, syscall="futex"),), syscall="poll")
    assert found.why == "its data loader waits for the next batch in step, train.py:40"
    assert found.evidence[0] == "none of its 1 data-loader workers has work, as far as their stacks show"


def test_the_owner_of_a_lock_is_named_where_it_is_known() -> None:
    inner = frame(f"acquire {LIB}/threading.py:1", self="<locked RLock owner=101 count=1>")
    other = thread("hold train.py:9", main=False, tid=101, name="saver")
    found = doing(user(inner), other, syscall="futex")
    assert found.evidence[0] == "the lock is held by thread saver (101) in hold, train.py:9"


def test_two_threads_that_wait_for_locks_are_shown() -> None:
    inside = native("PyThread_acquire_lock_timed")
    found = doing(user(inside), thread(inside, "b train.py:9", main=False, tid=101, name="other"), syscall="futex")
    assert found.evidence[0].startswith("thread other (101) in b, train.py:9 may hold it and waits for a lock itself")


def test_a_rank_that_polls_does_not_get_on_and_one_that_writes_does() -> None:
    awake: dict[str, Any] = {"asleep_since_ns": ago(0.1), "switches": 10}
    polls = doing(user(moving=True), syscall="clock_nanosleep", cpu_ns=10**6, **awake)
    assert polls.progressing is None
    # Two looks may find a loop that works at one place: only samples show that it was there all the time.
    assert doing(user(moving=False), cpu_ns=10**6, **awake).progressing is None
    assert doing(user(moving=False, since_ns=ago(39)), cpu_ns=10**6, **awake).progressing is False
    assert doing(user(moving=False, since_ns=ago(1)), cpu_ns=10**6, **awake).progressing is True
    assert doing(user(moving=True), cpu_ns=10**8, **awake).progressing is True
    works = thread("decode data.py:3", main=False, moving=True, state="running")
    assert doing(user(), works, syscall="futex").progressing is True
    writes = doing(user(f"save {TORCH}serialization.py:965"), syscall="write", write_bytes=53 * MIB, **FUSE)
    assert writes.progressing is True
    assert writes.since_ns is None


def test_a_rank_that_waits_for_a_compiler_gets_on() -> None:
    inner = f"step {TORCH}_inductor/codecache.py:1"
    waits = {"syscall": "wait4", "target": "g++ (pid 9, state S)", "target_kind": "child"}
    assert doing(user(inner), children=(("g++", 9, "S"),), **waits).progressing is True
    assert doing(user(inner), children=(("g++", 9, "T"),), **waits).progressing is False
    assert doing(user(), syscall="wait4", target="tar (pid 9, state R)", target_kind="child").progressing is True
    assert doing(user(), syscall="wait4", target="tar (pid 9, state S)", target_kind="child").progressing is False


def test_control_characters_of_targets_are_shown_as_text() -> None:
    found = doing(
        user("f\x1b[2J\u202e evil\n.py:1"), syscall="read", target="/a\x1b[31m", target_kind="file", target_fd=4
    )
    assert all(ord(c) >= 32 and c != "\u202e" for line in (found.why, *found.evidence) for c in line)


def test_a_rank_without_stack_and_condition_has_an_answer() -> None:
    assert does(rank(1)).kind == "unknown"
    assert does(rank(1, stack=elsewhere())).why == "it waits in load, data.py:12"
    assert does(rank(1, state="stopped")).kind == "stopped"
    assert does(rank(1, state="zombie")).kind == "exited"


QUEUE_WAIT = (f"_recv {LIB}/multiprocessing/connection.py:395", f"get {LIB}/multiprocessing/queues.py:103")


def test_a_worker_of_the_programs_own_is_named() -> None:
    dead = worker(21, end=Exit(ago(39), signal=9))
    found = doing(user(*QUEUE_WAIT), helpers=(dead,), syscall="read")
    assert (found.kind, found.why) == ("data_loader_worker", "its data-loader worker (pid 21) was killed by SIGKILL")
    stands = worker(
        22, "fetch_shard data.py:12", f"run {LIB}/multiprocessing/process.py:108", syscall="clock_nanosleep"
    )
    found = doing(user(*QUEUE_WAIT), helpers=(stands,), syscall="read")
    assert (found.kind, found.why) == ("data_loader_worker", "its data loader waits in fetch_shard, data.py:12")
    idle = worker(23, *QUEUE_WAIT, "work data.py:40", syscall="read")
    assert doing(user(*QUEUE_WAIT), helpers=(idle,), syscall="read").kind == "lock"


def test_the_frames_of_the_process_that_forked_do_not_count() -> None:
    fork = (f"_bootstrap {LIB}/multiprocessing/process.py:314", f"__init__ {LIB}/multiprocessing/popen_fork.py:19")
    above = (f"save {TORCH}serialization.py:9", f"__init__ {TORCH}utils/data/dataloader.py:1176", "train train.py:11")
    found = doing(thread("step child.py:3", *fork, *above), syscall="clock_nanosleep")
    assert (found.kind, found.why) == ("sleeping", "it sleeps in step, child.py:3")


def test_a_gil_waiter_of_a_stripped_python_is_known() -> None:
    inside = (native("pthread_cond_timedwait"), Frame("python3.11+0x4f94ed", "/usr/bin/python3.11", native=True))
    waits = thread(*inside, "log log.py:3", main=False, tid=9)
    found = doing(user(gil=True, state="running", moving=False), waits, state="R", switches=5, asleep_since_ns=None)
    assert (found.kind, found.why) == ("gil_held", "it holds the GIL in step, train.py:40")
    assert "1 other threads wait for the GIL" in found.evidence


def test_a_gil_waiter_that_is_awake_just_now_is_known() -> None:
    """As on a busy machine: it wakes every 5 ms, and waits for a CPU to look again."""
    holds = thread("match re.py:9", "scan text.py:7", main=False, name="scanner", gil=True, state="R", moving=False)
    awake = {"state": "R", "asleep_since_ns": None, "run_delay_ns": 4 * 10**8, "switches": 70}
    found = doing(user(state="R", moving=False), holds, **awake, cpu_ns=10**6)
    assert (found.kind, found.progressing) == ("gil_held", False)
    assert "1 other threads wait for the GIL" in found.evidence
    # One that computes does not wait for it, nor one that a CPU is taken from.
    assert doing(user(state="R", moving=False), holds, **awake, cpu_ns=3 * 10**8).kind != "gil_held"
    assert doing(user(state="R", moving=False), holds, **{**awake, "switches": 3}, cpu_ns=10**6).kind == "starved"


TEXTS = st.sampled_from(
    ["read", "futex", "openat", "wait4", "clock_nanosleep", "\x1b[2J", "", "pipe:[1]", "socket:[1] tcp"]
)
FRAMES = st.builds(
    Frame,
    st.sampled_from(["f", "_try_get_data", "save", "take_gil", "\u202e", "_bootstrap", "wait", "acquire"]),
    st.sampled_from(
        ["", "train.py", f"{TORCH}utils/data/dataloader.py", f"{LIB}/threading.py", "/bin/python3", "a\nb"]
    ),
    st.none() | st.integers(0, 99),
    st.booleans(),
)
NUMBERS = st.none() | st.integers(-(10**20), 10**20)
CONDITIONS = st.builds(
    Condition,
    st.none() | st.sampled_from("RSDTtZ"),
    wchan=TEXTS,
    syscall=st.none() | TEXTS,
    target=st.none() | TEXTS,
    target_kind=st.none() | st.sampled_from(["file", "pipe", "fifo", "socket", "child"]),
    target_fd=NUMBERS,
    asleep_since_ns=NUMBERS,
    tracer_pid=NUMBERS,
    frozen=st.none() | st.booleans(),
    shm_used_bytes=NUMBERS,
    shm_size_bytes=NUMBERS,
    swap_bytes=NUMBERS,
    interval_ns=NUMBERS,
    cpu_ns=NUMBERS,
    run_delay_ns=NUMBERS,
    read_bytes=NUMBERS,
    switches=NUMBERS,
    major_faults=NUMBERS,
    throttled_ns=NUMBERS,
)
THREADS = st.builds(
    Thread,
    st.integers(1, 9),
    TEXTS,
    st.booleans(),
    st.none() | TEXTS,
    st.none() | st.booleans(),
    st.lists(FRAMES, max_size=6).map(tuple),
    NUMBERS,
    st.none() | st.booleans(),
)
STACKS = st.lists(THREADS, max_size=3).map(tuple)
EXITS = st.none() | st.builds(Exit, st.just(NOW), NUMBERS, NUMBERS)
HELPERS = st.builds(
    Helper, st.just(21), st.just(1), st.just("data_loader"), st.none() | TEXTS, EXITS, STACKS, st.none() | CONDITIONS
)


@given(STACKS, st.none() | CONDITIONS, st.lists(HELPERS, max_size=2).map(tuple))
def test_any_facts_have_an_activity(threads: Any, condition: Any, helpers: Any) -> None:
    found = does(rank(1, threads=threads, condition=condition, helpers=helpers))
    assert found.kind in ACTIVITIES
    text = "".join((found.why, *found.evidence))
    assert all(ord(c) >= 32 and c != "\u202e" for c in text)


def test_a_starved_rank_names_who_shares_its_cpu() -> None:
    own = Condition(state="R", interval_ns=10**9, run_delay_ns=7 * 10**8, cpus_allowed=1, cpu_list="3")
    ranks = [rank(n, stack=user(state="R"), condition=own) for n in (1, 2)]
    given = facts(*ranks, nodes=[replace(node("a"), idle_cpus=(0, 1, 2))])
    assert activity_of(ranks[0], given).why == (
        "it waits for a CPU 70% of the time in step, train.py:40: it shares CPU 3 with rank 2, while 3 other CPUs of"
        " the node are free"
    )


LOOP = {"state": "R", "run_delay_ns": 69 * 10**7, "neighbours": (("hog", 55, 10**8),), "cpus_allowed": 2}
QUOTA = {"state": "R", "throttled_ns": 6 * 10**8, "cpu_quota": 0.5, "cgroup": "/jobs/7", "run_delay_ns": 0}


@pytest.mark.parametrize(
    ("condition", "contention"),
    [
        ({**LOOP, "cpu_ns": 30 * 10**7}, "it waits for a CPU 69% of the time in step, train.py:40"),
        ({**LOOP, "cpu_ns": 15 * 10**7}, "on its CPUs: hog (pid 55) used 10%"),
        (
            {**QUOTA, "cpu_ns": 4 * 10**8},
            "it is throttled in step, train.py:40: its cgroup /jobs/7 allows 0.5 CPUs",
        ),
    ],
    ids=["busy node", "busier node", "quota"],
)
def test_a_loop_on_a_busy_node_runs_and_contention_is_evidence(condition: dict[str, Any], contention: str) -> None:
    found = doing(user(state="R", since_ns=NOW - 31 * 10**9), **condition)
    assert (found.kind, found.why) == ("computing", "it runs in step, train.py:40")
    assert contention in found.evidence
    assert any(line.startswith("it used a CPU for ") for line in found.evidence)
    # Before, and where it moves from function to function, the CPU that it lacks is the reason.
    for since in (NOW - 20 * 10**9, None):
        assert doing(user(state="R", since_ns=since), **condition).kind in ("starved", "throttled")


@pytest.mark.parametrize("cpu_ns", [0, 10**7], ids=["no CPU", "hardly any"])
def test_a_rank_that_gets_no_cpu_does_not_run_however_long(cpu_ns: int) -> None:
    starved = {**LOOP, "run_delay_ns": 98 * 10**7, "cpu_ns": cpu_ns}
    assert doing(user(state="R", since_ns=NOW - 90 * 10**9), **starved).kind == "starved"


def test_a_thread_that_sleeps_in_between_does_not_run_in_its_frame() -> None:
    polls = {**LOOP, "run_delay_ns": 45 * 10**7, "cpu_ns": 10**8}
    assert doing(user(state="R", since_ns=NOW - 90 * 10**9), **polls).kind == "starved"


def test_a_lock_that_no_other_thread_can_hold() -> None:
    waits = user(native("PyThread_acquire_lock_timed"))
    own = "no other thread runs Python code: the same thread holds the lock, or a thread that has ended or left Python"
    assert own in doing(waits, thread(native("epoll_wait"), main=False), syscall="futex").evidence
    other = thread("upload data.py:3", main=False)
    assert "which thread holds it cannot be read" in doing(waits, other, syscall="futex").evidence
    # C code may signal a condition at any time.
    assert own not in doing(user(native("pthread_cond_wait")), syscall="futex").evidence
    assert own not in doing(user(native("sem_wait")), syscall="futex").evidence


def test_a_signal_that_a_c_function_looks_for_is_no_handler() -> None:
    looks = doing(user(native("PyErr_CheckSignals"), native("PyThread_acquire_lock_timed")), syscall="futex")
    assert looks.why == "it waits for a lock in step, train.py:40"


def test_a_regular_expression_shows_its_pattern_and_comes_before_a_cpu_that_is_taken() -> None:
    match = frame(f"match {LIB}/re/__init__.py:166", pattern=r"'(\w+\s?)+$'")
    found = doing(user(match, state="R", moving=False), state="R", run_delay_ns=8 * 10**8, cpu_ns=2 * 10**8)
    assert (found.kind, found.progressing) == ("computing", None)
    assert r"the pattern is '(\w+\s?)+$'" in found.evidence
    # One that comes and goes is work.
    moves = doing(user(match, state="R", moving=True), state="R", cpu_ns=9 * 10**8)
    assert moves.why == "it runs in step, train.py:40"


@pytest.mark.parametrize(
    "others",
    [
        (thread(native("cuLaunchKernel"), main=False),),
        (thread("cuModuleLoadData kernels.py:9", main=False),),  # a Python function of that name
        (),
    ],
)
def test_a_call_of_cuda_alone_is_no_lock_of_its_context(others: tuple[Thread, ...]) -> None:
    assert doing(user(native("cuMemcpyDtoHAsync_v2")), *others, syscall="futex").kind != "cuda_context_lock"
