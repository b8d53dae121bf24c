"""Finds the period of a sequence of operations: the pattern of signatures that a training job repeats in each step.

Patterns nest: layers repeat in a micro-step, micro-steps in a step, steps between two logged losses. The longest
pattern is the step, unless it only adds a few bytes to many repeats of a shorter pattern.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from probing.daemon.nccl_uprobes.steps.operation_history import signs

__all__ = ("MAX_MICRO_STEPS", "Period", "find_period", "least_rotation", "places", "signatures")

Array = npt.NDArray[Any]
MAX_MICRO_STEPS = 8
"""A longer pattern may add hardly a byte to the repeats of a shorter pattern. With up to this many repeats, the shorter
pattern is a micro-step. With more, it is a step, and the rest of the longer pattern runs once in several steps, for
example for logging."""
# A pattern counts as a step after this many consecutive repeats. A micro-step repeats less often in a row.
_REPEATS = MAX_MICRO_STEPS + 1
# Layers repeat in a micro-step, so a pattern counts as a step only if it repeats for at least _SPAN_NS. A pattern of at
# most _FEW_SIGNATURES distinct signatures must repeat for at least _FEW_SPAN_NS.
_SPAN_NS, _FEW_SIGNATURES, _FEW_SPAN_NS = 2_000_000_000, 2, 10_000_000_000
# For long steps that contain repeats, as in large models, fewer repeats over a longer time are enough.
_LONG_REPEATS, _LONG_SPAN_NS = 4, 60_000_000_000
_MATCHING = 0.8
# A pattern that repeats faster than this is no training step, ns.
_MIN_STEP_NS = 1_000_000
_SMALL_SHARE = 0.01
# A longer pattern replaces a shorter one if it covers this share of the operations outside the shorter pattern.
_BETTER = 0.3
_CHECKS = 16
_FEWEST = 3
_MANY_COUNTS = 8
_NEAR = 0.8
_MAX_TIES = 16
_BASE = 0x9E3779B97F4A7C15 | 1
_FEW = 2048


class Period(NamedTuple):
    """The period of a training job. ``pattern``: the signatures of a step from its first operation on. ``kinds`` and
    ``counts`` belong to the same operations; a count that varies is -1. ``varying``: kinds whose count is left out of
    signatures. ``repeats``: how often the pattern occurred. ``inner``: how often a shorter pattern repeats in this
    pattern; 1 without a shorter pattern. ``enclosing``: how often this pattern repeats in a longer pattern whose other
    operations transfer almost no bytes; 0 without such a pattern.
    """

    pattern: npt.NDArray[np.uint64]
    kinds: npt.NDArray[np.int64]
    counts: npt.NDArray[np.int64]
    varying: npt.NDArray[np.int64]
    repeats: int
    inner: int
    enclosing: int

    def rotated(self, by: int) -> Period:
        """Returns this period with its begin moved by ``by`` operations."""
        return self._replace(
            pattern=np.roll(self.pattern, -by),
            kinds=np.roll(self.kinds, -by),
            counts=np.roll(self.counts, -by),
        )

    @property
    def abstract(self) -> list[tuple[int, int]]:
        """Returns (op and dtype, count) of each operation: equal on ranks that use different communicators in the same
        way.
        """
        return [(kind & 0xFFFF, count) for kind, count in zip(self.kinds.tolist(), self.counts.tolist(), strict=True)]


def find_period(operations: Array) -> Period | None:
    """Returns the period of ``operations`` (``operation_history.OPERATION``), or None. The period begins after the
    longest pause.

    If several pauses are about equally long, the period begins after the pause that follows the rarest signature. If
    several pauses do, it begins after the pause that gives the smallest rotation.
    """
    varying = _varying(operations)
    signed = signatures(operations, varying)
    length, inner, enclosing = _length(signed, operations["bytes"])
    if not length:
        return None
    starts = _apart(_commonest(signed, length), length)
    if not _convincing(signed, operations["t"], starts, length):
        return None
    first = operations[starts[0] : starts[0] + length]
    steady = ~np.isin(first["kind"], varying)
    if not steady.any():
        return None
    counts = np.where(steady, first["count"], -1)
    pattern = signed[starts[0] : starts[0] + length].copy()
    period = Period(pattern, first["kind"].copy(), counts, varying, len(starts), inner, enclosing)
    return period.rotated(_begin(period, operations["t"], starts))


def signatures(operations: Array, varying: Array) -> npt.NDArray[np.uint64]:
    """Returns the signature of each operation: a hash of its kind and, unless the count varies, its count."""
    signed: npt.NDArray[np.uint64] = operations["sign"]
    if len(varying):
        varies = np.isin(operations["kind"], varying)
        signed = np.where(varies, signs(operations["kind"], np.full(len(operations), -1)), signed)
    return signed


def places(signed: npt.NDArray[np.uint64], pattern: npt.NDArray[np.uint64]) -> npt.NDArray[np.intp]:
    """Returns the indexes at which ``pattern`` begins in ``signed``; copies may overlap."""
    length = len(pattern)
    if len(signed) < length:
        return np.empty(0, np.intp)
    hashes = _hashes(signed, length)
    return np.flatnonzero(hashes == _hashes(pattern, length)[0])


def least_rotation(items: list[Any]) -> int:
    """Returns the index in ``items`` at which their smallest rotation begins (Booth, Lexicographically least circular
    substrings, 1980).
    """
    twice = items + items
    failure = [-1] * len(twice)
    least = 0
    for j in range(1, len(twice)):
        i = failure[j - least - 1]
        while i != -1 and twice[j] != twice[least + i + 1]:
            if twice[j] < twice[least + i + 1]:
                least = j - i - 1
            i = failure[i]
        if twice[j] != twice[least + i + 1]:
            if twice[j] < twice[least]:
                least = j
            failure[j - least] = -1
        else:
            failure[j - least] = i + 1
    return least % max(len(items), 1)


def _convincing(signed: npt.NDArray[np.uint64], t: Array, starts: npt.NDArray[np.intp], length: int) -> bool:
    """Returns whether a pattern that begins at ``starts`` covers the sequence, and repeats often and slowly enough."""
    if len(starts) < _LONG_REPEATS or len(starts) * length < _MATCHING * (len(signed) - starts[0]):
        return False
    distinct = len(np.unique(signed[starts[0] : starts[0] + length]))
    breaks = np.flatnonzero(np.diff(starts, append=len(signed) + length) != length)
    span = t[-1] - t[starts[0]]
    if int(np.diff(breaks, prepend=-1).max()) < _REPEATS:
        if distinct * 2 > length or span < _LONG_SPAN_NS:
            return False
    elif span < (_FEW_SPAN_NS if distinct <= _FEW_SIGNATURES else _SPAN_NS):
        return False
    return bool(np.median(np.diff(t[starts])) >= _MIN_STEP_NS)


def _varying(operations: Array) -> npt.NDArray[np.int64]:
    """Returns the kinds of operations that are called with ever new element counts, for example because sequence
    lengths vary.
    """
    distinct = np.unique(operations["sign"], return_index=True)[1]
    kinds, counts = np.unique(operations["kind"][distinct], return_counts=True)
    totals = np.unique(operations["kind"], return_counts=True)[1]
    found: npt.NDArray[np.int64] = kinds[(counts > _MANY_COUNTS) & (counts * 4 > totals)]
    return found


def _length(signed: npt.NDArray[np.uint64], sizes: Array) -> tuple[int, int, int]:
    """Returns the length of the pattern of a step, how often a shorter pattern repeats in this pattern, and how often
    this pattern repeats in a longer pattern. The length is 0 without a pattern.
    """
    rough = _rough_matches(np.unique(signed, return_inverse=True)[1])
    tried, covered = _next_length(signed, rough, 0, 0.0)
    chosen, inner = _primitive(signed, tried), 1
    while tried:
        tried, better = _next_length(signed, rough, tried, covered)
        inside, adds_little = _compare(signed, sizes, chosen, tried) if tried else (0, False)
        if inside * chosen == tried:
            # No further length has a pattern, or the length is a multiple of the chosen length. A longer pattern has to
            # cover more than this multiple; otherwise each multiple would be compared.
            covered = better
            continue
        if adds_little and inside > MAX_MICRO_STEPS:
            return chosen, inner, inside
        chosen, covered, inner = tried, better, max(inside, 1)
    return chosen, inner, 0


def _primitive(signed: npt.NDArray[np.uint64], length: int) -> int:
    """Returns the length of the shortest pattern that repeats within the most frequent pattern of ``length``."""
    if not length:
        return 0
    at = _commonest(signed, length)[0]
    pattern = signed[at : at + length]
    return next(n for n in range(1, length + 1) if length % n == 0 and bool((pattern[n:] == pattern[:-n]).all()))


def _rough_matches(codes: npt.NDArray[np.intp]) -> npt.NDArray[np.float64]:
    """Estimates, for each distance up to a third of the sequence, the share of operations that equal the operation this
    distance before them.

    An autocorrelation by FFT: each code gets random signs, whose products average to zero unless the codes are equal.
    """
    count = len(codes)
    chance = np.random.default_rng(0).choice(np.array([-1.0, 1.0]), (8 if count < _FEW else 4, codes.max() + 1))
    size = 1 << (2 * count - 1).bit_length()
    spectrum = np.fft.rfft(chance[:, codes], size)
    products = np.fft.irfft((np.abs(spectrum) ** 2).mean(axis=0), size)[: count // 3 + 1]
    shares: npt.NDArray[np.float64] = products / (count - np.arange(len(products)))
    return shares


def _next_length(
    signed: npt.NDArray[np.uint64], rough: npt.NDArray[np.float64], after: int, covered: float
) -> tuple[int, float]:
    """Returns the shortest length above ``after`` whose patterns cover clearly more than ``covered``, and
    their share.
    """
    if covered > 1 - 1e-9:
        return 0, 0.0
    lengths = np.arange(len(rough))
    noise = 4 * np.sqrt((1 - _MATCHING) / (4 * (len(signed) - lengths)))
    likely = np.flatnonzero((rough >= _MATCHING - noise) & (lengths > after))
    checks = _CHECKS if len(signed) > _FEW else 4 * _CHECKS
    best = likely[np.argsort(-rough[likely], kind="stable")[:checks]]
    enough = max(_MATCHING, covered + (1 - covered) * _BETTER)
    for length in np.unique(np.concatenate((likely[: _CHECKS // 4], best))).tolist():
        share = _covered(signed, length)
        if share >= enough:
            return length, share
    return 0, 0.0


def _covered(signed: npt.NDArray[np.uint64], length: int) -> float:
    """Returns the share of operations, from the first copy on, in copies of the most frequent pattern of this
    length.
    """
    starts = _apart(_commonest(signed, length), length)
    if len(starts) < _FEWEST or int(starts[0]) * 2 > len(signed):
        return 0.0
    # The operations may end within a copy of the pattern.
    rest = len(signed) - int(starts[-1]) - length
    return len(starts) * length / (len(signed) - int(starts[0]) - min(rest, length - 1))


def _compare(signed: npt.NDArray[np.uint64], sizes: Array, shorter: int, longer: int) -> tuple[int, bool]:
    """Returns (repeats of the shorter pattern in the longer, whether the rest of the longer has almost no bytes)."""
    at = _commonest(signed, longer)[0]
    around = np.concatenate((signed[at : at + longer], signed[at : at + shorter - 1]))
    starts = _commonest(signed, shorter)
    repeats = _apart(places(around, signed[starts[0] : starts[0] + shorter]), shorter)
    within = np.zeros(longer, bool)
    within[(repeats[:, None] + np.arange(shorter)) % longer] = True
    weight = np.maximum(sizes[at : at + longer], 1)
    return len(repeats), bool(weight[~within].sum() <= _SMALL_SHARE * weight.sum())


def _hashes(signed: npt.NDArray[np.uint64], length: int) -> npt.NDArray[np.uint64]:
    """Returns a hash of each sequence of ``length`` signatures."""
    base, inverse = np.uint64(_BASE), np.uint64(pow(_BASE, -1, 1 << 64))
    powers: Array = np.cumprod(np.full(len(signed), base))
    sums = np.concatenate((np.zeros(1, np.uint64), np.cumsum((signed ^ signed >> np.uint64(31)) * powers)))
    back: Array = np.cumprod(np.full(len(signed), inverse))[: len(signed) - length + 1]
    found: npt.NDArray[np.uint64] = (sums[length:] - sums[:-length]) * back
    return found


def _commonest(signed: npt.NDArray[np.uint64], length: int) -> npt.NDArray[np.intp]:
    """Returns the indexes at which the most frequent pattern of this length begins."""
    hashes = _hashes(signed, length)
    values, first, counts = np.unique(hashes, return_index=True, return_counts=True)
    most = np.flatnonzero(counts == counts.max())
    return np.flatnonzero(hashes == values[most[np.argmin(first[most])]])


def _apart(starts: npt.NDArray[np.intp], length: int) -> npt.NDArray[np.intp]:
    """Returns ``starts`` without the copies that overlap an earlier copy."""
    if len(starts) < 2 or int(np.diff(starts).min()) >= length:
        return starts
    kept: list[int] = []
    for start in starts.tolist():
        if not kept or start >= kept[-1] + length:
            kept.append(start)
    return np.array(kept, np.intp)


def _begin(period: Period, t: Array, starts: npt.NDArray[np.intp]) -> int:
    """Returns the index of the operation that follows the longest pause of the pattern."""
    length = len(period.pattern)
    inside = starts[starts > 0][-256:, None] + np.arange(length)
    pauses = np.median(t[inside] - t[inside - 1], axis=0)
    near = np.flatnonzero(pauses >= _NEAR * pauses.max())
    if len(near) == 1:
        return int(near[0])
    abstract = period.abstract
    # An operation that is called once in a step, such as the norm of the gradients, ends the step.
    _, which, times = np.unique(period.pattern, return_inverse=True, return_counts=True)
    rare = times[which][near - 1]
    ties = near[rare == rare.min()][:_MAX_TIES]
    return int(min(ties.tolist(), key=lambda r: abstract[r:] + abstract[:r]))
