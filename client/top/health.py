"""Holds the answers of nodes in one refresh, and the nodes that do not answer.

A node that failed is not asked with the other nodes until it has answered a request for its name.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from probing.client.render.rows import Row
from probing.federation.execution.answer import Failed, Gathered

__all__ = (
    "Absent",
    "Fetched",
    "Health",
    "NodeRows",
    "merged",
)


@dataclass(frozen=True, slots=True)
class NodeRows:
    """The rows of a node by question; questions that were not asked this time are missing. ``paused``: why its probes
    are paused, or empty.
    """

    address: str
    node: str
    rows: Mapping[str, list[Row]]
    paused: str = ""


@dataclass(frozen=True, slots=True)
class Absent:
    """A node that does not answer. ``node`` is empty if its name is unknown; ``since``: time.monotonic()."""

    address: str
    node: str
    reason: str
    since: float


@dataclass(frozen=True, slots=True)
class Fetched:
    """The answers of one refresh; ``at`` is time.monotonic() when it was complete."""

    at: float
    nodes: tuple[NodeRows, ...] = ()
    absent: tuple[Absent, ...] = field(default=())


def merged(known: NodeRows | None, new: NodeRows) -> NodeRows:
    """Returns ``new``, with the rows of ``known`` for questions that were not asked this time."""
    return new if known is None else NodeRows(new.address, new.node, {**known.rows, **new.rows}, new.paused)


# The retry backoff for absent nodes, s: it begins with _FIRST_S and doubles up to _LONGEST_S. _PATIENCE_S: the timeout
# of an attempt, s.
_FIRST_S = 1.0
_LONGEST_S = 10.0
_PATIENCE_S = 3.0


class Health:
    """Tracks the nodes that do not answer. ``ask(addresses, seconds)`` asks nodes for their names.

    ``back`` is called when an absent node answers again. Thread-safe.
    """

    def __init__(self, ask: Callable[[Sequence[str], float], Gathered[None]], back: Callable[[], None]) -> None:
        self._ask = ask
        self._back = back
        self._lock = threading.Lock()
        self._absent: dict[str, Absent] = {}
        self._names: dict[str, str] = {}
        self._thread: threading.Thread | None = None
        self._ended = threading.Event()

    @property
    def absent(self) -> tuple[Absent, ...]:
        with self._lock:
            return tuple(self._absent.values())

    def present(self, addresses: Iterable[str]) -> tuple[str, ...]:
        """Returns the addresses of nodes that are not absent."""
        with self._lock:
            return tuple(address for address in addresses if address not in self._absent)

    def answered(self, address: str, node: str) -> None:
        with self._lock:
            self._names[address] = node
            self._absent.pop(address, None)

    def failed(self, failures: Iterable[Failed]) -> None:
        """Marks nodes as absent. From now on only a thread asks these nodes, and it asks only for their names."""
        with self._lock:
            for failure in failures:
                known = self._absent.get(failure.address)
                name = failure.node or self._names.get(failure.address, "")
                since = known.since if known else time.monotonic()
                self._absent[failure.address] = Absent(failure.address, name, failure.reason, since)
            if self._absent and (self._thread is None or not self._thread.is_alive()):
                self._thread = threading.Thread(target=self._try, name="absent nodes", daemon=True)
                self._thread.start()

    def stop(self) -> None:
        self._ended.set()

    def _try(self) -> None:
        pause = _FIRST_S
        while not self._ended.wait(pause):
            with self._lock:
                addresses = tuple(self._absent)
                if not addresses:
                    # After a later failure, ``failed`` starts another thread.
                    self._thread = None
                    return
            pause = _FIRST_S if self._asked(addresses) else min(2 * pause, _LONGEST_S)

    def _asked(self, addresses: tuple[str, ...]) -> bool:
        """Asks absent nodes for their names; returns whether at least one node is back."""
        gathered = self._ask(addresses, _PATIENCE_S)
        for answered in gathered.answered:
            self.answered(answered.address, answered.node)
        self.failed(gathered.failed)
        if gathered.answered:
            self._back()
        return bool(gathered.answered)
