"""The live view of one visitor: a Fetcher and a Model, which serve all of the visitor's streams while one is open."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import suppress
from typing import TYPE_CHECKING

from anyio import to_thread

from probing.api.errors import ProbingError
from probing.client.collectives.silence import SilenceWatch
from probing.client.top.fetch import Fetcher, Functions
from probing.client.top.health import Fetched
from probing.client.top.model import Model, View
from probing.client.web.answers import encoded
from probing.client.web.finding_watch import FindingWatch
from probing.client.web.live_rows import job_event, jobs_event

if TYPE_CHECKING:
    from probing.client.cluster import Cluster

__all__ = ("Live",)

# The interval between refreshes, s. It is long because a refresh costs a node some 80 ms of CPU (bench/page.py).
_EVERY_S = 5.0
# The interval between refreshes is at least one second for each _NODES_A_SECOND nodes: this process needs seconds for
# the rows of a thousand nodes, and answers nothing else meanwhile.
_NODES_A_SECOND = 100
_STACKS_EVERY_S = 10.0
_WINDOW_S = 10.0
# The series that the Jobs screen shows.
_HISTORIES = ("steps_per_s",)
_PATIENCE_S = 5.0
_LOOK_EVERY_S = 30.0
# How long the threads go on without a stream, s, because a page that is loaded again opens a new stream.
_LINGER_S = 5.0
_MOST_KEPT = 32
# A stream without events gets a comment after this time, s. If the comment cannot be sent, the reader is gone.
_SIGN_S = 15.0
_SIGN = b": still here\n\n"


class Live:
    """Asks the nodes of ``cluster`` while ``events`` has a reader: every five seconds, and when a node has stored a
    finding of a job whose ranks are read. Belongs to one event loop."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._view = View()
        self._error = ""
        self._number = 0
        self._changed = asyncio.Event()
        self._readers = 0
        self._readers_of_jobs: Counter[str] = Counter()
        self._threads: _Threads | None = None
        self._ending: asyncio.TimerHandle | None = None
        # Events by job (None: all jobs) and number of the view.
        self._bodies: dict[tuple[str | None, int], bytes] = {}
        self._lock = threading.Lock()

    @property
    def nodes(self) -> int:
        """The number of nodes in the newest view."""
        return len(self._view.nodes)

    @property
    def jobs(self) -> frozenset[str]:
        """The names of the jobs in the newest view."""
        return frozenset(job.job for job in self._view.jobs)

    async def events(self, job: str | None) -> AsyncIterator[bytes]:
        """Yields an event for each change of the view: of all jobs, or of the ranks of ``job``.

        A slow reader gets the newest view and misses earlier views.
        """
        self._begin(job)
        seen = self._number - (self._view.at is not None)
        try:
            while True:
                changed = self._changed
                if self._number == seen:
                    try:
                        await asyncio.wait_for(changed.wait(), _SIGN_S)
                    except asyncio.TimeoutError:
                        yield _SIGN
                        continue
                seen = self._number
                yield await to_thread.run_sync(self._body, job, seen, self._view, self._error)
        finally:
            self._end(job)

    def close(self) -> None:
        """Ends the threads; streams get no further event."""
        if self._threads is not None:
            self._threads.stop()
            self._threads = None

    def _begin(self, job: str | None) -> None:
        self._readers += 1
        if job is not None:
            self._readers_of_jobs[job] += 1
        if self._ending is not None:
            self._ending.cancel()
            self._ending = None
        if self._threads is None:
            # The last view may be hours old.
            self._view, self._error = View(), ""
            self._threads = _Threads(self._cluster, self._deliver)
        self._threads.read_ranks(self._readers_of_jobs.keys())

    def _end(self, job: str | None) -> None:
        self._readers -= 1
        if job is not None:
            self._readers_of_jobs -= Counter([job])
        if self._threads is not None:
            self._threads.read_ranks(self._readers_of_jobs.keys())
        if not self._readers:
            self._ending = asyncio.get_running_loop().call_later(_LINGER_S, self.close)

    def _deliver(self, view: View, error: str) -> None:
        self._view, self._error = view, error
        self._number += 1
        self._changed.set()
        self._changed = asyncio.Event()

    def _body(self, job: str | None, number: int, view: View, error: str) -> bytes:
        """Returns the event of a view; it is encoded once for all readers."""
        key = job, number
        with self._lock:
            if key not in self._bodies:
                name, data = ("jobs", jobs_event(view, error)) if job is None else ("job", job_event(view, error, job))
                body = b"event: " + name.encode() + b"\ndata: " + encoded(data) + b"\n\n"
                # Only the newest events are kept: older events have been sent, and slow browsers skip them.
                newest = [(known, own) for known, own in self._bodies.items() if known[1] >= number]
                self._bodies = {**dict(newest[-_MOST_KEPT:]), key: body}
            return self._bodies[key]


class _Threads:
    """The threads that ask nodes. In the event loop, ``deliver`` gets each view and the error of the last refresh."""

    def __init__(self, cluster: Cluster, deliver: Callable[[View, str], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._deliver_in_loop = deliver
        self._stopped = False
        self._looked = time.monotonic()
        self._view = View()
        self._cluster = cluster.afresh()
        self._cluster.timeout = min(cluster.timeout, _PATIENCE_S)
        self._model = Model(_WINDOW_S, SilenceWatch(self._cluster), _HISTORIES)
        self._fetcher = Fetcher(self._cluster, "true", _EVERY_S, self._fetched, self._failed, calm=True)
        # New frames are shown with the next view, so their arrival needs no callback.
        self._functions = Functions(self._fetcher, self._cluster, lambda: None)
        self._functions.repeater.every(_STACKS_EVERY_S)
        self._functions.repeater.pause(True)
        self._findings = FindingWatch(self._cluster, self._fetcher.repeater.hurry)
        self._fetcher.repeater.start()
        self._functions.repeater.start()

    def read_ranks(self, jobs: Collection[str]) -> None:
        """Reads the Python frames of ranks, and watches for findings of ``jobs``, while ``jobs`` is not empty."""
        self._functions.repeater.pause(not jobs)
        self._findings.watch(jobs)

    def stop(self) -> None:
        self._stopped = True
        self._fetcher.stop()
        self._functions.repeater.stop()
        self._findings.stop()

    def _fetched(self, fetched: Fetched) -> None:
        # Otherwise the list of outcomes would grow without limit.
        self._cluster.outcomes.clear()
        self._functions.watch(fetched.nodes)
        self._look_for_nodes()
        rest = len(fetched.nodes) / _NODES_A_SECOND
        self._fetcher.repeater.every(max(_EVERY_S, rest))
        self._functions.repeater.every(max(_STACKS_EVERY_S, 2 * rest))
        self._view = self._model.update(fetched, self._functions.found)
        self._findings.find(fetched.nodes, self._view.jobs)
        self._deliver("")

    def _look_for_nodes(self) -> None:
        """Adds nodes that the target knows by now, because a page may be open for days."""
        if time.monotonic() - self._looked > _LOOK_EVERY_S:
            self._looked = time.monotonic()
            with suppress(ProbingError):
                self._cluster.meet(self._cluster.afresh().addresses())

    def _failed(self, error: ProbingError) -> None:
        self._deliver(error.message)

    def _deliver(self, error: str) -> None:
        view = self._view
        # The loop may have ended before this thread.
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(lambda: None if self._stopped else self._deliver_in_loop(view, error))
