"""A node that was taken over, with its own identity, beside two honest ones: what these say of a job is right, in time.

The watches, proofs, coordinators and the facts of the honest nodes are real; clock, network and kernels are made up.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
from diagnosis_cases import WORLD, comm, elsewhere, history, in_collective, op, rank
from diagnosis_cases import facts as facts_of_ranks
from fakes import at_once
from watch_support import SECOND, START, finding, progress_rows

from probing.api.errors import NotFound, PeerError, ProbingError
from probing.daemon.config import DiagnoseConfig
from probing.daemon.diagnose.coordination.coordinator import Coordinator
from probing.daemon.diagnose.coordination.job_facts import JobFacts
from probing.daemon.diagnose.coordination.peers import Holder, Holding, PeerFacts, Sight
from probing.daemon.diagnose.coordination.proofs import Proofs
from probing.daemon.diagnose.finding_row import finding_row
from probing.daemon.diagnose.watch import Clocks, JobWatch
from probing.daemon.query.caller import Caller
from probing.daemon.service.received_findings import ReceivedFindings
from probing.diagnosis.facts import Facts
from probing.diagnosis.facts_file import to_json

HANGS, STALL_S = 40.0, 10.0
LATE, LATE_NODE = 1, "n2"
JOB, RUN = "job", "run"


def at(*numbers: int) -> frozenset[str]:
    return frozenset(f"10.0.0.{number}" for number in numbers)


def facts_on(node: str, number: int, size: int, *, hangs: bool, deep: bool) -> Facts:
    """What a node knows of its rank: all wait in a collective that rank ``LATE`` does not join."""
    late = number == LATE
    stack = {"stack": elsewhere() if late else in_collective()} if deep else {}
    ops = [*history(6, ago=40 if hangs else 0.1), *([op(7, ago=39)] if hangs and not late else [])]
    own = rank(number, *ops, node=node, world_size=size, **stack)
    return facts_of_ranks(own, comms=[comm(WORLD, range(size))], world_size=size)


class World:
    """``ranks``: whose rank is where. ``sights``: what the kernel of each node shows, or what it says that it does.

    ``says``: facts that the node "-" answers with, in place of true ones.
    """

    def __init__(self, **ranks: int) -> None:
        self.now = 0.0
        self.ranks = ranks
        self.size = len(ranks)
        self.claims: set[str] = set(ranks)
        self.sights = {
            "n1": Sight(at(1), at(2), at(1)),
            "n2": Sight(at(2), at(1), at(2)),
            "-": Sight(at(1, 2, 9), at(1, 2), at(9)),
        }
        self.says: Callable[[bool], list[Facts]] | None = None
        self.nodes = {name: Node(self, name) for name in ("n1", "n2")}

    @property
    def hangs(self) -> bool:
        return self.now >= HANGS

    def run(self, until: float) -> None:
        while self.now < until:
            self.now += 0.5
            for node in self.nodes.values():
                node.watch.step()
                node.coordinator.step()

    def send(self, by: str, rows: Sequence[Mapping[str, Any]], to: str) -> None:
        caller = Caller("tcp", "10.0.0.9", nodes=frozenset((by,)))
        self.nodes[to].received.take(json.dumps(rows).encode(), caller)


class Node:
    """An honest node: its store, its kernel, its hook, and its calls to others."""

    def __init__(self, world: World, name: str) -> None:
        self.world, self.name = world, name
        self.rows: list[Mapping[str, Any]] = []
        self.hooked: list[tuple[float, Mapping[str, Any]]] = []
        self.proofs = Proofs(name, self, self, grace_s=15.0, now=lambda: world.now)  # type: ignore[arg-type]
        self.jobs = JobFacts(name, Local(self), self.proofs)
        self.coordinator = Coordinator(name, self.proofs, look_s=STALL_S, now=lambda: world.now)
        self.watch = JobWatch(
            name,
            DiagnoseConfig(stall_s=STALL_S),
            self,
            self.jobs,
            lambda row: self.hooked.append((world.now, row)),
            Shared(self),
            clocks=Clocks(lambda: world.now, lambda: START + round(world.now * SECOND)),
            run=at_once,
        )
        self.received = ReceivedFindings(name, self.watch, self.proofs, self.coordinator.taken, now=lambda: world.now)

    # Its store.

    def progress(self) -> bytes:
        number, world = self.world.ranks[self.name], self.world
        newest = START + round(min(world.now, HANGS) * SECOND)
        row = {
            "rank": number,
            "world_size": world.size,
            "pid": 4000 + number,
            "start_ns": 10**9 + number,
            "comm": WORLD,
        }
        calls = round(min(world.now, HANGS) * 10)
        utc = START + round(world.now * SECOND)
        return progress_rows({**row, "ts": utc, "job": JOB, "run": RUN, "calls": calls, "last_call": newest})

    def findings(self) -> Sequence[Mapping[str, Any]]:
        return ()

    def record(self, *of: Any) -> None:
        self.rows += of[0]

    # Its kernel, and its calls to others.

    def hold(self, runs: Mapping[tuple[str, str], bool]) -> None: ...

    def holding(self, job: str, run: str) -> Holding:
        calls = round(min(self.world.now, HANGS) * 10)
        return Holding(frozenset((self.world.ranks[self.name],)), self.world.size, calls, living=True)

    def holders(self, job: str, run: str) -> Sequence[Holder]:
        return [Holder(name, True, False) for name in sorted(self.world.claims - {self.name})]

    def sight(self, *asked: Any) -> Any:
        # Of this node by job and run, of another by its name before these.
        return at_once(lambda: self.world.sights[asked[0]]) if len(asked) > 2 else self.world.sights[self.name]

    def facts(self, node: str, job: str, *, run: str, deep: bool, timeout: float) -> Future[PeerFacts]:
        return at_once(lambda: self._facts(node, deep))

    def _facts(self, node: str, deep: bool) -> PeerFacts:
        world = self.world
        if node == "-" and world.says is not None:
            return PeerFacts([to_json(one) for one in world.says(deep)], 0, 1000)
        if node not in world.ranks:
            raise NotFound("no such job is known")
        return PeerFacts(
            [to_json(facts_on(node, world.ranks[node], world.size, hangs=world.hangs, deep=deep))], 0, 1000
        )


class Shared:
    """The coordinator of a node, whose rows reach the others at once."""

    def __init__(self, node: Node) -> None:
        self._node = node

    def hold(self, runs: Mapping[tuple[str, str], bool]) -> None:
        self._node.coordinator.hold(runs)

    def leads(self, job: str, run: str, *, living: bool) -> bool:
        return self._node.coordinator.leads(job, run, living=living)

    def is_beside(self, job: str, run: str, *, living: bool) -> bool:
        return self._node.coordinator.is_beside(job, run, living=living)

    def share(self, row: Mapping[str, Any]) -> None:
        node, world = self._node, self._node.world
        node.coordinator.share(row)
        for one in node.proofs.holders(JOB, RUN):
            if one.node in world.nodes:
                with suppress(ProbingError):
                    world.send(node.name, [row], one.node)


class Local:
    """The gatherer of a node."""

    def __init__(self, node: Node) -> None:
        self._node = node

    def facts(self, job: str, *, run: str, deep: bool, timeout: float) -> list[Facts]:
        world, name = self._node.world, self._node.name
        return [facts_on(name, world.ranks[name], world.size, hangs=world.hangs, deep=deep)]

    def standing(self, job: str, *, timeout: float) -> Hashable:
        return None

    def read_ahead(self, job: str, *, timeout: float) -> None: ...


def open_errors(node: Node, by: str = "") -> set[tuple[str, str, str]]:
    """(verdict, ranks, nodes) of the errors that are open in the store of a node; ``by``: that this node found."""
    newest = {row["finding_id"]: row for row in node.rows if not by or row["found_by"] == by}
    errors = [row for row in newest.values() if row["severity"] == "error" and row["state"] == "open"]
    return {(row["verdict"], row["ranks"], row["nodes"]) for row in errors}


TRUTH = ("not_joined", str(LATE), LATE_NODE)


def found(world: World, *, within: float) -> list[tuple[str, str]]:
    """Returns who found the truth on each node, within so many seconds; one hook was started for it, and no other."""
    world.run(HANGS + within)
    for node in world.nodes.values():
        assert TRUTH in open_errors(node), node.name
    hooked = [row for node in world.nodes.values() for _, row in node.hooked if row["severity"] == "error"]
    assert {(row["verdict"], row["ranks"], row["nodes"]) for row in hooked} == {TRUTH}
    assert len({row["finding_id"] for row in hooked}) == 1
    return sorted({(node.name, row["found_by"]) for node in world.nodes.values() for row in node.rows})


def test_two_honest_nodes_alone() -> None:
    world = World(n1=0, n2=1)
    assert found(world, within=16) == [("n1", "n1"), ("n2", "n1")]
    # The second node looks once whether the first one is right, and stores nothing of its own.
    world.run(HANGS + 400)
    assert world.nodes["n2"].coordinator.leads(JOB, RUN, living=True) is False
    assert found(world, within=400) == [("n1", "n1"), ("n2", "n1")]
    assert [len(node.hooked) for node in world.nodes.values()] == [1, 0]
    assert all(not node.coordinator.problems for node in world.nodes.values())


@pytest.mark.parametrize("answers", ["nothing", "empty", "calm"])
def test_it_claims_the_public_mark_of_the_job(answers: str) -> None:
    world = World(n1=0, n2=1)
    world.claims.add("-")
    calm = facts_on("-", 2, 3, hangs=False, deep=False)
    if answers != "nothing":
        world.says = lambda _: [] if answers == "empty" else [calm]
    assert found(world, within=16) == [("n1", "n1"), ("n2", "n1")]
    assert "-" in world.nodes["n1"].coordinator.problems[0]
    # Its claim changes nothing of what is found, but is named in it.
    [row] = [row for _, row in world.nodes["n1"].hooked]
    assert any("node - " in text for text in json.loads(row["missing"]))


@pytest.mark.parametrize("answers", ["nothing", "empty", "calm", "broken"])
def test_it_leads_a_job_of_which_it_has_a_rank_and_finds_nothing(answers: str) -> None:
    world = World(**{"n1": 0, "n2": 1, "-": 2})
    world.sights["n1"] = Sight(at(1), at(2, 9), at(1))
    calm = facts_on("-", 2, 3, hangs=False, deep=False)

    def broken(_: bool) -> list[Facts]:
        raise PeerError("no answer")

    world.says = {"nothing": None, "empty": lambda _: [], "calm": lambda _: [calm], "broken": broken}[answers]
    assert found(world, within=3 * STALL_S + 20) == [("n1", "n1"), ("n2", "n1")]
    [problem] = [text for text in world.nodes["n1"].coordinator.problems if "leads" in text]
    assert "node -" in problem


def test_it_lies_about_the_job_that_it_leads() -> None:
    world = World(**{"n1": 0, "n2": 1, "-": 2})
    world.sights["n1"] = Sight(at(1), at(2, 9), at(1))
    world.run(HANGS + 5)
    lie = finding("not_joined", 0)
    row = {**finding_row(JOB, RUN, lie, 7), "found_by": "-"}
    for name in ("n1", "n2"):
        world.send("-", [row], name)
    world.run(HANGS + 3 * STALL_S + 25)
    assert TRUTH in open_errors(world.nodes["n1"])
    assert [row["nodes"] for _, row in world.nodes["n1"].hooked] == [LATE_NODE]
    assert "node -" in world.nodes["n1"].coordinator.problems[0]


def test_it_floods_findings() -> None:
    world = World(**{"n1": 0, "n2": 1, "-": 2})
    world.sights["n1"] = Sight(at(1), at(2, 9), at(1))
    world.run(HANGS - 5)
    refused = 0
    for number in range(500):
        one = replace(finding("not_joined", about=f"{number}"), severity="error")
        row = {**finding_row(JOB, RUN, one, 7), "found_by": "-", "nodes": "", "stacks": "[]"}
        for name in ("n1", "n2"):
            try:
                world.send("-", [row], name)
            except ProbingError:
                refused += 1
    assert refused >= 800
    world.run(HANGS + 3 * STALL_S + 25)
    assert TRUTH in open_errors(world.nodes["n1"])
    assert [row["nodes"] for _, row in world.nodes["n1"].hooked] == [LATE_NODE]
    assert "- are refused" in world.nodes["n1"].received.problems[0]


def test_it_forges_findings_of_a_job_without_ranks_there() -> None:
    world = World(n1=0, n2=1)
    world.claims.add("-")
    world.run(30)
    for by, named in (("-", 0), ("n2", 0), ("n1", 1)):
        row = {**finding_row(JOB, RUN, finding("not_joined", named), 7), "found_by": by}
        with pytest.raises(ProbingError):
            world.send("-", [row], "n1")
    assert found(world, within=16) == [("n1", "n1"), ("n2", "n1")]


def test_it_says_that_it_has_ranks_that_are_elsewhere() -> None:
    world = World(**{"n1": 0, "n2": 1, "-": 2})
    world.sights["n1"] = Sight(at(1), at(2, 9), at(1))
    calm = facts_on("-", 2, 3, hangs=True, deep=True)

    def says(deep: bool) -> list[Facts]:
        # Its newer process of rank 0 is what holds the job up.
        stray = rank(0, *history(6, ago=40), node="-", world_size=3, stack=elsewhere(), started_ns=1 << 62)
        return [replace(calm, ranks=(stray, *calm.ranks))]

    world.says = says
    found(world, within=3 * STALL_S + 20)
    assert open_errors(world.nodes["n1"], by="n1") == {TRUTH}
