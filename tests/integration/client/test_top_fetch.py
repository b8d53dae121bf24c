"""How often the live views ask nodes."""

from __future__ import annotations

from pathlib import Path

import pytest
from client_fake_node import FakeNode, process

from probing.client.cluster import Cluster
from probing.client.top.fetch import Fetcher
from probing.client.top.health import Fetched


def test_new_nodes_are_asked_for_their_other_tables_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = [
        FakeNode(tmp_path, f"n{rank}", {"process.processes": [process(f"n{rank}", rank, 1000 + rank)]})
        for rank in range(3)
    ]
    delivered: list[Fetched] = []
    hurried: list[int] = []
    try:
        with Cluster(nodes[0].address, nodes=[node.address for node in nodes], timeout=20) as cluster:
            fetcher = Fetcher(cluster, "true", 3600, delivered.append, lambda error: pytest.fail(error.message))
            monkeypatch.setattr(fetcher.repeater, "hurry", lambda: hurried.append(len(delivered)))
            for _ in range(3):
                fetcher._refresh()
    finally:
        for node in nodes:
            node.stop()
    assert [len(fetched.nodes) for fetched in delivered] == [3, 3, 3]
    assert hurried == [1]
