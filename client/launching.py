"""Connects a launcher to the daemon of its node, and reconnects after each break. The daemon sends orders, the launcher
sends reports.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from importlib.metadata import version
from typing import NamedTuple

from probing.api.errors import SERVED, FormatError, PrivilegeError, ProbingError, UsageError
from probing.api.proto.probing.v1 import node_pb2 as pb
from probing.client.cluster import Cluster
from probing.client.wire.loop import Work, in_loop
from probing.groups.group import Group

__all__ = ("Lease", "Link", "LogWanted")

_FIRST_PAUSE_S, _MAX_PAUSE_S = 0.2, 2.0
_CALL_S = 365 * 86_400.0
# The daemon refers to reports that were sent some seconds ago. So the launcher keeps the times at which reports were
# sent: at most _REMEMBERED times, which are at least _APART_S (s) apart.
_REMEMBERED, _APART_S = 256, 0.1


class LogWanted(NamedTuple):
    """A request for a part of the log of a rank. A negative ``start`` counts bytes back from the end of the log."""

    number: int
    group: str
    rank: int
    start: int


class Lease(NamedTuple):
    """Says that a quorum of nodes knew no newer ``generation`` of ``group`` after the time ``sent`` (s since boot), at
    which the launcher sent a report.
    """

    group: str
    generation: int
    sent: float


class Link:
    """The connection to the daemon at ``address``. ``orders`` holds the orders that arrived; ``wake`` is called after
    each order arrives.

    ``problem`` says why there is no connection; it is empty while connected, and None before the first answer.
    ``refused`` says why the daemon will never serve these workers. Only the thread of the launcher may call the
    methods.
    """

    def __init__(self, cluster: Cluster, address: str, workers: Sequence[str], wake: Callable[[], None]) -> None:
        self._cluster, self._address, self._workers, self._wake = cluster, address, tuple(workers), wake
        self.orders: deque[Group | Lease | LogWanted] = deque()
        self.problem: str | None = None
        self.refused: ProbingError | None = None
        self._rows = b"[]"
        self._logs: list[pb.LogPart] = []
        self._changed = asyncio.Event()
        self._sent: OrderedDict[int, float] = OrderedDict()
        self._work = Work(self._run())

    def report(self, rows: bytes) -> None:
        """Sends ``rows`` (JSON). They replace earlier rows that have not been sent yet."""

        def put() -> None:
            self._rows = rows
            self._changed.set()

        in_loop(put)

    def answer(self, wanted: LogWanted, data: bytes, end: int, problem: str = "") -> None:
        """Sends ``data``, a part of a log that ends at position ``end``; or ``problem``, the reason for no data."""
        part = pb.LogPart(id=wanted.number, data=data, end=end, problem=problem)

        def put() -> None:
            self._logs.append(part)
            self._changed.set()

        in_loop(put)

    def close(self) -> None:
        self._work.cancel()

    async def _run(self) -> None:
        pause = _FIRST_PAUSE_S
        while True:
            begun = time.monotonic()
            try:
                await self._connected()
                self.problem = "the connection ended"
            except (PrivilegeError, UsageError) as e:
                self.problem = e.message
                # SERVED may be wrong: a launcher that was killed counts as connected until the daemon notices its
                # silence. So this refusal is retried.
                if e.code != SERVED:
                    self.refused = e
                    self._wake()
                    return
            except ProbingError as e:
                self.problem = e.message
            pause = _FIRST_PAUSE_S if time.monotonic() - begun > _MAX_PAUSE_S else min(2 * pause, _MAX_PAUSE_S)
            await asyncio.sleep(pause)

    async def _connected(self) -> None:
        call = self._cluster.node(self._address).work(self._reports(), _CALL_S)
        try:
            while (order := await call.next()) is not None:
                self.problem = ""
                self._note(order)
        finally:
            call.end()

    def _note(self, order: pb.WorkOrder) -> None:
        if order.group:
            with suppress(FormatError):
                # A rank trusts its master, so the address comes from the daemon of this node, not from the record.
                self.orders.append(replace(Group.from_json(order.group), address=order.master))
        elif order.HasField("log"):
            log = order.log
            self.orders.append(LogWanted(log.id, log.group, log.rank, getattr(log, "from")))
        elif before := [sent for number, sent in self._sent.items() if number <= order.report]:
            self.orders.append(Lease(order.leased, order.generation, before[-1]))
        self._wake()

    async def _reports(self) -> AsyncIterator[pb.WorkReport]:
        self._sent.clear()
        self._logs.clear()
        number = 0
        while True:
            self._changed.clear()
            number += 1
            # This clock also counts while the machine is suspended: other nodes may start the group again meanwhile.
            now = time.clock_gettime(time.CLOCK_BOOTTIME)
            if not self._sent or now - next(reversed(self._sent.values())) >= _APART_S:
                self._sent[number] = now
            while len(self._sent) > _REMEMBERED:
                self._sent.popitem(last=False)
            report = pb.WorkReport(number=number, rows=self._rows, logs=self._logs)
            self._logs = []
            if number == 1:
                report.workers.extend(self._workers)
                report.version, report.pid = version("probingd"), os.getpid()
            yield report
            await self._changed.wait()
