"""Shares bounded places among the users whose jobs want them: what many processes of a user displace is that user's."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from itertools import chain, zip_longest
from typing import Generic, TypeVar

__all__ = ("Turns", "crowding", "in_turn")

_T = TypeVar("_T")
_H = TypeVar("_H", bound=Hashable)
_NONE = object()


def crowding(owners: Iterable[_H]) -> _H:
    """Returns the owner who holds most places; of equal ones the first. Raises ValueError without any."""
    counts = Counter(owners)
    return max(counts, key=counts.__getitem__)


def in_turn(items: Iterable[_T], owner: Callable[[_T], Hashable]) -> list[_T]:
    """Returns the items, one of each owner in turn, so that a cut after any number is fair.

    The items of an owner stay in their order.
    """
    of_owner: dict[Hashable, list[_T]] = {}
    for item in items:
        of_owner.setdefault(owner(item), []).append(item)
    turns = chain.from_iterable(zip_longest(*of_owner.values(), fillvalue=_NONE))
    return [item for item in turns if item is not _NONE]  # type: ignore[misc]


class Turns(Generic[_H]):
    """Whose turn it is at something that takes one after the other (start-time fair queueing, Goyal 1996).

    Who asks for the first time, or again after a pause, is next, and has no turns left over from the pause.
    """

    def __init__(self) -> None:
        self._now = 0
        self._next: dict[_H, int] = {}

    def of(self, owner: _H) -> int:
        """Returns the turn of ``owner``: the lowest comes first."""
        return max(self._next.get(owner, 0), self._now)

    def took(self, owner: _H) -> None:
        """Counts a turn that ``owner`` has taken."""
        self._now = self.of(owner)
        self._next = {one: turn for one, turn in self._next.items() if turn > self._now}
        self._next[owner] = self._now + 1
