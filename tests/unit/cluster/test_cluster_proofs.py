"""What a taken-over node can say of others where nodes have keys: what counts, what is refused, and what is said."""

from __future__ import annotations

import pytest
from gossip_network import WALL_S, Network, Node, key_of_name, record

from probing.daemon.cluster import Membership
from probing.daemon.cluster.keys import NodeKey, answers, is_signed, new_nonce
from probing.daemon.cluster.messages import Message
from probing.daemon.cluster.record import Claim, Proof, Record, Update
from probing.daemon.cluster.table import MAX_MEMBERS, Entry
from probing.daemon.cluster.view import FORGET_S, MAX_CHECKS, MAX_OF_HOST, MAX_UNMET

SEED = "10.0.0.0:1"
OTHER = NodeKey(b"\7" * 32)


@pytest.fixture
def world() -> tuple[Network, list[Node]]:
    network = Network(5)
    nodes = [network.start(record(f"n{i}", f"10.0.0.{i}:1", i + 1), [SEED], at=i / 5) for i in range(5)]
    settle(network, nodes)
    return network, nodes


def settle(network: Network, nodes: list[Node]) -> None:
    others = len(nodes) - 1
    assert network.run(10, lambda: all(len(n.machine.view.table.entries) == others for n in nodes))
    network.run(10)


def lie(network: Network, node: Node, *updates: Update, sender: Record | None = None) -> None:
    liar = OTHER.signed(record("liar", "10.0.0.66:1", 66))
    node.machine.answer(Message(sender or liar, 0, updates), network.now)


def entry(node: Node, name: str) -> Entry:
    return node.machine.view.table.entries[name]


def membership(network: Network, node: Node) -> Membership:
    return Membership(node.machine, lambda: network.now, lambda: int((WALL_S + network.now) * 1e9))


def raised(own: Record, **changes: object) -> Record:
    return own._replace(incarnation=own.incarnation + 9, jobs=(13,), **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "forged",
    [
        lambda own: raised(own),
        lambda own: OTHER.signed(raised(own)),
        lambda own: raised(own, key=b"", signature=b""),
        lambda own: OTHER.signed(raised(own, uid=own.uid + 1, address="10.0.0.66:1")),
        lambda own: raised(own, signature=bytes(64)),
    ],
    ids=["its signature of another record", "another key", "no key", "another life elsewhere", "no signature"],
)
@pytest.mark.parametrize("claim", list(Claim))
@pytest.mark.parametrize("as_sender", [False, True])
def test_nobody_speaks_for_a_node_whose_key_is_known(
    world: tuple[Network, list[Node]], forged: object, claim: Claim, as_sender: bool
) -> None:
    network, nodes = world
    own = nodes[2].machine.view.own
    wrong = forged(own)  # type: ignore[operator]
    if as_sender:
        lie(network, nodes[0], sender=wrong)
    else:
        lie(network, nodes[0], Update.of(wrong, claim, WALL_S))
    for _ in range(20):
        for node in nodes:
            if node is not nodes[2]:
                assert entry(node, "n2").update == Update.of(own)
        network.run(0.5)
    assert nodes[2].machine.view.own == own
    assert all(node.states(network.now)["n2"] == "healthy" for node in nodes if node is not nodes[2])


def test_an_old_record_is_no_news(world: tuple[Network, list[Node]]) -> None:
    network, nodes = world
    before = nodes[2].machine.view.own
    made = membership(network, nodes[2])
    made.set_jobs([1, 2])
    network.run(10)
    assert entry(nodes[0], "n2").update.record.jobs == (1, 2)
    for claim in Claim:
        lie(network, nodes[0], Update.of(before, claim, WALL_S))
    network.run(10)
    assert entry(nodes[0], "n2").update.record.jobs == (1, 2)


def test_nobody_answers_for_a_node_that_is_gone(world: tuple[Network, list[Node]]) -> None:
    network, nodes = world
    gone = nodes[2]
    own, key = gone.machine.view.own, key_of_name("n2")
    old = new_nonce()
    recorded = key.answer(old, own)
    gone.up = False
    call = next(
        call
        for _ in range(200)
        for call in nodes[0].machine.tick(network.now, int((WALL_S + network.now) * 1e9))
        if call.name == "n2"
    )
    heard = entry(nodes[0], "n2").heard
    # The record is the node's own; what it signed was another question, and what answers this one another key.
    for proof in (b"", recorded, OTHER.answer(call.message.nonce, own)):
        nodes[0].machine.answered(call, Message(own, 0, proof=proof), network.now, 0)
        assert entry(nodes[0], "n2").heard == heard
    nodes[0].machine.answered(call, Message(own, 0, proof=key.answer(call.message.nonce, own)), network.now, 0)
    assert entry(nodes[0], "n2").heard == network.now


def test_a_relay_cannot_keep_a_node_alive(world: tuple[Network, list[Node]]) -> None:
    network, nodes = world
    own = nodes[2].machine.view.own
    nodes[2].up = False
    asked = nodes[0].machine
    call = asked._message(relay="n2")
    from probing.daemon.cluster.messages import Call, Purpose

    nonce = new_nonce()
    relay = Call(Purpose.RELAY, "n2", "10.0.0.3:1", call._replace(nonce=nonce), 1.0, network.now, 0)
    heard = entry(nodes[0], "n2").heard
    liar = nodes[3].machine.view.own
    said = Message(liar, 0, (Update.of(own),), reached=True)
    for relayed in (b"", OTHER.answer(nonce, own), key_of_name("n2").answer(new_nonce(), own)):
        asked.answered(relay, said._replace(relayed=relayed), network.now, 0)
        assert entry(nodes[0], "n2").heard == heard
    asked.answered(relay, said._replace(relayed=key_of_name("n2").answer(nonce, own)), network.now, 0)
    assert entry(nodes[0], "n2").heard == network.now


def test_who_claims_a_name_first_does_not_keep_it(world: tuple[Network, list[Node]]) -> None:
    network, nodes = world
    lie(network, nodes[0], Update.of(OTHER.signed(record("n9", "10.0.0.9:1", 900, WALL_S + 5_000))))
    network.run(2)
    assert entry(nodes[1], "n9").key == OTHER.public
    network.start(record("n9", "10.0.0.9:1", 9), [SEED])

    def true_key() -> bool:
        return all(entry(n, "n9").key == key_of_name("n9").public for n in nodes)

    assert network.run(60, true_key)


def test_a_renamed_node_is_a_new_one_and_the_old_name_fails(world: tuple[Network, list[Node]]) -> None:
    network, nodes = world
    network.start(record("renamed", nodes[2].address, 99, WALL_S + 100), [SEED], key=key_of_name("n2"))
    others = [node for node in nodes if node is not nodes[2]]

    def known() -> bool:
        return all(
            node.states(network.now).get("renamed") == "healthy" and node.states(network.now)["n2"] == "failed"
            for node in others
        )

    assert network.run(60, known)
    found = {member.name: member.address for member in membership(network, nodes[0]).members()}
    assert (found["renamed"], found["n2"]) == ("10.0.0.2:1", "")
    assert all(entry(node, "renamed").key == key_of_name("n2").public for node in others)


def test_a_key_made_anew_is_said_and_counts_once_the_old_is_forgotten(world: tuple[Network, list[Node]]) -> None:
    network, nodes = world
    network.start(record("n2", nodes[2].address, 99, WALL_S + 100), [SEED], key=OTHER)
    others = [node for node in nodes if node is not nodes[2]]
    problem = "n2: 10.0.0.2:1 answers under this name with another key"
    assert network.run(30, lambda: any(problem in membership(network, n).problems() for n in others))
    network.run(10)
    assert {node.states(network.now)["n2"] for node in others} == {"failed"}
    for node in network.nodes.values():
        node.offset_s += FORGET_S + 1
    assert network.run(200, lambda: all(entry(n, "n2").key == OTHER.public for n in others if "n2" in n.states(0)))
    assert network.run(60, lambda: all(n.states(network.now).get("n2") == "healthy" for n in others))


def test_a_certificate_proves_a_key_made_anew(world: tuple[Network, list[Node]]) -> None:
    network, nodes = world
    nodes[2].up = False
    assert network.run(20, lambda: nodes[0].states(network.now)["n2"] == "failed")
    new = OTHER.signed(record("n2", "10.0.0.77:1", 99, WALL_S + 100))
    nodes[0].machine.answer(Message(new, 0), network.now, certified=True)
    assert entry(nodes[0], "n2").update.record == new
    assert (entry(nodes[0], "n2").proof, entry(nodes[0], "n2").key) == (Proof.CERTIFICATE, OTHER.public)


def test_of_two_nodes_with_valid_certificates_neither_wins(world: tuple[Network, list[Node]]) -> None:
    network, nodes = world
    own = nodes[2].machine.view.own
    nodes[0].machine.answer(Message(own, 0), network.now, certified=True)
    twin = OTHER.signed(record("n2", "10.0.0.77:1", 99, WALL_S + 100))
    nodes[0].machine.answer(Message(twin, 0), network.now, certified=True)
    assert entry(nodes[0], "n2").update.record == own
    # It is asked where it says that it is, and proves its name there, too.
    machine = nodes[0].machine
    call = next(c for c in machine.tick(network.now, WALL_S * 10**9) if c.address == "10.0.0.77:1" and c.name == "n2")
    answer = Message(twin, WALL_S * 10**9, proof=OTHER.answer(call.message.nonce, twin))
    machine.answered(call, answer, network.now, WALL_S * 10**9, certified=True)
    assert entry(nodes[0], "n2").update.record == own
    (problem,) = membership(network, nodes[0]).problems()
    assert problem == "n2: 10.0.0.77:1 answers under this name with another key"
    # The twin itself is told.
    nodes[2].machine.answer(Message(twin, 0), network.now, certified=True)
    assert nodes[2].machine.view.conflict(network.now) == "10.0.0.77:1 answers under the name n2, too"


def test_a_renewed_certificate_changes_nothing(world: tuple[Network, list[Node]]) -> None:
    network, nodes = world
    for _ in range(2):
        nodes[0].machine.answer(Message(nodes[2].machine.view.own, 0), network.now, certified=True)
        assert entry(nodes[0], "n2").proof is Proof.CERTIFICATE
    assert not membership(network, nodes[0]).problems()


def test_half_of_the_nodes_without_keys_are_seen_and_said() -> None:
    network = Network(9)
    nodes = [
        network.start(record(f"n{i}", f"10.0.0.{i}:1", i + 1), [SEED], at=i / 7, old=i % 2 == 1) for i in range(12)
    ]
    settle(network, nodes)
    assert all(set(n.states(network.now).values()) == {"healthy"} for n in nodes)
    membership(network, nodes[1]).set_jobs([5])
    membership(network, nodes[2]).set_jobs([6])
    network.run(20)
    for node in nodes:
        jobs = {m.name: m.jobs for m in membership(network, node).members()}
        assert (jobs["n1"], jobs["n2"]) == ((5,), (6,))
        assert not membership(network, node).problems()
    proofs = {m.name: m.proof for m in membership(network, nodes[0]).members()}
    assert {name for name, proof in proofs.items() if not proof} == {f"n{i}" for i in range(1, 12, 2)}
    # One is restarted with a version that has keys, and one stops.
    new = network.start(record("n1", "10.0.0.1:1", 77, WALL_S + 300), [SEED])
    nodes[4].up = False
    alive = [n for n in [*nodes, new] if n.up]
    keyed = [n for n in alive if not n.old and n is not new]
    assert network.run(90, lambda: all(entry(n, "n1").key for n in keyed))
    assert network.run(30, lambda: all(n.states(network.now)["n4"] == "failed" for n in alive))


def test_a_node_without_key_cannot_be_given_one_by_others() -> None:
    network = Network(10)
    nodes = [network.start(record(f"n{i}", f"10.0.0.{i}:1", i + 1), [SEED], old=i == 2) for i in range(5)]
    settle(network, nodes)
    own = nodes[2].machine.view.own
    lie(network, nodes[0], Update.of(OTHER.signed(raised(own))))
    for _ in range(40):
        network.run(0.5)
        assert all(n.states(network.now)["n2"] != "failed" for n in nodes if n is not nodes[2])
    assert not any(entry(n, "n2").key for n in nodes if n is not nodes[2])


def test_invented_names_leave_room_for_true_nodes(world: tuple[Network, list[Node]]) -> None:
    network, nodes = world
    machine = nodes[0].machine
    for i in range(MAX_MEMBERS // MAX_OF_HOST):
        found = (record(f"x{i}-{j}", f"10.9.{i // 250}.{i % 250}:{j + 1}", 1000 + j) for j in range(2 * MAX_OF_HOST))
        machine.view.hear((Update.of(one) for one in found), network.now)
    table = machine.view.table
    assert max(table.hosts.values()) == MAX_OF_HOST
    assert len(table.entries) == MAX_MEMBERS - 1
    new = key_of_name("n9").signed(record("n9", "10.0.0.9:1", 9))
    machine.answer(Message(new, 0), network.now, certified=True)
    assert entry(nodes[0], "n9").update.record == new
    assert all(node.name in table.entries for node in nodes[1:])
    for found in list(table.entries.values()):
        if found.update.record.name.startswith("x"):
            machine.view._claim(found, Claim.FAILED, network.now)
    machine.view.forget()
    assert sum(name.startswith("x") for name in table.entries) == MAX_UNMET
    assert all(node.name in table.entries for node in nodes[1:])


def test_a_clock_a_year_off_neither_forgets_nor_binds() -> None:
    network = Network(11)
    year = 365 * 86400
    nodes = [network.start(record(f"n{i}", f"10.0.0.{i}:1", i + 1), [SEED], offset_s=year * (i - 1)) for i in range(3)]
    settle(network, nodes)
    own = nodes[2].machine.view.own
    for claim in Claim:
        lie(network, nodes[0], Update.of(OTHER.signed(raised(own)), claim, WALL_S))
    network.run(30)
    for node in nodes:
        for other in nodes:
            if other is not node:
                assert entry(node, other.name).key == key_of_name(other.name).public
                assert node.states(network.now)[other.name] == "healthy"


def test_a_signature_counts_for_what_was_signed() -> None:
    key = key_of_name("n1")
    own = key.signed(record("n1", "10.0.0.1:1", 5, jobs=(1, 2)))
    assert is_signed(own)
    changes: list[dict[str, object]] = [
        {"name": "n2"},
        {"address": "10.0.0.2:1"},
        {"incarnation": 7},
        {"uid": 6},
        {"labels": ()},
        {"jobs": (1,)},
        {"version": ""},
        {"engine": ""},
        {"key": OTHER.public},
        {"key": bytes(32)},
        {"signature": bytes(64)},
    ]
    assert {name for change in changes for name in change} == set(Record._fields)
    assert not any(is_signed(own._replace(**change)) for change in changes)  # type: ignore[arg-type]
    nonce = new_nonce()
    assert answers(key.answer(nonce, own), nonce, own)
    assert not answers(own.signature, nonce, own)
    assert not answers(key.answer(nonce, own), new_nonce(), own)
    assert not answers(key.answer(nonce, own), nonce, own._replace(uid=6))
    assert not answers(key.answer(nonce, own), nonce, own._replace(name="n2"))
    assert key.answer(b"", own) == b""


def test_nobody_takes_the_address_of_another_node(world: tuple[Network, list[Node]]) -> None:
    network, nodes = world
    key = key_of_name("c")
    for name, address in (("c", nodes[2].address), ("d", nodes[0].address)):
        thief = key_of_name(name).signed(record(name, address, 70))
        nodes[0].machine.answer(Message(thief, 0), network.now, certified=True)
    made = membership(network, nodes[0])
    found = {member.name: member for member in made.members()}
    assert found["n2"].address == nodes[2].address
    assert (found["c"].address, found["d"].address) == ("", "")
    assert found["c"].problem == "its record has the address of n2: 10.0.0.2:1"
    at = made.at(nodes[2].address)
    assert at is not None
    assert at.name == "n2"
    assert {name: made.address_of(name) for name in found} == {
        name: member.address if name != made.name else "" for name, member in found.items()
    }
    assert made.address_of("nobody") == ""
    assert entry(nodes[0], "c").key == key.public


def test_signatures_are_checked_within_bounds(world: tuple[Network, list[Node]]) -> None:
    network, nodes = world
    view = nodes[0].machine.view
    view.checks = MAX_CHECKS
    new = key_of_name("n9").signed(record("n9", "10.0.0.9:1", 9))
    lie(network, nodes[0], Update.of(new))
    assert "n9" not in view.table.entries
    network.run(2)
    lie(network, nodes[0], Update.of(new))
    assert "n9" in view.table.entries


def test_nobody_drives_a_nodes_incarnation_to_its_end(world: tuple[Network, list[Node]]) -> None:
    network, nodes = world
    own = nodes[2].machine.view.own
    for key in (b"", OTHER.public):
        wrong = own._replace(incarnation=own.incarnation + (1 << 30), key=key, signature=b"", uid=9)
        lie(network, nodes[2], Update.of(OTHER.signed(wrong) if key else wrong))
        assert nodes[2].machine.view.own == own
