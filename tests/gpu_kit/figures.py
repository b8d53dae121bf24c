"""Figures of cost: blocks of a job with probes on and paused in turn, compared pair by pair."""

from __future__ import annotations

import random
import statistics
import struct
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

__all__ = ("Ratio", "durations", "ratio", "read_times", "times_between")

# Of the resampling.
_ROUNDS, _SEED = 2_000, 7


class Ratio(NamedTuple):
    """How much more a block takes with probes on, per cent: the median of the pairs, and its 95 % interval."""

    percent: float
    low: float
    high: float
    pairs: int

    def __str__(self) -> str:
        return f"{self.percent:+.2f} % ({self.low:+.2f} to {self.high:+.2f}, {self.pairs} pairs)"


def ratio(on: Sequence[float], off: Sequence[float]) -> Ratio:
    """Returns the ratio of pairs of blocks, as a bootstrap over the pairs has it. Raises ValueError without pairs."""
    changes = [(a / b - 1) * 100 for a, b in zip(on, off, strict=True)]
    if not changes:
        raise ValueError("no pairs")
    chooser = random.Random(_SEED)
    medians = sorted(statistics.median(chooser.choices(changes, k=len(changes))) for _ in range(_ROUNDS))
    low, high = medians[round(_ROUNDS * 0.025)], medians[round(_ROUNDS * 0.975) - 1]
    return Ratio(statistics.median(changes), low, high, len(changes))


def read_times(file: Path) -> list[int]:
    """Returns the times, ns, that a job has written into ``file``, 8 bytes each; none while there is no file."""
    data = file.read_bytes() if file.exists() else b""
    return [time for (time,) in struct.iter_unpack("<q", data[: len(data) // 8 * 8])]


def times_between(times: Sequence[int], begin_ns: int, end_ns: int) -> list[int]:
    """Returns the times from ``begin_ns`` to ``end_ns``."""
    return [time for time in times if begin_ns <= time <= end_ns]


def durations(times: Sequence[int]) -> list[float]:
    """Returns the seconds between successive times."""
    return [(after - before) / 1e9 for before, after in pairwise(times)]
