"""Recognizes a main thread that waits for the next batch, from a torch DataLoader or from worker processes of the
program.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import takewhile

from probing.diagnosis.activity.scene import Scene, Seen, innermost, is_library
from probing.diagnosis.activity.waiting import full_shm
from probing.diagnosis.facts import Helper
from probing.diagnosis.words import exit_text, frame_text

__all__ = ("find_data_loader", "find_worker")

_LOADER = "torch/utils/data/dataloader.py"
_WORKER = "torch/utils/data/_utils/worker.py"
_FETCH = "torch/utils/data/_utils/fetch.py"
# Files of Python's queues and pipes between processes.
_SHARED = ("/multiprocessing/queues.py", "/multiprocessing/connection.py", "/multiprocessing/pool.py")
_HALTED = ("exited", "stopped", "traced")
# These kinds of activity say little, so the text names the worker's line instead.
_BARE = ("sleeping", "unknown", "lock")
_Look = Callable[[Scene], Seen]


def find_data_loader(scene: Scene, look: _Look) -> Seen | None:
    """Returns the activity of the process's data loader if the main thread is in it. ``look`` returns the activity of a
    worker.
    """
    at = innermost(scene.python, _LOADER)
    if at is None or scene.rank is None:
        return None
    if any(not is_library(frame) for frame in scene.python[:at]):
        return _in_process(scene, look)
    workers = [helper for helper in scene.helpers if helper.role == "data_loader"]
    seen = [(worker, look(scene.of_helper(worker))) for worker in workers]
    return _halted(scene, seen) or _busy(scene, seen) or _idle(scene, len(workers))


def find_worker(scene: Scene, look: _Look) -> Seen | None:
    """Returns the worker process that ended or makes no progress, if the main thread waits for it."""
    inner = takewhile(is_library, scene.python)
    if scene.rank is None or not any(file in frame.file for frame in inner for file in _SHARED):
        return None
    seen = [(worker, look(scene.of_helper(worker))) for worker in scene.helpers if worker.role == "data_loader"]
    found = _halted(scene, seen) or _busy(scene, seen)
    return found if found is not None and found.progressing is False else None


def _in_process(scene: Scene, look: _Look) -> Seen:
    """Returns the activity of a main thread that reads the data itself, without workers."""
    assert scene.main is not None
    at = innermost(scene.main.frames, _LOADER)
    main = replace(scene.main, frames=scene.main.frames[:at])
    return _named(look(replace(scene, threads=(main,), rank=None, helpers=())), "it loads data itself: ")


def _halted(scene: Scene, seen: Sequence[tuple[Helper, Seen]]) -> Seen | None:
    for worker, does in seen:
        # Workers of earlier epochs have ended with exit code 0, so such an end is normal.
        if does.kind in _HALTED and (worker.exit is None or worker.exit.signal or worker.exit.code):
            who = f"its data-loader worker (pid {worker.pid})"
            full = full_shm(scene)
            bus = worker.exit is not None and worker.exit.signal == signal.SIGBUS
            text = f"{exit_text(worker.exit)}: {full}" if worker.exit and bus and full else does.does
            kills = f"the kernel killed {scene.condition.oom_kills} processes of its cgroup for memory"
            evidence = (f"{who[4:]} {does.does}", full, kills if scene.condition.oom_kills else "", *does.evidence)
            return Seen("data_loader_worker", text, who, scene.user, does.since_ns, False, evidence)
    return None


def _busy(scene: Scene, seen: Sequence[tuple[Helper, Seen]]) -> Seen | None:
    """Returns the activity of the busy worker that has gone longest without progress."""
    busy = [(worker, does) for worker, does in seen if does.frame is not None and not _is_idle(worker)]
    if not busy:
        return None
    latest = scene.now_ns
    worker, does = min(busy, key=lambda b: (b[1].progressing is True, b[1].since_ns or latest))
    others = f"{len(busy)} of {len(seen)} data-loader workers are at work" if len(seen) > 1 else ""
    found = _named(does, f"data-loader worker (pid {worker.pid}): ", f"its data-loader worker (pid {worker.pid})")
    kind = "data_loader_worker" if does.progressing is False else "data_loader"
    return replace(found, kind=kind, evidence=(*found.evidence, others))


def _named(does: Seen, source: str, who: str = "its data loader") -> Seen:
    evidence = (f"{source}{does.does}", *does.evidence)
    if does.frame is not None and (does.kind in _BARE or does.kind == "computing"):
        verb = "runs" if does.kind == "computing" else "waits"
        text, who = f"{verb} in {frame_text(does.frame)}", "its data loader"
    else:
        text = does.does
    return Seen("data_loader", text, who, does.frame, does.since_ns, does.progressing, evidence, settled=True)


def _is_idle(worker: Helper) -> bool:
    """Returns whether a worker waits for work: in its loop outside of the dataset, or in a queue of the program."""
    main = next((thread for thread in worker.threads if thread.main), None)
    python = [frame for frame in main.frames if not frame.native] if main else []
    loop = innermost(python, _WORKER)
    if loop is not None:
        return innermost(python, _FETCH) is None and all(is_library(f) for f in python[:loop])
    return not python or any(file in frame.file for frame in takewhile(is_library, python) for file in _SHARED)


def _idle(scene: Scene, workers: int) -> Seen:
    known = f"none of its {workers} data-loader workers has work, as far as their stacks show" if workers else ""
    evidence = (known or "the stacks of its data-loader workers could not be read", scene.kernel)
    does = f"waits for the next batch{scene.where}"
    return Seen("data_loader", does, "its data loader", scene.user, scene.since_ns, None, evidence, settled=True)
