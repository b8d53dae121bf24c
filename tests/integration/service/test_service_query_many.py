"""QueryMany: known peers alone are asked, in the caller's name, each answered once, and never too many."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from probing.api.errors import UsageError
from probing.api.proto.probing.v1 import node_pb2 as pb
from probing.api.wire import bound, shown
from probing.daemon.service.allowed import Allowed, own_networks
from probing.daemon.service.limits import Limits
from probing.daemon.service.outgoing import Known, Outgoing
from probing.daemon.service.query_many import QueryMany


class Context:
    """A call, as far as QueryMany uses it."""

    def __init__(self, gone: bool = False) -> None:
        self.gone = gone
        self.written: list[pb.QueryManyReply] = []

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return (("authorization", "Bearer abc"),)

    def time_remaining(self) -> float:
        return 5.0

    async def write(self, reply: pb.QueryManyReply) -> None:
        if self.gone:
            raise grpc.aio.UsageError("RPC already finished.")
        self.written.append(reply)


def _answered(*addresses: str, known: tuple[str, ...] = ()) -> dict[str, pb.QueryManyReply]:
    context: Any = Context()
    request = pb.QueryManyRequest(query=pb.QueryRequest(sql="SELECT 1"), addresses=addresses)
    asyncio.run(QueryMany(Outgoing(), Limits()).answer(request, context, known))
    found = {reply.address: reply for reply in context.written if reply.address}
    assert sum(1 for reply in context.written if reply.done) == len(found)
    return found


def test_who_is_no_peer_is_not_asked() -> None:
    found = _answered("10.0.0.9:1", "unix:/etc/passwd", "unix:/etc/passwd", known=("10.0.0.1:1",))
    assert {address: reply.error.kind for address, reply in found.items()} == {
        "10.0.0.9:1": "NotFound",
        "unix:/etc/passwd": "NotFound",
    }


def test_a_peer_that_is_gone_is_named() -> None:
    gone = "127.0.0.1:1"
    (reply,) = _answered(gone, known=(gone,)).values()
    assert (reply.error.kind, reply.error.message) == ("PeerError", f"{gone} does not answer: connection refused")


def test_a_caller_that_is_gone_ends_the_question() -> None:
    context: Any = Context(gone=True)
    request = pb.QueryManyRequest(query=pb.QueryRequest(sql="SELECT 1"), addresses=["10.0.0.9:1"])
    with pytest.raises(grpc.aio.InternalError):
        asyncio.run(QueryMany(Outgoing(), Limits()).answer(request, context, ()))


@pytest.mark.parametrize("number", [0, 129])
def test_a_request_names_some_nodes_and_not_too_many(number: int) -> None:
    with pytest.raises(UsageError):
        _answered(*(f"10.0.0.1:{port}" for port in range(1, number + 1)))


def test_a_token_is_passed_on_in_the_clear_to_loopback_alone() -> None:
    outgoing = Outgoing()
    assert outgoing.passed_on("127.0.0.1:7070", "Bearer abc") == (("authorization", "Bearer abc"),)
    assert outgoing.passed_on("10.0.0.1:7070", "Bearer abc") == ()
    assert outgoing.passed_on("127.0.0.1:7070", "") == ()


def test_a_peer_with_a_key_is_shown_what_is_bound_to_its_name() -> None:
    known = {"127.0.0.1:7": Known("gn7", keyed=True), "127.0.0.1:8": Known("gn8")}
    outgoing = Outgoing(None, None, Allowed(["127.0.0.0/8"]), lambda address: known.get(address, Known()))
    assert outgoing.passed_on("127.0.0.1:7", shown("abc")) == (("authorization", bound("abc", "gn7")),)
    assert outgoing.passed_on("127.0.0.1:7", bound("abc", "gn9")) == (("authorization", bound("abc", "gn9")),)
    # A node of a version before keys takes nothing else; a person's token goes there only if somebody stands for it.
    assert outgoing.passed_on("127.0.0.1:8", shown("abc")) == (("authorization", shown("abc")),)
    assert [outgoing.vouches(f"127.0.0.1:{port}") for port in (7, 8, 9)] == [True, False, False]
    asyncio.run(outgoing.allowed.set_seeds(["127.0.0.1:9"]))  # type: ignore[union-attr]
    assert outgoing.vouches("127.0.0.1:9")


def test_a_peer_that_nothing_proves_is_not_shown_the_callers_token() -> None:
    context: Any = Context()
    request = pb.QueryManyRequest(query=pb.QueryRequest(sql="SELECT 1"), addresses=["127.0.0.1:8"])
    outgoing = Outgoing(None, None, Allowed(["127.0.0.0/8"]))
    asyncio.run(QueryMany(outgoing, Limits()).answer(request, context, ["127.0.0.1:8"]))
    (reply,) = (reply for reply in context.written if reply.address)
    assert (reply.error.kind, "your token is not sent there" in reply.error.message) == ("PrivilegeError", True)


@pytest.mark.parametrize(
    ("networks", "named", "allowed"),
    [
        (["10.0.0.0/8"], [], {"10.9.9.9:1"}),
        (["192.0.2.0/24", "fd00::/8"], [], {"192.0.2.7:1", "[fd00::1]:1"}),
        (["10.0.0.0/8"], ["192.0.2.7:1"], {"10.9.9.9:1", "192.0.2.7:1"}),
        ([], ["10.0.0.1:1"], {"10.9.9.9:1"}),
        ([], ["[::1]:9"], set()),
        (["127.0.0.0/8"], [], {"127.0.0.1:1", "localhost:1", "[::ffff:127.0.0.1]:1"}),
    ],
)
def test_addresses_that_others_name_are_bounded(
    monkeypatch: pytest.MonkeyPatch, networks: list[str], named: list[str], allowed: set[str]
) -> None:
    monkeypatch.setattr("probing.daemon.service.allowed.own_networks", lambda: ())
    asked = ["10.9.9.9:1", "192.0.2.7:1", "[fd00::1]:1", "127.0.0.1:1", "localhost:1", "[::ffff:127.0.0.1]:1"]

    async def found() -> set[str]:
        made = Allowed(networks)
        await made.set_seeds(named)
        return await made.among(asked)

    assert asyncio.run(found()) == allowed


def test_the_networks_of_interfaces_are_read(tmp_path: Path) -> None:
    (tmp_path / "route").write_text(
        "Iface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask\n"
        "eth0\t00000000\t010200C0\t0003\t0\t0\t0\t00000000\t0\t0\t0\n"
        "eth0\t000200C0\t00000000\t0001\t0\t0\t0\t00FFFFFF\t0\t0\t0\n"
    )
    (tmp_path / "if_inet6").write_text(
        "00000000000000000000000000000001 01 80 10 80       lo\nfd000000000000000000000000000002 04 40 00 82 eth0\n"
    )
    assert [str(network) for network in own_networks(tmp_path)] == ["192.0.2.0/24", "fd00::/64"]
    assert list(own_networks(tmp_path / "none")) == []
