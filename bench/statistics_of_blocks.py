"""Figures from interleaved blocks: the ratio of two times that are measured in turn, with a bootstrap interval."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

__all__ = ("Ratio", "ratio_of_blocks", "table")

RESAMPLES = 10_000
Values = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Ratio:
    """``low`` and ``high`` are the 2.5 and 97.5 percentiles of the bootstrap."""

    ratio: float
    low: float
    high: float
    blocks: int

    def percent(self) -> str:
        """Returns the difference to 1, in percent, with its interval."""
        value, low, high = ((x - 1) * 100 for x in (self.ratio, self.low, self.high))
        return f"{value:+.2f} % [{low:+.2f}, {high:+.2f}]"


def ratio_of_blocks(with_it: Sequence[float], without: Sequence[float], seed: int = 7) -> Ratio:
    """Returns the mean ratio over pairs (a block with the load, a neighbour without), bootstrapped over the pairs."""
    pairs = np.asarray(with_it, dtype=np.float64) / np.asarray(without, dtype=np.float64)
    rng = np.random.default_rng(seed)
    means = rng.choice(pairs, (RESAMPLES, len(pairs))).mean(axis=1)
    low, high = np.percentile(means, [2.5, 97.5])
    return Ratio(float(pairs.mean()), float(low), float(high), len(pairs))


def table(rows: Sequence[Mapping[str, object]]) -> str:
    """Returns a Markdown table."""
    names = list(rows[0])
    lines = ["| " + " | ".join(names) + " |", "|" + "---|" * len(names)]
    lines += ["| " + " | ".join(str(row[n]) for n in names) + " |" for row in rows]
    return "\n".join(lines)
