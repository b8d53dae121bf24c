"""Makes facts of stacks: frames, the variables that name an operation, and whether a stack moves."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any

from probing.daemon.diagnose.gather.history import Innermost
from probing.daemon.diagnose.gather.processes import Key
from probing.daemon.diagnose.gather.tables import Row
from probing.daemon.stack_wire import Frame as WireFrame
from probing.daemon.stack_wire import ProcessStacks, threads_of
from probing.daemon.stack_wire import Thread as WireThread
from probing.diagnosis.activity.processor import REGEX_FILES
from probing.diagnosis.facts import Frame, Thread

__all__ = ("MAX_FRAMES", "lines_of", "threads_of_processes")

MAX_FRAMES = 64
# The number of outer Python frames that are kept of a stack with more than MAX_FRAMES frames: they show the user's
# code.
_OUTER = 16
_MAX_THREADS = 16
_MAX_VALUES = 12
_VALUE = 160
_TEXT = 200
# Files of torch and of Python whose local variables name the operation, lock or worker that a thread waits for.
_WITH_VALUES = frozenset({"distributed_c10d.py", "c10d_logger.py", "threading.py", "dataloader.py"})
_WAIT = ("wchan", "syscall", "target", "target_kind", "file_system")
_Threads = Mapping[Key, list[WireThread]]


def threads_of_processes(
    first: Iterable[ProcessStacks],
    second: Iterable[ProcessStacks],
    native: Iterable[ProcessStacks],
    waits: Mapping[Key, Sequence[Row]],
    innermost: Mapping[Key, Innermost | None],
) -> dict[Key, tuple[Thread, ...]]:
    """Returns the threads of each process, the training thread first.

    ``first`` and ``second``: two readings of Python frames; ``native``: a reading with native frames, of some
    processes. ``waits``: rows of ``thread_waits``. Raises InternalError for malformed stacks.
    """
    readings = [list(reading) for reading in (first, second, native)]
    earlier, later, deeper = map(_by_process, readings)
    trains = {Key(one.pid, one.start_ns): one.trains for reading in readings for one in reading}
    found = {}
    for key in {**later, **earlier, **deeper}:
        best = deeper.get(key) or earlier.get(key) or later[key]
        if key in deeper and key in earlier:
            _add_locals(best, earlier[key])
        moving = _moving(earlier.get(key), later.get(key))
        own = {row["tid"]: row for row in waits.get(key, ())}
        tid = trains[key] if any(one["tid"] == trains[key] for one in best) else key.pid
        threads = [_thread(one, tid, moving, own, innermost.get(key)) for one in best]
        found[key] = tuple(sorted(threads, key=_order)[:_MAX_THREADS])
    return found


def lines_of(stacks: Iterable[ProcessStacks]) -> Hashable:
    """Returns the Python lines of the threads that train, for a comparison with a later reading.

    Raises InternalError for malformed stacks.
    """
    return frozenset(
        (one.pid, one.start_ns, *map(_line, _python_frames(thread)[:MAX_FRAMES]))
        for one in stacks
        for thread in threads_of(one.packed)
        if thread["tid"] == (one.trains or one.pid)
    )


def _order(thread: Thread) -> tuple[bool, bool, bool, int]:
    """Returns the sort key of a thread. The threads that should be kept come first. torch has a hundred threads that
    run no Python.
    """
    return not thread.main, not thread.gil, all(frame.native for frame in thread.frames), thread.tid


def _by_process(stacks: Iterable[ProcessStacks]) -> _Threads:
    return {Key(one.pid, one.start_ns): threads_of(one.packed) for one in stacks}


def _add_locals(native: list[WireThread], python: list[WireThread]) -> None:
    """Copies the locals of Python frames to the same frames of ``native`` stacks, which are read without locals."""
    known = {thread["tid"]: thread for thread in python}
    for thread in native:
        if thread["tid"] in known:
            own, read = (_python_frames(one)[::-1] for one in (thread, known[thread["tid"]]))
            for frame, before in zip(own, read, strict=False):
                if "locals" in before and _line(frame) == _line(before):
                    frame["locals"] = before["locals"]


def _moving(first: list[WireThread] | None, second: list[WireThread] | None) -> dict[int, bool]:
    if first is None or second is None:
        return {}
    before = {thread["tid"]: _lines(thread) for thread in first}
    return {t["tid"]: before[t["tid"]] != _lines(t) for t in second if t["tid"] in before}


def _lines(thread: WireThread) -> list[tuple[str, str, int | None]]:
    return [_line(frame) for frame in _python_frames(thread)]


def _python_frames(thread: WireThread) -> list[WireFrame]:
    return [frame for frame in thread["frames"] if frame["frame_type"] == "Python"]


def _line(frame: WireFrame) -> tuple[str, str, int | None]:
    return frame["func"], frame["file"], frame["lineno"]


def _thread(
    thread: WireThread, trains: int, moving: Mapping[int, bool], waits: Mapping[int, Row], innermost: Innermost | None
) -> Thread:
    tid, main = thread["tid"], thread["tid"] == trains
    frames = tuple(_frame(frame) for frame in _ends(thread["frames"]))
    wait: dict[str, Any] = {name: waits.get(tid, {}).get(name) for name in _WAIT}
    since = _since(frames, innermost) if main else None
    return Thread(
        tid,
        (thread.get("thread") or "")[:_TEXT],
        main,
        thread.get("state") or None,
        thread.get("gil"),
        frames,
        since,
        moving.get(tid),
        (thread.get("native_missing") or "")[:_TEXT],
        **wait,
    )


def _ends(frames: Sequence[WireFrame]) -> Sequence[WireFrame]:
    if len(frames) <= MAX_FRAMES:
        return frames
    inner = frames[: MAX_FRAMES - _OUTER]
    outer = [frame for frame in frames[len(inner) :] if frame["frame_type"] == "Python"]
    return [*inner, *outer[-_OUTER:]]


def _since(frames: Sequence[Frame], innermost: Innermost | None) -> int | None:
    own = next((frame for frame in frames if not frame.native), None)
    same = own is not None and innermost is not None and (own.func, own.file) == innermost[:2]
    return innermost.since_ns if same and innermost is not None else None


def _frame(frame: WireFrame) -> Frame:
    return Frame(
        frame["func"][:_TEXT],
        frame["file"][-_TEXT:],
        frame["lineno"],
        native=frame["frame_type"] == "Native",
        values=_values(frame),
    )


def _values(frame: WireFrame) -> tuple[tuple[str, str], ...]:
    regex = frame["file"].endswith(REGEX_FILES)
    if not regex and PurePosixPath(frame["file"]).name not in _WITH_VALUES:
        return ()
    read = frame.get("locals") or ()
    known = [(one["name"][:40], one["value"][:_VALUE]) for one in read if one["value"] is not None]
    if regex:
        known = [(name, text) for name, text in known if name == "pattern"]
    return tuple(known[:_MAX_VALUES])
