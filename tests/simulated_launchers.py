"""Launchers in one event loop: they decide about records and leases as the real one does, and start ranks that only
look alive.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from group_records import key_of

from probing.api.errors import ProbingError
from probing.api.proto.probing.v1 import node_pb2 as pb
from probing.daemon.query.caller import Caller
from probing.groups.group import Group
from probing.groups.report import WorkerRow, rows_json
from probing.launcher.allowed import Rules
from probing.launcher.decisions import Facts, ended_below, record_problem, start_verdict
from probing.launcher.state import History

if TYPE_CHECKING:
    from groups_network import Network, Node

__all__ = ("UID", "Launcher", "Process")

UID = 1000
_NS = 1_000_000_000


@dataclass(eq=False)
class Process:
    """A rank that was started. ``ends_at``: the time of its end, once an end was ordered."""

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
        self._rules = Rules(frozenset({key_of().public}), UID, "ada", ("*",))

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

    def forget(self) -> None:
        """Forgets all records, as a launcher whose state directory is new."""
        self.histories.clear()
        self._groups.clear()

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
        caller = Caller("unix", str(UID), 7)
        while True:
            groups = self._node.groups
            if groups is not None:
                with suppress(ProbingError, ConnectionError):
                    await self._node.call(lambda groups: groups.launchers.work(self._reports(), self, caller))
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
        if record_problem(group, history, self._rules):
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
        if history.started >= history.generation or start_verdict(group, history, self._rules, facts).state != "start":
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
