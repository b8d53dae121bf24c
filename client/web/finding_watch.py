"""Waits for nodes to store findings of the jobs that visitors look at, so that the page need not ask every second.

A node stores the findings of its jobs even if another node leads the diagnosis. The live node with the lowest name
leads the diagnosis of a job, so it is enough to wait at the few nodes with the lowest names, however many nodes the job
has.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Collection, Iterable
from typing import TYPE_CHECKING

from probing.api.errors import ProbingError
from probing.client.wire.loop import Work

if TYPE_CHECKING:
    from probing.client.cluster import Cluster
    from probing.client.top.health import NodeRows
    from probing.client.top.trouble import Job

__all__ = ("FindingWatch",)

_MOST_JOBS, _NODES = 8, 3
# A node answers after this time at the latest, s.
_WAIT_S = 25.0
# The pause after an error, s. A node of an older version always gives an error, because it does not know the call.
_AGAIN_S = 10.0
# The minimum time between two calls of ``stored``, s.
_APART_S = 1.0
_Place = tuple[str, str]


class FindingWatch:
    """Calls ``stored`` when a node has stored a finding of a job that is watched, at most once a second.

    ``stored`` is called in the event loop that asks the nodes, so it must not block. Nodes that do not know the call,
    and nodes that do not answer, cause no calls of ``stored``. Thread-safe.
    """

    def __init__(self, cluster: Cluster, stored: Callable[[], None]) -> None:
        self._cluster = cluster
        self._stored = stored
        self._lock = threading.Lock()
        self._jobs: tuple[str, ...] = ()
        self._addresses: dict[str, str] = {}
        self._places: dict[str, list[str]] = {}
        self._calls: dict[_Place, Work[None]] = {}
        self._news = asyncio.Event()
        self._telling: Work[None] | None = None

    def watch(self, jobs: Collection[str]) -> None:
        """Sets the jobs to watch; only the first _MOST_JOBS by name are watched."""
        with self._lock:
            self._jobs = tuple(sorted(jobs)[:_MOST_JOBS])
            self._set()

    def find(self, nodes: Iterable[NodeRows], jobs: Iterable[Job]) -> None:
        """Notes the addresses of ``nodes``, and on which nodes ``jobs`` have ranks."""
        with self._lock:
            self._addresses |= {rows.node: rows.address for rows in nodes}
            self._places = {}
            for job in jobs:
                living = {row["node"] for row in job.ranks if row["ended"] is None}
                named = (living or {row["node"] for row in job.ranks}) & self._addresses.keys()
                self._places.setdefault(job.job, []).extend(self._addresses[node] for node in sorted(named)[:_NODES])
            self._set()

    def stop(self) -> None:
        self.watch(())

    def _set(self) -> None:
        wanted = {(job, address) for job in self._jobs for address in self._places.get(job, ())}
        for place in self._calls.keys() - wanted:
            self._calls.pop(place).cancel()
        for place in wanted - self._calls.keys():
            self._calls[place] = Work(self._await(*place))
        if wanted and self._telling is None:
            self._telling = Work(self._tell())
        elif not wanted and self._telling is not None:
            self._telling.cancel()
            self._telling = None

    async def _await(self, job: str, address: str) -> None:
        number = 0
        while True:
            try:
                stored = await self._cluster.node(address).await_finding(job, number, _WAIT_S)
            except ProbingError:
                # A daemon that was restarted counts from 0.
                number = 0
                await asyncio.sleep(_AGAIN_S)
                continue
            if stored != number:
                number = stored
                self._news.set()
                await asyncio.sleep(_APART_S)

    async def _tell(self) -> None:
        while True:
            await self._news.wait()
            self._news.clear()
            self._stored()
            await asyncio.sleep(_APART_S)
