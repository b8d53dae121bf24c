"""A connection that breaks during a long call: the call is made again, and the node is not taken for silent."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from client_fake_node import FakeNode, operation

from probing.api.proto.probing.v1 import node_pb2 as pb
from probing.client.cluster import Cluster
from probing.client.wire import node as wire_node


class Breaking(FakeNode):
    """Breaks off ``breaks`` queries."""

    breaks = 0

    def Query(self, request: pb.QueryRequest, context: grpc.ServicerContext) -> Iterator[pb.QueryReply]:
        if self.breaks:
            self.breaks -= 1
            context.abort(grpc.StatusCode.UNAVAILABLE, "Socket closed")
        yield from super().Query(request, context)


def test_a_long_call_that_breaks_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Each call is as long as one that has taken a while.
    monkeypatch.setattr(wire_node, "_PATIENCE_S", 0.0)
    tables = {name: {"comm.ops": [operation(name, 0, seq, ts=seq) for seq in range(3)]} for name in ("a", "b")}
    with (
        Breaking(tmp_path, "a", tables["a"]) as first,
        FakeNode(tmp_path, "b", tables["b"]) as second,
        Cluster(nodes=[first.address, second.address]) as cluster,
    ):
        first.breaks = 1
        assert cluster.query("SELECT count(*) AS n FROM comm.ops").to_pylist() == [{"n": 6}]
        # A second break is a failure, which the next question does not inherit.
        first.breaks = 2
        assert cluster.query("SELECT count(*) AS n FROM comm.ops").to_pylist() == [{"n": 3}]
        assert cluster.query("SELECT count(*) AS n FROM comm.ops").to_pylist() == [{"n": 6}]
