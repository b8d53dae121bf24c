"""``group status`` and ``group logs`` over nodes that know a group, and one that does not answer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest
from client_fake_node import FakeNode
from group_records import record

from probing.api.proto.probing.v1 import node_pb2 as pb
from probing.client.cluster import Cluster
from probing.client.commands import group

Run = Callable[..., tuple[int, str, str]]


class GroupNode(FakeNode):
    """A node that knows the group llama, if ``knows``, and answers each question for its log with a line."""

    knows = True

    def Group(self, request: pb.GroupRequest, context: grpc.ServicerContext) -> pb.GroupReply:
        return pb.GroupReply(node=self.name, groups=[record().to_json()] if self.knows else [])

    def GroupLog(self, request: pb.GroupLogRequest, context: grpc.ServicerContext) -> pb.GroupLogReply:
        start = max(0, getattr(request, "from"))
        return pb.GroupLogReply(node=self.name, data=f"line {start}\n".encode(), end=start + 1)


@pytest.fixture
def nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[GroupNode]]:
    made = [GroupNode(tmp_path, name) for name in ("gn6", "gn7")]
    made[0].peers = [pb.Peer(node=node.name, address=node.address, state="healthy") for node in made]
    made[0].insert(
        "cluster.members",
        [{"node": "gn6", "ts": 1, "member": node.name, "address": node.address, "state": "healthy"} for node in made],
    )
    monkeypatch.setenv("PROBING_TARGET", made[0].address)
    yield made
    for node in made:
        node.stop()


def test_a_group_that_a_silent_node_may_know_is_not_said_to_be_missing(nodes: list[GroupNode], ctl: Run) -> None:
    assert "llama" in ctl("group", "status", "llama")[1]
    nodes[0].knows = False
    nodes[1].stop()
    code, _, err = ctl("group", "status", "llama")
    assert (code, err.splitlines()[0]) == (4, "error: there is no group llama on the nodes that answered")


def test_a_log_that_is_followed_is_not_kept(nodes: list[GroupNode], ctl: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[int] = []
    log = Cluster.group_log

    def asked(cluster: Cluster, name: str, rank: int, start: int) -> tuple[bytes, int]:
        if len(kept) == 4:
            raise KeyboardInterrupt
        found = log(cluster, name, rank, start)
        kept.append(len(cluster.outcomes))
        return found

    monkeypatch.setattr(group, "_FOLLOW_S", 0.0)
    monkeypatch.setattr(Cluster, "group_log", asked)
    code, out, _ = ctl("group", "logs", "llama", "--follow")
    assert (code, out) == (130, "line 0\nline 1\nline 2\nline 3\n")
    assert kept[1:] == [1, 1, 1]
