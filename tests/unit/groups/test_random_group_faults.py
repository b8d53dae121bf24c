"""Random faults and orders beside a group of up to nine nodes: no rank runs twice, and all nodes agree in the end."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from contextlib import suppress
from functools import partial
from typing import Any

import pytest
from group_records import finding_of, group_of, newer
from groups_network import Network, simulated
from long import long_unless

from probing.api.errors import PeerError, ProbingError, UsageError
from probing.groups.group import Action, Group

ADA = 1000


class Schedule:
    """Random faults and orders, by a seed. At its end all links heal, and everything that died comes back."""

    def __init__(self, network: Network, seed: int) -> None:
        self.network, self.chosen = network, random.Random(seed)
        self.names = list(network.nodes)
        self.refusals = 0

    async def run(self, events: int) -> None:
        actions = (self.cut, self.heal, self.kill, self.power_cut, self.launcher, self.rank, self.rank, self.finding)
        for number in range(events):
            await self.chosen.choice((*actions, self.order, self.order, self.renew, self.back))(number)
            await asyncio.sleep(self.chosen.choice((0.05, 0.3, 1.0, 5.0, 12.0, 30.0)))
        self.network.heal()
        for name in self.names:
            await self._back(name)

    async def cut(self, number: int) -> None:
        self.network.cut(*self.chosen.sample(self.names, self.chosen.randint(1, len(self.names))))

    async def heal(self, number: int) -> None:
        self.network.heal()

    async def kill(self, number: int) -> None:
        await self.network.nodes[self.chosen.choice(self.names)].kill()

    async def power_cut(self, number: int) -> None:
        await self.network.nodes[self.chosen.choice(self.names)].power_cut()

    async def back(self, number: int) -> None:
        await self._back(self.chosen.choice(self.names))

    async def _back(self, name: str) -> None:
        node = self.network.nodes[name]
        if not node.up:
            node.start()
        if not node.launcher.lives:
            node.launcher.start()

    async def launcher(self, number: int) -> None:
        """Runs a launcher anew, as an upgrade does."""
        launcher = self.network.nodes[self.chosen.choice(self.names)].launcher
        if launcher.lives:
            await launcher.stop()
            await asyncio.sleep(self.chosen.uniform(0, 1))
            launcher.start()

    async def rank(self, number: int) -> None:
        if living := self.network.living():
            process = self.chosen.choice(living)
            self.network.nodes[process.worker.rpartition("-")[0]].launcher.end(
                process.worker, self.chosen.choice((0, 1, None))
            )

    async def finding(self, number: int) -> None:
        name = self.chosen.choice(self.names)
        if (groups := self.network.nodes[name].groups) is not None:
            groups.finding(finding_of(self.chosen.randrange(4), number=number, found_by=name), ADA)

    async def order(self, number: int) -> None:
        without = self.chosen.sample(self.names, self.chosen.choice((0, 0, 0, 1)))
        action: Action = self.chosen.choice(("start", "start", "restart", "stop", "delete"))
        await self._tried(lambda via: self.network.order(via, action, *without))

    async def renew(self, number: int) -> None:
        def change(via: str) -> Coroutine[Any, Any, Group]:
            group = self.network.nodes[via].known()
            assert group is not None
            workers = [f"{name}-{slot}" for name in self.names for slot in range(2) if self.chosen.random() < 0.8]
            chosen = tuple(workers or [f"{self.names[0]}-0"])
            return self.network.create(
                via, newer(group, workers=chosen, master=self.chosen.choice(chosen), min_nodes=0)
            )

        await self._tried(change)

    async def _tried(self, change: Callable[[str], Coroutine[Any, Any, Group]]) -> None:
        known = [name for name in self.names if self.network.nodes[name].up and self.network.nodes[name].known()]
        if known:
            task = asyncio.ensure_future(change(self.chosen.choice(known)))
            outcome = await asyncio.gather(task, return_exceptions=True)
            assert isinstance(outcome[0], (Group, ConnectionError, ProbingError)), outcome
            self.refusals += not isinstance(outcome[0], Group)


def settled(network: Network) -> bool:
    """Returns whether all nodes agree, and the ranks are as the record says."""
    phase = network.phase()
    [group] = network.records() if phase else [None]
    if group is None:
        return False
    if phase == "running":
        ranks = {rank.worker for rank in group.ranks()}
        started = {
            p.worker for n in network.nodes.values() for p in n.launcher.processes if p.generation == group.generation
        }
        return started == ranks and {p.generation for p in network.living()} <= {group.generation}
    return phase != "ending" and (phase == "finished" or not network.living())


@pytest.mark.parametrize("seed", [long_unless(seed < 11, seed) for seed in range(307)])
def test_random_faults(seed: int) -> None:
    chosen = random.Random(seed)
    names = [f"gn{number}" for number in range(1, 1 + chosen.choice((1, 2, 3, 3, 4, 5, 9)))]
    fields = {
        "restart": chosen.choice(("never", "on_failure", "always")),
        "max_restarts": chosen.choice((1, 3, 100)),
        "on_hang": chosen.choice(("report", "restart", "restart_without_node")),
        "min_nodes": chosen.choice((0, 0, 1, len(names))),
        "world_size": chosen.choice((None, None, 2 * len(names) - 1)),
    }

    async def scene(network: Network) -> None:
        def generation() -> int:
            group = network.nodes[names[0]].known()
            return group.generation if group else -1

        create = partial(network.create, names[0], group_of(*names, slots=2, **fields))
        start = partial(network.order, names[0], "start")
        for change, made in ((create, 0), (start, 1)):
            for _ in range(23):
                if generation() >= made:
                    break
                # Messages may be lost.
                with suppress(PeerError, UsageError):
                    await change()
                await asyncio.sleep(5)
        await Schedule(network, seed).run(40)
        await network.until(lambda: settled(network), 900)
        for _ in range(23):
            # The policy may change the group at the same time, and messages may be lost.
            [group] = network.records() if network.phase() else [None]
            if group is not None and group.phase not in ("stopped", "deleted"):
                with suppress(UsageError, PeerError):
                    await network.order(group.voters[0], "stop", seen=group)
            await asyncio.sleep(5)
        assert network.phase() in ("stopped", "deleted")
        assert not network.living()

    simulated(scene, names, seed=seed, slots=2, loss=chosen.choice((0.0, 0.0, 0.02, 0.1)))
