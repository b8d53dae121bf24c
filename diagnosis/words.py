"""Texts of ranks, operations, times and sizes, for sentences and evidence."""

from __future__ import annotations

import signal
from collections.abc import Iterable, Sequence

from probing.diagnosis.facts import Condition, Exit, Frame, Rank

__all__ = (
    "bytes_text",
    "call_text",
    "clean",
    "duration_text",
    "exit_text",
    "frame_text",
    "listed",
    "numbers_text",
    "ranks_of",
    "ranks_wait",
    "share_text",
    "time_text",
    "who",
)

_LONGEST = 80
_MOST_RANKS = 12
_MOST_LISTED = 8


def clean(text: str, longest: int = _LONGEST) -> str:
    """Returns ``text`` of a target without control characters, cut to ``longest`` characters."""
    printable = "".join(c if c.isprintable() else "?" for c in text[:longest])
    return printable + ("…" if len(text) > longest else "")


def who(ranks: Sequence[Rank]) -> str:
    """Returns "rank 1 (node b, pid 4711)", and of several "ranks 1-3"."""
    if len(ranks) != 1:
        return ranks_of(rank.rank for rank in ranks)
    return f"rank {ranks[0].rank} (node {clean(ranks[0].node)}, pid {ranks[0].pid})"


def ranks_of(ranks: Iterable[int]) -> str:
    """Returns "rank 3" or "ranks 0-2, 5"."""
    own = set(ranks)
    return f"rank{'' if len(own) == 1 else 's'} {numbers_text(own)}"


def numbers_text(numbers: Iterable[int]) -> str:
    """Returns "3" or "0-2, 5"."""
    spans: list[list[int]] = []
    for number in sorted(set(numbers)):
        if spans and spans[-1][1] == number - 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    texts = [str(a) if a == b else f"{a}{'-' if b > a + 1 else ', '}{b}" for a, b in spans]
    if len(texts) > _MOST_RANKS:
        texts = [*texts[:_MOST_RANKS], "…"]
    return ", ".join(texts)


def ranks_wait(ranks: Iterable[int]) -> str:
    """Returns "rank 3 waits" or "ranks 0-2 wait"."""
    own = set(ranks)
    return f"{ranks_of(own)} {'waits' if len(own) == 1 else 'wait'}"


def exit_text(end: Exit, condition: Condition | None = None) -> str:
    """Returns how a process ended: "was killed by SIGKILL, out of memory (OOM)" or "exited with code 1".

    ``condition``: what is known of its memory.
    """
    limit = f", limit {bytes_text(condition.memory_limit_bytes)}" if condition and condition.memory_limit_bytes else ""
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


def time_text(ns: int | None) -> str:
    """Returns "39 s", "5 min" or "2.5 h"; "an unknown time" for None."""
    if ns is None:
        return "an unknown time"
    seconds = ns / 1e9
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def duration_text(ns: float) -> str:
    """Returns "1.3 ms", "41 ms" or "3.2 s", and longer times as ``time_text``."""
    if ns < 1e9:
        return f"{ns / 1e6:.{0 if ns >= 10e6 else 1}f} ms"
    return f"{ns / 1e9:.1f} s" if ns < 10e9 else time_text(int(ns))


def share_text(share: float) -> str:
    """Returns "41 %"."""
    return f"{100 * share:.0f} %"


def bytes_text(count: float) -> str:
    """Returns "512 MB" or "2.0 GB" (2**30 bytes)."""
    return f"{count / (1 << 30):.1f} GB" if abs(count) >= 1 << 30 else f"{count / (1 << 20):.0f} MB"


def call_text(op: str | None, comm: str, seq: int | None) -> str:
    """Returns "all_reduce seq 7 of default_pg"."""
    number = f" seq {seq}" if seq is not None else ""
    return f"{clean(op) if op else 'a collective'}{number} of {clean(comm)}"


def frame_text(frame: Frame) -> str:
    """Returns "augment, data.py:33", without the folders of the file."""
    func, name = clean(frame.func), clean(frame.file.rpartition("/")[2])
    if not name:
        return func
    return f"{func}, {name}" if frame.line is None else f"{func}, {name}:{frame.line}"


def listed(texts: Iterable[str]) -> str:
    """Returns "a, b and c"; of many texts the first ones and the number of the others."""
    own = list(texts)
    if len(own) > _MOST_LISTED:
        own = [*own[: _MOST_LISTED - 1], f"{len(own) - _MOST_LISTED + 1} more"]
    return own[0] if len(own) == 1 else f"{', '.join(own[:-1])} and {own[-1]}" if own else ""
