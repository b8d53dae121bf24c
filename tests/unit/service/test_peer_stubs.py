"""Calls to other nodes after their connection was cut without a word."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import grpc.aio
import pytest

from probing.api.proto.probing.v1 import node_pb2 as pb
from probing.api.proto.probing.v1.node_pb2_grpc import NodeServicer, add_NodeServicer_to_server
from probing.daemon.service.outgoing import Outgoing, PeerStubs

SECONDS = 60.0


class Node(NodeServicer):
    """Answers ``Status``; ``Agree`` waits for ``answers``."""

    def __init__(self) -> None:
        self.answers = asyncio.Event()

    async def Status(self, request: pb.StatusRequest, context: object) -> pb.StatusReply:
        return pb.StatusReply(node="n1")

    async def Agree(self, request: pb.AgreeRequest, context: object) -> pb.AgreeReply:
        await self.answers.wait()
        return pb.AgreeReply()


class Link:
    """Passes bytes on to a server; a connection that is cut passes nothing on any more, and stays open."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._passes = asyncio.Event()
        self.connections = 0
        self._tasks: list[asyncio.Task[None]] = []
        self._writers: list[asyncio.StreamWriter] = []

    def cut(self) -> None:
        """Cuts the connections that there are."""
        for task in self._tasks:
            task.cancel()

    async def close(self) -> None:
        self.cut()
        for writer in self._writers:
            writer.close()
        await asyncio.gather(*self._tasks, *(writer.wait_closed() for writer in self._writers), return_exceptions=True)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        answers, sink = await asyncio.open_connection("127.0.0.1", self._port)
        self._writers += [sink, writer]
        self._tasks += [asyncio.create_task(_pass(reader, sink)), asyncio.create_task(_pass(answers, writer))]


async def _pass(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(1 << 16):
        writer.write(data)
        await writer.drain()


@asynccontextmanager
async def linked() -> AsyncIterator[tuple[Link, Node, PeerStubs, str]]:
    server, node = grpc.aio.server(), Node()
    add_NodeServicer_to_server(node, server)  # type: ignore[no-untyped-call]
    link = Link(server.add_insecure_port("127.0.0.1:0"))
    await server.start()
    relay = await asyncio.start_server(link.serve, "127.0.0.1", 0)
    stubs = PeerStubs(Outgoing())
    try:
        yield link, node, stubs, f"127.0.0.1:{relay.sockets[0].getsockname()[1]}"
    finally:
        await stubs.close()
        await link.close()
        await server.stop(None)
        relay.close()


async def status(stubs: PeerStubs, address: str, seconds: float = SECONDS) -> str:
    async with stubs.use(address) as stub:
        reply = await stub.Status(pb.StatusRequest(), timeout=seconds)
    return str(reply.node)


def test_after_a_cut_the_next_call_connects_anew() -> None:
    async def scene() -> None:
        async with linked() as (link, _, stubs, address):
            assert await status(stubs, address) == "n1"
            link.cut()
            with pytest.raises(grpc.aio.AioRpcError) as late:
                await status(stubs, address, 0.2)
            assert late.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            assert await status(stubs, address) == "n1"
            assert link.connections == 2

    asyncio.run(scene())


def test_one_late_answer_beside_others_is_no_cut() -> None:
    async def scene() -> None:
        async with linked() as (link, node, stubs, address):

            async def slow() -> None:
                async with stubs.use(address) as stub:
                    await stub.Agree(pb.AgreeRequest(), timeout=2.0)

            waiting = asyncio.create_task(slow())
            for _ in range(23):
                assert await status(stubs, address) == "n1"
            with pytest.raises(grpc.aio.AioRpcError):
                await waiting
            assert await status(stubs, address) == "n1"
            assert link.connections == 1
            node.answers.set()

    asyncio.run(scene())
