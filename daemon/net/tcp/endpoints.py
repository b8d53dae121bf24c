"""Local ends of TCP sockets by process, also of those that closed lately: the rows of net.sockets.

What an error says of a peer is an address of a socket that is closed by then. A tick costs a comparison of cookies;
rows are made when somebody asks.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from probing.api.tables.net import SOCKETS
from probing.daemon.arrow import batch_of
from probing.daemon.net.tcp.sock_diag import LISTEN, address_text
from probing.daemon.source import Identity

__all__ = ("KEPT_NS", "MAX_ROWS", "Endpoints")

KEPT_NS = 600_000_000_000
"""How long a closed socket is kept, ns."""
MAX_ROWS = 4_096
"""The most closed sockets that are kept, and the most open ones that are shown."""
_Array = npt.NDArray[Any]
_Integers = npt.NDArray[np.int64]


class _Held(NamedTuple):
    """Sockets (SOCKET) of a namespace that were there at ``seen_ns`` (UTC), and of each its index in ``who``."""

    netns: int
    sockets: _Array
    process: _Integers
    who: Sequence[Identity | None]
    seen_ns: int


class Endpoints:
    """Safe for any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[int, _Held] = {}
        self._closed: deque[_Held] = deque()

    def read(self, netns: int, sockets: _Array, owners: _Integers, who: Sequence[Identity | None], now_ns: int) -> None:
        """Takes all sockets of a namespace at ``now_ns`` (UTC). ``owners``: indices in ``who``, -1 for others."""
        own = np.flatnonzero(owners >= 0)
        now = _Held(netns, sockets[own], owners[own], who, now_ns)
        with self._lock:
            before = self._open.get(netns)
            self._open[netns] = now
            if before is not None and not np.array_equal(before.sockets["cookie"], now.sockets["cookie"]):
                self._close(before, ~np.isin(before.sockets["cookie"], now.sockets["cookie"]))

    def keep(self, namespaces: Collection[int], now_ns: int) -> None:
        """Closes the sockets of all other namespaces, and forgets those that closed KEPT_NS before ``now_ns`` (UTC)."""
        with self._lock:
            for netns in [netns for netns in self._open if netns not in namespaces]:
                held = self._open.pop(netns)
                self._close(held, np.ones(len(held.sockets), bool))
            while self._closed and self._closed[0].seen_ns < now_ns - KEPT_NS:
                self._closed.popleft()

    def rows(self, node: str, ts_ns: int) -> pa.RecordBatch:
        """Returns net.sockets, the open ones first, then those that closed last."""
        with self._lock:
            still, ended = list(self._open.values()), list(reversed(self._closed))
        common = {"node": node, "ts": ts_ns}
        shown = [{**common, **row} for row in islice(_rows(still, closed=False), MAX_ROWS)]
        return batch_of(SOCKETS.name, [*shown, *({**common, **row} for row in _rows(ended, closed=True))])

    def _close(self, held: _Held, which: npt.NDArray[np.bool_]) -> None:
        if not which.any():
            return
        room = MAX_ROWS - int(which.sum())
        while self._closed and sum(len(part.sockets) for part in self._closed) > room:
            self._closed.popleft()
        gone = np.flatnonzero(which)[:MAX_ROWS]
        self._closed.append(held._replace(sockets=held.sockets[gone], process=held.process[gone]))


def _rows(parts: Iterable[_Held], *, closed: bool) -> Iterator[dict[str, Any]]:
    for part in parts:
        for one, process in zip(part.sockets, part.process.tolist(), strict=True):
            who = part.who[process]
            if who is None:
                continue
            listens = int(one["state"]) == LISTEN
            family = int(one["family"])
            yield {
                **who._asdict(),
                "netns": part.netns,
                "state": "closed" if closed else "listens" if listens else "open",
                "seen": part.seen_ns,
                "local_address": address_text(family, one["local"].tobytes()),
                "local_port": int(one["local_port"]),
                "peer_address": None if listens else address_text(family, one["peer"].tobytes()),
                "peer_port": None if listens else int(one["peer_port"]),
            }
