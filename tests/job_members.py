"""The calls of a node to other nodes of a job, with a membership that has these nodes and does not change."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import cast

from probing.daemon.cluster import Member, Membership
from probing.daemon.service.job_peers import JobPeers
from probing.daemon.service.outgoing import Outgoing, PeerStubs

__all__ = ("calling",)


class _Members:
    def __init__(self, name: str, members: Sequence[Member]) -> None:
        self.name = name
        self._members = members
        self._addresses = {member.name: member.address for member in members}

    def members(self) -> Sequence[Member]:
        return self._members

    def address_of(self, name: str) -> str:
        return self._addresses.get(name, "")

    def set_jobs(self, marks: Sequence[int]) -> None: ...


@contextmanager
def calling(name: str, members: Sequence[Member]) -> Iterator[JobPeers]:
    """Yields the calls of node ``name`` to ``members``, from an event loop in a thread of its own."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    stubs = PeerStubs(Outgoing())
    try:
        yield JobPeers(cast("Membership", _Members(name, members)), stubs, loop)
    finally:
        asyncio.run_coroutine_threadsafe(stubs.close(), loop).result(60)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
