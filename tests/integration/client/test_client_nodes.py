"""``nodes``, ``--where``, and nodes that the target knows to have failed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from client_fake_node import FakeNode

from probing.api.errors import PartialAnswer, QueryRejected
from probing.api.proto.probing.v1 import node_pb2 as pb
from probing.client.cluster import Cluster
from probing.client.diagnosis.asking import gathered

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def labelled(pair: tuple[FakeNode, FakeNode]) -> tuple[FakeNode, FakeNode]:
    alpha, beta = pair
    alpha.peers = [
        pb.Peer(node="alpha", address=alpha.address, state="healthy", labels={"rack": "r7"}),
        pb.Peer(node="beta", address=beta.address, state="healthy", labels={"rack": "r8"}),
        pb.Peer(node="gamma", address="127.0.0.1:1", state="failed", labels={"rack": "r8"}, since_ns=10**18),
    ]
    return pair


def _ranks(out: str) -> list[int]:
    return [row["rank"] for row in json.loads(out)]


def test_labels_choose_the_nodes_of_any_command(labelled: tuple[FakeNode, FakeNode], ctl: Run) -> None:
    everywhere = _ranks(ctl("ps", "--all-nodes", "-f", "json")[1])
    code, out, err = ctl("ps", "--where", "rack=r7", "-f", "json")
    assert (code, err) == (0, "")
    there = _ranks(ctl("ps", "--where=rack=r*,node=beta", "-f", "json")[1])
    assert set(_ranks(out)) | set(there) == set(everywhere)
    assert not set(_ranks(out)) & set(there)
    code, _, err = ctl("ps", "--where", "rack=r9")
    assert (code, err.splitlines()[0]) == (1, "error: no known node has rack=r9")
    assert ctl("ps", "--where", "rack")[0] == 2
    assert ctl("ps", "--where", "rack=r7", "--nodes", "a:1")[0] == 2


def test_a_failed_node_is_named_and_not_waited_for(
    labelled: tuple[FakeNode, FakeNode], ctl: Run, tmp_path: Path
) -> None:
    report = tmp_path / "report.json"
    code, out, err = ctl("query", "--all-nodes", "SELECT count(*) AS n FROM process.processes", "--report", str(report))
    assert code == 0
    assert "warning: node gamma (127.0.0.1:1) is missing: failed since 2001-09-09T01:46:40" in err
    found: dict[str, Any] = json.loads(report.read_text())
    assert found["asked"] == ["127.0.0.1:1", labelled[0].address, labelled[1].address]
    assert [(f["node"], f["kind"]) for f in found["failed"]] == [("gamma", "PeerError")]
    code, out, err = ctl("query", "--all-nodes", "--strict", "SELECT count(*) AS n FROM process.processes")
    assert (code, out) == (4, "")
    assert "1 of 1 nodes did not answer: gamma" in err


def test_a_failed_node_is_missing_in_a_diagnosis_and_in_top(labelled: tuple[FakeNode, FakeNode], ctl: Run) -> None:
    with Cluster(labelled[0].address, all_nodes=True) as cluster:
        cluster.query("SELECT count(*) AS n FROM process.processes")
        with pytest.raises(PartialAnswer) as caught:
            gathered(cluster, None)
    assert "missing: gamma (failed since" in caught.value.hint
    _, out, err = ctl("top", "--once", "--all-nodes")
    assert "gamma" in out + err


def test_nodes_shows_states_and_labels(pair: tuple[FakeNode, FakeNode], ctl: Run) -> None:
    alpha = pair[0]
    columns = json.loads(ctl("tables", "cluster.members", "-f", "json")[1])
    assert {"labels", "since", "clock_offset_ns", "problem"} <= {row["column"] for row in columns}
    assert ctl("nodes")[1].split()[:5] == ["NODE", "ADDRESS", "STATE", "SINCE", "LABELS"]

    def reject_new_columns() -> None:
        alpha.error = QueryRejected("there is no column labels") if "labels" in alpha.asked[-1] else None

    alpha.meanwhile = reject_new_columns
    code, out, err = ctl("nodes")
    assert code == 0
    assert out.split()[:4] == ["NODE", "ADDRESS", "STATE", "VERSION"]
    assert "warning: the daemon is older than probingctl" in err
