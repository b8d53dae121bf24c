"""Nodes in a simulated network: they find each other, agree, and see failures within the configured times."""

from __future__ import annotations

import pytest
from gossip_network import WALL_S, Network, Node, record
from hypothesis import given, settings
from hypothesis import strategies as st
from long import examples

from probing.daemon.cluster.messages import MAX_BYTES, Message
from probing.daemon.cluster.record import Claim, Record
from probing.daemon.cluster.view import Times
from probing.daemon.service.gossip import packed

SEED = "10.0.0.0:1"


def serialized(message: Message) -> bytes:
    return packed(message).SerializeToString()


def cluster(count: int, *, seed: int = 1, loss: float = 0.0) -> tuple[Network, list[Node]]:
    network = Network(seed, loss=loss, measure=serialized)
    nodes = [network.start(record(f"n{i}", f"10.0.0.{i}:1", i + 1), [SEED], at=i / count) for i in range(count)]
    return network, nodes


def met(nodes: list[Node]) -> bool:
    return all(len(node.machine.view.table.entries) == len(nodes) - 1 for node in nodes)


def agreeing(network: Network, nodes: list[Node]) -> bool:
    live = [n for n in nodes if n.up and not n.paused]
    return network.agree(nodes) and all(
        node.states(network.now).get(other.name) == "healthy" for node in live for other in live if other is not node
    )


@pytest.mark.parametrize("count", [2, 3, 10, 60])
def test_nodes_with_one_seed_find_each_other(count: int) -> None:
    network, nodes = cluster(count)
    assert network.run(10, lambda: met(nodes) and agreeing(network, nodes))


def test_a_stopped_node_is_suspect_after_two_seconds_and_failed_after_five() -> None:
    network, nodes = cluster(3)
    assert network.run(10, lambda: agreeing(network, nodes) and met(nodes))
    network.run(5)
    nodes[2].up, stopped = False, network.now
    seen: dict[str, float] = {}
    for _ in range(40):
        network.run(0.25)
        for node in nodes[:2]:
            seen.setdefault(node.states(network.now)["n2"], network.now - stopped)
    assert list(seen) == ["healthy", "suspect", "failed"]
    # The last answer was up to a heartbeat before the stop, and each tick looks once.
    assert 1 <= seen["suspect"] <= 3.5
    assert 4 <= seen["failed"] <= 6.5


def test_a_node_that_comes_back_with_a_new_address_recovers() -> None:
    network, nodes = cluster(4)
    assert network.run(10, lambda: met(nodes))
    nodes[3].up = False
    rest = nodes[:3]
    assert network.run(15, lambda: all(n.states(network.now)["n3"] == "failed" for n in rest))
    back = network.start(record("n3", "10.0.9.9:1", 77, WALL_S + 20), [SEED])
    assert network.run(10, lambda: all(n.states(network.now)["n3"] == "recovering" for n in rest))
    assert all(n.machine.view.table.entries["n3"].update.record.address == back.address for n in rest)
    assert network.run(15, lambda: agreeing(network, [*rest, back]))


def test_a_node_that_restarts_at_once_keeps_its_state_and_changes_its_address() -> None:
    network, nodes = cluster(4)
    assert network.run(10, lambda: met(nodes))
    nodes[3].up = False
    back = network.start(record("n3", "10.0.9.9:1", 77, WALL_S + 20), [SEED])
    rest = nodes[:3]
    moved = lambda: all(n.machine.view.table.entries["n3"].update.record.address == back.address for n in rest)  # noqa: E731
    assert network.run(15, lambda: moved() and agreeing(network, [*rest, back]))


def test_a_node_that_stood_still_blames_no_other() -> None:
    network, nodes = cluster(4)
    assert network.run(10, lambda: met(nodes))
    nodes[0].paused = True
    assert network.run(15, lambda: all(n.states(network.now)["n0"] == "failed" for n in nodes[1:]))
    nodes[0].paused = False
    for _ in range(40):
        network.run(0.25)
        assert set(nodes[0].states(network.now).values()) == {"healthy"}
    assert agreeing(network, nodes)


def test_a_cut_link_fails_nobody_while_others_reach_both_ends() -> None:
    network, nodes = cluster(5)
    assert network.run(10, lambda: met(nodes))
    network.cut.add((nodes[1].address, nodes[2].address))
    for _ in range(80):
        network.run(0.25)
        assert all("failed" not in node.states(network.now).values() for node in nodes)


def test_two_halves_fail_each_other_and_find_each_other_again() -> None:
    network, nodes = cluster(8)
    assert network.run(10, lambda: met(nodes))
    network.cut |= {(a.address, b.address) for a in nodes[:4] for b in nodes[4:]}
    halves = nodes[:4], nodes[4:]
    assert network.run(
        20,
        lambda: all(
            node.states(network.now)[other.name] == "failed"
            for half, rest in (halves, halves[::-1])
            for node in half
            for other in rest
        ),
    )
    network.cut.clear()
    assert network.run(60, lambda: agreeing(network, nodes))


@settings(max_examples=examples(15), deadline=None)
@given(
    seed=st.integers(0, 1 << 30),
    count=st.integers(2, 9),
    loss=st.sampled_from([0.0, 0.05, 0.2]),
    events=st.lists(
        st.tuples(st.integers(0, 8), st.sampled_from(["stop", "pause", "move", "cut"]), st.floats(0.1, 8)), max_size=6
    ),
)
def test_whatever_happened_live_nodes_agree_in_the_end(
    seed: int, count: int, loss: float, events: list[tuple[int, str, float]]
) -> None:
    network, nodes = cluster(count, seed=seed, loss=loss)
    for number, (index, event, seconds) in enumerate(events):
        node = nodes[index % count]
        if event == "stop":
            node.up = False
        elif event == "pause":
            node.paused = True
        elif event == "cut":
            network.cut.add((node.address, nodes[(index + 1) % count].address))
        else:
            node.up = False
            own = record(node.name, f"10.1.{number}.{index}:1", 1000 + number, WALL_S + 1000 + number)
            nodes[index % count] = network.start(own, [SEED, *(n.address for n in nodes)])
        network.run(seconds)
    network.cut.clear()
    for i, node in enumerate(nodes):
        node.paused = False
        if not node.up:
            own = record(node.name, node.address, 5000 + i, WALL_S + 5000)
            nodes[i] = network.start(own, [SEED, *(n.address for n in nodes)])
    network._loss = 0.0
    assert network.run(120, lambda: met(nodes) and agreeing(network, nodes)), [n.states(network.now) for n in nodes]
    assert network.largest <= MAX_BYTES


def test_messages_of_many_large_records_stay_within_their_bound() -> None:
    network = Network(3, measure=serialized)
    labels = tuple((f"key{i}" + "k" * 20, "v" * 30) for i in range(16))
    for i in range(40):
        own = Record(
            f"{i}" + "ü" * 200,
            f"10.0.0.{i}:1",
            WALL_S,
            i + 1,
            labels,
            tuple(range(2**63, 2**63 + 64)),
            "1" * 32,
            "2" * 32,
        )
        network.start(own, [SEED])
    nodes = list(network.nodes.values())
    assert network.run(60, lambda: met(nodes))
    assert 4_000 < network.largest <= MAX_BYTES


def test_a_change_of_a_node_reaches_all() -> None:
    network, nodes = cluster(12)
    assert network.run(10, lambda: met(nodes))
    machine = nodes[5].machine
    own = machine.view.own
    machine.change(Record(own.name, own.address, own.incarnation, own.uid, own.labels, (7, 9)))
    assert network.run(
        10,
        lambda: all(
            n.machine.view.table.entries["n5"].update.record.jobs == (7, 9) for n in nodes if n is not nodes[5]
        ),
    )


def test_the_limits_are_those_that_are_configured() -> None:
    network = Network(2)
    times = Times(heartbeat=0.2, suspect=0.5, failed=1.0)
    nodes = [network.start(record(f"n{i}", f"10.0.0.{i}:1", i + 1), [SEED], times) for i in range(3)]
    assert network.run(5, lambda: met(nodes))
    nodes[1].up, stopped = False, network.now
    assert network.run(3, lambda: nodes[0].machine.view.table.entries["n1"].update.claim is Claim.FAILED, every=0.05)
    assert network.now - stopped < 2
