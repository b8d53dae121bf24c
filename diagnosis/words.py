"""Texts about ranks, operations, frames and ends of processes, for sentences and evidence."""

from __future__ import annotations

import signal
from collections.abc import Iterable, Sequence

from probing.api.text import escape, ranks_of, size
from probing.diagnosis.facts import Condition, Exit, Frame, Rank

__all__ = ("call_text", "clean", "exit_text", "frame_text", "ranks_wait", "who")

_LONGEST = 80


def clean(text: str, longest: int = _LONGEST) -> str:
    """Returns ``text`` of a target, escaped and cut to ``longest`` characters."""
    return escape(text, longest)


def who(ranks: Sequence[Rank]) -> str:
    """Returns a text such as "rank 1 (node b, pid 4711)", or "ranks 1-3" for several."""
    if len(ranks) != 1:
        return ranks_of(rank.rank for rank in ranks)
    return f"rank {ranks[0].rank} (node {clean(ranks[0].node)}, pid {ranks[0].pid})"


def ranks_wait(ranks: Iterable[int]) -> str:
    """Returns "rank 3 waits" or "ranks 0-2 wait"."""
    distinct = set(ranks)
    return f"{ranks_of(distinct)} {'waits' if len(distinct) == 1 else 'wait'}"


def exit_text(end: Exit, condition: Condition | None = None) -> str:
    """Returns how a process ended: "was killed by SIGKILL, out of memory (OOM)" or "exited with code 1".

    ``condition``: the condition of the process, with the facts about its memory.
    """
    limit = f", limit {size(condition.memory_limit_bytes)}" if condition and condition.memory_limit_bytes else ""
    if end.oom:
        return f"was killed by SIGKILL, out of memory (OOM{limit})"
    if end.signal:
        likely = end.signal == signal.SIGKILL and condition is not None and bool(condition.oom_kills)
        return f"was killed by {_signal(end.signal)}{f', probably out of memory (OOM{limit})' if likely else ''}"
    return f"exited with code {end.code}" if end.code is not None else "ended"


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def call_text(op: str | None, comm: str, seq: int | None) -> str:
    """Returns a text such as "all_reduce seq 7 of default_pg"."""
    number = f" seq {seq}" if seq is not None else ""
    return f"{clean(op) if op else 'a collective'}{number} of {clean(comm)}"


def frame_text(frame: Frame) -> str:
    """Returns a text such as "augment, data.py:33", without the folders of the file."""
    func, name = clean(frame.func), clean(frame.file.rpartition("/")[2])
    if not name:
        return func
    return f"{func}, {name}" if frame.line is None else f"{func}, {name}:{frame.line}"
