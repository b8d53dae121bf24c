"""Ten clients of one user: ``crowd_member.py KIND ADDRESS SECONDS SOURCE CA TOKEN``; figures in JSON.

KIND ``ask``: they ask and read, with the deadline that probingctl has. ``idle``: five start a query and read one
message of it, five connect and send a part of what a client sends. SOURCE: the address from which TCP connects; it
and TOKEN are empty for a Unix socket, and CA, the authority's certificate, without TLS.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from contextlib import suppress

import grpc
import grpc.aio

from probing.api.proto.probing.v1 import node_pb2 as pb
from probing.api.proto.probing.v1.node_pb2_grpc import NodeStub

DEADLINE_S = 30.0
PAUSE_S = 0.2
# Before those that do not read begin again.
IDLE_S = 2.0
CLIENTS = 10
ENDLESS = "SELECT a.range, b.range AS r FROM range(1000000) a, range(1000000) b"
COUNT = "SELECT count(*) AS n FROM comm.ops"
# The begin of a TLS handshake, and of HTTP/2.
PARTS = (b"\x16\x03\x01\x02\x00\x01", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00")
LIMITS = (grpc.StatusCode.RESOURCE_EXHAUSTED,)


class Group:
    """The clients of one user."""

    def __init__(self, address: str, seconds: float, source: str, ca: str, token: str) -> None:
        self.address = address
        self.source = source
        self.until = time.monotonic() + seconds
        self.metadata = (("authorization", f"Bearer {token}"),) if token else ()
        self.credentials = grpc.ssl_channel_credentials(ca.encode()) if ca else None
        self.seconds: list[float] = []
        self.limited = 0
        self.failed: list[str] = []
        self.starved = 0

    async def run(self, kind: str) -> dict[str, object]:
        """Returns the figures, once the time is over."""
        target = self.address
        if self.source:
            server = await asyncio.start_server(self._forward, "127.0.0.1", 0)
            target = f"localhost:{server.sockets[0].getsockname()[1]}"
        if kind == "ask":
            await asyncio.gather(*(self._reader(target) for _ in range(CLIENTS)))
        else:
            pairs = range(CLIENTS // 2)
            await asyncio.gather(*(self._silent(target) for _ in pairs), *(self._half_open() for _ in pairs))
        return {
            "seconds": self.seconds,
            "limited": self.limited,
            "failed": self.failed[:5],
            "failures": len(self.failed),
            "starved": self.starved,
        }

    def _channel(self, target: str) -> grpc.aio.Channel:
        options = [("grpc.use_local_subchannel_pool", 1)]
        if self.credentials:
            return grpc.aio.secure_channel(target, self.credentials, options=options)
        return grpc.aio.insecure_channel(target, options=options)

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Connects from the source address, which gRPC cannot choose."""
        with suppress(OSError):
            far_reader, far_writer = await self._connected()
            await asyncio.gather(_pass(reader, far_writer), _pass(far_reader, writer))

    async def _connected(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if self.address.startswith("unix:"):
            return await asyncio.open_unix_connection(self.address[len("unix:") :])
        host, _, port = self.address.rpartition(":")
        return await asyncio.open_connection(host, int(port), local_addr=(self.source, 0))

    async def _reader(self, target: str) -> None:
        answered = 0
        async with self._channel(target) as channel:
            node = NodeStub(channel)
            while time.monotonic() < self.until:
                begun = time.monotonic()
                try:
                    if random.random() < 0.3:
                        await node.Status(pb.StatusRequest(), timeout=DEADLINE_S, metadata=self.metadata)
                    else:
                        request = pb.QueryRequest(sql=COUNT)
                        parts = [p async for p in node.Query(request, timeout=DEADLINE_S, metadata=self.metadata)]
                        assert parts[-1].end.rows == 1
                    answered += 1
                    self.seconds.append(time.monotonic() - begun)
                except grpc.aio.AioRpcError as e:
                    if e.code() in LIMITS:
                        self.limited += 1
                    else:
                        self.failed.append(f"{time.monotonic() - begun:.1f} s: {e.code().name}: {e.details()}")
                await asyncio.sleep(PAUSE_S)
        self.starved += not answered

    async def _silent(self, target: str) -> None:
        async with self._channel(target) as channel:
            node = NodeStub(channel)
            while time.monotonic() < self.until:
                request = pb.QueryRequest(sql=ENDLESS, max_bytes=(1 << 64) - 1, timeout_ms=600_000)
                stream = node.Query(request, timeout=600, metadata=self.metadata)
                with suppress(grpc.aio.AioRpcError):
                    await stream.read()
                    with suppress(asyncio.TimeoutError):
                        await asyncio.wait_for(asyncio.shield(stream.code()), max(self.until - time.monotonic(), 0.1))
                stream.cancel()
                await asyncio.sleep(IDLE_S)

    async def _half_open(self) -> None:
        while time.monotonic() < self.until:
            with suppress(OSError, asyncio.TimeoutError):
                reader, writer = await self._connected()
                writer.write(random.choice(PARTS))
                await asyncio.wait_for(reader.read(), max(self.until - time.monotonic(), 0.1))
                writer.close()
            await asyncio.sleep(PAUSE_S)


async def _pass(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while data := await source.read(65536):
            sink.write(data)
            await sink.drain()
    sink.close()


if __name__ == "__main__":
    kind, address, seconds, source, ca, token = sys.argv[1:]
    print("ready", flush=True)
    sys.stdin.readline()
    print(json.dumps(asyncio.run(Group(address, float(seconds), source, ca, token).run(kind))))
