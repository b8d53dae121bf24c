"""News that a node passes on: each a bounded number of times, what was passed on least first."""

from __future__ import annotations

from collections.abc import Iterator

from probing.daemon.cluster.record import Update

__all__ = ("Rumors",)

# When much is new, nodes pass it on so often, and the comparison of digests spreads the rest: it sends what the other
# node lacks, where news may come twice, each time with a signature that cannot be compressed.
BUSY = 6
SENDS_BUSY = 2


class Rumors:
    """The news by name of the node. A newer update of a node replaces the older one."""

    def __init__(self) -> None:
        # By the number of times that they were sent; a dict keeps the order of arrival.
        self._by_sends: list[dict[str, Update]] = [{}]
        self._sends: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._sends)

    @property
    def busy(self) -> bool:
        """Whether there is so much news that a record more is left to the comparison."""
        return len(self._sends) >= BUSY

    def add(self, update: Update) -> None:
        self.drop(update.record.name)
        self._sends[update.record.name] = 0
        self._by_sends[0][update.record.name] = update

    def drop(self, name: str) -> None:
        sends = self._sends.pop(name, None)
        if sends is not None:
            del self._by_sends[sends][name]

    def take(self, room: int, most: int, nodes: int) -> tuple[Update, ...]:
        """Returns news of at most ``room`` bytes and ``most`` updates, and counts them as passed on."""
        limit = SENDS_BUSY if len(self._sends) > BUSY else 2 * max(nodes, 2).bit_length()
        taken: list[Update] = []
        for update in self._in_order():
            if len(taken) >= most or update.size > room:
                break
            room -= update.size
            taken.append(update)
        for update in taken:
            self._count(update, limit)
        return tuple(taken)

    def _in_order(self) -> Iterator[Update]:
        for level in self._by_sends:
            yield from level.values()

    def _count(self, update: Update, limit: int) -> None:
        name = update.record.name
        sends = self._sends[name]
        self.drop(name)
        if sends + 1 >= limit:
            return
        while len(self._by_sends) <= sends + 1:
            self._by_sends.append({})
        self._sends[name] = sends + 1
        self._by_sends[sends + 1][name] = update
