"""Recognizes a main thread that waits for a lock, within its process or between processes, or for the GIL."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise

from probing.diagnosis.activity.scene import Scene, Seen, innermost, is_library, letter, python_frames, user_frame
from probing.diagnosis.facts import Frame, Thread
from probing.diagnosis.words import clean, frame_text

__all__ = ("find_gil", "find_lock")

_SECOND_NS = 1_000_000_000
_MOST_THREADS = 4
_FUTEX = frozenset(("futex", "futex_waitv", "futex_wait"))
_GIL = ("take_gil", "PyEval_RestoreThread", "PyEval_AcquireThread", "PyGILState_Ensure")
# Functions of CPython and glibc that acquire a lock.
_LOCKS = (
    "PyThread_acquire_lock",
    "acquire_timed",
    "rlock_acquire",
    "_PyMutex_Lock",
    "PyMutex_Lock",
    "_PyRecursiveMutex",
    "_multiprocessing_SemLock_acquire",
    "semlock_acquire",
    "sem_wait",
    "sem_clockwait",
    "sem_timedwait",
    "pthread_mutex_lock",
    "pthread_rwlock",
    "lll_lock_wait",
)
_JOINS = "waits for another thread to end"
_LOCKS_OF_PYTHON = ("PyThread_acquire_lock", "acquire_timed", "_PyMutex_Lock", "PyMutex_Lock")
_OWN = "no other thread runs Python code: the same thread holds the lock, or a thread that has ended or left Python"
# Functions of CPython 3.8 to 3.14, Modules/signalmodule.c, that call the handlers of signals.
_SIGNALS = ("PyErr_CheckSignals", "_PyErr_CheckSignals", "handle_signals")
# Waits in Python's library: end of the file's path, names of functions, text.
_PYTHON = (
    ("/threading.py", ("join", "_wait_for_tstate_lock", "_join", "_shutdown"), _JOINS),
    ("/queue.py", ("get", "put", "join"), "waits in a queue"),
    ("/concurrent/futures/_base.py", ("result", "exception", "wait"), "waits for the result of a future"),
    ("/concurrent/futures/thread.py", ("shutdown",), "waits for the threads of a pool"),
    ("/multiprocessing/queues.py", ("get", "put"), "waits in a queue between processes"),
    ("/multiprocessing/synchronize.py", (), "waits for a lock between processes"),
    ("/threading.py", ("acquire", "wait", "wait_for", "__enter__"), "waits for a lock or condition"),
)
# A thread that waits for a Python lock has frames of these libraries only. Their files are compared because stripped
# libraries do not name their functions.
_OF_PYTHON = re.compile(r"libc[.-]|libpthread|ld-|\[vdso\]|(?:lib)?python3|_multiprocessing\.|_queue\.|_posixshmem\.|$")
_CPYTHON = re.compile(r"(?:lib)?python3")
# The package filelock tries to get a lock of flock(2) every 50 ms, and torch checks every 100 ms whether a file is
# gone: the stack moves, but the rank makes no progress.
_FILE_LOCK = re.compile(r"/filelock/.*\.py$|/torch/utils/file_baton\.py$")
_POLLS = re.compile(r"acquire|wait$")
_TIMED_WAITS = ("pthread_cond_timedwait", "pthread_cond_clockwait", "___pthread_cond_timedwait")
_FILE_LOCKS = frozenset(("flock", "fcntl"))
# A thread that waits for the GIL on a busy machine wakes at least this often a second, and uses at most this share of a
# CPU.
_WAKES, _AWAKE = 20, 0.02
_OWNER = re.compile(r"owner=(\d+)")


def find_gil(scene: Scene) -> Seen | None:
    """Returns the thread that keeps the GIL. It sleeps, or its stack stays the same while other threads wait for the
    GIL.
    """
    holder = next((thread for thread in scene.threads if thread.gil), None)
    if holder is None or not _stands(scene, holder):
        return None
    asleep = letter(holder) in ("S", "D")
    waiting = [t for t in scene.threads if t is not holder and (_waits_for_gil(t) or _wakes_for_gil(scene, t))]
    if not asleep and not waiting:
        return None
    frame = user_frame(holder.frames)
    call = holder.syscall or (scene.condition.syscall if holder.main else None)
    what = f" ({call})" if asleep and call else ""
    calls = next((f.func for f in holder.frames if f.native), "")
    c_code = f"its C code: {clean(calls)}" if calls else ""
    does = f"holds the GIL{scene.at(frame)} and waits in C{what}" if asleep else f"holds the GIL{scene.at(frame)}"
    if not holder.main:
        does = f"waits for the GIL: thread {clean(holder.name)} {does}"
    others = f"{len(waiting)} other threads wait for the GIL" if waiting else ""
    stood = "its Python stack did not move" if holder.moving is False else ""
    evidence = (f"thread {clean(holder.name)} ({holder.tid}) holds the GIL", c_code, others, stood, scene.kernel)
    return Seen("gil_held", does, frame=frame, since_ns=_since(scene, holder), progressing=False, evidence=evidence)


def find_lock(scene: Scene) -> Seen | None:
    """Returns the lock, queue or thread for which the main thread waits, and the thread that holds it or may hold
    it.
    """
    if any(_FILE_LOCK.search(frame.file) and _POLLS.search(frame.func) for frame in _library(scene)):
        does = f"polls a file lock that another process holds{scene.where}"
        return Seen("lock", does, frame=scene.user, progressing=False, evidence=(scene.kernel,))
    what = _what(scene)
    if not what:
        return None
    if what == _JOINS:
        threads = [_thread(t) for t in scene.threads if not t.main and python_frames(t.frames)]
        which = f": {threads[0]}" if len(threads) == 1 else ""
        running = tuple(f"{thread} has not ended" for thread in threads[:_MOST_THREADS])
        return Seen("lock", f"{what}{scene.where}{which}", frame=scene.user, evidence=(*running, scene.kernel))
    if interrupted := _interrupted(scene):
        does = f"{what}{scene.where}, in a signal handler that interrupted {frame_text(interrupted)}"
        holder = "the interrupted code may hold it, and goes on only when the handler ends: both run in one thread"
        return Seen("lock", does, frame=scene.user, progressing=False, evidence=(holder, scene.kernel))
    owners = list(_owners(scene))
    return Seen("lock", f"{what}{scene.where}", frame=scene.user, evidence=(*owners, scene.kernel))


def _what(scene: Scene) -> str:
    c = scene.condition
    if c.syscall in _FILE_LOCKS:
        return f"waits for the lock of file {clean(c.target or '')}"
    if not scene.python:
        return ""
    for file, names, what in _PYTHON:
        # Only the frames of the library that the user's line called are searched.
        if innermost(_library(scene), file, names) is not None:
            return what
    if scene.runs_in(*_LOCKS) and not scene.runs_in(*_GIL):
        return "waits for a lock"
    if c.syscall not in _FUTEX or scene.letter != "S" or any(not _OF_PYTHON.match(_module(f)) for f in scene.native):
        return ""
    # A thread that waits for the GIL wakes every 5 ms (Python/ceval_gil.c). So a thread that slept waits for something
    # else.
    return "waits for a lock or condition" if scene.slept and scene.python[0] is scene.user else ""


def _module(frame: Frame) -> str:
    return frame.file.rpartition("/")[2]


def _library(scene: Scene) -> tuple[Frame, ...]:
    """Returns the frames inside the innermost frame of the user's code; all frames if there is none."""
    if scene.user is None or is_library(scene.user):
        return scene.python
    return scene.python[: scene.python.index(scene.user)]


def _interrupted(scene: Scene) -> Frame | None:
    """Returns the Python function that a signal interrupted, if the main thread is in the signal's handler."""
    frames = scene.main.frames if scene.main else ()
    at = next((n for n, frame in enumerate(frames) if frame.native and frame.func.startswith(_SIGNALS)), None)
    # A running handler has frames inside ``at`` (``frames[:at]``). CPython's signal check can also be the innermost
    # frame when no handler runs.
    if at is None or not python_frames(frames[:at]):
        return None
    return user_frame(frames[at:])


def _owners(scene: Scene) -> Iterator[str]:
    """Yields lines about the threads that hold or may hold the lock, as variables and stacks show."""
    threads = {thread.tid: thread for thread in scene.threads}
    owner = next((int(m[1]) for f in scene.python[:4] for _, text in f.values if (m := _OWNER.search(text))), None)
    if owner in threads:
        yield f"the lock is held by {_thread(threads[owner])}"
        return
    others = [t for t in scene.threads if not t.main and python_frames(t.frames)]
    near = [t for t in others if scene.user and any(f.file == scene.user.file for f in t.frames)]
    for thread in near[:_MOST_THREADS]:
        waits = " and waits for a lock itself: the two may wait for each other" if _waits(thread) else ""
        yield f"{_thread(thread)} may hold it{waits}"
    if not near:
        alone = not others and bool(scene.threads) and scene.runs_in(*_LOCKS_OF_PYTHON)
        yield _OWN if alone else "which thread holds it cannot be read"


def _thread(thread: Thread) -> str:
    frame = user_frame(thread.frames)
    return f"thread {clean(thread.name)} ({thread.tid})" + (f" in {frame_text(frame)}" if frame else "")


def _waits(thread: Thread) -> bool:
    python = python_frames(thread.frames)
    outer = user_frame(python)
    inner = python[: python.index(outer)] if outer in python else python
    native = [f.func for f in thread.frames[:8] if f.native]
    shown = any(token in name for name in native for token in _LOCKS)
    return shown or innermost(inner, "/threading.py", ("acquire", "__enter__")) is not None


def _waits_for_gil(thread: Thread) -> bool:
    # A stripped CPython does not name take_gil, its only function that waits on a condition of the C library.
    frames = [frame for frame in thread.frames[:8] if frame.native]
    timed = any(a.func.startswith(_TIMED_WAITS) and _CPYTHON.match(_module(b)) for a, b in pairwise(frames))
    return timed or any("take_gil" in frame.func for frame in frames)


def _wakes_for_gil(scene: Scene, thread: Thread) -> bool:
    # A thread that waits for the GIL wakes every 5 ms and uses almost no CPU. If its stack is read while the thread
    # runs or is runnable, the reading has no native frames.
    c = scene.condition
    if not thread.main or thread.moving is not False or scene.letter != "R" or not c.interval_ns:
        return False
    often = (c.switches or 0) * _SECOND_NS >= _WAKES * c.interval_ns
    return often and c.cpu_ns is not None and c.cpu_ns < _AWAKE * c.interval_ns


def _stands(scene: Scene, holder: Thread) -> bool:
    if holder.moving is not None:
        return not holder.moving
    since = _since(scene, holder)
    return since is not None and scene.now_ns - since >= _SECOND_NS


def _since(scene: Scene, holder: Thread) -> int | None:
    asleep = scene.condition.asleep_since_ns if holder.main else None
    return min((t for t in (holder.since_ns, asleep) if t is not None), default=None)
