"""Recognizes a process that has ended or is stopped, or whose main thread waits: for ranks, CUDA, input, a process or a
timer.
"""

from __future__ import annotations

import re
import signal

from probing.api.text import size
from probing.diagnosis.activity.scene import Scene, Seen, innermost, user_frame
from probing.diagnosis.facts import Thread
from probing.diagnosis.waits import Wait, wait_of
from probing.diagnosis.words import clean, exit_text, frame_text

__all__ = (
    "find_child",
    "find_collective",
    "find_context_lock",
    "find_ended",
    "find_init",
    "find_network",
    "find_open",
    "find_pipe",
    "find_sleep",
    "find_stdin",
    "find_stopped",
    "full_shm",
)

_FULL = 0.95


def find_ended(scene: Scene) -> Seen | None:
    """Returns how the process ended."""
    if scene.exit is not None:
        more = f": {full_shm(scene)}" if scene.exit.signal == signal.SIGBUS and full_shm(scene) else ""
        return Seen("exited", exit_text(scene.exit) + more, since_ns=scene.exit.ts_ns, progressing=False)
    if scene.state in ("exited", "zombie") or scene.letter in ("Z", "X"):
        return Seen("exited", "has ended", progressing=False)
    return None


def find_stopped(scene: Scene) -> Seen | None:
    """Returns what has stopped the process: a debugger, its cgroup or a signal."""
    condition = scene.condition
    tracer = clean(condition.tracer or "a debugger")
    if scene.letter == "t":
        pid = f" (pid {condition.tracer_pid})" if condition.tracer_pid else ""
        return _stood("traced", scene, f"is held by {tracer}{pid}{scene.where}")
    if condition.frozen:
        return _stood("stopped", scene, f"is frozen by its cgroup {clean(condition.cgroup or '')}".rstrip())
    if scene.letter == "T" or (not scene.letter and scene.state == "stopped"):
        return _stood("stopped", scene, f"is stopped by a signal{scene.where}")
    return None


def full_shm(scene: Scene) -> str:
    """Returns a text if /dev/shm is full, else ""."""
    used, total = scene.condition.shm_used_bytes, scene.condition.shm_size_bytes
    if not total or used is None or used < _FULL * total:
        return ""
    return f"/dev/shm is full ({size(used, total)})"  # noqa: S108


def _stood(kind: str, scene: Scene, does: str) -> Seen:
    return Seen(kind, does, frame=scene.user, progressing=False, evidence=(scene.kernel,))


_DISTRIBUTED = "torch/distributed/distributed_c10d.py"
_INIT = ("init_process_group", "_new_process_group_helper", "new_group", "_store_based_barrier", "split_group")
_RENDEZVOUS = ("torch/distributed/rendezvous.py", "torch/distributed/elastic/rendezvous/dynamic_rendezvous.py")
_NATIVE = ("ncclCommInit", "ncclCommSplit", "connectFullMesh")


def find_init(scene: Scene) -> Seen | None:
    """Returns whether the rank creates a communicator or waits in a store."""
    wait = _wait(scene)
    shown = innermost(scene.python, _DISTRIBUTED, _INIT) is not None or scene.runs_in(*_NATIVE)
    shown = shown or any(innermost(scene.python, file) is not None for file in _RENDEZVOUS)
    if not shown and (wait is None or wait.op != "init"):
        return None
    stored = not shown and scene.runs_in("Store::")
    does = f"waits for other ranks {'in a store' if stored else 'to set up communication'}{scene.where}"
    since = wait.since_ns if wait else None
    return Seen("nccl_init", does, frame=scene.user, since_ns=since, evidence=(scene.kernel,))


def find_collective(scene: Scene) -> Seen | None:
    """Returns the operation in which the rank waits, if its stack shows the wait or was not read."""
    wait = _wait(scene)
    return _seen(scene, wait) if wait is not None and ("stack" in wait.witnesses or not scene.python) else None


def find_open(scene: Scene) -> Seen | None:
    """Returns the rank's operation in flight, for a rank for which no earlier function has found another activity."""
    wait = _wait(scene)
    return _seen(scene, wait) if wait is not None else None


def _wait(scene: Scene) -> Wait | None:
    return wait_of(scene.rank, scene.facts) if scene.rank is not None else None


def _seen(scene: Scene, wait: Wait) -> Seen:
    number = f" (seq {wait.seq})" if wait.seq is not None else ""
    does = f"waits in {wait.op or 'a collective'}{number}{scene.where}"
    witnesses = f"shown by: {', '.join(wait.witnesses)}"
    return Seen("in_collective", does, frame=scene.user, since_ns=wait.since_ns, evidence=(witnesses,))


_KIND = "cuda_context_lock"
_FRAMES = 32
# Loading a CUDA module waits for the running kernels of the context. With lazy loading, the first launch of a kernel
# loads its module.
_LOADS = re.compile(
    r"cuLibrary(?:LoadData|LoadFromFile|GetKernel)\w*|cuModule(?:Load|GetFunction)\w*|cudaLibraryLoad\w*"
)
_WAITS = re.compile(
    r"cu(?:da)?(?:Mem(?:cpy|set|Alloc|Free)|Launch|StreamSynchronize|EventSynchronize|EventRecord|CtxSynchronize)\w*"
)


def find_context_lock(scene: Scene) -> Seen | None:
    """Returns whether the main thread waits in CUDA while another thread loads a module, or loads a module itself.

    A kernel that waits for a peer does not end. So the load that waits for the kernel hangs, and with it each call that
    needs the context.
    """
    main = scene.main
    if main is None or scene.letter == "R":
        return None
    if load := _call(main, _LOADS):
        does = f"loads code into its CUDA context{scene.where} ({load}), which waits for the kernels that run there"
        return Seen(_KIND, does, frame=scene.user, evidence=(scene.kernel,))
    call = _call(main, _WAITS)
    if not call:
        return None
    for thread in scene.threads:
        if thread is not main and (load := _call(thread, _LOADS)):
            frame = user_frame(thread.frames)
            place = f", in {frame_text(frame)}" if frame is not None else ""
            who = f"thread {clean(thread.name)} ({thread.tid})"
            does = f"waits in {call}{scene.where} for its CUDA context: {who} loads code into it"
            return Seen(_KIND, does, frame=scene.user, evidence=(f"{who} is in {load}{place}", scene.kernel))
    return None


def _call(thread: Thread, calls: re.Pattern[str]) -> str:
    """Returns the function of CUDA on the native stack of ``thread``; empty if there is none."""
    native = (frame.func for frame in thread.frames[:_FRAMES] if frame.native)
    return next((match[0] for name in native if (match := calls.fullmatch(name))), "")


_READS = frozenset(("read", "readv", "pread64", "poll", "ppoll", "select", "pselect6", "splice", "recvfrom", "ioctl"))
_WRITES = frozenset(("write", "writev", "pwrite64", "sendfile"))
_OPENS = frozenset(("open", "openat", "openat2"))
_SLEEPS = frozenset(("nanosleep", "clock_nanosleep"))
# If there is no file to wait for, these calls only sleep.
_TIMED = frozenset(("select", "pselect6", "poll", "ppoll"))
_DEBUGGERS = ("/pdb.py", "/bdb.py", "/cmd.py", "/IPython/terminal/debugger.py")
_STANDARD = {1: "standard output", 2: "standard error"}


def find_stdin(scene: Scene) -> Seen | None:
    """Returns whether the process waits for input, for example at a breakpoint."""
    c = scene.condition
    at_prompt = any(innermost(scene.python, name) is not None for name in _DEBUGGERS)
    reads = c.target_fd == 0 and c.syscall in _READS and c.target_kind != "file"
    if not reads and not (at_prompt and c.syscall in (*_READS, None)):
        return None
    what = "waits at a breakpoint of the debugger" if at_prompt else "waits for input on its standard input"
    return Seen("stdin", f"{what}{scene.where}", frame=scene.user, evidence=(scene.kernel,))


def find_pipe(scene: Scene) -> Seen | None:
    """Returns the wait of the process for a pipe or FIFO."""
    c = scene.condition
    if c.target_kind not in ("pipe", "fifo") or c.target is None:
        return None
    name = scene.target if c.target_kind == "pipe" else f"the FIFO {scene.target}"
    if c.syscall in _OPENS:
        does = f"waits until another process opens {name}"
    elif c.syscall in _WRITES:
        what = _STANDARD.get(c.target_fd or -1)
        does = f"waits until another process reads {f'its {what}' if what else 'from'} ({name})"
    elif c.syscall in _READS:
        does = f"waits for data from {name}"
    else:
        return None
    return Seen("pipe", f"{does}{scene.where}", frame=scene.user, evidence=(scene.kernel,))


def find_network(scene: Scene) -> Seen | None:
    """Returns the process's wait on a socket, with the socket's peer if it is known."""
    c = scene.condition
    if c.target_kind != "socket" or c.target is None or c.syscall is None:
        return None
    ends = scene.target.partition(" ")[2]
    other = ends.partition(" -> ")[2] or ends or scene.target
    if c.syscall == "connect":
        does = f"waits for a connection to {other}"
    elif c.syscall in ("sendto", "sendmsg", "sendmmsg", *_WRITES):
        does = f"waits until {other} takes its data"
    else:
        does = f"waits for data from {other}"
    return Seen("network", f"{does}{scene.where}", frame=scene.user, evidence=(scene.kernel,))


def find_child(scene: Scene) -> Seen | None:
    """Returns the wait of the process for a child."""
    if scene.condition.target_kind != "child" or scene.condition.target is None:
        return None
    child = "any of its children" if scene.target == "any child" else f"its child {scene.target}"
    runs = True if scene.condition.target.endswith(", state R)") else None
    does = f"waits for {child}{scene.where}"
    return Seen("child", does, frame=scene.user, progressing=runs, evidence=(scene.kernel,))


def find_sleep(scene: Scene) -> Seen | None:
    """Returns whether the main thread sleeps for a time that the program chose."""
    c = scene.condition
    waits_for_nothing = c.syscall in _TIMED and c.target is None and c.target_fd is None
    if c.syscall not in _SLEEPS and not waits_for_nothing and not scene.runs_in("time_sleep", "pysleep"):
        return None
    return Seen("sleeping", f"sleeps{scene.where}", frame=scene.user, evidence=(scene.kernel,))
