"""QueryMany: known peers alone are asked, in the caller's name, each answered once, and never too many."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc.aio
import pytest

from probing.api.errors import UsageError
from probing.api.proto.probing.v1 import node_pb2 as pb
from probing.daemon.service.limits import Limits
from probing.daemon.service.outgoing import Outgoing
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
