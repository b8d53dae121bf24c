"""Where the ranks of a group meet: a record that another node sends does not decide it."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from dataclasses import replace
from types import SimpleNamespace

import pytest
from group_records import running

from probing.api.errors import FormatError, PeerError
from probing.api.proto.probing.v1 import node_pb2 as pb
from probing.client.launching import Link
from probing.daemon.groups.workers import Workers
from probing.daemon.service import group_votes
from probing.daemon.service.group_peers import Entry, Records
from probing.daemon.service.group_votes import GroupVotes
from probing.daemon.service.groups import Groups
from probing.groups.group import Group
from probing.groups.spec import PORTS

GROUP = running()
MASTER = GROUP.ranks()[0].node


def address(node: str) -> str:
    if node != MASTER:
        raise PeerError(f"node {node} is not known here")
    return "[2001:db8::6]:7070"


def test_ranks_meet_where_their_own_node_says() -> None:
    groups = Groups("gn7", SimpleNamespace(address=address), Records(None), Workers("gn7", 2, 5))  # type: ignore[arg-type]
    forged = replace(GROUP, address="203.0.113.9")
    order = groups.launchers.record_for(forged, forged.to_json())
    assert order.master == "2001:db8::6"
    link = Link.__new__(Link)
    link.orders, link._wake, link.problem = [], lambda: None, None  # type: ignore[assignment]
    link._note(order)
    [group] = link.orders
    assert isinstance(group, Group)
    assert {rank.master_addr for rank in group.ranks()} == {"2001:db8::6"}


@pytest.mark.parametrize("port", [GROUP.spec.master_port - 1, GROUP.spec.master_port + PORTS, 22])
def test_another_port_than_those_of_the_specification_is_refused(port: int) -> None:
    with pytest.raises(FormatError, match="out of bounds"):
        Group.from_json(replace(GROUP, port=port).to_json())


def test_groups_that_start_together_meet_at_ports_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    def free_port(first: int, taken: Collection[int]) -> int:
        return next(port for port in range(first, first + PORTS) if port not in taken)

    monkeypatch.setattr(group_votes, "free_port", free_port)
    names = [f"g{number}" for number in range(7)]

    async def found() -> list[int]:
        records = Records(None)  # type: ignore[arg-type]
        records.entries.update({name: Entry() for name in names})
        votes = GroupVotes("gn6", records, Workers("gn6", 2, 5))
        requests = [pb.AgreeRequest(group=name, port=29500) for name in [*names, names[3]]]
        return [reply.port for reply in await asyncio.gather(*map(votes.agree, requests))]

    # A group that asks again gets its port again.
    assert asyncio.run(found()) == [*range(29500, 29507), 29503]
