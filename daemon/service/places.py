"""Places for connections whose callers are not known yet: nobody is kept out by another's."""

from __future__ import annotations

from typing import Generic, TypeVar

__all__ = ("Places",)

_C = TypeVar("_C")


class Places(Generic[_C]):
    """At most ``most`` connections, and ``each`` of one holder. A new one always gets a place: the oldest connection of
    its holder gives way where that has ``each``, else the oldest of the holder that has the most."""

    def __init__(self, most: int, each: int) -> None:
        self._most = most
        self._each = each
        # By holder, in order of age.
        self._held: dict[str, list[_C]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._held.values()))

    def take(self, holder: str, connection: _C) -> tuple[str, _C] | None:
        """Gives ``connection`` a place. Returns the holder and the connection that lost theirs for it: close that."""
        held, lost = len(self._held.get(holder, ())), None
        if held >= self._each or len(self) >= self._most:
            crowd = max(self._held, key=lambda one: len(self._held[one]))
            loser = holder if held >= min(self._each, len(self._held[crowd])) else crowd
            lost = loser, self._held[loser][0]
            self.leave(*lost)
        self._held.setdefault(holder, []).append(connection)
        return lost

    def leave(self, holder: str, connection: _C) -> None:
        """Gives the place back, if ``connection`` still has it."""
        held = self._held.get(holder, [])
        if connection in held:
            held.remove(connection)
            if not held:
                del self._held[holder]
