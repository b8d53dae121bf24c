"""Peers, clients and launchers that lie to a node about groups: refused, and nothing changes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from dataclasses import asdict
from typing import Any

import pytest
from group_records import key_of, record
from groups_network import Network, Node, simulated

from probing.api.errors import FormatError, NotFound, Overloaded, PrivilegeError, ProbingError, UsageError
from probing.api.proto.probing.v1 import node_pb2 as pb
from probing.daemon.arrow import batch_of
from probing.daemon.query.caller import Caller, Scope
from probing.daemon.service import group_peers
from probing.daemon.service.group_peers import Entry
from probing.groups.group import Group, created, order_of
from probing.groups.report import WorkerRow, rows_json
from probing.groups.spec import Spec

NAMES = ["gn6", "gn7", "gn8"]
WORKERS = ("gn6-0", "gn7-0", "gn8-0")
EVE = 1001


def peer(name: str) -> Caller:
    return Caller("tcp", name, name=name, scopes=frozenset((Scope.PEER,)), nodes=frozenset((name,)))


def user(uid: int = 1000) -> Caller:
    return Caller("unix", str(uid), 7, scopes=frozenset((Scope.LAUNCH,)))


def forged(group: Group, **fields: Any) -> bytes:
    return json.dumps({**asdict(group), **fields}).encode()


def renewed(group: Group, signer: str = "ada", **fields: Any) -> Group:
    """Returns the record of another specification of the group."""
    return created(Spec.from_json(json.dumps({**asdict(group.spec), **fields}).encode()), key_of(signer))


async def agree(node: Node, caller: Caller | None, **fields: Any) -> pb.AgreeReply:
    group = node.known()
    identity = group.spec.id if group else ""
    request = pb.AgreeRequest(**{"group": "llama", "id": identity, **fields})
    return await node.call(lambda groups: groups.agree(request, caller))


def proposal(value: bytes, counter: int = 1_000_003, node: str = "gn7") -> pb.Proposal:
    return pb.Proposal(ballot=pb.Ballot(counter=counter, node=node), record=value, base=NAMES)


def attacked(attack: Callable[[Network, Group], Coroutine[Any, Any, None]]) -> None:
    """Makes an attack on nodes whose group runs, and checks that the group runs on as it was."""

    async def scene(network: Network) -> None:
        await network.create("gn6", record(workers=WORKERS, grace_s=3.0))
        await network.order("gn6", "start")
        await network.until(lambda: len(network.living()) == 3 and network.phase() == "running", 60)
        before = network.nodes["gn6"].known()
        assert before is not None
        await attack(network, before)
        await asyncio.sleep(30)
        assert network.records() == {before}
        assert sorted(process.generation for process in network.living()) == [1, 1, 1]
        # The owner is still the master of the group.
        await network.order("gn8", "stop")
        await network.until(lambda: not network.living() and network.phase() == "stopped", 60)

    simulated(scene, NAMES)


RECORDS: tuple[tuple[str, Callable[[Group], bytes]], ...] = (
    ("another key", lambda group: renewed(group, "eve").to_json()),
    ("another id", lambda group: renewed(group, id="other").to_json()),
    ("another name", lambda group: renewed(group, name="other").to_json()),
    ("another owner's specification", lambda group: forged(group, spec_text=renewed(group, "eve", uid=EVE).spec_text)),
    ("a changed command", lambda group: forged(group, spec_text=renewed(group, command=["rm", "-rf"]).spec_text)),
    ("no signature", lambda group: forged(group, signature="")),
    ("an older generation", lambda group: renewed(group).to_json()),
    ("a stop that the owner did not order", lambda group: forged(group, phase="stopped", generation=0, order=None)),
    ("a generation that the owner did not begin", lambda group: forged(group, generation=0)),
    ("a deletion of an older version", lambda group: forged(renewed(group), phase="deleted")),
    ("no record", lambda group: b""),
    ("10 MB", lambda group: b" " * 10_000_000 + group.to_json()),
    ("10,000 lists", lambda group: b"[" * 10_000),
)


@pytest.mark.parametrize("make", [case[1] for case in RECORDS], ids=[case[0] for case in RECORDS])
@pytest.mark.parametrize("step", ["accept", "learn"])
def test_a_forged_record(step: str, make: Callable[[Group], bytes]) -> None:
    async def attack(network: Network, group: Group) -> None:
        for node in network.nodes.values():
            with pytest.raises(ProbingError) as refused:
                await agree(node, peer("gn7"), **{step: proposal(make(group))})
            assert refused.value.message.isprintable()

    attacked(attack)


@pytest.mark.parametrize(
    "fields",
    [
        {"prepare": pb.Ballot(counter=1_000_003, node="gn9")},
        {"accept": proposal(record().to_json(), node="gn9")},
        {"learn": proposal(record().to_json(), node="gn9")},
    ],
)
def test_a_node_that_is_no_member(fields: Mapping[str, Any]) -> None:
    async def attack(network: Network, group: Group) -> None:
        for node in network.nodes.values():
            with pytest.raises(PrivilegeError, match="gn9 is not a node of group llama"):
                await agree(node, peer("gn9"), **fields)

    attacked(attack)


def test_a_member_that_proposes_in_the_name_of_another() -> None:
    async def attack(network: Network, group: Group) -> None:
        with pytest.raises(PrivilegeError, match="gn7 proposes in the name of node gn8"):
            await agree(network.nodes["gn6"], peer("gn7"), prepare=pb.Ballot(counter=1_000_003, node="gn8"))

    attacked(attack)


@pytest.mark.parametrize("counter", [0, (1 << 48) + 1, (1 << 64) - 1])
def test_a_ballot_out_of_bounds(counter: int) -> None:
    async def attack(network: Network, group: Group) -> None:
        for step in (
            {"prepare": pb.Ballot(counter=counter, node="gn7")},
            {"accept": proposal(group.to_json(), counter)},
        ):
            with pytest.raises(ProbingError):
                await agree(network.nodes["gn6"], peer("gn7"), **step)

    attacked(attack)


@pytest.mark.parametrize("name", ["", "../etc", "a\x1b[2J", "a" * 64, "a\n"])
def test_a_name_that_is_no_name_of_a_group(name: str) -> None:
    async def attack(network: Network, group: Group) -> None:
        node = network.nodes["gn6"]
        for step in ({"rows": True}, {"lease": 1}, {"port": 1}, {"prepare": pb.Ballot(counter=1, node="gn7")}):
            with pytest.raises(FormatError):
                await agree(node, peer("gn7"), group=name, **step)
        for change in ({"stop": True}, {"create": group.to_json()}, {"order": b"{}"}):
            with pytest.raises(UsageError) as refused:
                await node.call(lambda groups, c=change: groups.group(pb.GroupRequest(name=name, **c), user()))
            assert refused.value.message.isprintable()

    attacked(attack)


def test_messages_about_unknown_groups_leave_room_for_others() -> None:
    async def attack(network: Network, group: Group) -> None:
        node = network.nodes["gn6"]
        for number in range(2003):
            for step in ({"rows": True}, {"lease": 1}):
                await agree(node, peer("gn7"), group=f"g{number}", **step)
        assert set(node.records.entries) == {"llama"}

    attacked(attack)


def test_groups_that_are_not_created_leave_room_for_others() -> None:
    async def attack(network: Network, group: Group) -> None:
        asyncio.get_running_loop().disk_s = 0.0  # type: ignore[attr-defined]
        gn6 = network.nodes["gn6"]
        for number in range(1031):
            name = f"g{number}"
            # There is no group to change or stop; the voters are asked for it.
            new = record(name=name, workers=WORKERS, version=2, uid=EVE, owner="eve")
            for request in (pb.GroupRequest(name=name, create=new.to_json()), pb.GroupRequest(name=name, stop=True)):
                with pytest.raises((NotFound, UsageError), match=r"there is no group|knows no group"):
                    await gn6.call(lambda groups, request=request: groups.group(request, user(EVE)))
        other = record(name="other", workers=WORKERS)
        assert await network.create("gn7", other) == other
        for name in NAMES:
            assert set(network.nodes[name].records.entries) == {"llama", "other"}
            assert set(network.nodes[name].disk.records) == {"llama", "other"}

    attacked(attack)


def test_no_more_groups_than_a_node_keeps() -> None:
    async def scene(network: Network) -> None:
        node = network.nodes["gn6"]
        asyncio.get_running_loop().disk_s = 0.0  # type: ignore[attr-defined]
        for number in range(1024):
            node.records.entries[f"g{number}"] = Entry()
        with pytest.raises(Overloaded, match="this node has 1024 groups"):
            await network.create("gn6", record(workers=("gn6-0",)))
        # What is known stays in use.
        group = record(workers=("gn6-0",), name="g7")
        await network.ask("gn6", pb.GroupRequest(name="g7", create=group.to_json()))

    simulated(scene, ["gn6"])


def test_a_user_leaves_room_for_the_groups_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_peers, "_MAX_OWNED", 7)
    monkeypatch.setattr(group_peers, "_MAX_OWNED_BYTES", 30_000)

    async def scene(network: Network) -> None:
        node = network.nodes["gn6"]

        async def create(name: str, **fields: Any) -> None:
            group = record(workers=("gn6-0",), name=name, **fields)
            caller = user(group.spec.uid)
            await node.call(lambda g: g.group(pb.GroupRequest(name=name, create=group.to_json()), caller))

        for number in range(5):
            await create(f"g{number}")
        with pytest.raises(Overloaded, match="a user may have 7 with"):
            await create("large", env={"NOTE": "x" * 30_000})
        for number in range(5, 7):
            await create(f"g{number}")
        with pytest.raises(Overloaded, match="a user may have 7 with"):
            await create("g7")
        await create("eve", uid=EVE, owner="eve")

    simulated(scene, ["gn6"])


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (b"", UsageError),
        (b"[" * 10_000, UsageError),
        (b"{}", UsageError),
        (b" " * 10_000_000, UsageError),
        (json.dumps({"group": "llama", "action": "start", "generation": 2, "version": 1}).encode(), PrivilegeError),
        (json.dumps({"group": "llama", "action": "explode", "generation": 2, "version": 1}).encode(), UsageError),
        (json.dumps({"group": "llama", "action": "stop", "generation": 10**400, "version": 1}).encode(), ProbingError),
    ],
)
def test_a_malformed_order(data: bytes, kind: type[ProbingError]) -> None:
    async def attack(network: Network, group: Group) -> None:
        with pytest.raises(kind) as refused:
            await network.ask("gn7", pb.GroupRequest(name="llama", order=data))
        assert len(refused.value.message) < 5_000

    attacked(attack)


def test_an_order_of_another_user() -> None:
    async def attack(network: Network, group: Group) -> None:
        order = order_of(group, "stop", key_of("eve"))
        with pytest.raises(PrivilegeError, match="is not signed by its owner ada"):
            await network.ask("gn7", pb.GroupRequest(name="llama", order=order.to_json()))

    attacked(attack)


def test_a_replayed_start_after_a_stop() -> None:
    async def scene(network: Network) -> None:
        new = await network.create("gn6", record(workers=WORKERS, grace_s=3.0))
        start = order_of(new, "start", key_of()).to_json()
        await network.ask("gn6", pb.GroupRequest(name="llama", order=start))
        await network.until(lambda: len(network.living()) == 3 and network.phase() == "running", 60)
        ran = network.nodes["gn7"].known()
        assert ran is not None
        # To repeat an order that is in force changes nothing.
        assert (await network.ask("gn8", pb.GroupRequest(name="llama", order=start))).generation == 1
        await network.order("gn6", "stop")
        with pytest.raises(UsageError, match="was changed meanwhile"):
            await network.ask("gn8", pb.GroupRequest(name="llama", order=start))
        # A record that says so is refused, too: the owner's last order is to stop.
        for generation in (1, 2, 3):
            value = forged(ran, generation=generation)
            for step in ("accept", "learn"):
                with pytest.raises(FormatError, match="is older than the record here"):
                    await agree(network.nodes["gn7"], peer("gn8"), **{step: proposal(value, node="gn8")})
        await network.until(lambda: not network.living(), 60)
        await asyncio.sleep(60)
        assert not network.living()

    simulated(scene, NAMES)


@pytest.mark.parametrize(
    ("caller", "make", "problem"),
    [
        (
            user(EVE),
            lambda: record(name="other", workers=WORKERS),
            "uid 1001 has no right to create a group of uid 1000",
        ),
        (user(), lambda: record(name="third", workers=WORKERS), "the request and the record name two groups"),
        (user(), lambda: record(name="other", workers=WORKERS, version=2), "there is no group other"),
        # No finding about its job would be about the group.
        (user(), lambda: record(name="none", workers=WORKERS), "a job cannot have the name none"),
    ],
)
def test_a_group_that_is_not_created(caller: Caller, make: Callable[[], Group], problem: str) -> None:
    async def attack(network: Network, group: Group) -> None:
        new = make()
        named = "none" if new.spec.name == "none" else "other"
        request = pb.GroupRequest(name=named, create=new.to_json())
        with pytest.raises(ProbingError, match=problem):
            await network.nodes["gn6"].call(lambda groups: groups.group(request, caller))

    attacked(attack)


def test_a_new_group_begins_with_what_its_owner_signed() -> None:
    async def scene(network: Network) -> None:
        new = record(workers=WORKERS)
        started = new.ordered(order_of(new, "start", key_of()), 7).running(7, address="10.0.0.9", port=29507)
        made = await network.create("gn6", started)
        assert made == new
        await asyncio.sleep(30)
        assert not network.living()

    simulated(scene, NAMES)


def test_a_group_of_another_user_with_the_same_name() -> None:
    async def attack(network: Network, group: Group) -> None:
        for fields in ({"version": 1}, {"version": 2}):
            other = renewed(group, "eve", uid=EVE, **fields)
            with pytest.raises(PrivilegeError, match="group llama belongs to ada"):
                await network.nodes["gn7"].call(
                    lambda groups, g=other: groups.group(pb.GroupRequest(name="llama", create=g.to_json()), user(EVE))
                )

    attacked(attack)


def test_a_launcher_from_another_machine() -> None:
    async def attack(network: Network, group: Group) -> None:
        async def reports() -> AsyncIterator[pb.WorkReport]:
            yield pb.WorkReport(number=1, workers=["gn6-1"])

        with pytest.raises(PrivilegeError, match="a launcher has to run on node gn6 itself"):
            await network.nodes["gn6"].call(lambda groups: groups.launchers.work(reports(), network, peer("gn7")))

    attacked(attack)


@pytest.mark.parametrize(
    ("uid", "workers", "rows", "kind"),
    [
        (EVE, ["gn6-0"], b"", PrivilegeError),
        (EVE, ["gn7-0"], b"", UsageError),
        (EVE, [], b"", UsageError),
        (EVE, ["gn6-1"] * 2, b"", UsageError),
        (EVE, ["\x1b[2J-0"], b"", UsageError),
        (EVE, ["gn6-1"], b"[" * 10_000, FormatError),
        (EVE, ["gn6-1"], b" " * 10_000_000, FormatError),
    ],
)
def test_a_launcher_that_is_refused(uid: int, workers: list[str], rows: bytes, kind: type[ProbingError]) -> None:
    async def attack(network: Network, group: Group) -> None:
        async def reports() -> AsyncIterator[pb.WorkReport]:
            yield pb.WorkReport(number=1, workers=workers, rows=rows)

        with pytest.raises(kind) as refused:
            await network.nodes["gn6"].call(lambda groups: groups.launchers.work(reports(), network, user(uid)))
        assert refused.value.message.isprintable()

    attacked(attack)


def test_a_launcher_of_another_user_cannot_say_that_the_older_ranks_have_ended() -> None:
    async def scene(network: Network) -> None:
        await network.create("gn6", record(workers=WORKERS, grace_s=3.0))
        await network.order("gn6", "start")
        await network.until(lambda: len(network.living()) == 3, 60)
        # The launcher of gn8 dies, its rank lives on, and another user takes the name of its worker.
        node = network.nodes["gn8"]
        await node.launcher.stop()
        await asyncio.sleep(30)
        rows = [WorkerRow("gn8-0", "llama", 2, seen=1 << 50, clear=True, state="waiting")]

        async def reports() -> AsyncIterator[pb.WorkReport]:
            for number in range(1, 1009):
                yield pb.WorkReport(number=number, workers=["gn8-0"], rows=rows_json(rows))
                await asyncio.sleep(0.5)

        async def write(order: pb.WorkOrder) -> None:
            del order

        context: Any = type("Context", (), {"write": staticmethod(write)})()
        lying = asyncio.create_task(node.call(lambda groups: groups.launchers.work(reports(), context, user(EVE))))
        await network.order("gn6", "restart")
        await asyncio.sleep(120)
        assert [process.generation for process in network.living()] == [1]
        lying.cancel()
        await asyncio.gather(lying, return_exceptions=True)
        await asyncio.sleep(15)
        node.launcher.start()
        await network.until(lambda: sorted(p.generation for p in network.living()) == [2, 2, 2], 60)

    simulated(scene, NAMES)


def test_a_peer_that_claims_rows_of_workers_of_other_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene(network: Network) -> None:
        await network.create("gn6", record(workers=WORKERS, grace_s=3.0, restart="on_failure"))
        await network.order("gn6", "start")
        await network.until(lambda: len(network.living()) == 3 and network.phase() == "running", 60)
        liar = network.nodes["gn7"].groups
        assert liar is not None
        honest = liar._workers.of_group

        def lies(group: str, uid: int) -> list[WorkerRow]:
            more = [
                WorkerRow(worker, name, 1, seen=9, clear=True, state="ended", exit_code=1, rank=rank)
                for rank, worker in enumerate(WORKERS)
                for name in ("llama", "other")
                if worker != "gn7-0"
            ]
            return [*honest(group, uid), *more]

        monkeypatch.setattr(liar._workers, "of_group", lies)
        await asyncio.sleep(60)
        assert sorted(process.generation for process in network.living()) == [1, 1, 1]
        # Its own rank it can report as it likes.
        assert network.phase() == "running"

    simulated(scene, NAMES)


def test_whatever_is_in_a_record_the_tables_show_it() -> None:
    async def scene(network: Network) -> None:
        fields = {"command": ("sh", "-c", "echo \x1b[2J\n"), "env": {"A": "\x1b"}, "owner": "\u4f60\u597d"}
        await network.create("gn6", record(workers=WORKERS, version=1, **fields))
        for name in NAMES:
            groups = network.nodes[name].groups
            assert groups is not None
            rows = [{**row, "ts": 1, "node": name} for row in groups.group_rows()]
            assert batch_of("cluster.groups", rows).num_rows == 1

    simulated(scene, NAMES)


def test_an_administrator_may_stop_and_nothing_else() -> None:
    async def scene(network: Network) -> None:
        await network.create("gn6", record(workers=WORKERS, grace_s=3.0))
        await network.order("gn6", "start")
        await network.until(lambda: len(network.living()) == 3, 60)
        root = Caller("unix", "0", 7, scopes=frozenset((Scope.ADMIN,)))
        request = pb.GroupRequest(name="llama", stop=True)
        await network.nodes["gn7"].call(lambda groups: groups.group(request, root))
        await network.until(lambda: not network.living(), 60)
        group = network.nodes["gn6"].known()
        assert group is not None
        assert (group.phase, group.reason) == ("stopped", "stop by unix: uid 0, pid 7")
        with pytest.raises(NotFound):
            await network.nodes["gn7"].call(lambda groups: groups.group(pb.GroupRequest(name="other", stop=True), root))

    simulated(scene, NAMES)
