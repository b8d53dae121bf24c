"""Asks all nodes for what the screen shows: one request to each a refresh, bounded in time and size, in a thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from probing.api.errors import ProbingError
from probing.client.collectives.silence import Process, innermost
from probing.client.render.rows import rows_of
from probing.client.top.answers import Fetched, NodeRows
from probing.client.top.health import Health
from probing.client.top.questions import questions, statements
from probing.client.top.repeat import Repeater
from probing.client.wire.stream import Room
from probing.federation.execution.answer import Failed

if TYPE_CHECKING:
    from probing.client.cluster import Cluster
    from probing.client.wire.node import Node

__all__ = ("Fetcher", "Functions", "name_of")

_MAX_BYTES = 64 << 20
# Whether probes are paused is asked with every so manyth request.
_STATUS_EVERY = 5
_STACKS_EVERY_S = 2.0
_MOST_STACKS = 64


class Fetcher:
    """Delivers a ``Fetched`` every ``interval`` seconds; ``failed`` gets what else goes wrong."""

    def __init__(
        self,
        cluster: Cluster,
        where: str,
        interval: float,
        deliver: Callable[[Fetched], None],
        failed: Callable[[ProbingError], None],
    ) -> None:
        """``where`` is an SQL condition on the job; the time-out is that of ``cluster``."""
        self._cluster = cluster
        self._questions = questions(where)
        self._deliver = deliver
        self._turns: dict[str, int] = {}
        self._tables: dict[str, frozenset[str]] = {}
        self._fresh: dict[str, bool] = {}
        self._paused: dict[str, str] = {}
        # Addresses of nodes that had failed at the start; None: not known yet.
        self._failed: tuple[str, ...] | None = None
        self.repeater = Repeater("fetch", self._refresh, interval, failed)
        self.health = Health(lambda addresses, seconds: cluster.ask(addresses, name_of, seconds), self.repeater.hurry)

    def stop(self) -> None:
        self.repeater.stop()
        self.health.stop()

    def _refresh(self) -> None:
        addresses = self._addresses()
        asked = self.health.present(addresses)
        gathered = self._cluster.ask(asked, self._ask, self._cluster.timeout)
        for answered in gathered.answered:
            self.health.answered(answered.address, answered.node)
        if gathered.failed:
            self.health.failed(gathered.failed)
            for failed in gathered.failed:
                # It may be another process when it is back.
                self._turns.pop(failed.address, None)
        self._deliver(Fetched(time.monotonic(), tuple(a.value for a in gathered.answered), self.health.absent))
        if any(self._fresh.pop(answered.address, False) for answered in gathered.answered):
            # Now it is known which other tables they have.
            self.repeater.hurry()

    def _addresses(self) -> tuple[str, ...]:
        target = self._cluster.target
        try:
            addresses = self._cluster.addresses()
            if self._failed is None:
                # They are asked as soon as they answer again.
                self._failed = tuple(failed.address for failed in self._cluster.absent)
                self.health.failed(self._cluster.absent)
            return (*addresses, *self._failed)
        except ProbingError as e:
            # Its peers are asked for when it answers.
            self.health.failed([Failed(target, "", e)])
            return (target,)

    async def _ask(self, node: Node, seconds: float) -> tuple[str, NodeRows]:
        address = node.address
        turn = self._turns.get(address, 0)
        known = self._tables.get(address, frozenset()) if turn else frozenset()
        asked = statements(self._questions, turn, known, new=turn <= 1)
        replies = await node.replies(asked, seconds, Room(_MAX_BYTES))
        rows = {name: rows_of(reply.table) for name, reply in zip(asked, replies, strict=True)}
        if "tables" in rows:
            self._tables[address] = frozenset(str(row["name"]) for row in rows["tables"])
            self._fresh[address] = turn == 0
        if turn % _STATUS_EVERY == 0:
            status = await node.status(seconds)
            self._paused[address] = status.reason.removeprefix("paused") or " " if status.state == "paused" else ""
        self._turns[address] = turn + 1
        name = replies[0].node
        return name, NodeRows(address, name, rows, self._paused.get(address, ""))


async def name_of(node: Node, seconds: float) -> tuple[str, None]:
    """Returns the name of a node."""
    return (await node.status(seconds)).node, None


class Functions:
    """Keeps the innermost Python frame of each process's thread that trains, read every 2 s in a thread of its own.

    A process that is slow to read holds up nothing else.
    """

    def __init__(self, fetcher: Fetcher, cluster: Cluster, changed: Callable[[], None]) -> None:
        self.found: dict[Process, str] = {}
        self._cluster = cluster
        self._health = fetcher.health
        self._changed = changed
        self._lock = threading.Lock()
        self._pids: dict[str, tuple[int, ...]] = {}
        self.repeater = Repeater("stacks", self._read, _STACKS_EVERY_S, lambda _: None)

    def watch(self, nodes: Iterable[NodeRows]) -> None:
        """Reads the trainers of these nodes from now on, at most 64 of each."""
        with self._lock:
            before = bool(self._pids)
            for node in nodes:
                if "ranks" in node.rows:
                    pids = (row["pid"] for row in node.rows["ranks"][:_MOST_STACKS])
                    self._pids[node.address] = tuple(pids)
            new = bool(self._pids) and not before
        if new:
            self.repeater.hurry()

    def _read(self) -> None:
        with self._lock:
            pids = {address: own for address, own in self._pids.items() if own}
        gathered = self._cluster.ask(
            self._health.present(pids),
            lambda node, seconds: _frames(node, pids[node.address], seconds),
            self._cluster.timeout,
        )
        found = {process: text for answered in gathered.answered for process, text in answered.value.items()}
        # Of a node that did not answer the last is kept.
        read = {answered.node for answered in gathered.answered}
        kept = {process: text for process, text in self.found.items() if process[0] not in read}
        self.found = {**kept, **found}
        self._changed()


async def _frames(node: Node, pids: tuple[int, ...], seconds: float) -> tuple[str, dict[Process, str]]:
    """Returns the innermost Python frame of each process ``pids``, or why it could not be read."""
    from probing.api.proto.probing.v1 import node_pb2 as pb
    from probing.client.messages import thread_of

    reply = await node.stacks(pb.StacksRequest(pids=pids), seconds)
    frames: dict[Process, str] = {(reply.node, failed.pid): f"({failed.error.message})" for failed in reply.failures}
    for thread in (thread_of(reply.node, thread) for thread in reply.threads):
        if thread["trains"]:
            frames[reply.node, thread["pid"]] = innermost(thread["frames"]) or ""
    return reply.node, frames
