"""``health`` over two nodes: what is wrong with their hardware, and what could not be read."""

from __future__ import annotations

import csv
import io
import json
import time
from collections.abc import Callable

import pytest
from client_fake_node import FakeNode

from probing.diagnosis.facts import Facts, Missing, NodeFacts
from probing.diagnosis.facts_file import to_json
from probing.diagnosis.hardware_facts import Disk, FileSystem, Gpu, Hardware, HardwareEvent

Run = Callable[..., tuple[int, str, str]]
WELL = Hardware(gpus=tuple(Gpu(n, name="H100") for n in range(8)), disks=(Disk("nvme0n1", 0.2, 90_000.0),))


def facts(node: str, hardware: Hardware, *missing: Missing) -> bytes:
    now = time.time_ns()
    return to_json(Facts("", "", None, 10.0, now, (NodeFacts(node, now, hardware=hardware),), (), missing=missing))


@pytest.fixture
def nodes(pair: tuple[FakeNode, FakeNode]) -> tuple[FakeNode, FakeNode]:
    now = time.time_ns()
    xid = HardwareEvent("gpu", "xid", now, now, 2, "Xid 79", 3, None, 79)
    full = FileSystem("/data", "ext4", used=0.99, available_bytes=5 << 20)
    pair[0].hardware = facts("alpha", WELL)
    gpus = (*WELL.gpus[:3], Gpu(3, name="H100", state="lost"))
    pair[1].hardware = facts("beta", Hardware(gpus, (xid,), file_systems=(full,)))
    return pair


def test_nodes_that_are_well_and_nodes_that_are_not(ctl: Run, nodes: tuple[FakeNode, FakeNode]) -> None:
    assert ctl("health") == (0, "node alpha: nothing is wrong: 8 GPUs, 1 disk\n", "")
    code, out, _ = ctl("health", "--all-nodes")
    lines = out.splitlines()
    assert code == 3
    assert lines[:2] == ["node alpha: nothing is wrong: 8 GPUs, 1 disk", "warning: node beta: GPU 3 is lost"]
    assert "  GPU 3 reported XID 79, the GPU has fallen off the bus" in lines
    assert "warning: node beta: /data is full: 99%, 5 MiB are left" in lines
    assert "  Do next: Free space on it." in lines


def test_as_objects_and_rows(ctl: Run, nodes: tuple[FakeNode, FakeNode]) -> None:
    code, out, _ = ctl("health", "--all-nodes", "-f", "json")
    alpha, beta = json.loads(out)
    assert code == 3
    assert (alpha["node"], alpha["gpus"], alpha["disks"], alpha["findings"]) == ("alpha", 8, 1, [])
    assert [one["verdict"] for one in beta["findings"]] == ["gpu_fault", "storage_fault"]
    _, out, _ = ctl("health", "--all-nodes", "-f", "csv")
    assert [(row["node"], row["verdict"]) for row in csv.DictReader(io.StringIO(out))] == [
        ("alpha", ""),
        ("beta", "gpu_fault"),
        ("beta", "storage_fault"),
    ]


def test_what_could_not_be_read_is_said(ctl: Run, nodes: tuple[FakeNode, FakeNode]) -> None:
    nodes[0].hardware = facts("alpha", WELL, Missing("history", "the disks cannot be read: time-out"))
    code, out, _ = ctl("health")
    assert out.startswith("node alpha: cannot tell whether something is wrong: 8 GPUs")
    assert (code, out.splitlines()[1]) == (4, "node alpha: not known: the disks cannot be read: time-out")
    nodes[0].hardware = b"\xff"
    code, out, _ = ctl("health")
    assert code == 4
    assert out.startswith("node alpha: the facts are malformed")
    # The formats for programs have no line for it.
    code, out, err = ctl("health", "-f", "json")
    assert (code, json.loads(out)) == (4, [])
    assert err.startswith("warning: node alpha: the facts are malformed")


def test_a_node_that_does_not_answer_is_missing(ctl: Run, nodes: tuple[FakeNode, FakeNode]) -> None:
    nodes[1].stop()
    code, out, err = ctl("health", "--all-nodes")
    assert (code, out) == (4, "node alpha: nothing is wrong: 8 GPUs, 1 disk\n")
    assert "is missing" in err
