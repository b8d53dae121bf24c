"""How many lines of a kind are stored: a number at once, and then some a second."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ("Allowance",)


@dataclass(slots=True)
class _Bucket:
    left: float
    at_ns: int
    left_out: int = 0


class Allowance:
    """``burst`` lines of a kind at once, ``rate`` a second in the long run."""

    def __init__(self, burst: int, rate: float) -> None:
        self._burst, self._rate = burst, rate
        self._buckets: dict[str, _Bucket] = {}

    def take(self, kind: str, now_ns: int) -> int | None:
        """Returns how many lines of this kind were left out since the last that was stored; None: leave this out."""
        bucket = self._buckets.setdefault(kind, _Bucket(self._burst, now_ns))
        seconds = max(0, now_ns - bucket.at_ns) / 1e9
        bucket.left, bucket.at_ns = min(self._burst, bucket.left + seconds * self._rate), now_ns
        if bucket.left < 1:
            bucket.left_out += 1
            return None
        left_out, bucket.left_out, bucket.left = bucket.left_out, 0, bucket.left - 1
        return left_out
