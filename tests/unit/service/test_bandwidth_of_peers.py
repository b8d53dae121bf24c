"""A measurement of bandwidth that does not go on keeps no other from being made."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from probing.api.errors import Overloaded, QueryError
from probing.api.proto.probing.v1 import node_pb2 as pb
from probing.daemon.service.preflight import bandwidth
from probing.daemon.service.preflight.bandwidth import Bandwidth

DEADLINE_S = 30.0


async def sent(*sizes: int, ends: bool = True) -> AsyncIterator[pb.SinkRequest]:
    for size in sizes:
        yield pb.SinkRequest(data=bytes(size))
    if not ends:
        await asyncio.get_running_loop().create_future()


@pytest.mark.parametrize("sizes", [(), (100,)])
def test_a_peer_that_sends_nothing_more_is_given_up(monkeypatch: pytest.MonkeyPatch, sizes: tuple[int, ...]) -> None:
    async def scene() -> None:
        made = Bandwidth(1000)
        monkeypatch.setattr(bandwidth, "PEER_S", DEADLINE_S)
        other = asyncio.create_task(made.take(sent(*sizes, ends=False)))
        await asyncio.sleep(0)
        with pytest.raises(Overloaded):
            await made.take(sent(7))
        other.cancel()
        await asyncio.gather(other, return_exceptions=True)
        monkeypatch.setattr(bandwidth, "PEER_S", 0.05)
        with pytest.raises(QueryError, match="took too long"):
            await asyncio.wait_for(made.take(sent(*sizes, ends=False)), DEADLINE_S)
        monkeypatch.setattr(bandwidth, "PEER_S", DEADLINE_S)
        assert await made.take(sent(7, 993)) == 1000
        with pytest.raises(QueryError, match="too many bytes"):
            await made.take(sent(7, 994))

    asyncio.run(scene())
