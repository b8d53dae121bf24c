"""The sockets of watched processes: opens a sock_diag socket in each of their network namespaces, finds the owner of
each TCP socket, and makes the rows of net.sockets.

Listing the descriptors of a process takes microseconds for each descriptor, so it is done only if there are new
processes or sockets, and otherwise once a minute. Closed sockets are kept for a while, since an error may name a peer
by the address of a socket that has been closed since.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from probing.api.errors import PrivilegeError, ProbingError, UnsupportedTarget
from probing.api.tables.net import SOCKETS
from probing.api.tables.schema import Row
from probing.daemon.arrow import batch_of
from probing.daemon.fairness import in_turn
from probing.daemon.net.tcp.reading import MAX_SOCKETS
from probing.daemon.net.tcp.sock_diag import LISTEN, NETLINK_SOCK_DIAG, address_text
from probing.daemon.processes.namespaces import own_namespace, socket_in
from probing.daemon.processes.reader_pool import ReaderPool, payload_of
from probing.daemon.source import Identity, ProcessKey

__all__ = ("KEPT_NS", "MAX_ROWS", "DiagSockets", "Endpoints", "Owners")

TIMEOUT_S = 1.0
# The maximum number of namespaces with an open sock_diag socket. An open socket keeps its namespace alive, so it is
# closed when the last watched process of the namespace has ended.
MAX_NAMESPACES = 256


class DiagSockets:
    """The sock_diag sockets by namespace. Not thread-safe."""

    def __init__(self, readers: ReaderPool) -> None:
        self._readers = readers
        self._open: dict[int, socket.socket] = {}
        self._refused: dict[int, str] = {}

    @property
    def namespaces(self) -> Iterable[int]:
        """Returns the namespaces with an open socket, by the inode of /proc/PID/ns/net."""
        return list(self._open)

    @property
    def refused(self) -> Iterable[int]:
        """Returns the namespaces in which no socket could be opened, by the inode of /proc/PID/ns/net."""
        return list(self._refused)

    def of(self, netns: int) -> socket.socket:
        return self._open[netns]

    def open(self, processes: Mapping[int, ProcessKey]) -> list[str]:
        """Opens a socket in each namespace of ``processes``, and closes all other sockets. ``processes`` has a process
        of each namespace.

        Returns the reasons why some namespaces have no socket.
        """
        for netns in [netns for netns in self._open if netns not in processes]:
            self.drop(netns)
        self._refused = {netns: why for netns, why in self._refused.items() if netns in processes}
        for netns, key in list(processes.items())[:MAX_NAMESPACES]:
            if netns not in self._open and netns not in self._refused:
                try:
                    self._open[netns] = self._made(netns, key)
                except ProbingError as e:
                    self._refused[netns] = e.message
        counts: dict[str, int] = {}
        for why in self._refused.values():
            counts[why] = counts.get(why, 0) + 1
        return [f"{count} network namespace{'s'[: count > 1]} not read: {why}" for why, count in counts.items()]

    def drop(self, netns: int) -> None:
        self._open.pop(netns).close()

    def close(self) -> None:
        for netns in list(self._open):
            self.drop(netns)

    def _made(self, netns: int, key: ProcessKey) -> socket.socket:
        kind = socket.SOCK_DGRAM
        if netns == own_namespace()[1]:
            try:
                made = socket.socket(socket.AF_NETLINK, kind | socket.SOCK_CLOEXEC, NETLINK_SOCK_DIAG)
            except OSError as e:
                raise UnsupportedTarget(f"the kernel has no sock_diag: {e.strerror}") from e
        else:
            answer = self._readers.call("network", pid=key.pid, start_ns=key.start_ns)
            namespace = answer.take_fd()
            try:
                made = socket_in(namespace, socket.AF_NETLINK, kind, NETLINK_SOCK_DIAG)
            except PrivilegeError as e:
                raise PrivilegeError("connections in containers need CAP_SYS_ADMIN for the collector") from e
            finally:
                os.close(namespace)
        made.settimeout(TIMEOUT_S)
        return made


_MAX_PROCESSES = 1_024
OWNERS_TIMEOUT_S = 2.0
# The maximum and the minimum time between two listings of descriptors, s. Only new processes can cause an earlier
# listing than the minimum time allows.
AT_LEAST_S = 60.0
SOON_S = 5.0
# The maximum share of a core that listings may take.
_SHARE = 1 / 400
# If processes share a socket, its owner is the process whose role comes first in this list. For example, data loaders
# inherit sockets of their trainer.
_ORDER = ("trainer", "launcher", "other", "data_loader")
_Integers = npt.NDArray[np.int64]
# The network namespace of a process, and the inode of each of its sockets.
_HeldSockets = tuple[int, list[int]]


class Owners:
    """The owners of sockets. ``processes``: the processes in the last listing of descriptors; ``of`` returns indices in
    this list. Not thread-safe."""

    def __init__(self, readers: ReaderPool) -> None:
        self._readers = readers
        self.processes: list[ProcessKey] = []
        self.namespaces: dict[int, ProcessKey] = {}
        """A process of each network namespace."""
        self._inodes: _Integers = np.zeros(0, np.int64)
        self._owners: _Integers = np.zeros(0, np.int64)
        self._held: dict[ProcessKey, _HeldSockets] = {}
        self._looked = self._due = 0.0
        self._unknown = False
        self._error: ProbingError | None = None

    def refresh(self, watched: Sequence[Identity]) -> None:
        """Lists the descriptors of the ``watched`` processes if that is due. Raises ProbingError if the reader does not
        answer, or did not answer lately.
        """
        now = time.monotonic()
        if self._error is not None and now < self._due:
            raise self._error
        # A listing has a time limit and a maximum number of sockets. Users take turns, so that no user takes the whole
        # listing.
        ordered = in_turn(sorted(watched[:_MAX_PROCESSES], key=_rank), lambda who: who.owner)
        keys = [who.key for who in ordered]
        new = keys != self.processes
        if not new and not (self._unknown and now >= self._due) and now < self._looked + AT_LEAST_S:
            return
        if new and now < self._due and set(keys) <= set(self.processes):
            return  # some processes have ended, and their sockets are closed
        self._look(ordered, now)

    def of(self, inodes: _Integers) -> _Integers:
        """Returns the index in ``processes`` of the owner of each socket; -1 if the owner is not a watched process."""
        if not len(self._inodes):
            return np.full(len(inodes), -1, np.int64)
        place = np.minimum(np.searchsorted(self._inodes, inodes), len(self._inodes) - 1)
        return np.where(self._inodes[place] == inodes, self._owners[place], -1)

    def unknown(self, found: bool) -> None:
        """Requests an early listing if ``found``, that is, if there are new sockets whose owner is unknown."""
        self._unknown |= found

    def _look(self, watched: list[Identity], now: float) -> None:
        keys = [who.key for who in watched]
        self._due = now + SOON_S
        try:
            read, cpu_s = self._ask(keys) if keys else ([], 0.0)
            self._error = None
        except ProbingError as e:
            self._error = e
            raise
        # The pause depends on the CPU time, because on a busy machine a listing takes long but costs little.
        self._due = now + max(SOON_S, cpu_s / _SHARE)
        # A process without an answer (None) was not reached in time and is tried again, or has ended and is soon no
        # longer watched.
        self._looked, self._unknown = now, None in read
        self.processes = keys
        held = self._with_last(keys, read)
        self._held = {key: seen for key, seen in zip(keys, held, strict=True) if seen}
        namespaces: dict[int, ProcessKey] = {}
        owners: dict[int, int] = {}
        for key, (namespace, _) in self._held.items():
            namespaces.setdefault(namespace, key)
        for index in sorted(range(len(held)), key=lambda index: _rank(watched[index])):
            if seen := held[index]:
                for inode in seen[1]:
                    owners.setdefault(inode, index)
        self.namespaces = namespaces
        self._inodes = np.array(sorted(owners), np.int64)
        self._owners = np.array([owners[inode] for inode in self._inodes.tolist()], np.int64)

    def _with_last(self, keys: list[ProcessKey], read: Sequence[_HeldSockets | None]) -> list[_HeldSockets | None]:
        """Returns ``read``. Processes that were not reached keep the sockets of their last listing, as long as there
        are at most MAX_SOCKETS sockets in all."""
        room = MAX_SOCKETS - sum(len(seen[1]) for seen in read if seen)
        held: list[_HeldSockets | None] = []
        for key, seen in zip(keys, read, strict=True):
            last = self._held.get(key) if seen is None else None
            if last is not None and len(last[1]) <= room:
                room -= len(last[1])
                held.append(last)
            else:
                held.append(seen)
        return held

    def _ask(self, keys: list[ProcessKey]) -> tuple[list[_HeldSockets | None], float]:
        """Returns the result of ``held_sockets`` in the reader, and the CPU time that it took, s."""
        timeout_ms = int(OWNERS_TIMEOUT_S * 500)
        targets = [list(key) for key in keys]
        answer = self._readers.call("sockets", timeout=OWNERS_TIMEOUT_S, targets=targets, timeout_ms=timeout_ms)
        return payload_of(list[_HeldSockets | None], answer), float(answer.header.get("cpu_s") or 0.0)


def _rank(who: Identity) -> tuple[int, int, int]:
    return _ORDER.index(who.role) if who.role in _ORDER else len(_ORDER), who.start_ns, who.pid


KEPT_NS = 600_000_000_000
"""The time for which a closed socket is kept, ns."""
MAX_ROWS = 4_096
"""The maximum number of closed sockets that are kept, and of open sockets that are shown, for all users together."""
_Array = npt.NDArray[Any]


class _Held(NamedTuple):
    """The sockets (SOCKET) of a namespace at ``seen_ns`` (UTC). ``process``: the index of each owner in ``who``."""

    netns: int
    sockets: _Array
    process: _Integers
    who: Sequence[Identity | None]
    seen_ns: int


class Endpoints:
    """Keeps the open and the recently closed sockets of watched processes. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[int, _Held] = {}
        # By owner, oldest first.
        self._closed: dict[int, deque[_Held]] = {}

    def read(self, netns: int, sockets: _Array, owners: _Integers, who: Sequence[Identity | None], now_ns: int) -> None:
        """Stores all sockets of a namespace at ``now_ns`` (UTC). ``owners``: the index of each owner in
        ``who``, or -1.
        """
        own = np.flatnonzero(owners >= 0)
        now = _Held(netns, sockets[own], owners[own], who, now_ns)
        with self._lock:
            before = self._open.get(netns)
            self._open[netns] = now
            if before is not None and not np.array_equal(before.sockets["cookie"], now.sockets["cookie"]):
                self._close(before, ~np.isin(before.sockets["cookie"], now.sockets["cookie"]))

    def keep(self, namespaces: Collection[int], now_ns: int) -> None:
        """Marks the sockets of all other namespaces as closed, and drops sockets that were closed more than KEPT_NS
        before ``now_ns`` (UTC).
        """
        with self._lock:
            for netns in [netns for netns in self._open if netns not in namespaces]:
                held = self._open.pop(netns)
                self._close(held, np.ones(len(held.sockets), bool))
            for owner, parts in list(self._closed.items()):
                while parts and parts[0].seen_ns < now_ns - KEPT_NS:
                    parts.popleft()
                if not parts:
                    del self._closed[owner]

    def rows(self, node: str, ts_ns: int) -> pa.RecordBatch:
        """Returns rows of net.sockets: open sockets first, then closed sockets, the last closed first."""
        with self._lock:
            still = list(self._open.values())
            ended = [part for parts in self._closed.values() for part in parts]
        ended.sort(key=lambda part: -part.seen_ns)
        common = {"node": node, "ts": ts_ns}
        shown = in_turn(_owned(still), lambda each: each[1].owner)[:MAX_ROWS]
        rows = [_row(*each, closed=False) for each in shown] + [_row(*each, closed=True) for each in _owned(ended)]
        return batch_of(SOCKETS.name, [{**common, **row} for row in rows])

    def _close(self, held: _Held, which: npt.NDArray[np.bool_]) -> None:
        owners = np.array([-1 if one is None else one.owner for one in held.who], np.int64)[held.process]
        for owner in np.unique(owners[which & (owners >= 0)]).tolist():
            gone = np.flatnonzero(which & (owners == owner))[:MAX_ROWS]
            parts = self._closed.setdefault(owner, deque())
            parts.append(held._replace(sockets=held.sockets[gone], process=held.process[gone]))
        sizes = {owner: sum(len(part.sockets) for part in parts) for owner, parts in self._closed.items()}
        while sum(sizes.values()) > MAX_ROWS:
            # The owner with the most closed sockets loses the oldest of them; other owners lose none.
            owner = max(sizes, key=sizes.__getitem__)
            parts = self._closed[owner]
            over = min(sum(sizes.values()) - MAX_ROWS, len(parts[0].sockets))
            sizes[owner] -= over
            oldest = parts.popleft()
            if over < len(oldest.sockets):
                parts.appendleft(oldest._replace(sockets=oldest.sockets[over:], process=oldest.process[over:]))


def _owned(parts: Iterable[_Held]) -> Iterator[tuple[_Held, Identity, int]]:
    """Yields the part, the owner and the index of each socket of a known process."""
    for part in parts:
        for index, process in enumerate(part.process.tolist()):
            if (who := part.who[process]) is not None:
                yield part, who, index


def _row(part: _Held, who: Identity, index: int, *, closed: bool) -> Row:
    one = part.sockets[index]
    listens = int(one["state"]) == LISTEN
    family = int(one["family"])
    return {
        **who._asdict(),
        "netns": part.netns,
        "state": "closed" if closed else "listens" if listens else "open",
        "seen": part.seen_ns,
        "local_address": address_text(family, one["local"].tobytes()),
        "local_port": int(one["local_port"]),
        "peer_address": None if listens else address_text(family, one["peer"].tobytes()),
        "peer_port": None if listens else int(one["peer_port"]),
    }
