"""Nodes that agree on groups in one event loop: a network with delays and cut links, a disk for each node that may lose
what was not acknowledged, launchers that start and end ranks, and a clock that skips to the next timer.

The services, peers, acceptors and proposers are the real ones, and so are the decisions of launchers.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any, TypeVar

import grpc.aio
from fakes import SkippingLoop
from group_records import key_of
from simulated_launchers import UID, Launcher, Process

from probing.api.errors import PeerError, ProbingError, UsageError
from probing.api.proto.probing.v1 import node_pb2 as pb
from probing.daemon.cluster.membership import Member
from probing.daemon.groups.workers import Workers
from probing.daemon.query.caller import Caller, Scope
from probing.daemon.service.group_peers import GroupPeers, Records
from probing.daemon.service.groups import Groups
from probing.groups.group import Action, Group, order_of

__all__ = ("Loop", "Network", "Node", "simulated")

SUSPECT_S, FAILED_S, RECOVERED_S = 5.0, 10.0, 2.0
_NS = 1_000_000_000
_T = TypeVar("_T")


class Loop(SkippingLoop):
    """A loop whose time is that of its timers only. A function for a thread runs in the loop, after ``disk_s``."""

    def __init__(self, chosen: random.Random) -> None:
        super().__init__()
        self._chosen = chosen
        self.disk_s = 0.01

    def time(self) -> float:
        return self._skipping.skipped

    def run_in_executor(self, executor: Any, function: Callable[..., _T], *args: Any) -> asyncio.Future[_T]:  # type: ignore[override]
        del executor
        future: asyncio.Future[_T] = self.create_future()

        def run() -> None:
            try:
                result = function(*args)
            except BaseException as e:
                if not future.done():
                    future.set_exception(e)
            else:
                if not future.done():
                    future.set_result(result)

        self.call_later(self._chosen.uniform(0, self.disk_s), run)
        return future


@dataclass
class Disk:
    """The records that a node's collector keeps."""

    records: dict[str, str] = field(default_factory=dict)
    numbers: dict[str, int] = field(default_factory=dict)


@dataclass
class Collector:
    """A collector's client, for one life of the service. When the service dies, a write on the way may still be made;
    when the power is cut, it is lost.
    """

    disk: Disk
    chosen: random.Random
    lives: bool = True
    power: bool = True

    def keep_group(self, group: str, record: bytes, number: int, timeout: float) -> None:
        del timeout
        if not self.power or (not self.lives and self.chosen.random() < 0.5):
            raise PeerError("the write is lost")
        if number <= self.disk.numbers.get(group, -1):
            raise UsageError("a newer record was written meanwhile")
        self.disk.numbers[group] = number
        self.disk.records[group] = record.decode()
        if not self.lives:
            raise PeerError("nobody hears of the write")

    def kept_groups(self, timeout: float) -> tuple[dict[str, str], list[str]]:
        del timeout
        return dict(self.disk.records), []


class Node:
    """A node with its disk, which lives on when the service dies."""

    def __init__(self, network: Network, name: str, slots: int) -> None:
        self.name, self._network = name, network
        self.disk = Disk()
        self.groups: Groups | None = None
        self._collector: Collector | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        self.launcher = Launcher(network, self, slots)

    @property
    def up(self) -> bool:
        return self.groups is not None

    def start(self) -> None:
        network, clock = self._network, asyncio.get_running_loop().time
        self._collector = Collector(self.disk, network.chosen)
        peers: Any = GroupPeers(self, _Stubs(network, self.name), lambda request: self._groups.agree(request), clock)  # type: ignore[arg-type]
        records, workers = Records(self._collector), Workers(self.name, SUSPECT_S, FAILED_S, clock, network.wall_ns)  # type: ignore[arg-type]
        self._groups = self.groups = Groups(self.name, peers, records, workers, clock, network.wall_ns)
        self.records = records
        self.groups.start()
        network.changed(self.name)

    async def kill(self) -> None:
        """Ends the service at once, as by SIGKILL: calls break off, and writes on the way may be lost."""
        groups, self.groups = self.groups, None
        if groups is None:
            return
        assert self._collector is not None
        self._collector.lives = False
        self._network.changed(self.name)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await groups.stop()

    async def power_cut(self) -> None:
        """Ends the service, the launcher and the ranks."""
        if self._collector is not None:
            self._collector.power = False
        await self.kill()
        # These are in the memory of the collector.
        self.disk.numbers.clear()
        await self.launcher.stop()
        for process in self.launcher.living():
            self.launcher.end(process.worker, None)

    async def call(self, ask: Callable[[Groups], Coroutine[Any, Any, _T]]) -> _T:
        """Returns what the service answers. Raises ConnectionError if it dies meanwhile."""
        if self.groups is None:
            raise ConnectionError
        task = asyncio.create_task(ask(self.groups))
        self._tasks.add(task)
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError:
            task.cancel()
            raise
        finally:
            self._tasks.discard(task)
        if task.cancelled():
            raise ConnectionError
        return task.result()

    def known(self, group: str = "llama") -> Group | None:
        entry = self.records.entries.get(group)
        return entry.known if entry else None

    def members(self) -> Iterator[Member]:
        """Yields what the node's membership has."""
        for name in self._network.nodes:
            yield Member(name, name, self._network.state(self.name, name))


class Network:
    """Nodes by name. ``loss``: the share of messages that are lost though links are not cut."""

    def __init__(self, chosen: random.Random, names: list[str], slots: int = 1, loss: float = 0.0) -> None:
        self.chosen, self._loss = chosen, loss
        self._cut: set[frozenset[str]] = set()
        # When two nodes last could, or could not, talk.
        self._since: dict[frozenset[str], float] = {}
        self._newest: dict[tuple[str, int], int] = {}
        self.nodes = {name: Node(self, name, slots) for name in names}
        self.starts = 0

    def start(self) -> None:
        for node in self.nodes.values():
            node.start()
            node.launcher.start()
        self._since.clear()

    async def stop(self) -> None:
        for node in self.nodes.values():
            await node.power_cut()

    def wall_ns(self) -> int:
        return 1_800_000_000 * _NS + round(asyncio.get_running_loop().time() * _NS)

    def changed(self, node: str) -> None:
        """Notes that a node came or went."""
        for other in self.nodes:
            self._note(frozenset((node, other)))

    def _note(self, link: frozenset[str]) -> None:
        self._since[link] = asyncio.get_running_loop().time()

    def cut(self, *side: str) -> None:
        """Cuts the links between one side and the other nodes."""
        for one, other in combinations(self.nodes, 2):
            if (one in side) != (other in side):
                self._cut.add(frozenset((one, other)))
                self._note(frozenset((one, other)))

    def heal(self) -> None:
        for link in self._cut:
            self._note(link)
        self._cut.clear()

    def state(self, node: str, other: str) -> str:
        """Returns the state of ``other`` as ``node`` sees it."""
        link = frozenset((node, other))
        if node == other:
            return "healthy"
        for_s = asyncio.get_running_loop().time() - self._since.get(link, -1e9)
        if link not in self._cut and self.nodes[other].up:
            return "healthy" if for_s > RECOVERED_S else "recovering"
        return "healthy" if for_s < SUSPECT_S else "suspect" if for_s < FAILED_S else "failed"

    async def delay(self) -> None:
        await asyncio.sleep(self.chosen.uniform(0.001, 0.02))

    async def passes(self, node: str, other: str) -> None:
        """Waits while a message is on its way; for ever if it is lost."""
        await self.delay()
        if frozenset((node, other)) in self._cut or self.chosen.random() < self._loss:
            await asyncio.get_running_loop().create_future()

    def living(self, group: str = "llama") -> list[Process]:
        return [process for node in self.nodes.values() for process in node.launcher.living(group)]

    def check_start(self, process: Process) -> None:
        """Raises AssertionError if a rank may not start now: no rank of another generation may be alive anywhere."""
        self.starts += 1
        others = self.living(process.group)
        assert all(other.generation == process.generation for other in others), (process, others)
        assert all(other.rank != process.rank for other in others), (process, others)
        place = process.group, process.rank
        assert self._newest.get(place, -1) < process.generation, (process, self._newest)
        self._newest[place] = process.generation

    async def until(self, condition: Callable[[], object], seconds: float = 300.0) -> None:
        """Waits, in the time of the loop, until ``condition`` is true."""
        end = asyncio.get_running_loop().time() + seconds
        while not condition():
            assert asyncio.get_running_loop().time() < end, self.describe()
            await asyncio.sleep(0.25)

    def describe(self) -> str:
        lines = [f"{asyncio.get_running_loop().time():.1f} s, cut: {sorted(map(sorted, self._cut))}"]
        for node in self.nodes.values():
            group = node.known() if node.up else None
            record = f"{group.generation} {group.phase} {group.occupied} {group.reason}" if group else "-"
            lines.append(f"{node.name} {'up' if node.up else 'down'} {record} {node.launcher.living()}")
        return "\n".join(lines)

    def records(self, group: str = "llama") -> set[Group | None]:
        """Returns the different records that the nodes of the group have."""
        found = [node.known(group) for node in self.nodes.values() if node.up]
        newest = max((one for one in found if one), key=_age, default=None)
        return {self.nodes[name].known(group) for name in newest.nodes} if newest else {None}

    def phase(self, group: str = "llama") -> str:
        """Returns the phase of the group, empty if the nodes have different records."""
        records = self.records(group)
        one = records.pop()
        return one.phase if one is not None and not records else ""

    async def ask(self, via: str, request: pb.GroupRequest) -> Group:
        """Returns the record after the change in ``request``, which the node ``via`` makes for its owner."""
        caller = Caller("unix", str(UID), 7, scopes=frozenset((Scope.LAUNCH,)))
        reply = await self.nodes[via].call(lambda groups: groups.group(request, caller))
        return Group.from_json(reply.groups[0])

    async def create(self, via: str, group: Group) -> Group:
        return await self.ask(via, pb.GroupRequest(name=group.spec.name, create=group.to_json()))

    async def order(self, via: str, action: Action, *without: str, seen: Group | None = None) -> Group:
        """Gives an order for the record ``seen``, or the record that ``via`` knows."""
        group = seen or self.nodes[via].known()
        assert group is not None
        order = order_of(group, action, key_of(), without)
        return await self.ask(via, pb.GroupRequest(name=group.spec.name, order=order.to_json()))


def _age(group: Group) -> tuple[int, int, int]:
    return group.generation, group.spec.version, group.since_ns


class _Stubs:
    def __init__(self, network: Network, node: str) -> None:
        self._network, self._node = network, node

    def metadata(self, address: str) -> None:
        del address

    @asynccontextmanager
    async def use(self, address: str) -> AsyncIterator[_Stub]:
        yield _Stub(self._network, self._node, address)


class _Stub:
    def __init__(self, network: Network, source: str, target: str) -> None:
        self._network, self._source, self._target = network, source, target

    async def Agree(self, request: pb.AgreeRequest, timeout: float, metadata: object) -> pb.AgreeReply:
        del timeout, metadata
        await self._network.passes(self._source, self._target)
        scopes = frozenset((Scope.PEER,))
        caller = Caller("tcp", self._source, name=self._source, scopes=scopes, nodes=frozenset((self._source,)))
        sent = pb.AgreeRequest.FromString(request.SerializeToString())
        try:
            reply = await self._network.nodes[self._target].call(lambda groups: groups.agree(sent, caller))
        except ProbingError as e:
            raise _failed(grpc.StatusCode.FAILED_PRECONDITION, e.message) from None
        except ConnectionError:
            raise _failed(grpc.StatusCode.UNAVAILABLE, "the node is down") from None
        await self._network.passes(self._target, self._source)
        return pb.AgreeReply.FromString(reply.SerializeToString())


def _failed(code: grpc.StatusCode, details: str) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details)


def simulated(
    scene: Callable[[Network], Coroutine[Any, Any, None]],
    names: list[str],
    *,
    seed: int = 1,
    slots: int = 1,
    loss: float = 0.0,
) -> Network:
    """Runs a scene in a network whose nodes have started, and returns the network."""
    chosen = random.Random(seed)
    # The pauses of proposers.
    random.seed(seed)

    async def run() -> Network:
        network = Network(chosen, names, slots, loss)
        network.start()
        try:
            await network.until(lambda: all(node.records.loaded for node in network.nodes.values()))
            await scene(network)
        finally:
            await network.stop()
        return network

    with asyncio.Runner(loop_factory=lambda: Loop(chosen)) as runner:
        return runner.run(run())
