"""Nodes with a register in a simulated network, all from one seed: messages are delayed, lost, doubled and reordered,
nodes crash and start again with what they had written, links are cut and mended.

Time is simulated, so a seed always gives the same run.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

from fakes import SkippingLoop

from probing.api.errors import PeerError
from probing.groups.proposer import Proposer
from probing.groups.register import Accepted, Acceptor, Ballot, Committed, Promise, Proposal, Quorum, Refusal

__all__ = ("Change", "Network", "simulated", "tokens_of", "value_of", "voters_of")

FAULTS_S = 12.0
CALM_S = 8.0
_T = TypeVar("_T")


def value_of(tokens: Iterable[str], voters: Iterable[str]) -> bytes:
    return json.dumps([list(tokens), list(voters)]).encode()


def tokens_of(value: bytes) -> list[str]:
    return list(json.loads(value)[0]) if value else []


def voters_of(value: bytes) -> list[str]:
    return list(json.loads(value)[1])


class Change(NamedTuple):
    """A change, or a read if ``token`` is empty, that a proposer reported as committed."""

    token: str
    started: float
    ended: float
    committed: Committed


@dataclass
class Node:
    """A node that is up while ``state`` is set. ``disk``: the state that it wrote last."""

    name: str
    disk: Acceptor = field(default_factory=Acceptor)
    state: Acceptor | None = None
    tasks: list[asyncio.Task[None]] = field(default_factory=list)

    def write(self, state: Acceptor) -> None:
        self.state = self.disk = state


class _Loop(SkippingLoop):
    """A loop whose time passes only by skipping."""

    def time(self) -> float:
        return self._skipping.skipped


class Network:
    """``changes`` are the reported ones. ``proposals``: each value that was proposed, by ballot."""

    def __init__(self, seed: int, count: int) -> None:
        self.random = random.Random(seed)
        self.nodes = {name: Node(name) for name in (f"n{i}" for i in range(count))}
        self.changes: list[Change] = []
        self.failures: list[PeerError] = []
        self.proposals: dict[Ballot, set[Proposal]] = {}
        self._first = tuple(self.nodes)[: self.random.randint(1, min(count, 3))]
        self._cut: set[frozenset[str]] = set()
        self._loss = self.random.choice((0.0, 0.02, 0.2))
        self._doubled = self.random.choice((0.0, 0.1))
        self._slow = self.random.choice((0.0, 0.1, 0.3))
        self._crash = self.random.choice((0.0, 0.002, 0.02))
        self._number = 0

    def quorum_of(self, value: bytes) -> Quorum:
        return Quorum(tuple(voters_of(value)) if value else self._first)

    async def run(self) -> None:
        """Runs proposers under faults, and then one change on each node without any."""
        self._loop = asyncio.get_running_loop()
        for node in self.nodes.values():
            self._start(node)
        while self._loop.time() < FAULTS_S:
            await asyncio.sleep(self.random.uniform(0, 0.8))
            self._fault()
        await self._heal()
        for node in self.nodes.values():
            await self._change(node, self._token(node))
        for node in self.nodes.values():
            self._stop(node)

    def _fault(self) -> None:
        names = list(self.nodes)
        kind = self.random.randrange(6)
        if kind == 0:
            self._stop(self.nodes[self.random.choice(names)])
        elif kind == 1:
            half = set(self.random.sample(names, self.random.randint(1, len(names) - 1)))
            self._cut |= {frozenset((a, b)) for a in half for b in names if b not in half}
        elif kind == 2:
            self._cut.add(frozenset(self.random.sample(names, 2)))
        else:
            self._cut = set()
        for node in self.nodes.values():
            if node.state is None and self.random.random() < 0.5:
                self._start(node)

    async def _heal(self) -> None:
        self._cut, self._loss, self._slow, self._crash = set(), 0.0, 0.0, 0.0
        for node in self.nodes.values():
            if node.state is None:
                self._start(node)
        # By then the proposers have ended, and no message is under way.
        await asyncio.sleep(CALM_S)
        await asyncio.gather(*(task for node in self.nodes.values() for task in node.tasks))

    def _start(self, node: Node) -> None:
        node.state = Acceptor.from_dict(json.loads(json.dumps(node.disk.to_dict())))
        node.tasks = [self._loop.create_task(self._propose(node)) for _ in range(self.random.randint(0, 2))]

    def _stop(self, node: Node) -> None:
        node.state = None
        for task in node.tasks:
            task.cancel()
        node.tasks = []

    async def _propose(self, node: Node) -> None:
        while self._loop.time() < FAULTS_S:
            await asyncio.sleep(self.random.uniform(0, 1.5))
            try:
                await self._change(node, self._token(node) if self.random.random() < 0.8 else "")
            except PeerError as e:
                self.failures.append(e)

    def _token(self, node: Node) -> str:
        self._number += 1
        return f"{node.name}:{self._number}"

    async def _change(self, node: Node, token: str) -> None:
        def update(value: bytes) -> bytes | None:
            tokens = tokens_of(value)
            if not token or token in tokens:
                return None
            return value_of([*tokens, token], self._voters(self.quorum_of(value).voters))

        assert node.state is not None
        started = self._loop.time()
        proposer = Proposer(node.name, _Calls(self, node.name), self.quorum_of, self._pause, deadline_s=1.0)
        committed = await proposer.change(node.state.committed, update)
        self.changes.append(Change(token, started, self._loop.time(), committed))
        if committed != Committed():
            for other in self.nodes.values():
                self._send(node.name, other, lambda node: node.write(node.state.learn(committed)))

    def _voters(self, voters: Sequence[str]) -> list[str]:
        kind = self.random.randrange(6)
        names = list(self.nodes)
        if kind > 2:
            return list(voters)
        if kind == 0:
            return self.random.sample(names, self.random.randint(1, len(names)))
        if kind == 1 and len(voters) > 1:
            left = list(voters)
            left.remove(self.random.choice(left))
            return left
        more = [name for name in names if name not in voters]
        return [*voters, self.random.choice(more)] if more else list(voters)

    async def _pause(self, attempt: int) -> None:
        await asyncio.sleep(self.random.uniform(0, 0.02 * 2**attempt))

    async def call(self, sender: str, to: str, request: Callable[[Acceptor], tuple[Acceptor, _T]]) -> _T:
        """Returns the answer of a node; it may never come, or the call fails."""
        answer: asyncio.Future[_T] = self._loop.create_future()
        if frozenset((sender, to)) in self._cut and self.random.random() < 0.5:
            raise PeerError("the connection was refused")

        def answered(node: Node, result: _T) -> None:
            if not answer.done():
                answer.set_result(result)

        def handle(node: Node) -> None:
            assert node.state is not None
            crash = self.random.random() if self._crash else 1.0
            if crash < self._crash / 2:
                return self._stop(node)
            state, result = request(node.state)
            node.write(state)
            if crash < self._crash:
                return self._stop(node)
            return self._send(to, self.nodes[sender], lambda node: answered(node, result))

        self._send(sender, self.nodes[to], handle)
        return await answer

    def _send(self, sender: str, to: Node, deliver: Callable[[Node], None]) -> None:
        def arrive() -> None:
            if to.state is not None and frozenset((sender, to.name)) not in self._cut:
                deliver(to)

        if sender == to.name:
            self._loop.call_soon(arrive)
        elif self.random.random() >= self._loss:
            for _ in range(2 if self.random.random() < self._doubled else 1):
                slow = self.random.random() < self._slow
                self._loop.call_later(self.random.uniform(0.001, 2.0 if slow else 0.02), arrive)


class _Calls:
    def __init__(self, network: Network, name: str) -> None:
        self._network = network
        self._name = name

    async def prepare(self, node: str, ballot: Ballot) -> Promise | Refusal:
        return await self._network.call(self._name, node, lambda state: state.prepare(ballot))

    async def accept(self, node: str, proposal: Proposal) -> Accepted | Refusal:
        self._network.proposals.setdefault(proposal.ballot, set()).add(proposal)
        return await self._network.call(self._name, node, lambda state: state.accept(proposal))


def simulated(seed: int, count: int) -> Network:
    """Returns a network of ``count`` nodes after its run."""
    network = Network(seed, count)
    loop = _Loop()
    try:
        loop.run_until_complete(network.run())
    finally:
        loop.close()
    return network
