"""Finds the thread that trains from stacks, if the daemon started late and has seen none of the thread's operations.

Ray Train and embedded interpreters train in another thread than the main thread, which only waits for tasks. In a job
that hangs, some of these threads wait in a collective or in a step. A thread of another rank that began in the same
function trains, too.

A rank of torch.distributed.rpc serves requests in threads of torch, while its main thread waits for the end of the job.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from probing.diagnosis.activity.scene import innermost, is_library, letter, python_frames
from probing.diagnosis.facts import Condition, Facts, Rank, Thread
from probing.diagnosis.stack_calls import python_wait

__all__ = ("training_threads", "with_training_threads")

# Files of the innermost Python frame of a main thread that waits for tasks, events or other threads.
_IDLE_FILES = ("threading.py", "queue.py", "concurrent/futures/_base.py", "selectors.py", "ray/_private/worker.py")
# Files of frames in a training step.
_STEP_FILES = ("torch/autograd/graph.py", "torch/nn/modules/module.py", "torch/optim/optimizer.py")
# torch runs the function of a request within this function.
_SERVES = ("torch/distributed/rpc/internal.py", ("_run_function",))
_DIGITS = re.compile(r"\d+")
_Key = TypeVar("_Key")
_Begin = tuple[str, str, str]


def with_training_threads(facts: Facts) -> Facts:
    """Returns ``facts`` with ``Thread.main`` set for the threads that train; unchanged if the main threads train."""
    silent = {rank.rank: rank.threads for rank in facts.ranks if not _issues(rank)}
    training = training_threads(silent)
    served = {rank.rank: rank.threads for rank in facts.ranks if rank.rank not in training and _idle(rank.threads)}
    training |= {rank: thread for rank, threads in served.items() if (thread := _serving(threads)) is not None}
    return replace(facts, ranks=tuple(_with_thread(rank, training) for rank in facts.ranks)) if training else facts


def training_threads(processes: Mapping[_Key, Sequence[Thread]]) -> dict[_Key, Thread]:
    """Returns the thread that trains in each process whose main thread, marked by ``Thread.main``, is idle."""
    idle = {key: threads for key, threads in processes.items() if _idle(threads)}
    waiting = {key: thread for key, threads in idle.items() if (thread := _at_work(threads)) is not None}
    begins = {_begin(thread) for thread in waiting.values()}
    chosen = {key: waiting.get(key) or _begun_alike(threads, begins) for key, threads in idle.items()}
    return {key: thread for key, thread in chosen.items() if thread is not None}


def _issues(rank: Rank) -> bool:
    """Returns whether the main thread issued an operation, or another thread was seen to issue operations."""
    main = next((thread.tid for thread in rank.threads if thread.main), rank.pid)
    return main != rank.pid or any(one.tid == rank.pid for one in (*rank.open, *rank.done))


def _idle(threads: Sequence[Thread]) -> bool:
    main = next((thread for thread in threads if thread.main), None)
    inner = next((frame for frame in main.frames if not frame.native), None) if main is not None else None
    return main is not None and (inner is None or inner.file.endswith(_IDLE_FILES))


def _at_work(threads: Sequence[Thread]) -> Thread | None:
    return next((t for t in threads if not t.main and _works(t)), None)


def _serving(threads: Sequence[Thread]) -> Thread | None:
    """Returns the thread that has served a request of torch.distributed.rpc for the longest time."""
    serving = [t for t in threads if not t.main and innermost(python_frames(t.frames), *_SERVES) is not None]
    return min(serving, key=lambda thread: thread.since_ns or 0, default=None)


def _works(thread: Thread) -> bool:
    """Returns whether a thread is in a call of torch.distributed, or in a step: DDP waits for its buckets within
    backward.
    """
    in_step = any(frame.file.endswith(_STEP_FILES) for frame in thread.frames if not frame.native)
    return in_step or python_wait(thread.frames) is not None


def _begun_alike(threads: Sequence[Thread], begins: set[_Begin]) -> Thread | None:
    alike = [thread for thread in threads if not thread.main and _begin(thread) in begins]
    return alike[0] if len(alike) == 1 else None


def _begin(thread: Thread) -> _Begin:
    """Returns the name of a thread without its numbers, and the user's function in which it began."""
    python = [frame for frame in thread.frames if not frame.native]
    outer = next((frame for frame in reversed(python) if not is_library(frame)), None)
    return _DIGITS.sub("*", thread.name), outer.func if outer else "", outer.file if outer else ""


def _with_thread(rank: Rank, training: Mapping[int, Thread]) -> Rank:
    chosen = training.get(rank.rank)
    if chosen is None:
        return rank
    threads = sorted((replace(t, main=t.tid == chosen.tid) for t in rank.threads), key=lambda thread: not thread.main)
    condition = _of_thread(rank.condition, chosen) if rank.condition is not None else None
    return replace(rank, threads=tuple(threads), condition=condition)


def _of_thread(condition: Condition, thread: Thread) -> Condition:
    """Returns ``condition`` with the values of ``thread`` in place of the values of the main thread. Differences
    between two readings are left out.
    """
    return replace(
        condition,
        state=letter(thread) or None,
        wchan=thread.wchan,
        syscall=thread.syscall,
        target=thread.target,
        target_kind=thread.target_kind,
        target_fd=None,
        file_system=thread.file_system,
        asleep_since_ns=None,
        cpu_ns=None,
        run_delay_ns=None,
        switches=None,
    )
