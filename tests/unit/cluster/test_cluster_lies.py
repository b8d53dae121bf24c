"""What a peer can do that lies about others, uses the name of another, or has a wrong clock."""

from __future__ import annotations

import pytest
from gossip_network import WALL_S, Network, Node, record

from probing.daemon.cluster import Membership
from probing.daemon.cluster.messages import Message
from probing.daemon.cluster.record import MAX_INCARNATION, Claim, Record, Update
from probing.daemon.cluster.table import MAX_MEMBERS

SEED = "10.0.0.0:1"


def made(*, old: bool) -> tuple[Network, list[Node]]:
    network = Network(5)
    nodes = [network.start(record(f"n{i}", f"10.0.0.{i}:1", i + 1), [SEED], at=i / 5, old=old) for i in range(5)]
    assert network.run(10, lambda: all(len(n.machine.view.table.entries) == 4 for n in nodes))
    return network, nodes


@pytest.fixture
def world() -> tuple[Network, list[Node]]:
    return made(old=False)


@pytest.fixture
def old_world() -> tuple[Network, list[Node]]:
    """Nodes of a version without keys."""
    return made(old=True)


def lie(network: Network, node: Node, *updates: Update) -> None:
    liar = record("liar", "10.0.0.66:1", 66)
    node.machine.answer(Message(liar, 0, updates), network.now)


def seen(node: Node, name: str) -> Update:
    return node.machine.view.table.entries[name].update


def membership(network: Network, node: Node) -> Membership:
    return Membership(node.machine, lambda: network.now, lambda: int((WALL_S + network.now) * 1e9))


@pytest.mark.parametrize("leap", [0, 1, 1000])
def test_a_living_node_that_is_said_to_have_failed_refutes_it(old_world: tuple[Network, list[Node]], leap: int) -> None:
    network, nodes = old_world
    accused = nodes[2].machine.view.own
    claimed = Update.of(accused._replace(incarnation=accused.incarnation + leap), Claim.FAILED, WALL_S)
    lie(network, nodes[0], claimed)
    assert seen(nodes[0], "n2").claim is Claim.SUSPECT
    for _ in range(40):
        network.run(0.25)
        assert all(seen(n, "n2").claim is not Claim.FAILED for n in nodes if n is not nodes[2])
    assert all(seen(n, "n2").claim is Claim.ALIVE for n in nodes if n is not nodes[2])
    assert nodes[2].machine.view.own.incarnation > claimed.record.incarnation


def test_a_node_that_is_said_to_be_elsewhere_stays_where_it_answers(old_world: tuple[Network, list[Node]]) -> None:
    network, nodes = old_world
    accused = nodes[2].machine.view.own
    moved = accused._replace(address="10.9.9.9:1", incarnation=accused.incarnation + 7, uid=9)
    lie(network, nodes[0], Update.of(moved))
    for _ in range(40):
        network.run(0.25)
        assert all(seen(n, "n2").record.address == accused.address for n in nodes if n is not nodes[2])


def test_labels_and_jobs_that_another_invents_are_put_right_and_counted(old_world: tuple[Network, list[Node]]) -> None:
    network, nodes = old_world
    accused = nodes[2].machine.view.own
    lie(network, nodes[0], Update.of(accused._replace(jobs=(13,), incarnation=accused.incarnation + 1)))
    assert network.run(10, lambda: nodes[2].machine.view.lies > 0)
    assert network.run(10, lambda: all(seen(n, "n2").record.jobs == () for n in nodes if n is not nodes[2]))
    assert "1 claims of peers were wrong" in membership(network, nodes[2]).problems()


def test_no_incarnation_can_be_claimed_that_the_node_cannot_exceed(old_world: tuple[Network, list[Node]]) -> None:
    network, nodes = old_world
    accused = nodes[2].machine.view.own
    lie(network, nodes[0], Update.of(accused._replace(incarnation=MAX_INCARNATION - 1), Claim.SUSPECT))
    lie(network, nodes[0], Update.of(record("new", "10.7.7.7:1", 5, MAX_INCARNATION - 1)))
    assert seen(nodes[0], "n2").record.incarnation == accused.incarnation
    assert "new" not in nodes[0].machine.view.table.entries
    assert nodes[0].machine.view.lies == 2


def test_invented_nodes_fail_and_are_bounded(world: tuple[Network, list[Node]]) -> None:
    network, nodes = world
    lie(network, nodes[0], *(Update.of(record(f"x{i}", f"10.8.0.{i}:1", 100 + i)) for i in range(20)))
    invented = [f"x{i}" for i in range(20)]
    assert network.run(
        60,
        lambda: all(
            name in n.machine.view.table.entries and seen(n, name).claim is Claim.FAILED
            for n in nodes
            for name in invented
        ),
    )
    assert all(n.states(network.now)[o.name] == "healthy" for n in nodes for o in nodes if o is not n)
    table = nodes[0].machine.view.table
    for i in range(MAX_MEMBERS + 10):
        table.put(Update.of(record(f"y{i}", "10.8.1.1:1", 500 + i)), network.now)
    assert len(table.entries) == MAX_MEMBERS - 1
    assert table.refused > 0
    assert all(o.name in table.entries for o in nodes[1:])


def test_two_nodes_with_one_name_are_named_by_both_and_by_others(world: tuple[Network, list[Node]]) -> None:
    network, nodes = world
    twin = network.start(record("n2", "10.0.0.99:1", 99, WALL_S + 5), [SEED])
    own = nodes[2].machine.view

    def named() -> bool:
        others = [membership(network, n).problems() for n in (nodes[0], nodes[1])]
        return bool(own.conflict(network.now) and twin.machine.view.conflict(network.now) and all(others))

    assert network.run(30, named)
    assert own.conflict(network.now) == "10.0.0.99:1 answers under the name n2, too"
    before = own.own.incarnation
    network.run(30)
    # They do not compete.
    assert own.own.incarnation - before < 5
    twin.up = False
    network.run(200)
    assert not own.conflict(network.now)
    assert not membership(network, nodes[0]).problems()


def test_a_clock_that_is_a_year_off_is_named_and_breaks_nothing() -> None:
    network = Network(6)
    nodes = [
        network.start(record(f"n{i}", f"10.0.0.{i}:1", i + 1), [SEED], offset_s=-365 * 86400 if i == 2 else 0)
        for i in range(4)
    ]
    assert network.run(10, lambda: all(len(n.machine.view.table.entries) == 3 for n in nodes))
    network.run(10)
    (problem,) = membership(network, nodes[0]).problems()
    assert problem.startswith("n2: its clock is 31536000.0 s behind ours")
    nodes[1].up = False
    assert network.run(15, lambda: all(seen(n, "n1").claim is Claim.FAILED for n in nodes if n is not nodes[1]))


def test_members_for_other_rooms(world: tuple[Network, list[Node]]) -> None:
    network, nodes = world
    made = membership(network, nodes[0])
    made.set_jobs([7, 7, 9, *range(100, 300)])
    made.set_engine("2.0.1")
    found = {m.name: m for m in made.members()}
    assert list(found) == [f"n{i}" for i in range(5)]
    assert (found["n0"].jobs[:3], len(found["n0"].jobs), found["n0"].engine) == ((7, 9, 100), 64, "2.0.1")
    assert made.name == "n0"
    incarnation = found["n0"].incarnation
    made.set_jobs([7, 9, *range(100, 300)])
    assert {m.name: m for m in made.members()}["n0"].incarnation == incarnation
    network.run(5)
    there = {m.name: m for m in membership(network, nodes[3]).members()}
    assert there["n0"].jobs == found["n0"].jobs
    assert {m.state for m in there.values()} == {"healthy"}


def test_a_failed_node_is_forgotten_after_a_day_and_does_not_come_back() -> None:
    network = Network(7)
    nodes = [network.start(record(f"n{i}", f"10.0.0.{i}:1", i + 1), [SEED]) for i in range(3)]
    assert network.run(10, lambda: all(len(n.machine.view.table.entries) == 2 for n in nodes))
    nodes[2].up = False
    assert network.run(10, lambda: all(seen(n, "n2").claim is Claim.FAILED for n in nodes[:2]))
    for node in nodes[:2]:
        node.offset_s = 86_500
    assert network.run(90, lambda: all("n2" not in n.machine.view.table.entries for n in nodes[:2]))
    old = Update.of(Record("n2", "10.0.0.2:1", WALL_S, 3), Claim.FAILED, WALL_S)
    lie(network, nodes[0], old)
    assert "n2" not in nodes[0].machine.view.table.entries
