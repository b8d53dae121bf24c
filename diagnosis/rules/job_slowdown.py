"""All ranks of a job are slower than before."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from probing.api.text import ranks_of, share_text, time_text
from probing.diagnosis.case import Case
from probing.diagnosis.facts import Sample
from probing.diagnosis.sample_difference import Difference, difference, growth, work_of
from probing.diagnosis.verdict import ERROR, WARNING, Finding, Verdict
from probing.diagnosis.words import frame_text

__all__ = ("VERDICTS", "change_point", "find")

MIN_BEFORE = 20
MIN_AFTER = 10
RATIO = 1.3
_MOST_VALUES = 1024
# The standard deviation of a normal distribution is this multiple of its median absolute deviation.
_NORMAL = 1.4826
_NEARLY_ALL = 0.9


@dataclass(frozen=True, slots=True)
class _ChangePoint:
    """A change in a series. ``index``: the index of the first value after the change. ``before`` and ``after``: the
    medians.
    """

    index: int
    before: float
    after: float


def change_point(values: Sequence[float], *, after: int = MIN_AFTER, ratio: float = RATIO) -> _ChangePoint | None:
    """Returns the point from which on ``values`` are at least ``ratio`` times as large as before, with at least
    ``after`` values after it.

    None if there is no such point, if more than a tenth of the earlier values are large, or if more than a tenth of the
    later values are small.
    """
    series = np.asarray(values[-_MOST_VALUES:], np.float64)
    if len(series) < MIN_BEFORE + after:
        return None
    # A cheap test for the usual case that nothing changed.
    if np.median(series[-after:]) < ratio / 1.1 * np.quantile(series, min(0.1, MIN_BEFORE / 2 / len(series))):
        return None
    index = _split(series, MIN_BEFORE)
    if index > len(series) - after:
        return None
    old, new = series[:index], series[index:]
    before, now = float(np.median(old)), float(np.median(new))
    if before <= 0 or now < ratio * before:
        return None
    deviation = _NORMAL * float(np.median(np.abs(old - before)))
    least = max(before + 3 * deviation, before * (1 + (ratio - 1) / 2))
    if (new > least).mean() < _NEARLY_ALL or (old < (before + now) / 2).mean() < _NEARLY_ALL:
        return None
    return _ChangePoint(index + max(0, len(values) - len(series)), before, now)


def _split(series: npt.NDArray[np.float64], first: int) -> int:
    """Returns the index, at least ``first``, at which the series splits into the two most uniform parts."""
    costs = [_cost(series[:index]) + _cost(series[index:]) for index in range(first, len(series))]
    return first + int(np.argmin(costs))


def _cost(part: npt.NDArray[np.float64]) -> float:
    return float(np.abs(part - np.median(part)).sum())


JOB_SLOWDOWN = Verdict(
    "job_slowdown",
    "slow",
    "All ranks are slower than the job was",
    "Steps take at least 1.3 times as long as before, for at least ten steps and 30 s, up to the newest step; and nine"
    " in ten earlier steps were shorter. No finding in an evaluation or checkpoint, or if one rank is slow.",
    "Durations of the job's steps in the last hour; code that takes more time in the stacks of all ranks than before.",
    "0.8; 0.7 if stacks show no difference; 0.6 without stacks.",
    "The next steps are as short as before, or the program made them longer, for example by another sequence length.",
    ("Look at what all ranks share: storage, network, power and clocks of the nodes.",),
    situations=("job_slowdown",),
)
VERDICTS: tuple[Verdict, ...] = (JOB_SLOWDOWN,)

_PERSISTS_NS = 30_000_000_000
_STEPS = 3
_FRESH_NS = 15_000_000_000
_OTHER_WORK = re.compile(r"eval|valid|checkpoint|save|test_(?:epoch|step|loop)", re.IGNORECASE)
_WAITS_MORE = 0.15


def find(case: Case) -> Iterator[Finding]:
    """Yields a finding if the steps became longer, and no earlier rule names the cause."""
    history = case.facts.step_history
    if not history or any(f.severity == ERROR or f.verdict.id == "slow_rank" for f in case.found):
        return
    change = change_point([float(duration) for _, duration in history])
    if change is None or not _lasts(case, change):
        return
    recent = _all(rank.samples for rank in case.facts.ranks)
    past = _all(rank.past_samples for rank in case.facts.ranks)
    more = difference(recent, [work_of(past)])
    if more is not None and _OTHER_WORK.search(f"{more.frame.func} {more.frame.file.rpartition('/')[2]}"):
        return
    since = history[change.index - 1][0]
    ranks = ranks_of(rank.rank for rank in case.facts.ranks)
    yield Finding(
        JOB_SLOWDOWN,
        WARNING,
        0.8 if more else 0.7 if recent and past else 0.6,
        f"{ranks} {'is' if len(case.facts.ranks) == 1 else 'are'} slower than before: a step takes"
        f" {time_text(change.after)} instead of {time_text(change.before)}{_why(more)}",
        victims=tuple(rank.rank for rank in case.facts.ranks),
        since_ns=since,
        evidence=tuple(_evidence(case, change, since, more, recent, past)),
        missing=() if recent and past else ("samples of the stacks now and before",),
        refuted_by=(JOB_SLOWDOWN.refuted_by,),
        next_steps=(*((f"Look at {frame_text(more.frame)}.",) if more else ()), *JOB_SLOWDOWN.next_steps),
    )


def _lasts(case: Case, change: _ChangePoint) -> bool:
    """Returns whether the slow steps have lasted for long enough, and up to now."""
    history = case.facts.step_history
    newest = history[-1][0]
    # The history is from one node, but which node is unknown. So its newest step is compared with the node whose facts
    # were taken nearest to that step.
    quiet = min((abs(node.taken_ns - newest) for node in case.facts.nodes), default=abs(case.facts.taken_ns - newest))
    lasts = newest - history[change.index - 1][0]
    return lasts >= _PERSISTS_NS and quiet <= max(_STEPS * case.usual_gate_ns, _STEPS * change.after, _FRESH_NS)


def _all(samples: Iterable[tuple[Sample, ...]]) -> list[Sample]:
    """Returns the samples of all ranks as if they were from one rank, with shares of the whole."""
    known = [own for own in samples if own]
    return [replace(sample, share=sample.share / len(known)) for own in known for sample in own]


def _why(more: Difference | None) -> str:
    if more is None:
        return ""
    return (
        f"; {share_text(more.share)} of the time is spent in {frame_text(more.frame)}, before {share_text(more.others)}"
    )


def _evidence(
    case: Case, change: _ChangePoint, since: int, more: Difference | None, recent: list[Sample], past: list[Sample]
) -> Iterator[str]:
    lasts = time_text(case.facts.step_history[-1][0] - since)
    yield f"median step {time_text(change.after)} for {lasts}, {time_text(change.before)} before"
    if more is not None:
        blocked = ", mostly off the CPU" if more.blocked() else ""
        shares = f"{share_text(more.share)} of the time{blocked}, before {share_text(more.others)}"
        yield f"stacks of all ranks: {frame_text(more.frame)} {shares}"
    elif recent and past:
        longer = growth(past, change.before, recent, change.after)
        now, before = 1 - work_of(recent).total, 1 - work_of(past).total
        if longer is not None:
            takes = f"{time_text(longer.after)} of each step, before {time_text(longer.before)}"
            yield f"stacks of all ranks: {frame_text(longer.frame)} takes {takes}"
        elif now - before >= _WAITS_MORE:
            shares = f"{share_text(now)} of the time, before {share_text(before)}"
            yield f"the ranks wait for each other or for the network {shares}"
        elif case.facts.step_history[-1][0] - since <= 2 * _PERSISTS_NS:
            # After this time the past samples are from slow steps, too, so they do not show the cause.
            yield "the stacks of all ranks are as before"
