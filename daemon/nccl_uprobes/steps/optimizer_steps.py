"""Detects the training steps of one process from the bursts of calls of its optimizer (``optimizer.bpf.c``).

A run of an optimizer makes one burst, or a quick succession of bursts, one for each group of parameters. A step may
have runs of several optimizers. A step is the sequence of bursts that repeats, and ends with the last call of its last
burst.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Sequence
from itertools import pairwise
from math import isqrt
from statistics import median
from typing import Any, NamedTuple

from probing.daemon.bpf.probe_slots import SLOTS

__all__ = ("FOREACH", "FUSED", "LIST_ADD", "OptimizerDetector", "OptimizerStep")

FUSED, FOREACH, _, LIST_ADD = SLOTS.reserve("optimizer", 56, 4)
"""The slots of the probes. Each slot counts the calls of one kind of operator."""
# (text, confidence) by preference. LIST_ADD is last: fused and foreach optimizers may call it, too.
_KINDS = {
    FUSED: ("the fused optimizer", 0.95),
    FOREACH: ("the optimizer over lists of tensors", 0.95),
    LIST_ADD: ("sums of lists of tensors, as SGD makes them,", 0.75),
}
# Kinds of operators that only an optimizer calls. Only these decide whether periods of the collectives are steps.
_SURE = (FUSED, FOREACH)
# After this many bursts without a rhythm no rhythm is expected.
_PATIENCE = 64
_SEVERAL_OPTIMIZERS = 0.8
_MAX_BURSTS, _AT_ONCE = 512, 128
_FEWEST = 5
# The gaps between bursts of a run are at most 1/_CLOSER of the gaps between runs, and at most _CLOSE_NS.
_CLOSER, _CLOSE_NS = 3, 500_000_000
# The minimum gap between two bursts, ns, and the multiplier of the hash function, both as in optimizer.bpf.c.
_GAP_NS, _SIGN_FACTOR = 1_000_000, 0x9E3779B97F4A7C15
# One run has at most _MAX_ALIKE equal bursts, and at most _MAX_GROUPS bursts.
_MAX_ALIKE, _MAX_GROUPS = 4, 64
_MAX_OPTIMIZERS = 8
_MATCHING = 0.9
_RECENT = 32
_MIN_FIT = 0.6
_MAX_CALLS = 1 << 20


class _Burst(NamedTuple):
    begin: int
    end: int
    sign: int
    calls: int


class OptimizerStep(NamedTuple):
    """A step, from the end of one run of the optimizer to the end of the next; times are CLOCK_MONOTONIC ns.

    ``calls``: number of calls of the optimizer's operators. ``goes_on``: no step was missed before this step.
    ``exact``: the step matches the rhythm. ``sure``: only an optimizer calls these operators.
    """

    t_start: int
    t_end: int
    calls: int
    exact: bool
    goes_on: bool
    sure: bool
    confidence: float
    why: str


class _Rhythm(NamedTuple):
    """What repeats in each step: the hash of its calls, the number of its calls, and the number of its runs. Bursts of
    one run are at most ``close_ns`` apart."""

    sign: int
    calls: int
    runs: int
    close_ns: int


class OptimizerDetector:
    """Detects steps in the records of one process. A run of the optimizer has ended when the next one begins."""

    def __init__(self) -> None:
        self._streams: dict[int, _Stream] = {}
        self._reported = 0

    @property
    def promising(self) -> bool:
        """Whether the calls of an optimizer have a rhythm, or may still get one, because only few calls were seen."""
        return any(s.rhythm or s.added < _PATIENCE for which, s in self._streams.items() if which in _SURE)

    def observe(self, records: Sequence[Any]) -> list[OptimizerStep]:
        """Adds ``records``, in their order. Returns the steps that have ended. Duplicates and old records are
        skipped.
        """
        steps: list[OptimizerStep] = []
        begin = 0
        for at, record in enumerate(records):
            # Steps are detected before a gap clears the bursts, and before the deque of bursts is full.
            if record["left_out"] or not record["before_calls"] or at - begin >= _AT_ONCE:
                steps += self._add(records[begin:at])
                begin = at
        return steps + self._add(records[begin:])

    def _add(self, records: Sequence[Any]) -> list[OptimizerStep]:
        for record in records:
            which = int(record["which"])
            if which in _KINDS:
                self._streams.setdefault(which, _Stream(which)).add(record)
        best = next((s for which in _KINDS if (s := self._streams.get(which)) and s.find_rhythm()), None)
        steps = [step for step in best.steps() if step.t_start >= self._reported] if best else []
        if steps:
            self._reported = steps[-1].t_end
        return steps


class _Stream:
    def __init__(self, which: int) -> None:
        self._what, self._worth = _KINDS[which]
        self._sure = which in _SURE
        self._bursts: deque[_Burst] = deque(maxlen=_MAX_BURSTS)
        self._open = 0
        # The end of the last run that ended a step; 0 if unknown.
        self._since = 0
        self._goes_on = False
        self._recent: deque[bool] = deque(maxlen=_RECENT)
        self.rhythm: _Rhythm | None = None
        self.added = 0
        self._search_at = 0

    def add(self, record: Any) -> None:
        t, calls, last = int(record["t"]), int(record["before_calls"]), int(record["before_last"])
        if t <= self._open:
            return
        if calls <= 0 or not 0 < self._open <= last < t or record["left_out"]:
            # Bursts are missing before this record.
            self._bursts.clear()
            self._since, self._goes_on = 0, False
        else:
            if len(self._bursts) == _MAX_BURSTS:
                # The next append drops the oldest burst: these bursts have no rhythm, or another stream gives the
                # steps.
                self._since, self._goes_on, self.rhythm = 0, False, None
            self._bursts.append(_Burst(self._open, last, int(record["before_sign"]), min(calls, _MAX_CALLS)))
        self._open = t
        self.added += 1

    def find_rhythm(self) -> bool:
        known = len(self._bursts)
        if self.rhythm is None and known > _FEWEST and self.added >= self._search_at:
            # The intervals between searches grow, so that all searches together cost only a few times as much as the
            # last one.
            self._search_at = self.added + known // 2
            self.rhythm, at = _rhythm([*self._bursts], self._open)
            for _ in range(at):
                self._since = self._bursts.popleft().end
            self._goes_on = self._goes_on and not at
            self._recent.clear()
        return self.rhythm is not None

    def steps(self) -> list[OptimizerStep]:
        steps: list[OptimizerStep] = []
        while self.rhythm is not None and (inside := _next([*self._bursts], self._open, self.rhythm)):
            if self._since:
                steps.append(self._step(self.rhythm, inside))
                self._goes_on = True
            self._since = inside[-1].end
            for _ in inside:
                self._bursts.popleft()
            if len(self._recent) >= _FEWEST and sum(self._recent) < _MIN_FIT * len(self._recent):
                self.rhythm = None
        return steps

    def _step(self, rhythm: _Rhythm, bursts: list[_Burst]) -> OptimizerStep:
        calls = sum(burst.calls for burst in bursts)
        exact = (_sign(bursts), calls) == (rhythm.sign, rhythm.calls)
        self._recent.append(exact)
        times = f"{calls} call{'s' if calls > 1 else ''}"
        worth, why = self._worth, f"{self._what} runs once in it ({times})"
        if rhythm.runs > 1:
            worth *= _SEVERAL_OPTIMIZERS
            why = f"{self._what} runs {rhythm.runs} times in it, not always alike ({times})"
        confidence = round(worth * sum(self._recent) / len(self._recent), 3)
        return OptimizerStep(self._since, bursts[-1].end, calls, exact, self._goes_on, self._sure, confidence, why)


def _runs(bursts: list[_Burst], following: int, close_ns: int) -> Iterator[list[_Burst]]:
    """Yields the runs that have ended. ``following``: when the next burst after ``bursts`` began."""
    run: list[_Burst] = []
    for burst, begin in zip(bursts, [*(b.begin for b in bursts[1:]), following][: len(bursts)], strict=True):
        run.append(burst)
        if begin - burst.end > close_ns:
            yield run
            run = []


def _sign(bursts: list[_Burst]) -> int:
    sign = 0
    for burst in bursts:
        sign = _joined(sign, burst)
    return sign


def _joined(sign: int, burst: _Burst) -> int:
    """Returns the hash of all calls of ``sign`` and ``burst``, which does not depend on where they were split."""
    return (sign * pow(_SIGN_FACTOR, burst.calls, 1 << 64) + burst.sign) % (1 << 64)


def _rhythm(bursts: list[_Burst], following: int) -> tuple[_Rhythm | None, int]:
    """Returns the fitting rhythm with the largest ``close_ns``, and the index of its first burst; None if none fits."""
    begins = [*(burst.begin for burst in bursts[1:]), following]
    gaps = sorted(begin - burst.end for burst, begin in zip(bursts, begins, strict=True))
    # The BPF program joins calls that are less than _GAP_NS apart into one burst.
    steps = [(a, b) for a, b in pairwise([_GAP_NS, *gaps]) if b >= _CLOSER * a and a <= _CLOSE_NS]
    for close_ns in [*(isqrt(a * b) for a, b in reversed(steps)), 0]:
        runs = [*_runs(bursts, following, close_ns)]
        # The first run may lack calls that were made before the probes were attached.
        first, runs = (runs[0], runs[1:]) if runs else ([], [])
        rest = bursts[len(first) + sum(map(len, runs)) :]
        if not all(_is_run(run) for run in (*runs, rest)):
            continue
        if len(runs) < _FEWEST - 1:
            # More bursts may show that the sequence repeats.
            return None, 0
        if length := _length(runs):
            at = _first(runs, length)
            step = [burst for run in runs[at : at + length] for burst in run]
            before = len(first) + sum(map(len, runs[:at]))
            return _Rhythm(_sign(step), sum(burst.calls for burst in step), length, close_ns), before
    return _by_calls(bursts, following)


def _next(bursts: list[_Burst], following: int, rhythm: _Rhythm) -> list[_Burst]:
    """Returns the bursts of the next step; an empty list while the step has not ended. The step ends with the burst at
    which hash and number of the step's calls equal those of ``rhythm``; if there is no such burst, at the longest
    pause.
    """
    pauses: list[int] = []
    sign = calls = 0
    for burst, begin in zip(bursts, [*(b.begin for b in bursts[1:]), following][: len(bursts)], strict=True):
        pauses.append(begin - burst.end)
        sign, calls = _joined(sign, burst), calls + burst.calls
        if (sign, calls) == (rhythm.sign, rhythm.calls):
            return bursts[: len(pauses)]
        if calls >= rhythm.calls and (pauses[-1] > rhythm.close_ns or len(pauses) >= _MAX_GROUPS):
            return bursts[: pauses.index(max(pauses)) + 1]
    return []


def _by_calls(bursts: list[_Burst], following: int) -> tuple[_Rhythm | None, int]:
    """Returns the rhythm of the most frequent burst, if in nearly all steps one or several bursts add up to this burst.

    Used where pauses do not separate runs, because threads wait for a CPU between groups of parameters.
    """
    (sign, calls), times = Counter((burst.sign, burst.calls) for burst in bursts).most_common(1)[0]
    if calls == 1 or times < _FEWEST:
        return None, 0
    rhythm = _Rhythm(sign, calls, 1, 0)
    # The first burst may lack calls that were made before the probes were attached.
    begin = at = next((i for i, burst in enumerate(bursts) if i and burst.sign == sign), 0)
    exact = inexact = 0
    while step := _next(bursts[at:], following, rhythm):
        at += len(step)
        exact, inexact = (exact + 1, inexact) if _sign(step) == sign else (exact, inexact + 1)
    fits = begin and exact >= _MATCHING * (exact + inexact)
    return (rhythm, begin) if fits else (None, 0)


def _is_run(run: list[_Burst]) -> bool:
    alike = len({burst.sign for burst in run}) == 1
    return len(run) <= (_MAX_ALIKE if alike else _MAX_GROUPS)


def _length(runs: list[list[_Burst]]) -> int:
    """Returns the number of runs of optimizers in a step; 0 if the sequence of runs does not repeat."""
    signs = [_sign(run) for run in runs]
    for length in range(1, min(_MAX_OPTIMIZERS, len(signs) // (_FEWEST - 1)) + 1):
        same = sum(a == b for a, b in zip(signs, signs[length:], strict=False))
        if same >= _MATCHING * (len(signs) - length):
            return length
    return 0


def _first(runs: list[list[_Burst]], length: int) -> int:
    """Returns the index of the run with which a step begins: the run after the longest pause."""
    pauses = [b[0].begin - a[-1].end for a, b in pairwise(runs)]
    return max(range(length), key=lambda at: median(pauses[(at - 1) % length :: length]))
