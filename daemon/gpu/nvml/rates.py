"""Turns counters into rates and differences."""

from __future__ import annotations

from collections.abc import Hashable

__all__ = ("Counters",)


class Counters:
    """Keeps the last value of each counter. A counter that went back (wrapped, or began anew) has no difference."""

    def __init__(self) -> None:
        self._last: dict[Hashable, tuple[float, int]] = {}

    def more(self, key: Hashable, value: float | None, at_ns: int) -> float | None:
        """Returns by how much a counter grew since the call before; None at the first one. Never negative."""
        return self._step(key, value, at_ns)[0]

    def per_second(self, key: Hashable, value: float | None, at_ns: int) -> float | None:
        """Returns the growth a second; ``at_ns`` is on a clock that does not step."""
        grown, length_ns = self._step(key, value, at_ns)
        return None if grown is None or length_ns <= 0 else grown * 1e9 / length_ns

    def forget(self) -> None:
        """The next values are first ones: the driver may have begun its counters anew."""
        self._last.clear()

    def _step(self, key: Hashable, value: float | None, at_ns: int) -> tuple[float | None, int]:
        if value is None:
            self._last.pop(key, None)
            return None, 0
        before, self._last[key] = self._last.get(key), (value, at_ns)
        if before is None or value < before[0]:
            return None, 0
        return value - before[0], at_ns - before[1]
