"""A limit that deletes rows: what the client asks first, of all nodes, and what it says."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from client_fake_node import SECOND, FakeNode

from probing.api.errors import UsageError
from probing.api.proto.probing.v1 import node_pb2 as pb
from probing.client.cluster import Cluster

Run = Callable[..., tuple[int, str, str]]
DOOMED = pb.Deletion(segments=3, rows=12_345, bytes=1_200_000, begins_ns=2_000_000_000 * SECOND)
LOWER = ("config", "store.max_age_days=1", "--all-nodes")


@pytest.fixture
def nodes(pair: tuple[FakeNode, FakeNode]) -> tuple[FakeNode, FakeNode]:
    for node in pair:
        node.settings["store.max_age_days"] = "7.0"
    return pair


def changed(*nodes: FakeNode) -> list[tuple[str, str, bool]]:
    asked = [request for node in nodes for request in node.configured]
    return [
        (request.key, request.value, request.yes) for request in asked if request.HasField("value") or request.reset
    ]


def test_one_node_that_would_delete_keeps_all_from_the_change(nodes: tuple[FakeNode, FakeNode], ctl: Run) -> None:
    nodes[1].effect = DOOMED
    code, out, err = ctl(*LOWER)
    assert (code, out) == (2, "")
    message, hint = err.splitlines()
    assert "store.max_age_days = 1 would delete 12,345 rows (1.14 MiB in 3 segments) of beta" in message
    assert hint.startswith("hint: confirm it with --yes: rows are deleted from 2033-05-18 03:33:20Z on")
    assert changed(*nodes) == []
    nodes[0].effect = DOOMED
    assert "would delete 24,690 rows (2.29 MiB in 6 segments) of 2 nodes" in ctl(*LOWER)[2]
    assert changed(*nodes) == []


def test_confirmed_it_goes_to_all_and_says_what_goes(nodes: tuple[FakeNode, FakeNode], ctl: Run) -> None:
    for node in nodes:
        node.effect = node.waits = DOOMED
    code, out, _ = ctl(*LOWER, "--yes")
    assert code == 0
    assert changed(*nodes) == [("store.max_age_days", "1", True)] * 2
    assert "DELETES" in out.splitlines()[0]
    # The terminal may be narrow.
    (first, _) = json.loads(ctl("config", "store.max_age_days", "--all-nodes", "-f", "json")[1])
    assert {key: value for key, value in first.items() if key.startswith("deletes")} == {
        "deletes_segments": 3,
        "deletes_rows": 12_345,
        "deletes_bytes": 1_200_000,
        "deletes_from": "2033-05-18T03:33:20.000000000Z",
    }


def test_a_reset_asks_first_as_well(nodes: tuple[FakeNode, FakeNode], ctl: Run) -> None:
    nodes[0].effect = DOOMED
    code, _, err = ctl("config", "store.max_age_days", "--reset")
    assert code == 2
    assert "store.max_age_days --reset would delete 12,345 rows" in err
    assert changed(*nodes) == []
    assert nodes[0].configured[-1].propose_reset


def test_an_older_node_is_changed_only_with_confirmation(nodes: tuple[FakeNode, FakeNode], ctl: Run) -> None:
    """It would delete at once: it takes a proposal for a question, and shows the setting."""
    nodes[1].effect = None
    code, _, err = ctl(*LOWER)
    assert code == 2
    assert "the probingd of beta is older, and does not say what it would delete" in err
    assert changed(*nodes) == []
    assert ctl(*LOWER, "--yes")[0] == 0
    assert changed(*nodes) == [("store.max_age_days", "1", True)] * 2


def test_what_deletes_nothing_needs_no_confirmation(nodes: tuple[FakeNode, FakeNode], ctl: Run) -> None:
    assert ctl(*LOWER)[0] == 0
    assert changed(*nodes) == [("store.max_age_days", "1", False)] * 2
    assert ctl("config", "sampling.hz=5")[0] == 0
    # Only limits of the store are asked about first.
    assert len(nodes[0].configured) == 3


def test_the_python_client_is_held_to_it_as_well(nodes: tuple[FakeNode, FakeNode]) -> None:
    nodes[0].effect = DOOMED
    with Cluster(nodes[0].address) as cluster:
        with pytest.raises(UsageError, match="would delete 12,345 rows"):
            cluster.config("store.max_age_days", "1")
        assert changed(*nodes) == []
        cluster.config("store.max_age_days", "1", yes=True)
    assert changed(*nodes) == [("store.max_age_days", "1", True)]
