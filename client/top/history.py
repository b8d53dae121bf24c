"""Values over time: bounded series for sparklines, and rates of counters that may restart."""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Hashable

__all__ = ("MOST_VALUES", "Lags", "Rates", "Series")

MOST_VALUES = 120
_SAMPLES = 10


class Series:
    """The last MOST_VALUES values by key, each in the order of its times."""

    def __init__(self) -> None:
        self._values: dict[Hashable, deque[float | None]] = {}
        self._newest: dict[Hashable, float] = {}

    def add(self, key: Hashable, at: float, value: float | None) -> None:
        """Adds a value of time ``at``, in any unit. What is not newer than the last value of ``key`` is left out."""
        if at <= self._newest.get(key, float("-inf")):
            return
        self._newest[key] = at
        self._values.setdefault(key, deque(maxlen=MOST_VALUES)).append(value)

    def of(self, key: Hashable) -> tuple[float | None, ...]:
        return tuple(self._values.get(key, ()))

    def keep(self, keys: Container[Hashable]) -> None:
        """Forgets what is not in ``keys``."""
        for key in [key for key in self._values if key not in keys]:
            del self._values[key], self._newest[key]


class Rates:
    """Events a second of counters, over the last ``window`` seconds."""

    def __init__(self, window: float) -> None:
        self._window_ns = window * 1e9
        self._seen: dict[Hashable, deque[tuple[int, int]]] = {}

    def add(self, key: Hashable, at_ns: int, count: int) -> float | None:
        """Returns the rate of ``key`` with this reading; None for a first reading, or one of a counter that went back.

        A counter that went back has restarted: readings before have nothing to do with it.
        """
        readings = self._seen.setdefault(key, deque())
        if readings and (count < readings[-1][1] or at_ns < readings[-1][0]):
            readings.clear()
        readings.append((at_ns, count))
        # One reading from before the window stays, so that it is covered whole.
        while len(readings) > 2 and readings[1][0] <= at_ns - self._window_ns:
            readings.popleft()
        (first_ns, first), (last_ns, last) = readings[0], readings[-1]
        return (last - first) * 1e9 / (last_ns - first_ns) if last_ns > first_ns else None

    def keep(self, keys: Container[Hashable]) -> None:
        """Forgets what is not in ``keys``."""
        for key in [key for key in self._seen if key not in keys]:
            del self._seen[key]


class Lags:
    """How much later than the rank in the middle each rank calls, as the median over the last samples, ns."""

    def __init__(self) -> None:
        self._samples: dict[Hashable, deque[int]] = {}
        self._last: dict[Hashable, int] = {}

    def add(self, key: Hashable, seq: int, lag_ns: int) -> None:
        """Adds the lag of operation ``seq``; the same operation counts once."""
        if self._last.get(key) != seq:
            self._last[key] = seq
            self._samples.setdefault(key, deque(maxlen=_SAMPLES)).append(lag_ns)

    def of(self, key: Hashable) -> int | None:
        values = sorted(self._samples.get(key, ()))
        return values[(len(values) - 1) // 2] if values else None

    def keep(self, keys: Container[Hashable]) -> None:
        """Forgets what is not in ``keys``."""
        for key in [key for key in self._samples if key not in keys]:
            del self._samples[key], self._last[key]
