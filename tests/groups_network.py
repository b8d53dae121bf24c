"""Nodes that agree on groups in one event loop: a network with delays and cut links, a disk for each node that may lose
what was not acknowledged, launchers that start and end ranks, and a clock that skips to the next timer.

The services, peers, acceptors and proposers are the real ones, and so are the decisions of launchers.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any, TypeVar

import grpc.aio
from fakes import SkippingLoop
from group_records import key_of

from probing.api.errors import PeerError, ProbingError, UsageError
from probing.api.proto.probing.v1 import node_pb2 as pb
from probing.daemon.cluster.membership import Member
from probing.daemon.groups.workers import Workers
from probing.daemon.query.caller import Caller, Scope
from probing.daemon.service.group_peers import GroupPeers, Records
from probing.daemon.service.groups import Groups
from probing.groups.group import Action, Group, order_of
from probing.groups.report import WorkerRow, rows_json
from probing.launcher.allowed import Rules
from probing.launcher.decisions import Facts, ended_below, record_problem, start_verdict
from probing.launcher.state import History

__all__ = ("Launcher", "Loop", "Network", "Node", "Process", "simulated")

SUSPECT_S, FAILED_S, RECOVERED_S = 5.0, 10.0, 2.0
_NS = 1_000_000_000
_UID = 1000
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


@dataclass(eq=False)
class Process:
    """A rank that was started. ``ends_at``: when it ends, after it was told to."""

    group: str
    generation: int
    worker: str
    rank: int
    lives: bool = True
    exit_code: int | None = None
    ends_at: float | None = None
    fenced: bool = False
    since_ns: int = 0


class Launcher:
    """The launcher of one node: obeys records and leases as the real one decides, with ranks that only look alive."""

    def __init__(self, network: Network, node: Node, slots: int) -> None:
        self._network, self._node = network, node
        self.workers = tuple(f"{node.name}-{number}" for number in range(slots))
        self.processes: list[Process] = []
        self.histories: dict[str, History] = {}
        self._groups: dict[str, Group] = {}
        self._sent: dict[int, float] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._rules = Rules(frozenset({key_of().public}), _UID, "ada", ("*",))

    @property
    def lives(self) -> bool:
        return bool(self._tasks)

    def start(self) -> None:
        self._tasks = [asyncio.create_task(self._serve()), asyncio.create_task(self._work())]

    async def stop(self) -> None:
        """Ends the launcher. Its ranks and what it has written stay."""
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        for outcome in await asyncio.gather(*tasks, return_exceptions=True):
            if not isinstance(outcome, asyncio.CancelledError):
                raise AssertionError("the launcher ended") from outcome

    def living(self, group: str = "") -> list[Process]:
        return [process for process in self.processes if process.lives and group in ("", process.group)]

    def end(self, worker: str, exit_code: int | None) -> None:
        """Has the rank of a worker end."""
        for process in self.living():
            if process.worker == worker:
                self._ended(process, exit_code)

    async def write(self, order: pb.WorkOrder) -> None:
        """Takes an order, as the context of the call."""
        await self._network.delay()
        if order.group:
            self._apply(Group.from_json(order.group))
        elif (sent := self._sent.get(order.report)) is not None:
            history, group = self.histories.get(order.leased), self._groups.get(order.leased)
            if history and group and order.generation == history.generation:
                until_ns = round((sent + group.spec.fence_s) * _NS)
                history.lease = max(
                    history.lease or ("", 0, 0), ("boot", until_ns, order.generation), key=lambda x: x[1]
                )

    async def _serve(self) -> None:
        caller = Caller("unix", str(_UID), 7)
        while True:
            groups = self._node.groups
            if groups is not None:
                with suppress(ProbingError, ConnectionError):
                    await self._node.call(lambda groups: groups.work(self._reports(), self, caller))
            await asyncio.sleep(0.5)

    async def _reports(self) -> AsyncIterator[pb.WorkReport]:
        self._sent.clear()
        number = 0
        while True:
            number += 1
            self._sent[number] = asyncio.get_running_loop().time()
            yield pb.WorkReport(number=number, rows=rows_json(self._rows()), workers=self.workers, pid=7)
            await asyncio.sleep(0.5)

    def _apply(self, group: Group) -> None:
        spec = group.spec
        history = self.histories.get(spec.name)
        if record_problem(group, spec, history, self._rules):
            return
        history = self.histories.setdefault(spec.name, History(spec.name, group.key, spec.id))
        history.version, history.generation, history.phase = spec.version, group.generation, group.phase
        history.order = group.order.generation if group.order else 0
        self._groups[spec.name] = group

    async def _work(self) -> None:
        while True:
            self._step()
            await asyncio.sleep(0.2)

    def _step(self) -> None:
        now = asyncio.get_running_loop().time()
        for name, group in self._groups.items():
            self._fence(name, group, now)
            for process in self.living(name):
                if process.generation < ended_below(group.generation, group.phase) and process.ends_at is None:
                    process.ends_at = now + self._network.chosen.uniform(0, group.spec.grace_s)
                if process.ends_at is not None and now >= process.ends_at:
                    self._ended(process, None)
            self._start(group, now)

    def _fence(self, name: str, group: Group, now: float) -> None:
        lease, fence_s = self.histories[name].lease, group.spec.fence_s
        if group.spec.fenced and lease is not None and now >= lease[1] / _NS - fence_s / 20:
            for process in self.living(name):
                process.fenced = True
                self._ended(process, None)

    def _start(self, group: Group, now: float) -> None:
        history, spec = self.histories[group.spec.name], group.spec
        older = tuple(7 for process in self.living(spec.name) if process.generation < history.generation)
        ranks = [rank for rank in group.ranks() if rank.worker in self.workers] if group.phase == "running" else []
        facts = Facts(self._node.name, "boot", round(now * _NS), len(ranks), older)
        if (
            history.started >= history.generation
            or start_verdict(group, spec, history, self._rules, facts).state != "start"
        ):
            return
        history.started = history.generation
        if group.order is None or group.order.generation != group.generation:
            history.restarts.append(("boot", round(now * _NS)))
        for rank in ranks:
            process = Process(spec.name, group.generation, rank.worker, rank.rank, since_ns=self._network.wall_ns())
            self._network.check_start(process)
            self.processes.append(process)

    def _ended(self, process: Process, exit_code: int | None) -> None:
        process.lives, process.exit_code, process.since_ns = False, exit_code, self._network.wall_ns()

    def _rows(self) -> list[WorkerRow]:
        return [
            self._row(group, worker)
            for group in self._groups.values()
            for worker in self.workers
            # The others ask about older processes also of a worker that has left the group, and never had any.
            if worker in group.spec.workers or worker in group.occupied
        ]

    def _row(self, group: Group, worker: str) -> WorkerRow:
        name, history = group.spec.name, self.histories[group.spec.name]
        clear = not any(process.generation < history.generation for process in self.living(name))
        known: dict[str, Any] = {"seen": history.generation, "clear": clear}
        runs = [process for process in self.processes if (process.group, process.worker) == (name, worker)]
        if not runs or not (runs[-1].lives or runs[-1].generation == history.generation):
            return WorkerRow(worker, name, history.generation, state="waiting", **known)
        run = runs[-1]
        state: Any = "running" if run.lives else "fenced" if run.fenced else "ended"
        more = {"rank": run.rank, "exit_code": run.exit_code, "since_ns": run.since_ns}
        return WorkerRow(worker, name, run.generation, state=state, **known, **more)


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
        peers: Any = GroupPeers(self, _Stubs(network, self.name), lambda request: self._groups.agree(request))  # type: ignore[arg-type]
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
        caller = Caller("unix", str(_UID), 7, scopes=frozenset((Scope.LAUNCH,)))
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
