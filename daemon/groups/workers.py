"""The launchers that are connected to this node, and what they last reported about their workers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from probing.api.errors import SERVED, Overloaded, PrivilegeError, UsageError
from probing.api.tables.schema import Row
from probing.api.text import escape
from probing.groups.report import MAX_ROWS, WorkerRow
from probing.groups.spec import is_worker, node_of

__all__ = ("Launcher", "Workers")

MAX_LAUNCHERS, MAX_NAMES = 256, 256
# The maximum number of launchers of one user. It suffices for one launcher for each worker of a large node.
MAX_OF_USER = 64
# A launcher that sent no report for this long is forgotten, s. It is kept until then, since its processes may still
# run.
_FORGET_S = 86_400.0


@dataclass(eq=False)
class Launcher:
    """A launcher of ``user`` (``uid``) with ``pid``. ``heard``: the time of its last report, on time.monotonic().

    ``number``: the number of its last report.
    """

    uid: int
    user: str
    workers: tuple[str, ...]
    pid: int = 0
    version: str = ""
    heard: float = 0.0
    since_ns: int = 0
    connected: bool = True
    number: int = 0
    rows: list[WorkerRow] = field(default_factory=list)
    # The requests to read logs that the launcher has not answered yet, by their numbers.
    readings: dict[int, asyncio.Future[Any]] = field(default_factory=dict)
    _orders: dict[tuple[str, str], object] = field(default_factory=dict)
    _ordered: asyncio.Event = field(default_factory=asyncio.Event)

    def put(self, kind: str, group: str, order: object) -> None:
        """Queues an order for the launcher. It replaces a waiting order of the same kind for the same group, so the
        queue of a launcher that does not read cannot grow without limit.
        """
        # The order goes to the end of the queue, so that a lease follows the record of its generation.
        self._orders.pop((kind, group), None)
        self._orders[kind, group] = order
        self._ordered.set()

    async def next_order(self) -> object:
        """Waits for the next order to send, and returns it."""
        while not self._orders:
            self._ordered.clear()
            await self._ordered.wait()
        return self._orders.pop(next(iter(self._orders)))


class Workers:
    """The launchers of ``node``, by worker. Used by one event loop; only ``rows`` may be called from any thread.

    ``suspect_s`` and ``failed_s``: the times without a report after which a launcher is suspect, and has failed.
    """

    def __init__(
        self,
        node: str,
        suspect_s: float,
        failed_s: float,
        now: Callable[[], float] = time.monotonic,
        wall_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self._node, self._suspect_s, self._failed_s = node, suspect_s, failed_s
        self._now, self._wall_ns = now, wall_ns
        self._by_worker: dict[str, Launcher] = {}

    def join(self, uid: int, user: str, names: Sequence[str], pid: int, version: str) -> Launcher:
        """Registers a launcher of the user ``uid``. It replaces launchers of the same workers that are gone.

        Raises UsageError for names that are not workers of this node and for a worker that a running launcher serves,
        PrivilegeError for a worker of another user, Overloaded for too many launchers.
        """
        if not 0 < len(names) <= MAX_NAMES or len(set(names)) < len(names):
            raise UsageError(f"the launcher names {len(names)} workers", hint=f"1 to {MAX_NAMES}, each once")
        for name in names:
            if node_of(name) != self._node or not is_worker(name):
                raise UsageError(
                    f"{escape(name, 80)} is no worker of node {self._node}",
                    hint=f"workers of this node are named {self._node}-0, {self._node}-1, ...",
                )
        others = {id(other): other for name in names if (other := self._by_worker.get(name))}.values()
        for launcher in others:
            if launcher.uid != uid and (launcher.connected or not self._has_failed(launcher)):
                raise PrivilegeError(
                    f"worker {launcher.workers[0]} belongs to {launcher.user}", hint="choose other names by --name"
                )
            if launcher.connected and self._state(launcher) == "healthy":
                raise UsageError(
                    f"worker {launcher.workers[0]} is served by process {launcher.pid}",
                    hint="end it, or choose other names by --name",
                    code=SERVED,
                )
        for launcher in others:
            self.forget(launcher)
        self._forget_old()
        self._check_room(uid, user)
        launcher = Launcher(uid, user, tuple(names), pid, version, self._now(), self._wall_ns())
        self._by_worker.update(dict.fromkeys(names, launcher))
        return launcher

    def _check_room(self, uid: int, user: str) -> None:
        """Makes room for a new launcher if the user, or all users together, have too many: forgets a disconnected
        launcher of the user, or at the limit of all users a failed one. Raises Overloaded if there is none.
        """
        every = self._launchers()
        mine = [launcher for launcher in every if launcher.uid == uid]
        if len(mine) < MAX_OF_USER and len(every) < MAX_LAUNCHERS:
            return
        among = mine if len(mine) >= MAX_OF_USER else [one for one in every if one.uid == uid or self._has_failed(one)]
        gone = [launcher for launcher in among if not launcher.connected]
        if not gone:
            whose = f"{MAX_OF_USER} launchers of {user}" if among is mine else f"{MAX_LAUNCHERS} launchers"
            raise Overloaded(f"{whose} are connected", hint="one launcher serves many workers: --slots N")
        self.forget(min(gone, key=lambda launcher: launcher.heard))

    def _has_failed(self, launcher: Launcher) -> bool:
        return self._state(launcher) == "failed"

    def report(self, launcher: Launcher, number: int, rows: list[WorkerRow]) -> None:
        """Stores a report. Rows of workers that the launcher does not serve are left out."""
        launcher.heard, launcher.number, launcher.connected = self._now(), number, True
        served = set(launcher.workers)
        # A launcher may report a refusal only once, and the row of a refusal does not say which generation the
        # launcher knows. So refusals of earlier reports are kept until another row of the worker says that the
        # launcher knows the refused generation.
        refusals = {(row.worker, row.group): row for row in [*launcher.rows, *rows] if _is_refusal(row)}
        kept = {(row.worker, row.group): row for row in rows if row.worker in served and not _is_refusal(row)}
        still = []
        for place, refusal in list(refusals.items())[-MAX_ROWS:]:
            taken = kept.get(place)
            if refusal.worker in served and (taken is None or taken.seen < refusal.generation):
                still.append(refusal)
        launcher.rows = [*still, *kept.values()]

    def leave(self, launcher: Launcher) -> None:
        """Marks the launcher as disconnected. Its rows stay until another launcher serves the workers."""
        launcher.connected = False

    def forget(self, launcher: Launcher) -> None:
        for name in launcher.workers:
            if self._by_worker.get(name) is launcher:
                del self._by_worker[name]

    def of_group(self, group: str, uid: int) -> list[WorkerRow]:
        """Returns the last rows about a group of the user ``uid``, from launchers that are connected and have not
        failed.

        Launchers of other users are left out: they know nothing about the group's processes.
        """
        return [
            row
            for launcher in self._launchers()
            if launcher.uid == uid and launcher.connected and not self._has_failed(launcher)
            for row in launcher.rows
            if row.group == group
        ]

    def serving(self, workers: Sequence[str]) -> list[Launcher]:
        """Returns the connected launchers that serve any of ``workers``."""
        found = {id(one): one for name in workers if (one := self._by_worker.get(name)) and one.connected}
        return list(found.values())

    def rows(self) -> Iterator[Row]:
        """Yields rows of ``cluster.workers``. Thread-safe."""
        for launcher in self._launchers():
            common = {
                "user": launcher.user,
                "uid": launcher.uid,
                "state": self._state(launcher),
                "launcher_pid": launcher.pid,
                "version": launcher.version or None,
                "joined": launcher.since_ns,
                "heard_ns": round((self._now() - launcher.heard) * 1e9),
            }
            reported = {row.worker for row in launcher.rows}
            for worker in launcher.workers:
                if worker not in reported:
                    yield {"worker": worker, **common, "rank_state": "idle"}
            for row in launcher.rows:
                yield {
                    "worker": row.worker,
                    **common,
                    "group_name": row.group,
                    "generation": row.generation,
                    "rank": row.rank,
                    "rank_state": row.state,
                    "since": row.since_ns or None,
                    "pid": row.pid,
                    "start_ns": row.start_ns,
                    "exit_code": row.exit_code if row.signal is None else -row.signal,
                    "reason": row.reason or None,
                    "log": row.log or None,
                }

    def _launchers(self) -> list[Launcher]:
        # The inner list is made in one step, so a change by another thread cannot break the iteration.
        return list({id(launcher): launcher for launcher in list(self._by_worker.values())}.values())

    def _forget_old(self) -> None:
        oldest = self._now() - _FORGET_S
        for launcher in self._launchers():
            if launcher.heard < oldest:
                self.forget(launcher)

    def _state(self, launcher: Launcher) -> str:
        silent = self._now() - launcher.heard
        if silent >= self._failed_s:
            return "failed"
        if silent >= self._suspect_s or not launcher.connected:
            return "suspect"
        return "healthy"


def _is_refusal(row: WorkerRow) -> bool:
    return row.state == "refused" and row.seen == 0
