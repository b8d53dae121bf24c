"""Which record of a group a client believes, and which node it asks to change the record."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any, cast

import pyarrow as pa
import pytest
from group_records import key_of, ordered, record, running, spec_of

from probing.api.proto.probing.v1 import node_pb2 as pb
from probing.client.cluster import Cluster
from probing.client.groups import records
from probing.client.groups.changes import put
from probing.groups.group import Group, created
from probing.groups.keys import OwnerKey


class Nodes:
    """The nodes of a cluster, as a client sees them. ``asked``: the node that was asked for a change."""

    named = False
    outcomes = None

    def __init__(self, known: list[bytes], target: str = "gn9", serving: tuple[str, ...] = ()) -> None:
        self._known, self._target, self._serving = known, target, serving
        self._node = target
        self.asked: list[str] = []

    def groups(self, request: pb.GroupRequest) -> list[bytes]:
        if request.WhichOneof("change") is None:
            return self._known
        self.asked.append(self._node)
        return [request.create]

    def query_all(self, statements: dict[str, str]) -> dict[str, pa.Table]:
        names = ("gn6", "gn7", "gn8", "gn9")
        return {
            "members": pa.table({"member": names, "address": [f"{name}:7070" for name in names]}),
            "workers": pa.table({"node": self._serving, "worker": [f"{name}-0" for name in self._serving]}),
            "waits": pa.table({"group_name": pa.array([], pa.string()), "waits_for": pa.array([], pa.string())}),
        }

    def afresh(self, *, all_nodes: bool, node: str = "") -> Nodes:
        other = Nodes(self._known, self._target, self._serving)
        other.asked, other._node = self.asked, node or self._target
        return other

    def status(self) -> list[tuple[str, Any]]:
        return [("address", pb.StatusReply(node=self._target))]


def seen(nodes: Nodes) -> records.GroupsSeen:
    return records.seen(cast(Cluster, nodes))


def test_the_newest_record_counts() -> None:
    old, new = running(), ordered(running(), "stop")
    renewed = new.renewed(created(spec_of(version=2, command=("true",)), key_of()))
    known = [group.to_json() for group in (old, renewed, new)]
    assert seen(Nodes(known)).groups == {"llama": renewed}


def test_a_record_of_another_key_hides_no_group() -> None:
    # A node may show any record, such as its own group of the same name with a high generation.
    forged = created(spec_of(owner="eve"), key_of("eve"))
    forged = Group.from_json(json.dumps({**asdict(forged), "generation": 1_000_003}).encode())
    known = [forged.to_json(), running().to_json(), running().to_json()]
    assert seen(Nodes(known)).groups == {"llama": running()}


def test_a_malformed_record_hides_no_group(capsys: pytest.CaptureFixture[str]) -> None:
    known = [b"", b"[" * 10_000, running().to_json(), json.dumps({**asdict(running()), "key": "\x1b[2J"}).encode()]
    assert seen(Nodes(known)).groups == {"llama": running()}
    said = capsys.readouterr().err
    assert said.count("a record of a group is left out") == 3
    assert "\x1b[2J" not in said


@pytest.mark.parametrize(
    ("target", "serving", "asked"),
    [
        ("gn7", ("gn6", "gn7"), "gn7"),
        ("gn9", ("gn6", "gn7"), "gn6"),
        # The node of the master does not answer, and the others can agree without it.
        ("gn9", ("gn7", "gn8"), "gn7"),
        ("gn9", (), "gn6"),
    ],
)
def test_a_node_of_the_group_changes_it(target: str, serving: tuple[str, ...], asked: str) -> None:
    group = record(workers=("gn6-0", "gn7-0", "gn8-0"))
    nodes = Nodes([group.to_json()], target, serving)
    records.sent(cast(Cluster, nodes), seen(nodes), group, pb.GroupRequest(name="llama", create=group.to_json()))
    assert nodes.asked == [asked]


def test_a_node_that_comes_new_to_a_group_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OwnerKey, "of_user", key_of)
    nodes = Nodes([record().to_json()], "gn9", ("gn6", "gn7", "gn9"))
    spec = spec_of(version=2, workers=("gn9-0", "gn8-0"), master="gn9")
    put(cast(Cluster, nodes), seen(nodes), spec, dry_run=False)
    assert nodes.asked == ["gn6"]


def test_a_new_group_is_made_by_its_own_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OwnerKey, "of_user", key_of)
    nodes = Nodes([], "gn7", ("gn6", "gn7"))
    put(cast(Cluster, nodes), seen(nodes), spec_of(), dry_run=False)
    assert nodes.asked == ["gn7"]
