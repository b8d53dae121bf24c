"""Groups on several nodes whose links break and whose services die: no rank runs twice, and all agree in the end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest
from group_records import FENCE_S, finding_of, group_of, newer
from groups_network import Network, Node, simulated
from long import long_unless

from probing.api.errors import PeerError, ProbingError, UsageError
from probing.api.proto.probing.v1 import node_pb2 as pb
from probing.daemon.cluster.membership import Member
from probing.groups.group import Group

NAMES = ["gn6", "gn7", "gn8"]
NINE = [f"gn{number}" for number in range(1, 10)]
ADA = 1000


async def begun(network: Network, *names: str, slots: int = 1, **fields: Any) -> Group:
    """Creates and starts a group, and waits until all of its ranks run. Returns its record."""
    await network.create(names[0], group_of(*names, slots=slots, **fields))
    await network.order(names[0], "start")
    await network.until(lambda: len(network.living()) == len(names) * slots, 60)
    await network.until(lambda: network.phase() == "running", 10)
    group = network.nodes[names[0]].known()
    assert group is not None
    return group


def generations(network: Network) -> set[int]:
    return {process.generation for process in network.living()}


def runs(network: Network, generation: int, ranks: int) -> Callable[[], bool]:
    return lambda: sorted((p.generation, p.rank) for p in network.living()) == [(generation, r) for r in range(ranks)]


def test_a_group_starts_and_stops() -> None:
    async def scene(network: Network) -> None:
        await network.create("gn7", group_of(*NAMES, slots=2))
        assert network.phase() == "stopped"
        await network.order("gn8", "start")
        await network.until(runs(network, 1, 6), 30)
        await network.order("gn6", "stop")
        await network.until(lambda: not network.living(), 30)
        assert network.phase() == "stopped"

    assert simulated(scene, NAMES, slots=2).starts == 6


def test_nodes_that_have_just_started_take_a_command() -> None:
    async def scene(network: Network) -> None:
        for node in network.nodes.values():
            await node.kill()
            node.start()
        assert not any(node.records.loaded for node in network.nodes.values())
        await network.create("gn7", group_of(*NAMES))
        assert network.phase() == "stopped"

    simulated(scene, NAMES)


def test_a_node_whose_records_cannot_be_read_refuses_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise PeerError("the collector does not answer")

    async def scene(network: Network) -> None:
        node = network.nodes["gn7"]
        await node.kill()
        monkeypatch.setattr("groups_network.Collector.kept_groups", fails)
        node.start()
        for request in (pb.GroupRequest(), pb.GroupRequest(name="llama", create=group_of("gn7").to_json())):
            with pytest.raises(PeerError, match="this node is starting"):
                await network.ask("gn7", request)

    simulated(scene, NAMES)


def test_all_ranks_start_again_after_a_failure() -> None:
    async def scene(network: Network) -> None:
        await begun(network, *NAMES, restart="on_failure", max_restarts=2)
        for generation in (2, 3):
            network.nodes["gn8"].launcher.end("gn8-0", 7)
            await network.until(runs(network, generation, 3), 60)
        network.nodes["gn7"].launcher.end("gn7-0", 9)
        await network.until(lambda: network.phase() == "failed" and not network.living(), 60)
        group = network.nodes["gn6"].known()
        assert group is not None
        assert group.reason == "rank 1 (gn7-0) exited with 9; its limit of 2 restarts within an hour is reached"

    assert simulated(scene, NAMES).starts == 9


def test_a_group_finishes() -> None:
    async def scene(network: Network) -> None:
        await begun(network, *NAMES)
        for name in NAMES:
            network.nodes[name].launcher.end(f"{name}-0", 0)
        await network.until(lambda: network.phase() == "finished", 30)
        await network.order("gn7", "start")
        await network.until(runs(network, 2, 3), 30)

    simulated(scene, NAMES)


def test_a_minority_changes_nothing() -> None:
    async def scene(network: Network) -> None:
        await begun(network, *NAMES)
        network.cut("gn8")
        for action in ("stop", "restart", "delete"):
            with pytest.raises(PeerError, match="2 of 3 nodes do not answer: gn6, gn7"):
                await network.order("gn8", action)
        with pytest.raises(PeerError):
            await network.ask("gn8", pb.GroupRequest(name="llama", stop=True))
        assert generations(network) == {1}
        await network.order("gn7", "restart", "gn8")
        # The processes of gn8 are in the way, and nobody can say whether they have ended.
        await asyncio.sleep(120)
        assert [process.worker for process in network.living()] == ["gn8-0"]
        rows = {row["group_name"]: row for row in _groups(network, "gn6").group_rows()}
        assert rows["llama"]["waits_for"] == "waits for an answer of node gn8"
        network.heal()
        await network.until(runs(network, 2, 2), 60)
        assert network.phase() == "running"

    simulated(scene, NAMES)


def test_a_fence_that_the_running_ranks_never_had_fences_nobody() -> None:
    async def scene(network: Network) -> None:
        group = await begun(network, *NAMES)
        network.cut("gn8")
        stopped = await network.order("gn7", "stop")
        elastic = await network.create("gn7", newer(stopped, min_nodes=1))
        assert (elastic.fenced_s, group.fenced_s) == (None, None)
        await network.order("gn7", "start")
        # The launcher of gn8 has no lease to end, and its rank runs on.
        await asyncio.sleep(FENCE_S + 60)
        assert [process.worker for process in network.living()] == ["gn8-0"]
        network.heal()
        await network.until(runs(network, 3, 3), 60)

    simulated(scene, NAMES)


def test_the_restart_of_a_hang_waits_for_the_voters() -> None:
    async def scene(network: Network) -> None:
        await begun(network, *NAMES, on_hang="restart")
        network.cut("gn7")
        _groups(network, "gn7").finding(finding_of(1), ADA)
        # Alone, its node cannot restart the group.
        await asyncio.sleep(30)
        assert generations(network) == {1}
        network.heal()
        await network.until(runs(network, 2, 3), 60)
        group = network.nodes["gn6"].known()
        assert group is not None
        assert [(attempt.cause, attempt.reason) for attempt in group.attempts] == [("hang", "rank 1 hangs")]

    simulated(scene, NAMES)


def test_a_voter_without_the_record_does_not_lead() -> None:
    async def scene(network: Network) -> None:
        await network.create("gn7", group_of(*NAMES))
        await network.until(lambda: network.phase() == "stopped", 10)
        first = network.nodes["gn6"]
        await first.kill()
        first.disk.records["llama"] = "{"
        first.start()
        await network.until(lambda: first.records.loaded, 10)
        await network.order("gn7", "start", "gn6")
        await network.until(runs(network, 1, 2), 60)

    simulated(scene, NAMES)


def test_the_same_hang_after_a_start_by_the_owner() -> None:
    async def scene(network: Network) -> None:
        await begun(network, *NAMES, on_hang="restart")
        hang = finding_of(1)
        _groups(network, "gn7").finding(hang, ADA)
        await network.until(runs(network, 2, 3), 60)
        await network.order("gn6", "restart")
        await network.until(lambda: runs(network, 3, 3)() and network.phase() == "running", 60)
        # The run has the name of the first one, so the finding has its id.
        _groups(network, "gn7").finding(hang, ADA)
        await network.until(runs(network, 4, 3), 60)
        # It was acted on once in each generation that it is about.
        _groups(network, "gn7").finding({**hang, "opened": network.wall_ns() - 3600 * 10**9}, ADA)
        await asyncio.sleep(30)
        assert generations(network) == {4}

    simulated(scene, NAMES)


def test_the_nodes_of_a_large_cluster_are_listed_once_for_all_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    listed = 0

    def members(node: Node) -> Iterator[Member]:
        nonlocal listed
        listed += node.name == "gn1"
        return real(node)

    async def scene(network: Network) -> None:
        nonlocal listed
        await begun(network, *NINE)
        listed = 0
        await asyncio.sleep(60)
        # It leads, and asks the other nodes each second.
        assert listed <= 60

    real = Node.members
    monkeypatch.setattr(Node, "members", members)
    simulated(scene, NINE)


def _groups(network: Network, name: str) -> Any:
    groups = network.nodes[name].groups
    assert groups is not None
    return groups


def test_two_nodes_of_which_the_masters_decides() -> None:
    async def scene(network: Network) -> None:
        await begun(network, "gn7", "gn6")
        network.cut("gn6")
        with pytest.raises(PeerError):
            await network.order("gn6", "stop")
        await network.order("gn7", "stop")
        network.heal()
        await network.until(lambda: network.phase() == "stopped" and not network.living(), 60)

    simulated(scene, ["gn6", "gn7"])


@pytest.mark.parametrize("seed", range(3))
def test_a_cut_node_is_fenced_before_the_others_start_without_it(seed: int) -> None:
    async def scene(network: Network) -> None:
        # The others notice long before the fence is over.
        await begun(network, *NAMES, slots=2, min_nodes=2, fence_s=60.0)
        await asyncio.sleep(network.chosen.uniform(0, 60))
        network.cut("gn6")
        # The master's node is cut off: its ranks end by themselves, and those that are left start again.
        await network.until(runs(network, 2, 4), 180)
        assert {process.worker for process in network.living()} == {"gn7-0", "gn7-1", "gn8-0", "gn8-1"}
        network.heal()
        await network.until(lambda: network.phase() == "running", 60)
        await asyncio.sleep(120)
        assert runs(network, 2, 4)()

    simulated(scene, NAMES, slots=2, seed=seed)


def test_a_lease_needs_a_quorum_that_knows_no_newer_generation() -> None:
    async def scene(network: Network) -> None:
        group = await begun(network, *NAMES, min_nodes=1)
        histories = {name: network.nodes[name].launcher.histories["llama"] for name in NAMES}
        await asyncio.sleep(10)

        def end(name: str) -> float:
            lease = histories[name].lease
            assert lease is not None
            return lease[1] / 1e9

        network.cut("gn8")
        cut_at = asyncio.get_running_loop().time()
        await network.until(lambda: not network.nodes["gn8"].launcher.living(), FENCE_S + 1)
        assert end("gn8") < cut_at + FENCE_S
        assert end("gn6") > asyncio.get_running_loop().time()
        await network.order("gn6", "restart")
        request = pb.AgreeRequest(group="llama", id=group.spec.id, lease=1)
        answers = [(await _groups(network, name).agree(request)).agrees for name in NAMES]
        # Only the node that is cut off knows of nothing newer, and it alone is no quorum.
        assert answers == [False, False, True]

    simulated(scene, NAMES)


def test_a_node_that_does_not_know_a_group_gives_no_lease_and_keeps_nothing() -> None:
    async def scene(network: Network) -> None:
        groups = _groups(network, "gn6")
        for number in range(2003):
            for step in ({"lease": 7}, {"rows": True}, {"port": 29500}):
                reply = await groups.agree(pb.AgreeRequest(group=f"g{number}", **step))
                assert reply.agrees == ("lease" not in step)
                assert reply.rows in (b"", b"[]")
        assert network.nodes["gn6"].records.entries == {}

    simulated(scene, ["gn6"])


def test_the_leader_dies_while_older_ranks_end() -> None:
    async def scene(network: Network) -> None:
        await begun(network, *NAMES, slots=2)
        await network.order("gn8", "restart")
        await network.nodes["gn6"].kill()
        await network.until(lambda: network.phase() in ("ending", "running"), 60)
        # Nobody knows of gn6 whether its ranks have ended, although they have.
        await asyncio.sleep(60)
        assert all(process.worker == "gn6-0" or process.generation == 2 for process in network.living())
        network.nodes["gn6"].start()
        await network.until(runs(network, 2, 6), 60)

    simulated(scene, NAMES, slots=2)


def test_a_service_that_died_goes_on_from_its_kept_records() -> None:
    async def scene(network: Network) -> None:
        await begun(network, *NAMES)
        for name in NAMES:
            await network.nodes[name].kill()
        await asyncio.sleep(30)
        assert runs(network, 1, 3)()
        for name in NAMES:
            network.nodes[name].start()
        await asyncio.sleep(30)
        assert network.phase() == "running"
        assert runs(network, 1, 3)()
        await network.order("gn7", "restart")
        await network.until(runs(network, 2, 3), 60)

    simulated(scene, NAMES)


def test_a_launcher_that_connects_before_the_records_are_read() -> None:
    async def scene(network: Network) -> None:
        node = network.nodes["gn6"]
        await network.create("gn6", group_of("gn6"))
        await node.kill()
        node.launcher.forget()
        asyncio.get_running_loop().disk_s = 23.0  # type: ignore[attr-defined]
        node.start()
        await network.until(lambda: node.records.loaded)
        await network.until(lambda: "llama" in node.launcher.histories, 10)

    for seed in range(3):
        simulated(scene, ["gn6"], seed=seed)


def test_what_a_node_answers_is_on_its_disk() -> None:
    async def scene(network: Network) -> None:
        node, value = network.nodes["gn6"], group_of("gn6", "gn7").to_json()
        ballots = [pb.Ballot(counter=counter, node="gn7") for counter in (1, 2, 3)]
        steps: list[dict[str, Any]] = [
            {"accept": pb.Proposal(ballot=ballots[0], record=value, base=["gn6", "gn7"])},
            {"prepare": ballots[1]},
            {"learn": pb.Proposal(ballot=ballots[2], record=value)},
        ]
        for step in steps:
            reply = await _groups(network, "gn6").agree(pb.AgreeRequest(group="llama", **step))
            assert reply.agrees
            await node.power_cut()
            node.start()
            await network.until(lambda: node.records.loaded)
            acceptor = node.records.entries["llama"].acceptor
            numbers = [acceptor.promised.counter, acceptor.accepted.ballot.counter, acceptor.committed.ballot.counter]
            assert max(numbers) == steps.index(step) + 1

    for seed in range(11):
        simulated(scene, ["gn6", "gn7"], seed=seed)


def test_a_power_cut_of_a_node() -> None:
    async def scene(network: Network) -> None:
        await begun(network, *NAMES, restart="on_failure")
        node = network.nodes["gn7"]
        await node.power_cut()
        await asyncio.sleep(60)
        node.start()
        node.launcher.start()
        await network.until(runs(network, 2, 3), 60)

    simulated(scene, NAMES)


def test_the_master_changes_while_the_group_is_stopped() -> None:
    async def scene(network: Network) -> None:
        await begun(network, *NAMES)
        with pytest.raises(UsageError, match="its specification cannot change until the group is stopped"):
            await network.create("gn8", newer(group_of(*NAMES), master="gn8"))
        stopped = await network.order("gn6", "stop")
        await network.create("gn8", newer(stopped, master="gn8"))
        await network.order("gn6", "start")
        await network.until(runs(network, 3, 3), 60)
        assert {p.worker: p.rank for p in network.living()} == {"gn8-0": 0, "gn6-0": 1, "gn7-0": 2}

    simulated(scene, NAMES)


def test_a_group_moves_to_other_nodes() -> None:
    async def scene(network: Network) -> None:
        await begun(network, "gn1", "gn2", "gn3")
        stopped = await network.order("gn2", "stop")
        # Its older processes have not ended, so their nodes are asked, too.
        moved = newer(stopped, workers=("gn7-0", "gn8-0", "gn9-0"), master="gn8")
        group = await network.create("gn3", moved)
        assert group.occupied == ("gn1-0", "gn2-0", "gn3-0")
        network.cut("gn1")
        await network.order("gn9", "start")
        await asyncio.sleep(30)
        assert [process.generation for process in network.living() if process.worker != "gn1-0"] == []
        network.heal()
        await network.until(runs(network, 3, 3), 60)
        assert {process.worker for process in network.living()} == {"gn7-0", "gn8-0", "gn9-0"}

        def rows(*names: str) -> list[int]:
            return [len(list(network.nodes[name].groups.group_rows())) for name in names]  # type: ignore[union-attr]

        # The nodes that it left know that it does without them.
        for name in ("gn1", "gn2", "gn3"):
            await network.until(lambda node=network.nodes[name]: node.known().phase == "running")  # type: ignore[misc]
        assert rows("gn1", "gn2", "gn3", "gn7", "gn8", "gn9") == [0, 0, 0, 1, 1, 1]

    simulated(scene, NINE)


def test_two_clients_give_orders_at_once() -> None:
    async def scene(network: Network) -> None:
        group = await begun(network, *NAMES)
        for generation, others in ((2, ("gn6", "gn7", "gn8")), (3, ("gn7", "gn7", "gn6"))):
            seen = network.nodes["gn6"].known()
            assert seen is not None
            orders = [network.order(via, "restart", other, seen=seen) for via, other in zip(NAMES, others, strict=True)]
            results = await asyncio.gather(*orders, return_exceptions=True)
            refused = [result for result in results if isinstance(result, UsageError)]
            made = {result.order for result in results if isinstance(result, Group)}
            assert len(made) == 1
            assert all("was changed meanwhile" in result.message for result in refused)
            assert len(refused) == 3 - sum(isinstance(result, Group) for result in results)
            await network.until(runs(network, generation, 2), 60)
        assert group.generation == 1

    simulated(scene, NAMES)


def test_two_clients_create_a_group_at_once() -> None:
    async def scene(network: Network) -> None:
        one, other = group_of(*NAMES, id="1"), group_of(*reversed(NAMES), id="2")
        results = await asyncio.gather(network.create("gn6", one), network.create("gn8", other), return_exceptions=True)
        made = [result for result in results if isinstance(result, Group)]
        assert len(made) <= 1
        await network.until(lambda: network.phase() == "stopped", 60)
        await network.order("gn7", "start")
        await network.until(runs(network, 1, 3), 60)

    for seed in range(11):
        simulated(scene, NAMES, seed=seed)


@pytest.mark.parametrize("names", [NAMES, NINE], ids=["three nodes", "nine nodes"])
@pytest.mark.parametrize("seed", [long_unless(seed < 5, seed) for seed in range(101)])
def test_a_node_dies_at_any_point_of_a_change(names: list[str], seed: int) -> None:
    async def scene(network: Network) -> None:
        first, via = names[0], names[-1]

        async def broken(change: Coroutine[Any, Any, Group]) -> None:
            """Makes a change by a node that dies within it."""
            change = asyncio.ensure_future(change)
            await asyncio.sleep(network.chosen.uniform(0, 0.2))
            await network.nodes[via].kill()
            with_outcome = await asyncio.gather(change, return_exceptions=True)
            assert isinstance(with_outcome[0], (Group, ConnectionError, ProbingError))

        await broken(network.create(via, group_of(*names)))
        if network.chosen.random() < 0.5:
            await asyncio.sleep(60)
            network.nodes[via].start()
        # The client tries again, by another node.
        await network.until(lambda: network.nodes[first].records.loaded)
        await asyncio.sleep(60)
        await network.create(first, group_of(*names))
        if not network.nodes[via].up:
            network.nodes[via].start()
        await network.until(lambda: network.phase() == "stopped", 60)
        await broken(network.order(via, "start"))
        await asyncio.sleep(60)
        # Whatever a voter has accepted is decided by now, without another order.
        entries = [node.records.entries["llama"] for node in network.nodes.values() if node.up]
        assert all(entry.acceptor.accepted.ballot <= entry.ballot for entry in entries)
        group = network.nodes[first].known()
        assert group is not None
        network.nodes[via].start()
        if group.phase == "stopped":
            await network.order(first, "start")
        await network.until(runs(network, 1, len(names)), 120)
        assert network.phase() == "running"

    simulated(scene, names, seed=seed)


def test_a_change_by_a_node_that_has_no_vote_reaches_all() -> None:
    async def scene(network: Network) -> None:
        await begun(network, *NINE)
        # gn9 asks the voters, and dies out of sight of the others before any of them hears of the outcome.
        assert "gn9" not in (network.nodes["gn1"].known() or group_of("gn1")).voters
        group = await network.order("gn9", "stop")
        network.cut("gn9")
        await asyncio.sleep(30)
        network.heal()
        await network.until(lambda: network.phase() == "stopped", 30)
        assert group.generation == 2

    simulated(scene, NINE)


def test_groups_that_are_stopped_cost_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene(network: Network) -> None:
        for number in range(23):
            group = group_of(*NAMES, name=f"g{number}")
            await network.ask("gn6", pb.GroupRequest(name=f"g{number}", create=group.to_json()))
        await asyncio.sleep(5)
        turns: list[str] = []
        for name in NAMES:
            monkeypatch.setattr(_groups(network, name), "_begin", lambda group, turn: turns.append(group))
        await asyncio.sleep(60)
        assert turns == []

    simulated(scene, NAMES)


def test_a_hang_restarts_without_the_node_and_the_third_is_only_reported() -> None:
    async def scene(network: Network) -> None:
        names = NINE[:4]
        await begun(network, *names, on_hang="restart_without_node", max_restarts=10)
        groups = _groups(network, "gn2")
        for number, rank, ranks in ((1, 3, 3), (2, 2, 2)):
            for _ in range(2):  # the same finding again changes nothing
                groups.finding(finding_of(rank, number=number, found_by="gn2"), ADA)
            await network.until(runs(network, number + 1, ranks), 30)
        group = network.nodes["gn1"].known()
        assert group is not None
        assert (group.excluded, group.reason) == (("gn3", "gn4"), "rank 2 hangs")
        groups.finding(finding_of(1, number=3, found_by="gn2"), ADA)
        await asyncio.sleep(60)
        assert runs(network, 3, 2)()

    simulated(scene, NINE[:4])


@pytest.mark.parametrize(
    "more",
    [
        {"found_by": "gn8"},
        {"severity": "warning"},
        {"state": "closed"},
        {"job": "other"},
        # Anybody may give a job the name of a group.
        {"owner": 1001},
        {"owner": 1001, "job": "llama (uid 1001)"},
        {"owner": None},
    ],
)
def test_a_finding_that_changes_nothing(more: dict[str, Any]) -> None:
    async def scene(network: Network) -> None:
        await begun(network, *NAMES, on_hang="restart")
        owner = more.pop("owner", ADA)
        _groups(network, "gn7").finding(finding_of(1, **more), owner)
        await asyncio.sleep(30)
        assert runs(network, 1, 3)()

    simulated(scene, NAMES)


@pytest.mark.parametrize("ranks", [(), (99,), (0, 1, 2)])
def test_a_hang_of_which_no_node_can_be_left_out(ranks: tuple[int, ...]) -> None:
    async def scene(network: Network) -> None:
        await begun(network, *NAMES, on_hang="restart_without_node")
        _groups(network, "gn7").finding(finding_of(*ranks), ADA)
        await network.until(runs(network, 2, 3), 60)

    simulated(scene, NAMES)
