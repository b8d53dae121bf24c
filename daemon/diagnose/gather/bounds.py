"""Bounds the facts of a rank: what says least is left out first."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from probing.diagnosis.facts import Missing, Operation, Rank, Thread
from probing.diagnosis.facts_file import RANK_BYTES, size_of

__all__ = ("fitted",)

_Cut = Callable[[Rank], Rank]


def fitted(rank: Rank) -> tuple[Rank, list[Missing]]:
    """Returns ``rank`` with at most RANK_BYTES in JSON, and what was left out."""
    missing = []
    for kind, name, cut in _CUTS:
        if size_of(rank) <= RANK_BYTES:
            break
        smaller = cut(rank)
        if smaller != rank:
            text = f"{name} of rank {rank.rank} were left out: more than {RANK_BYTES} bytes"
            missing.append(Missing(kind, text, rank.rank, rank.node))
        rank = smaller
    return rank, missing


def _without_done(keep: int) -> _Cut:
    """Keeps the newest ``keep`` operations of each communicator."""

    def cut(rank: Rank) -> Rank:
        return replace(rank, done=_last(rank.done, keep))

    return cut


def _last(operations: Sequence[Operation], keep: int) -> tuple[Operation, ...]:
    left: dict[str, int] = {}
    kept = []
    for one in reversed(operations):
        left[one.comm] = left.get(one.comm, keep) - 1
        if left[one.comm] >= 0:
            kept.append(one)
    return tuple(reversed(kept))


def _shallow(frames: int, threads: int) -> _Cut:
    def shorter(own: Sequence[Thread]) -> tuple[Thread, ...]:
        return tuple(replace(one, frames=one.frames[:frames]) for one in own[:threads])

    def cut(rank: Rank) -> Rank:
        helpers = tuple(replace(one, threads=shorter(one.threads[:1])) for one in rank.helpers)
        return replace(rank, threads=shorter(rank.threads), helpers=helpers)

    return cut


def _few_samples(rank: Rank) -> Rank:
    return replace(rank, samples=rank.samples[:3], past_samples=rank.past_samples[:3])


def _few_helpers(rank: Rank) -> Rank:
    # Those that ended say most, then those that are blocked.
    order = sorted(rank.helpers, key=lambda one: (one.exit is None, one.state == "running", one.pid))
    return replace(rank, helpers=tuple(replace(one, threads=()) for one in order[:16]))


def _bare(rank: Rank) -> Rank:
    return replace(
        rank,
        open=rank.open[:8],
        progress=rank.progress[:64],
        logs=(),
        series=(),
        samples=(),
        past_samples=(),
        helpers=(),
        steps=(),
        witnesses=(),
        env=(),
        endpoints=(),
        time_outs=(),
        threads=rank.threads[:1],
        condition=None,
    )


_CUTS: Sequence[tuple[str, str, _Cut]] = (
    ("operations", "older operations", _without_done(32)),
    ("size", "some samples", _few_samples),
    ("operations", "older operations", _without_done(16)),
    ("stacks", "outer frames and some threads", _shallow(32, 8)),
    ("size", "some helper processes", _few_helpers),
    ("operations", "older operations", _without_done(4)),
    ("size", "values over time", lambda rank: replace(rank, series=rank.series[:2])),
    ("stacks", "outer frames and some threads", _shallow(16, 4)),
    ("operations", "older operations", lambda rank: replace(rank, done=rank.done[-64:], open=rank.open[:32])),
    ("size", "all but the main thread and open operations", _bare),
    ("stacks", "all stacks", lambda rank: replace(rank, threads=(), open=rank.open[:2], progress=rank.progress[:8])),
)
