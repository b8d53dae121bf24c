"""A node in the middle of a question to many: what it learns, and what it can do to the answers that it passes on."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any

import grpc
import grpc.aio
import pytest
from ports import free_port

from probing.api.errors import BROKEN, LATE, TOO_LARGE, Overloaded, PeerError, ProbingError, QueryError, QueryMemory
from probing.api.proto.probing.v1 import node_pb2 as pb
from probing.api.proto.probing.v1.node_pb2_grpc import NodeServicer, add_NodeServicer_to_server
from probing.api.wire import bound, shown
from probing.client.wire.credentials import Credentials
from probing.client.wire.loop import wait
from probing.client.wire.many import Question
from probing.client.wire.node import Wire
from probing.federation.execution.answer import Gathered

TOKEN = "0123456789abcdef-token"
CHILDREN = ("127.0.0.1:2", "127.0.0.1:3")
OLD = "127.0.0.1:4"


def _parts(text: str) -> list[pb.QueryReply]:
    return [pb.QueryReply(arrow=text.encode())]


class Middle(NodeServicer):  # type: ignore[misc]
    """Passes on what it makes up: of its children, and of nodes that it was not given."""

    def __init__(self) -> None:
        self.address = f"127.0.0.1:{free_port()}"
        self.shown: list[str] = []
        self.passed: list[str] = []
        # Passed on as the error of the first of its group; whether it passes on parts.
        self.error: ProbingError | None = None
        self.forged = True

    async def start(self) -> grpc.aio.Server:
        server = grpc.aio.server()
        add_NodeServicer_to_server(self, server)
        server.add_insecure_port(self.address)
        await server.start()
        return server

    async def QueryMany(self, request: pb.QueryManyRequest, context: Any) -> AsyncIterator[pb.QueryManyReply]:
        self.shown += [str(value) for key, value in context.invocation_metadata() if key == "authorization"]
        self.passed += request.shown
        for address in (OLD, "127.0.0.1:9", self.address, request.addresses[0], request.addresses[0]):
            error = None
            if (own := self.error) is not None:
                error = pb.Error(kind=own.kind, message=own.message, code=own.code)
            parts = _parts(f"forged {address}") if self.forged and error is None else []
            yield pb.QueryManyReply(address=address, parts=parts, done=True, error=error)


@pytest.fixture
def middle() -> Iterator[Middle]:
    made = Middle()
    server = wait(made.start())
    yield made
    wait(server.stop(0))


class Asked(Question):
    """Answers of two kinds: ``direct`` has the addresses that were asked directly."""

    def __init__(self, wire: Wire) -> None:
        super().__init__(wire, {"": "SELECT 1"}, lambda reply: reply, max_bytes=1 << 20)
        self.direct: list[str] = []

    async def one(self, address: str, seconds: float, attempt: int) -> tuple[str, Any]:
        self.direct.append(address)
        return f"node at {address}", "true"

    async def passed_on(self, address: str, parts: list[pb.QueryReply], sent_ns: int) -> tuple[str, Any]:
        if not parts:
            raise PeerError("empty")
        return f"node at {address}", parts[0].arrow.decode()


def _asked(middle: Middle, credentials: Credentials, direct: list[str]) -> Gathered[Any]:
    wire = Wire(credentials, None)
    asked = Asked(wire)
    try:
        return wait(asked.by_tree((middle.address, *CHILDREN, OLD), 10.0))
    finally:
        direct += asked.direct
        wait(wire.close())


def test_a_node_in_the_middle_learns_nothing_and_answers_for_its_own_group_alone(middle: Middle) -> None:
    credentials = Credentials(TOKEN)
    names = {middle.address: "m", CHILDREN[0]: "c2", CHILDREN[1]: "c3"}
    credentials.bind(pb.Peer(node=name, address=address, bound=True) for address, name in names.items())
    direct: list[str] = []
    answers = {a.address: a.value for a in _asked(middle, credentials, direct).answered}
    assert middle.shown == [bound(TOKEN, "m")]
    assert middle.passed == [bound(TOKEN, "c2"), bound(TOKEN, "c3")]
    # What it does not pass on is asked for directly, as is a node that has to be shown the token itself.
    assert sorted(direct) == sorted((middle.address, CHILDREN[1], OLD))
    assert answers == {
        middle.address: "true",
        # Rows are claims of the node that passes them on (docs/security.md).
        CHILDREN[0]: f"forged {CHILDREN[0]}",
        CHILDREN[1]: "true",
        OLD: "true",
    }


@pytest.mark.parametrize(
    ("error", "directly"),
    [
        (PeerError("no route to host"), True),
        (PeerError("the connection broke", code=BROKEN), True),
        (QueryMemory("the answer is larger than 67108864 bytes", code=TOO_LARGE), True),
        (Overloaded("the answers are too large to be passed on"), True),
        (PeerError("no answer in time", code=LATE), False),
        (QueryError("there is no column x"), False),
    ],
    ids=lambda value: value.kind if isinstance(value, ProbingError) else "",
)
def test_who_did_not_answer_the_node_in_the_middle_may_answer_directly(
    middle: Middle, error: ProbingError, directly: bool
) -> None:
    middle.error = error
    direct: list[str] = []
    found = _asked(middle, Credentials(), direct)
    assert (CHILDREN[0] in direct) == directly
    assert [f.error.kind for f in found.failed if f.address == CHILDREN[0]] == ([] if directly else [error.kind])


def test_a_node_is_asked_directly_if_the_answer_that_was_passed_on_is_no_answer(middle: Middle) -> None:
    middle.forged = False
    direct: list[str] = []
    found = _asked(middle, Credentials(), direct)
    assert CHILDREN[0] in direct
    assert {a.address for a in found.answered} == {middle.address, *CHILDREN, OLD}


def test_without_a_token_there_is_nothing_to_pass_on(middle: Middle) -> None:
    direct: list[str] = []
    _asked(middle, Credentials(), direct)
    assert (middle.shown, middle.passed) == ([], [])
    assert middle.address in direct
    assert shown(TOKEN) not in middle.passed
