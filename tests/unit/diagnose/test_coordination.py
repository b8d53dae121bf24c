"""The coordinator of a job: which node it is, whose facts it gathers, and who gets its findings."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import pytest
from diagnosis_cases import WORLD, comm, elsewhere, facts, history, in_collective, op, rank
from fakes import at_once
from hypothesis import given
from hypothesis import strategies as st
from waiting import until

from probing.api.errors import NotFound, PeerError
from probing.daemon.diagnose.coordination.coordinator import MAX_TRIES, Coordinator
from probing.daemon.diagnose.coordination.job_facts import MAX_DEEP, JobFacts
from probing.daemon.diagnose.coordination.peers import LIVING, Holder, Holding, PeerFacts, Sight, job_mark
from probing.daemon.diagnose.coordination.proofs import Proofs
from probing.diagnosis.facts import Facts, Rank
from probing.diagnosis.facts_file import to_json
from probing.diagnosis.ladder import diagnose

LATE = 3


class Nodes:
    """Nodes of one job with a rank each: all wait for rank ``LATE``, which does something else.

    ``asked``: (node, deep) of each call; ``broken``: what the call to a node raises; ``shapes``: what it sends instead.
    """

    def __init__(self, own: str, names: Sequence[str], failed: Sequence[str] = ()) -> None:
        self.own = own
        self.names = names
        self.failed = failed
        self.asked: list[tuple[str, bool]] = []
        self.broken: dict[tuple[str, bool], Exception] = {}
        self.shapes: dict[str, Facts] = {}
        self.offset_ns = 0
        self.rows: dict[str, list[Mapping[str, Any]]] = {name: [] for name in names}
        self.refusals: dict[str, int] = {}
        self.held: dict[tuple[str, str], bool] = {}
        self.claiming: list[str] = []

    def made(self, node: str, deep: bool) -> Facts:
        number = self.names.index(node)
        stack = {"stack": elsewhere() if number == LATE else in_collective()} if deep else {}
        ops = [*history(6, ago=40), *([] if number == LATE else [op(7, ago=39)])]
        own: Rank = rank(number, *ops, node=node, world_size=len(self.names), **stack)
        return facts(own, comms=[comm(WORLD, range(len(self.names)))], world_size=len(self.names))

    def holders(self, job: str, run: str) -> Sequence[Holder]:
        return [Holder(name, True, name in self.failed) for name in self.names if name != self.own]

    def facts(self, node: str, job: str, *, run: str, deep: bool, timeout: float) -> Future[PeerFacts]:
        return at_once(lambda: self._facts(node, deep, timeout))

    def _facts(self, node: str, deep: bool, timeout: float) -> PeerFacts:
        self.asked.append((node, deep))
        assert timeout <= 5 if deep else timeout < 1.1
        if (node, deep) in self.broken:
            raise self.broken[node, deep]
        return PeerFacts([to_json(self.shapes.get(node) or self.made(node, deep))], self.offset_ns, 1000)

    def record(self, node: str, rows: Sequence[Mapping[str, Any]], timeout: float) -> Future[None]:
        return at_once(lambda: self._record(node, rows))

    def _record(self, node: str, rows: Sequence[Mapping[str, Any]]) -> None:
        if self.refusals.get(node):
            self.refusals[node] -= 1
            raise PeerError(f"{node} does not answer")
        self.rows[node] += rows

    def unproven(self, job: str, run: str) -> Sequence[str]:
        return self.claiming

    def sight(self, node: str, job: str, run: str, timeout: float) -> Future[Sight]:
        raise NotImplementedError

    def hold(self, runs: Mapping[tuple[str, str], bool]) -> None:
        self.held = dict(runs)


class Own:
    """The gatherer of node ``nodes.own``."""

    def __init__(self, nodes: Nodes) -> None:
        self.nodes = nodes

    def facts(self, job: str, *, run: str, deep: bool, timeout: float) -> list[Facts]:
        return [self.nodes.made(self.nodes.own, deep)]

    def standing(self, job: str, *, timeout: float) -> Hashable:
        return "here"

    def read_ahead(self, job: str, *, timeout: float) -> None:
        raise NotImplementedError


def gathered(nodes: Nodes, *, deep: bool = True) -> Facts:
    [found] = JobFacts(nodes.own, Own(nodes), nodes).facts("job", run="run", deep=deep, timeout=5)
    return found


def blamed(found: Facts) -> list[tuple[str, int, str]]:
    return [(f.verdict.id, c.rank, c.node) for f in diagnose(found).findings for c in f.culprits]


NAMES = [f"n{number:02d}" for number in range(23)]


@pytest.mark.parametrize(("names", "stands"), [(["n00"], "here"), (["n00", "n01"], None)])
def test_where_ranks_stand_is_known_of_a_job_of_one_node(names: list[str], stands: str | None) -> None:
    nodes = Nodes("n00", names)
    jobs = JobFacts(nodes.own, Own(nodes), nodes)
    assert jobs.standing("job", "run", timeout=5) == stands


def test_only_the_nodes_that_matter_are_asked_for_stacks() -> None:
    nodes = Nodes("n00", NAMES)
    found = gathered(nodes)
    assert sorted(node for node, deep in nodes.asked if not deep) == NAMES[1:]
    assert [node for node, deep in nodes.asked if deep] == ["n03"]
    assert blamed(found) == [("not_joined", LATE, "n03")]
    stacks = {rank.node for rank in found.ranks if rank.threads}
    # The coordinator's own rank is the victim.
    assert {"n00", "n03"} <= stacks
    assert found.missing == ()


def test_without_a_suspect_a_few_nodes_are_asked_for_stacks() -> None:
    names = [name for number, name in enumerate(NAMES) if number != LATE]
    nodes = Nodes("n00", names[:LATE])
    found = gathered(nodes)
    assert len(found.ranks) == len([node for node in nodes.asked if node[1]]) + 1 <= MAX_DEEP


def test_a_look_without_stacks_asks_each_node_once() -> None:
    nodes = Nodes("n00", NAMES)
    gathered(nodes, deep=False)
    assert sorted(nodes.asked) == [(name, False) for name in NAMES[1:]]


class Many(Nodes):
    """Nodes that answer once all of them are called."""

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__(names[0], names)
        self.calls: list[tuple[Future[Any], Callable[[], Any]]] = []

    def facts(self, node: str, job: str, *, run: str, deep: bool, timeout: float) -> Future[PeerFacts]:
        return self._called(lambda: self._facts(node, deep, 1.0))

    def record(self, node: str, rows: Sequence[Mapping[str, Any]], timeout: float) -> Future[None]:
        return self._called(lambda: self._record(node, rows))

    def _called(self, call: Callable[[], Any]) -> Future[Any]:
        outcome: Future[Any] = Future()
        self.calls.append((outcome, call))
        if len(self.calls) == len(self.names) - 1:
            for waiting, answer in self.calls:
                waiting.set_result(answer())
        return outcome


def test_all_nodes_are_asked_before_one_answers() -> None:
    names = [f"n{number:04d}" for number in range(211)]
    nodes = Many(names)
    found = gathered(nodes, deep=False)
    assert (len(found.ranks), found.missing) == (len(names), ())
    assert blamed(found) == [("not_joined", LATE, names[LATE])]


def test_a_node_that_does_not_answer_is_missing_and_lowers_the_verdict() -> None:
    whole = gathered(Nodes("n00", NAMES[:5]))
    nodes = Nodes("n00", NAMES[:5], failed=["n04"])
    nodes.broken["n02", False] = PeerError("n02 does not answer: connection refused")
    found = gathered(nodes)
    assert {(one.node, one.kind) for one in found.missing} == {("n02", "node"), ("n04", "node")}
    assert ("n04", False) not in nodes.asked
    assert blamed(found) == blamed(whole) == [("not_joined", LATE, "n03")]
    assert diagnose(found).findings[0].confidence < diagnose(whole).findings[0].confidence


def test_the_node_of_the_culprit_is_missing_so_nobody_else_is_blamed() -> None:
    found = gathered(Nodes("n00", NAMES[:5], failed=["n03"]))
    assert {culprit for _, culprit, _ in blamed(found)} <= {LATE}


def test_stacks_that_cannot_be_read_leave_the_rest() -> None:
    nodes = Nodes("n00", NAMES[:5])
    nodes.broken["n03", True] = PeerError("no answer")
    found = gathered(nodes)
    assert [(one.kind, one.node) for one in found.missing] == [("stacks", "n03")]
    assert blamed(found) == [("not_joined", LATE, "n03")]


def test_a_peer_speaks_for_itself_alone() -> None:
    nodes = Nodes("n00", NAMES[:5])
    # It claims that the rank of another node is behind.
    lie = nodes.made("n01", False)
    nodes.shapes["n02"] = replace(lie, ranks=tuple(replace(one, open=()) for one in lie.ranks))
    found = gathered(nodes)
    assert blamed(found) == [("not_joined", LATE, "n03")]
    [missing] = found.missing
    assert (missing.node, "about other nodes" in missing.text) == ("n02", True)


@pytest.mark.parametrize("apart_ns", [50_000_000, 5_000_000_000, -5_000_000_000])
def test_clocks_apart_change_no_verdict(apart_ns: int) -> None:
    nodes = Nodes("n00", NAMES[:5])
    nodes.offset_ns = apart_ns
    found = gathered(nodes)
    assert blamed(found) == [("not_joined", LATE, "n03")]
    assert {one.clock_offset_ns for one in found.nodes if one.node != "n00"} == {apart_ns}


def test_a_run_that_this_node_does_not_know() -> None:
    nodes = Nodes("n00", NAMES[:3])
    jobs = JobFacts("n00", Own(nodes), nodes)
    with pytest.raises(NotFound):
        jobs.facts("job", run="other", deep=False, timeout=5)


def test_a_node_without_proof_is_not_asked_and_is_named() -> None:
    for names in (NAMES[:5], NAMES[:1]):
        nodes = Nodes("n00", names)
        nodes.claiming = ["-", *(f"-{number}" for number in range(99))]
        found = gathered(nodes)
        assert not [node for node, _ in nodes.asked if node.startswith("-")]
        claims = [one for one in found.missing if one.kind == "claim"]
        assert claims[0].node == "-"
        assert len(claims) < 10
        # It changes nothing of what is found, which names them.
        nodes.claiming = []
        named = tuple(gap.text for gap in claims)
        alone = [replace(one, missing=(*one.missing, *named)) for one in diagnose(gathered(nodes)).findings]
        assert list(diagnose(found).findings) == alone


def test_a_job_of_one_node_asks_nobody() -> None:
    nodes = Nodes("n00", ["n00"])
    assert len(gathered(nodes).ranks) == 1
    assert nodes.asked == []


class Here:
    """The live tables of a node without sockets."""

    def sight(self, job: str, run: str) -> Sight:
        return Sight()

    def holding(self, job: str, run: str) -> Holding:
        return Holding(frozenset((0,)), 5, 7, living=True)


def trusting(node: str, peers: Any) -> Proofs:
    """All nodes that say so take part, as an administrator may allow."""
    proofs = Proofs(node, peers, Here(), grace_s=0.0, trusted=True)
    proofs.hold({("job", "run"): True})
    return proofs


class View:
    """What one node knows of the others."""

    def __init__(self, *holders: Holder) -> None:
        self._holders = holders

    def holders(self, job: str, run: str) -> Sequence[Holder]:
        return self._holders

    def hold(self, runs: Mapping[tuple[str, str], bool]) -> None: ...


@given(st.sets(st.sampled_from("abcdefg"), min_size=1), st.sets(st.sampled_from("abcdefg")), st.sampled_from([0, 1]))
def test_exactly_one_live_node_leads(holding: set[str], failed: set[str], living: int) -> None:
    lives = {node: bool(living) and ord(node) % 2 == 1 for node in holding}
    up = holding - failed
    leaders = []
    for node in up:
        others = [Holder(other, lives[other], other in failed) for other in holding if other != node]
        coordinator = Coordinator(node, trusting(node, View(*others)))
        if coordinator.leads("job", "run", living=lives[node]):
            leaders.append(node)
    alive = [node for node in up if lives[node]]
    assert leaders == [min(alive or up)] if up else leaders == []


@pytest.fixture
def coordinators() -> Iterator[list[Coordinator]]:
    made: list[Coordinator] = []
    yield made
    for one in made:
        one.stop()


def test_findings_reach_the_other_nodes_and_are_offered_again(
    coordinators: list[Coordinator], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("probing.daemon.diagnose.coordination.coordinator.RETRY_S", 0.05)
    nodes = Nodes("n00", NAMES[:5], failed=["n04"])
    nodes.refusals = {"n02": 1}
    one = Coordinator("n00", trusting("n00", nodes))
    coordinators.append(one)
    one.start()
    row = {"job": "job", "run": "run", "finding_id": "f"}
    one.share(row)
    until(lambda: nodes.rows["n02"])
    assert [len(nodes.rows[name]) for name in NAMES[:5]] == [0, 1, 1, 1, 0]
    until(lambda: not list(one.problems))
    assert one.dropped == 0


def test_all_nodes_are_offered_a_finding_before_one_takes_it(coordinators: list[Coordinator]) -> None:
    names = [f"n{number:04d}" for number in range(211)]
    nodes = Many(names)
    one = Coordinator(names[0], trusting(names[0], nodes))
    coordinators.append(one)
    one.start()
    one.share({"job": "job", "run": "run", "finding_id": "f"})
    until(lambda: one.shared == 1)
    assert [len(nodes.rows[name]) for name in names] == [0] + [1] * 210


def test_a_node_that_takes_nothing_is_given_up(
    coordinators: list[Coordinator], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("probing.daemon.diagnose.coordination.coordinator.RETRY_S", 0.01)
    nodes = Nodes("n00", NAMES[:2])
    nodes.refusals = {"n01": MAX_TRIES}
    one = Coordinator("n00", trusting("n00", nodes))
    coordinators.append(one)
    one.start()
    one.share({"job": "job", "run": "run"})
    until(lambda: one.dropped == 1)
    assert list(one.problems)
    one.share({"job": "job", "run": "run"})
    until(lambda: nodes.rows["n01"])
    until(lambda: not list(one.problems))


def test_a_finding_that_was_closed_meanwhile_is_not_opened_again(
    coordinators: list[Coordinator], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("probing.daemon.diagnose.coordination.coordinator.RETRY_S", 0.05)
    nodes = Nodes("n00", NAMES[:3])
    nodes.refusals = {"n02": 3}
    one = Coordinator("n00", trusting("n00", nodes))
    coordinators.append(one)
    for number in range(4):
        one.share({"job": "job", "run": "run", "finding_id": f"{number % 2}", "state": ("open", "closed")[number // 2]})
    one.start()
    until(lambda: {row["state"] for row in nodes.rows["n02"]} == {"closed"} and len(nodes.rows["n02"]) == 2)
    one.share({"job": "job", "run": "run", "finding_id": "0", "state": "open"})
    until(lambda: nodes.rows["n02"][-1]["state"] == "open")
    assert [row["state"] for row in nodes.rows["n01"]] == ["closed", "closed", "open"]


def test_offers_are_bounded_and_new_ones_come_first(
    coordinators: list[Coordinator], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("probing.daemon.diagnose.coordination.coordinator.RETRY_S", 3600.0)
    nodes = Nodes("n00", NAMES[:2])
    nodes.refusals = {"n01": 5}
    one = Coordinator("n00", trusting("n00", nodes))
    coordinators.append(one)
    one.start()
    for number in range(5):
        one.share({"job": "job", "run": "run", "finding_id": f"{number}"})
    until(lambda: not nodes.refusals["n01"])
    # What is refused keeps nothing else waiting.
    one.share({"job": "job", "run": "run", "finding_id": "new"})
    until(lambda: [row["finding_id"] for row in nodes.rows["n01"]] == ["new"])


def test_sharing_ends_while_a_node_hangs(coordinators: list[Coordinator]) -> None:
    class Hung(Nodes):
        def record(self, node: str, rows: Sequence[Mapping[str, Any]], timeout: float) -> Future[None]:
            return Future()

    nodes = Hung("n00", NAMES[:2])
    one = Coordinator("n00", trusting("n00", nodes))
    one.start()
    one.share({"job": "job", "run": "run"})
    one.stop()


def test_marks_of_jobs() -> None:
    living, over = job_mark("j", "r", living=True), job_mark("j", "r", living=False)
    assert (living ^ over, living & LIVING) == (LIVING, LIVING)
    assert len({job_mark(f"j{number}", "r", living=True) for number in range(1000)}) == 1000
    assert job_mark("ab", "c", living=True) != job_mark("a", "bc", living=True)
    assert 0 <= living < 1 << 64
