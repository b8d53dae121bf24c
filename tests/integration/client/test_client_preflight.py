"""``preflight`` of simulated nodes: what it asks them, what it shows, and how it ends."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from client_fake_node import FakeNode

from probing.api.proto.probing.v1 import node_pb2 as pb
from probing.diagnosis.preflight.facts import (
    FileSystem,
    Interface,
    Master,
    NodeFacts,
    Port,
    Problem,
    Reached,
    Version,
)

Run = Callable[..., tuple[int, str, str]]
GIB = 1 << 30
ENV = """
MASTER_ADDR=alpha
MASTER_PORT=29511
WORLD_SIZE=2
NCCL_SOCKET_IFNAME=bond
[alpha]
RANK=0
LOCAL_RANK=0
[beta]
RANK=1
LOCAL_RANK=0
"""


def facts(name: str) -> NodeFacts:
    versions = {"python": "3.11.9", "torch": "2.13.0", "cuda": "12.9", "nccl": "2.27.5", "kernel": "6.8"}
    return NodeFacts(
        name,
        "boot-1",
        versions=tuple(Version(k, v) for k, v in versions.items()),
        interfaces=(Interface("lo", "unknown"), Interface("bond0", "up")),
        ports=(Port("mlx5_0", 1, "InfiniBand", "ACTIVE", "LinkUp", 400.0),),
        file_systems=(
            FileSystem("/", "ext4", True, False, 500 * GIB, 300 * GIB),
            FileSystem("/dev/shm", "tmpfs", True, False, 64 * GIB, 63 * GIB),
        ),
        master=Master(("10.0.0.1",), name == "alpha", "free" if name == "alpha" else None),
        reached=(Reached("127.0.0.1:7001", 90_000), Reached("127.0.0.1:7002", 110_000)),
    )


@pytest.fixture
def nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[FakeNode, FakeNode]]:
    """Two healthy nodes on one machine."""
    with FakeNode(tmp_path, "alpha") as alpha, FakeNode(tmp_path, "beta") as beta:
        for node, port in ((alpha, 7001), (beta, 7002)):
            node.preflight = facts(node.name)
            node.peers = [pb.Peer(node=node.name, address=f"127.0.0.1:{port}", state="healthy")]
        monkeypatch.setenv("COLUMNS", "80")
        yield alpha, beta


def addresses(nodes: tuple[FakeNode, FakeNode]) -> str:
    return f"--nodes={nodes[0].address},{nodes[1].address}"


def test_healthy_nodes_pass(ctl: Run, nodes: tuple[FakeNode, FakeNode], tmp_path: Path) -> None:
    env = tmp_path / "job.env"
    env.write_text(ENV)
    code, out, err = ctl("preflight", addresses(nodes), "--env-file", str(env), "--python", "/opt/python")
    assert (code, err) == (0, "")
    assert "fail" not in out
    assert max(map(len, out.splitlines())) <= 80
    assert "pass    ranks: 2 ranks cover 0 to 1, and LOCAL_RANK once on each node" in out
    assert "nothing prevents the job" in out
    # AND the matrix has the round trips of both ways
    lines = out.splitlines()
    start = lines.index("round trips of 2 nodes, from row to column")
    assert [line.split() for line in lines[start + 1 : start + 4]] == [
        ["alpha", "beta"],
        ["alpha", "-", "110", "us"],
        ["beta", "90", "us", "-"],
    ]
    # AND each node was asked once, for what the options name
    for node in nodes:
        [asked] = node.preflight_asked
        assert (asked.python, asked.master_addr, asked.master_port) == ("/opt/python", "alpha", 29511)
        assert list(asked.peers) == ["127.0.0.1:7001", "127.0.0.1:7002"]


def test_faults_end_with_3_and_are_named(ctl: Run, nodes: tuple[FakeNode, FakeNode]) -> None:
    nodes[1].preflight = replace(
        facts("beta"),
        reached=(Reached("127.0.0.1:7001", None, "Connection refused"),),
        versions=(Version("python", "3.12.0"), Version("kernel", "6.8")),
    )
    nodes[1].ahead_ns = 7 * 10**9
    code, out, _ = ctl("preflight", addresses(nodes), "--python", "/opt/python", "--iface", "ib0")
    assert code == 3
    first = [line for line in out.splitlines() if line.startswith("fail")]
    assert any("beta does not reach alpha: Connection refused" in line for line in first)
    assert any("Python differs: 3.11.9 on alpha; 3.12.0 on beta" in line for line in first)
    assert any("has no interface ib0" in line for line in first)
    assert "lost" in out
    assert "do not start the job" in out


def test_the_clock_of_a_node_is_measured(ctl: Run, nodes: tuple[FakeNode, FakeNode]) -> None:
    nodes[1].ahead_ns = 20 * 10**9
    code, out, _ = ctl("preflight", addresses(nodes), "-f", "json")
    assert code == 3
    found = json.loads(out)
    offsets = {one["node"]: one["offset_ns"] for one in found["clocks"]}
    assert abs(offsets["beta"] - offsets["alpha"] - 20e9) < 5e9
    assert {r["state"] for r in found["results"] if r["check"] == "clocks"} == {"fail"}


def test_json_has_results_facts_and_round_trips(ctl: Run, nodes: tuple[FakeNode, FakeNode]) -> None:
    code, out, _ = ctl("preflight", addresses(nodes), "-f", "json")
    found = json.loads(out)
    assert (code, found["ok"]) == (0, True)
    assert set(found) == {"ok", "results", "round_trips", "clocks", "nodes"}
    assert set(found["results"][0]) == {"check", "state", "text", "nodes", "hint"}
    assert found["round_trips"][0] == {"from": "alpha", "to": "beta", "round_trip_ns": 110_000, "why": None}
    assert [node["node"] for node in found["nodes"]] == ["alpha", "beta"]
    assert ctl("preflight", addresses(nodes), "-f", "csv")[1].startswith("check,state,text,nodes,hint\n")


def test_a_node_that_does_not_answer_fails(ctl: Run, nodes: tuple[FakeNode, FakeNode], tmp_path: Path) -> None:
    code, out, err = ctl("preflight", f"{addresses(nodes)},unix:{tmp_path}/gone.sock")
    assert code == 3
    assert "does not answer" in out
    assert "gone.sock" in err


def test_what_a_node_may_not_do_is_skipped(ctl: Run, nodes: tuple[FakeNode, FakeNode]) -> None:
    why = "the scope admin is needed, and TCP gives only read"
    nodes[0].preflight = replace(facts("alpha"), problems=(Problem("versions", why),))
    code, out, _ = ctl("preflight", addresses(nodes), "--python", "/opt/python")
    assert code == 0
    assert f"skipped versions: the versions of alpha are not known: {why}"[:70] in out


def test_hostile_facts_are_refused_and_escaped(ctl: Run, nodes: tuple[FakeNode, FakeNode]) -> None:
    nodes[0].preflight = replace(facts("alpha"), interfaces=(Interface("\x1b[31mred", "up"),))
    nodes[1].preflight = replace(facts("beta"), node="alpha", boot_id=7)  # type: ignore[arg-type]
    code, out, _ = ctl("preflight", addresses(nodes), "--iface", "eth0")
    assert code == 3
    assert "\x1b" not in out
    assert "beta does not answer: the facts are malformed" in out


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("--python", "python3"), "--python python3 is not a path"),
        (("--env-file", "/no/such/file"), "cannot read --env-file"),
        (("--env-file", "/dev/null/x"), "cannot read --env-file"),
    ],
)
def test_wrong_options_are_usage_errors(
    ctl: Run, nodes: tuple[FakeNode, FakeNode], words: tuple[str, ...], text: str
) -> None:
    code, _, err = ctl("preflight", addresses(nodes), *words)
    assert code == 2
    assert text in err
