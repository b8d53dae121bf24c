"""Differences of counters between two looks. A counter that goes back, or is new, has none."""

from __future__ import annotations

from collections.abc import Hashable, Mapping

__all__ = ("Growth",)

MOST = 8_192
_FORGET_NS = 600_000_000_000


class Growth:
    """Remembers the last counters of each thing. A key names one life of a thing: a number or a path may come again."""

    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self._last: dict[Hashable, tuple[int, Mapping[str, int]]] = {}

    def __len__(self) -> int:
        return len(self._last)

    def since(self, key: Hashable, mono_ns: int, counters: Mapping[str, int]) -> dict[str, int]:
        """Returns by how much each counter grew since the last call, and ``wall_ns`` since then; empty at the first.

        A counter that went back, wrapped, or was not there before is left out.
        """
        before_ns, before = self._last.pop(key, (mono_ns, {}))
        if len(self._last) < self._most:
            self._last[key] = (mono_ns, counters)
        if mono_ns <= before_ns:
            return {}
        grown = {name: value - before[name] for name, value in counters.items() if value >= before.get(name, value + 1)}
        return {**grown, "wall_ns": mono_ns - before_ns}

    def forget(self, now_ns: int) -> None:
        """Forgets what was not seen for ten minutes."""
        for key in [key for key, (at_ns, _) in self._last.items() if at_ns < now_ns - _FORGET_NS]:
            del self._last[key]
