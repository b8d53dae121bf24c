"""A resolver that does not answer keeps nothing waiting but what needs the name."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from probing.api.errors import PeerError
from probing.daemon.service import outgoing
from probing.daemon.service.allowed import Allowed
from probing.daemon.service.outgoing import Outgoing, PeerStubs
from probing.daemon.service.preflight import network

DEADLINE_S = 30.0


class Resolver:
    """Answers at once, but for names that begin with ``slow``: those wait until ``answers``."""

    def __init__(self) -> None:
        self.answers = threading.Event()
        self.asked: Counter[str] = Counter()
        self._real = socket.getaddrinfo

    def find(self, host: str, port: int | None, *rest: Any, **more: Any) -> list[Any]:
        if host.partition(".")[0].startswith(("slow", "fast")):
            self.asked[host] += 1
            if host.startswith("slow"):
                self.answers.wait(DEADLINE_S)
            host = "127.0.0.1"
        return self._real(host, port, *rest, **more)


@pytest.fixture
def resolver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Resolver]:
    made = Resolver()
    monkeypatch.setattr(socket, "getaddrinfo", made.find)
    yield made
    made.answers.set()


def test_names_of_nodes_keep_no_other_thread_waiting(resolver: Resolver) -> None:
    async def scene() -> None:
        allowed = Allowed(["127.0.0.0/8"])
        waiting = [asyncio.create_task(allowed.target(f"slow{number}.example:7077")) for number in range(64)]
        await asyncio.sleep(0)
        # Votes and findings are stored by such threads.
        assert await asyncio.wait_for(asyncio.to_thread(int, "7"), DEADLINE_S) == 7
        assert not any(task.done() for task in waiting)
        resolver.answers.set()
        assert set(await asyncio.gather(*waiting)) == {"ipv4:127.0.0.1:7077"}

    asyncio.run(scene())


def test_names_that_callers_ask_about_keep_no_node_from_being_reached(resolver: Resolver) -> None:
    async def scene() -> None:
        peers = [f"slow{number}.example:7077" for number in range(64)]
        asking = asyncio.create_task(network.round_trips(peers, DEADLINE_S))
        allowed = Allowed(["127.0.0.0/8"])
        target = await asyncio.wait_for(allowed.target("fast.example:7077"), DEADLINE_S)
        assert target == "ipv4:127.0.0.1:7077"
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        resolver.answers.set()

    asyncio.run(scene())


def test_calls_for_one_name_wait_for_one_look_up(resolver: Resolver) -> None:
    async def scene() -> None:
        allowed = Allowed(["127.0.0.0/8"])
        calls = [asyncio.create_task(allowed.target(f"slow.example:{port}")) for port in range(7000, 7050)]
        await asyncio.sleep(0)
        # Its end does not end the look-up for the others.
        calls[0].cancel()
        resolver.answers.set()
        found = await asyncio.gather(*calls, return_exceptions=True)
        assert found[1:] == [f"ipv4:127.0.0.1:{port}" for port in range(7001, 7050)]
        assert resolver.asked == {"slow.example": 1}

    asyncio.run(scene())


def test_a_call_to_a_node_does_not_wait_for_its_name(resolver: Resolver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outgoing, "OPEN_S", 0.05)

    async def scene() -> None:
        stubs = PeerStubs(Outgoing(allowed=Allowed(["127.0.0.0/8"])))
        with pytest.raises(PeerError, match=r"the host name of slow\.example:7077 is not resolved within 0\.05 s"):
            async with stubs.use("slow.example:7077"):
                pass
        resolver.answers.set()
        await stubs.close()

    asyncio.run(scene())


@pytest.mark.parametrize("host", ["gn6..example", "n" * 64])
def test_a_text_that_is_no_name_is_an_error_of_its_node_alone(host: str) -> None:
    async def scene() -> None:
        with pytest.raises(PeerError, match="cannot be resolved"):
            await Allowed(["127.0.0.0/8"]).target(f"{host}:7077")
        [reached] = await network.round_trips([f"{host}:7077"], DEADLINE_S)
        assert reached.round_trip_ns is None
        assert reached.why

    asyncio.run(scene())
    with pytest.raises(OSError, match="name"):
        network.master(host, 29500)
