"""A simulated network of nodes that gossip: one clock, a queue of events, delays, losses, dead nodes and cut links."""

from __future__ import annotations

import hashlib
import heapq
import random
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import count

from probing.daemon.cluster.keys import NodeKey
from probing.daemon.cluster.machine import Machine
from probing.daemon.cluster.messages import MAX_BYTES, Call, Message
from probing.daemon.cluster.record import Claim, Record, Update
from probing.daemon.cluster.view import Times

__all__ = ("Network", "Node", "key_of_name", "record", "without_keys")

WALL_S = 1_800_000_000
# Of a call and of an answer beside the message: HTTP/2 frames and headers with known fields, TCP and IP headers.
OVERHEAD_BYTES = 150


def record(name: str, address: str, uid: int, incarnation: int = WALL_S, **more: object) -> Record:
    labels = (("rack", f"r{uid % 32}"), ("rail", str(uid % 8)))
    return Record(name, address, incarnation, uid, labels, version="0.1.0", engine="2.0.1", **more)  # type: ignore[arg-type]


def key_of_name(name: str) -> NodeKey:
    return NodeKey(hashlib.sha256(name.encode()).digest())


def without_keys(message: Message) -> Message:
    """Returns what a version without keys reads of ``message``, and passes on."""

    def bare(update: Update) -> Update:
        return update._replace(record=update.record._replace(key=b"", signature=b""))

    sender = message.sender._replace(key=b"", signature=b"")
    return message._replace(sender=sender, updates=tuple(map(bare, message.updates)), nonce=b"", proof=b"", relayed=b"")


@dataclass
class Node:
    """A node that runs while ``up``. ``offset_s`` is how far its clock is ahead. ``old``: its version has no keys."""

    machine: Machine
    address: str
    up: bool = True
    paused: bool = False
    offset_s: float = 0.0
    old: bool = False
    sent: Counter[int] = field(default_factory=Counter)
    messages: int = 0

    @property
    def name(self) -> str:
        return self.machine.view.own.name

    def states(self, now: float) -> dict[str, str]:
        view = self.machine.view
        return {name: view.state_of(entry, now) for name, entry in view.table.entries.items()}


class Network:
    """``measure`` returns the bytes of a message; without it only the bound on updates is checked."""

    def __init__(
        self,
        seed: int = 1,
        *,
        loss: float = 0.0,
        delay: tuple[float, float] = (0.0002, 0.002),
        measure: Callable[[Message], bytes] | None = None,
    ) -> None:
        self.now = 0.0
        self.nodes: dict[str, Node] = {}
        self.cut: set[tuple[str, str]] = set()
        self.largest = 0
        self._rng = random.Random(seed)
        self._loss = loss
        self._delay = delay
        self._measure = measure
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()

    def start(
        self,
        own: Record,
        seeds: Sequence[str] = (),
        times: Times | None = None,
        *,
        at: float = 0.0,
        offset_s: float = 0.0,
        key: NodeKey | None = None,
        old: bool = False,
    ) -> Node:
        """Starts a node, in place of any that has its address. Its key is made from its name, unless it has another."""
        rng = random.Random(self._rng.getrandbits(64))
        key = None if old else key or key_of_name(own.name)
        node = Node(Machine(own, seeds, times, rng, key), own.address, offset_s=offset_s, old=old)
        if old := self.nodes.get(own.address):
            old.up = False
        self.nodes[own.address] = node
        self._later(at, lambda: self._tick(node))
        return node

    def run(self, seconds: float, until: Callable[[], bool] | None = None, every: float = 0.25) -> bool:
        """Runs for ``seconds`` or until the condition holds, which is asked every so often; returns whether it does."""
        end, check = self.now + seconds, self.now
        while self.now < end:
            if until is not None and self.now >= check:
                if until():
                    return True
                check = self.now + every
            if not self._events or self._events[0][0] > end:
                break
            self.now, _, do = heapq.heappop(self._events)
            do()
        self.now = max(self.now, end)
        return until is None or until()

    def agree(self, nodes: Iterable[Node]) -> bool:
        """Whether the nodes that are up all see each other healthy, with equal tables."""
        live = [n for n in nodes if n.up and not n.paused]
        first = live[0].machine.view.table.digests
        return all(n.machine.view.table.digests == first for n in live) and all(
            n.machine.view.table.entries[o.name].update.claim is Claim.ALIVE
            for n in live[:1]
            for o in live
            if o is not n and o.name in n.machine.view.table.entries
        )

    def bytes_sent(self, node: Node, message: Message) -> None:
        if self._measure is None:
            return
        data = self._measure(message)
        self.largest = max(self.largest, len(data))
        assert len(data) <= MAX_BYTES
        # As gRPC does, which sends compressed what is smaller then.
        size = min(len(data), len(zlib.compress(data, 6)) + 12) if len(data) > 200 else len(data)
        node.sent[int(self.now)] += size + OVERHEAD_BYTES
        node.messages += 1

    def _wall_ns(self, node: Node) -> int:
        return int((WALL_S + self.now + node.offset_s) * 1e9)

    def _later(self, seconds: float, do: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now + seconds, next(self._order), do))

    def _tick(self, node: Node) -> None:
        if not node.up:
            return
        if not node.paused:
            self._make(node, node.machine.tick(self.now, self._wall_ns(node)))
        self._later(node.machine.times.heartbeat, lambda: self._tick(node))

    def _make(self, node: Node, calls: Iterable[Call], then: Callable[[bytes | None], None] | None = None) -> None:
        for call in calls:
            self._call(node, call, then)

    def _call(self, node: Node, call: Call, then: Callable[[bytes | None], None] | None = None) -> None:
        if node.old:
            call = call._replace(message=without_keys(call.message))
        self.bytes_sent(node, call.message)
        done: list[bool] = []

        def answered(message: Message) -> None:
            if not done and node.up and not node.paused:
                done.append(True)
                message = without_keys(message) if node.old else message
                self._make(node, node.machine.answered(call, message, self.now, self._wall_ns(node)))
                if then:
                    then(message.proof if message.sender.name == call.name else None)

        def late() -> None:
            if not done and node.up and not node.paused:
                done.append(False)
                self._make(node, node.machine.unanswered(call, self.now))
                if then:
                    then(None)

        self._later(call.seconds, late)
        other = self.nodes.get(call.address)
        if other is not None and self._passes(node, other):
            self._later(self._rng.uniform(*self._delay), lambda: self._receive(other, node, call.message, answered))

    def _receive(self, node: Node, source: Node, message: Message, reply: Callable[[Message], None]) -> None:
        if not node.up or node.paused:
            return

        message = without_keys(message) if node.old else message

        def send(answer: Message) -> None:
            answer = without_keys(answer) if node.old else answer
            self.bytes_sent(node, answer)
            if self._passes(node, source):
                self._later(self._rng.uniform(*self._delay), lambda: reply(answer))

        asked = node.machine.relay(message.relay, self.now, message.nonce) if message.relay else None
        if asked is None:
            send(node.machine.answer(message, self.now))
        else:
            answer = node.machine.answer

            def relay(proof: bytes | None) -> None:
                send(answer(message, self.now, reached=proof is not None, relayed=proof or b""))

            self._call(node, asked, relay)

    def _passes(self, source: Node, target: Node) -> bool:
        if (source.address, target.address) in self.cut or (target.address, source.address) in self.cut:
            return False
        return target.up and self._rng.random() >= self._loss
