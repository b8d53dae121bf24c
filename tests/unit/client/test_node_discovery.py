"""``--nodes dns:`` and ``slurm:``, and ``--where``: which nodes are asked."""

from __future__ import annotations

import socket
import stat
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from probing.api.errors import NotFound, PeerError, UsageError
from probing.api.proto.probing.v1 import node_pb2 as pb
from probing.client.discovery import hostnames
from probing.client.nodes import choose
from probing.client.settings import conditions, node_list
from probing.client.wire.credentials import Credentials


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("a1", ["a1"]),
        ("a[1-3,7],b05", ["a1", "a2", "a3", "a7", "b05"]),
        ("gn[008-011]", ["gn008", "gn009", "gn010", "gn011"]),
        ("r[1-2]n[01,03]", ["r1n01", "r1n03", "r2n01", "r2n03"]),
        ("gn-a[1].dc1, login", ["gn-a1.dc1", "login"]),
        ("x[9-11]y", ["x9y", "x10y", "x11y"]),
        ("a,a[1-2],a", ["a", "a1", "a2"]),
    ],
)
def test_hostlists(text: str, names: list[str]) -> None:
    assert list(hostnames(text)) == names


@pytest.mark.parametrize(
    "text",
    ["a[", "a]", "a[1", "a[]", "a[3-1]", "a[1-x]", "a[1-3]]", "a b", "[1-99999999]", "a[0-999]b[0-999]", "a[[1]]"],
)
def test_what_is_no_hostlist_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        hostnames(text)


@given(st.text(alphabet="ab1239[]-,. ", max_size=30))
def test_any_text_is_a_bounded_list_or_refused(text: str) -> None:
    try:
        found = hostnames(text)
    except UsageError:
        return
    assert len(found) <= 65_536
    assert all(name and "[" not in name and "," not in name for name in found)


def test_slurm_by_its_variable_or_scontrol(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("SLURM_JOB_NODELIST", raising=False)
    with pytest.raises(UsageError, match="SLURM_JOB_NODELIST"):
        node_list("slurm:")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "gn[1-2]")
    assert node_list("slurm:") == ("gn1:7077", "gn2:7077")
    assert node_list("slurm:9000,login:1") == ("gn1:9000", "gn2:9000", "login:1")
    scontrol = tmp_path / "scontrol"
    scontrol.write_text('#!/bin/sh\n[ "$1 $2 $3" = "show hostnames gn[1-2]" ] && echo odd1 && echo odd2\n')
    scontrol.chmod(scontrol.stat().st_mode | stat.S_IXUSR)
    assert node_list("slurm:") == ("odd1:7077", "odd2:7077")
    scontrol.write_text("#!/bin/sh\nexit 1\n")
    assert node_list("slurm:") == ("gn1:7077", "gn2:7077")


def test_dns_names(monkeypatch: pytest.MonkeyPatch) -> None:
    def found(name: str, port: int, **_: Any) -> list[Any]:
        if name != "probingd.mon":
            raise socket.gaierror(-2, "Name or service not known")
        return [(0, 0, 0, "", (host, port)) for host in ("10.0.0.2", "10.0.0.1", "10.0.0.2", "fd00::1")]

    monkeypatch.setattr(socket, "getaddrinfo", found)
    assert node_list("dns:probingd.mon:9000") == ("10.0.0.1:9000", "10.0.0.2:9000", "[fd00::1]:9000")
    assert node_list("dns:probingd.mon")[0] == "10.0.0.1:7077"
    for wrong in ("dns:nowhere", "dns:", "dns:a b", "dns:probingd.mon:0", "slurm:x"):
        with pytest.raises(UsageError):
            node_list(wrong)


PEERS = [
    pb.Peer(node="a", address="h1:1", state="healthy", labels={"rack": "r7"}),
    pb.Peer(node="b", address="h2:1", state="suspect", labels={"rack": "r7", "rail": "1"}),
    pb.Peer(node="c", address="h3:1", state="failed", labels={"rack": "r8"}, since_ns=1_800_000_000 * 10**9),
    pb.Peer(address="h4:1", state="unknown"),
]


def test_failed_nodes_are_reported_and_not_asked() -> None:
    chosen = choose("unix:/s", "a", PEERS)
    assert chosen.addresses == ("unix:/s", "h2:1", "h4:1")
    gathered = chosen.gathered()
    assert gathered.asked == ("h3:1",)
    assert [(f.node, f.reason) for f in gathered.failed] == [
        ("c", "failed since 2027-01-15T08:00:00.000000000Z, as the target knows")
    ]


@pytest.mark.parametrize(
    ("where", "asked", "failed"),
    [
        (["rack=r7"], ("unix:/s", "h2:1"), []),
        (["rack=r*", "rail=1"], ("h2:1",), []),
        (["rack=r7,rail=1"], ("h2:1",), []),
        (["rack=r8"], (), ["c"]),
        (["node=b"], ("h2:1",), []),
    ],
)
def test_labels_choose_nodes(where: list[str], asked: tuple[str, ...], failed: list[str]) -> None:
    chosen = choose("unix:/s", "a", PEERS, conditions(where))
    assert (chosen.addresses, [f.node for f in chosen.failed]) == (asked, failed)


def test_labels_that_no_node_has_and_what_is_no_label() -> None:
    with pytest.raises(NotFound, match="no known node has rack=r9"):
        choose("unix:/s", "a", PEERS, conditions(["rack=r9"]))
    for wrong in ("rack", "=r7", "rack=r7,"):
        with pytest.raises(UsageError):
            conditions([wrong])


def test_an_older_daemon_that_leaves_itself_out_is_asked() -> None:
    assert choose("unix:/s", "a", PEERS[1:2]).addresses == ("unix:/s", "h2:1")
    assert choose("unix:/s", "a", []).addresses == ("unix:/s",)


def test_only_nodes_that_somebody_stands_for_are_shown_a_token() -> None:
    own = pb.Peer(node="a", address="h1:1", state="healthy", bound=True, proof="key", named=True)
    peers = [
        own,
        pb.Peer(node="keyed", address="h2:1", state="healthy", bound=True, proof="key"),
        pb.Peer(node="heard", address="h3:1", state="healthy", bound=True, proof="heard"),
        pb.Peer(node="certified", address="h4:1", state="healthy", proof="certificate"),
        pb.Peer(address="h5:1", state="unknown", named=True),
        pb.Peer(node="invented", address="h6:1", state="healthy"),
    ]
    assert choose("unix:/s", "a", peers).addresses[1:] == ("h2:1", "h3:1", "h4:1", "h5:1", "h6:1")
    chosen = choose("unix:/s", "a", peers, token=True)
    assert chosen.addresses == ("unix:/s", "h2:1", "h3:1", "h4:1", "h5:1")
    (failed,) = chosen.failed
    assert (failed.node, failed.address) == ("invented", "h6:1")
    assert failed.reason == "nothing proves its name to the target, so it is not shown your token"
    made = Credentials("s3cret")
    made.bind(peers)
    shows = {peer.address: made.authorization(peer.address) for peer in peers}
    assert {address for address, text in shows.items() if "s3cret" in text} == {"h4:1", "h5:1", "h6:1"}
    assert len({shows[address] for address in ("h1:1", "h2:1", "h3:1")}) == 3
    assert [made.may_be_passed_on(address) for address in ("h2:1", "h4:1")] == [True, False]
    assert Credentials().metadata("h2:1") == ()
    made.check("h2:1", "keyed")
    made.check("h6:1", "anything")
    for address in ("h2:1", "h3:1", "h4:1"):
        with pytest.raises(PeerError, match="answers as b"):
            made.check(address, "b")
    # An older target says nothing of its peers.
    old = [pb.Peer(node="a", address="h1:1", state="healthy"), peers[-1]]
    assert choose("unix:/s", "a", old, token=True).addresses == ("unix:/s", "h6:1")
