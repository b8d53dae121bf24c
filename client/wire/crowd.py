"""Questions to many nodes at once: their calls run in one event loop, and their answers are checked as those of one."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from itertools import count
from typing import Any, TypeVar

import grpc
import grpc.aio
import pyarrow as pa

from probing.api.errors import PeerError, ProbingError, QueryMemory, QueryRejected
from probing.api.proto.probing.v1 import node_pb2 as pb
from probing.api.wire import ERROR_KEY, MAX_STATEMENTS
from probing.client.wire import loop
from probing.client.wire.channels import Channel, Channels
from probing.client.wire.credentials import Credentials
from probing.client.wire.errors import error_of, too_old
from probing.client.wire.statements import read_statements
from probing.client.wire.stream import Stream
from probing.client.wire.tls import Tls
from probing.client.wire.tree import TREE_FROM, ask_tree
from probing.federation.execution.answer import Reply, Take
from probing.federation.execution.asking import Again, Policy, ask_many
from probing.federation.execution.clocks import Clocks, measured
from probing.federation.execution.fanout import Gathered, late

__all__ = ("Crowd", "Watch")

T = TypeVar("T")
Watch = Callable[[str, pb.QueryProgress], None]
# As in Connection: what an older node answers, and how long a silent node is left alone.
_NO_SQL = "the query is empty"
_PATIENCE_S = 1.0
_PAUSE_S = 10.0
_LARGE = 4 << 20
_CLOSE_S = 2.0
_UNCONNECTED = "failed to connect"


class Crowd:
    """Many nodes. ``max_bytes`` bounds their answers together. Safe to use from several threads."""

    def __init__(
        self,
        credentials: Credentials,
        tls: Tls | None,
        clocks: Clocks,
        *,
        max_bytes: int,
        strict: bool = False,
        policy: Policy | None = None,
    ) -> None:
        self.policy = policy or Policy()
        self._credentials = credentials
        self._max_bytes = max_bytes
        self._strict = strict
        self._clocks = clocks
        self._channels = Channels(credentials.token, tls)
        self._silent: dict[str, tuple[float, ProbingError]] = {}
        self._running: set[Future[Any]] = set()
        # Only to find out why nodes cannot be reached.
        self._threads = ThreadPoolExecutor(8, thread_name_prefix="why")

    def gather(
        self,
        addresses: Sequence[str],
        statements: Mapping[str, str],
        timeout: float,
        take: Take,
        *,
        watch: Watch | None = None,
        done: Callable[[int, int], None] = lambda *_: None,
    ) -> Gathered[tuple[Reply, ...]]:
        """Returns the replies of each node to ``statements``, as ``answer.Gather``.

        ``done(nodes, all)`` is called when so many of all nodes have answered or failed.
        """
        question = _Question(self, statements, take, watch)
        numbers = count(1)

        def one_more(*_: object) -> None:
            done(next(numbers), len(addresses))

        if len(addresses) < TREE_FROM or len(statements) > MAX_STATEMENTS:
            work = ask_many(
                addresses, question.ask, timeout, self.policy, alive=self._channels.connected, answered=one_more
            )
        else:
            work = ask_tree(
                addresses,
                question.request(list(statements)),
                question.passed_on,
                question.ask,
                timeout,
                self.policy,
                self._channels,
                self._credentials,
                room=question.room,
                answered=one_more,
            )
        gathered = self._wait(work)
        now_ns = time.monotonic_ns()
        gathered.answered = [
            replace(a, clock=self._clocks.add(a.node, a.value[0].clock if a.value else None, now_ns))
            for a in gathered.answered
        ]
        return gathered

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        future = loop.submit(work)
        self._running.add(future)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise
        finally:
            self._running.discard(future)

    def cancel(self) -> None:
        """Ends the questions in flight."""
        for future in list(self._running):
            future.cancel()

    def close(self) -> None:
        """Ends the questions in flight, and closes all connections, but does not wait long."""
        self.cancel()
        self._threads.shutdown(wait=False, cancel_futures=True)
        closing = loop.submit(self._channels.close())
        try:
            closing.result(_CLOSE_S)
        except TimeoutError:
            closing.cancel()


class _Question:
    """One question to all nodes."""

    def __init__(self, crowd: Crowd, statements: Mapping[str, str], take: Take, watch: Watch | None) -> None:
        self._crowd = crowd
        self._names = list(statements)
        self._statements = statements
        self._take = take
        self._watch = watch
        self._left = crowd._max_bytes

    async def ask(self, address: str, seconds: float, attempt: int) -> tuple[str, tuple[Reply, ...]]:
        silent = self._crowd._silent.get(address)
        if silent is not None and time.monotonic() < silent[0]:
            raise silent[1]
        deadline = time.monotonic() + seconds
        channels = self._crowd._channels
        # The connection may be what broke or stalled.
        channel = channels.open(address) if attempt else channels.take(address)
        try:
            replies: list[Reply] = []
            for first in range(0, len(self._names), MAX_STATEMENTS):
                left = max(deadline - time.monotonic(), 0.001)
                replies += await self._some(channel, address, self._names[first : first + MAX_STATEMENTS], left)
        finally:
            if attempt:
                await channel.close()
            else:
                await channels.give_back(channel)
        for reply in replies:
            self._crowd._credentials.check(address, reply.node)
        return (replies[0].node if replies else address), tuple(self._take(reply) for reply in replies)

    def request(self, names: list[str]) -> pb.QueryRequest:
        """Returns the request for the statements ``names``."""
        request = pb.QueryRequest(max_bytes=self._crowd._max_bytes)
        if len(self._names) == 1:
            request.sql = self._statements[names[0]]
        else:
            request.statements.extend(pb.Statement(name=name, sql=self._statements[name]) for name in names)
        return request

    def passed_on(self, address: str, parts: list[pb.QueryReply], sent_ns: int) -> tuple[str, tuple[Reply, ...]]:
        """Reads the answer of a node that another one has asked for us."""
        if not parts:
            raise PeerError(f"{address} has an empty answer")
        clock = measured(sent_ns, time.time_ns(), parts[-1].end.node_time_ns)
        replies = [replace(reply, clock=clock) for reply in self._read(address, parts, self._names)]
        for reply in replies:
            self._crowd._credentials.check(address, reply.node)
        return replies[0].node, tuple(self._take(reply) for reply in replies)

    def room(self, size: int) -> None:
        """Counts bytes that are held. Raises QueryMemory for too many."""
        self._left -= size
        if self._left < 0:
            raise QueryMemory(f"the answer is larger than {self._crowd._max_bytes} bytes")

    async def _some(self, channel: Channel, address: str, names: list[str], seconds: float) -> list[Reply]:
        request = self.request(names)
        request.timeout_ms = max(1, int(seconds * 1000))
        request.progress = self._watch is not None
        begun, sent_ns = time.monotonic_ns(), time.time_ns()
        call = channel.stub.Query(request, timeout=seconds + 0.3, metadata=self._crowd._credentials.metadata(address))
        taken = 0
        parts: list[pb.QueryReply] = []
        try:
            async for part in call:
                taken += self._received(address, part, parts)
        except grpc.RpcError as e:
            raise await self._failed(channel, address, e, seconds, begun) from None
        finally:
            call.cancel()
            self._left += taken
        received_ns = sent_ns + time.monotonic_ns() - begun
        if taken > _LARGE:
            replies = await asyncio.to_thread(self._read, address, parts, names)
        else:
            replies = self._read(address, parts, names)
        self._left -= taken
        clock = measured(sent_ns, received_ns, parts[-1].end.node_time_ns)
        return [replace(reply, clock=clock) for reply in replies]

    def _received(self, address: str, part: pb.QueryReply, parts: list[pb.QueryReply]) -> int:
        """Keeps a message; returns its size."""
        if part.WhichOneof("part") == "progress":
            if self._watch is not None:
                self._watch(address, part.progress)
            return 0
        size = part.ByteSize()
        self.room(size)
        parts.append(part)
        return size

    def _read(self, address: str, parts: list[pb.QueryReply], names: list[str]) -> list[Reply]:
        crowd = self._crowd
        if len(self._names) > 1:
            try:
                return read_statements(parts, names, _unexpected, max_bytes=crowd._max_bytes, strict=crowd._strict)
            except QueryRejected as e:
                raise (too_old(address) if e.message == _NO_SQL else e) from None
        stream = Stream(_Received(parts), _unexpected, max_bytes=crowd._max_bytes, strict=crowd._strict)
        table = pa.Table.from_batches(list(stream), stream.schema)
        return [Reply(stream.node, table, stream.rows_scanned, stream.warnings)]

    async def _failed(
        self, channel: Channel, address: str, error: grpc.RpcError, seconds: float, begun: int
    ) -> Exception:
        code, details = error.code(), str(error.details() or "")
        if channel.problem:
            return channel.problem
        if any(entry[0] == ERROR_KEY for entry in _trailing(error)):
            found = error_of(address, error)
            return too_old(address) if isinstance(found, QueryRejected) and found.message == _NO_SQL else found
        if code is grpc.StatusCode.DEADLINE_EXCEEDED:
            found = late(address, seconds)
            if not channel.connected:
                found = PeerError(f"{address} does not answer: no connection within {seconds:g} s", hint=found.hint)
        elif code is grpc.StatusCode.UNAVAILABLE:
            # Connects once more, to find out why.
            found = await asyncio.get_running_loop().run_in_executor(self._crowd._threads, error_of, address, error)
        elif code is grpc.StatusCode.CANCELLED:
            # Its gRPC had too many calls to begin this one.
            return Again(error_of(address, error))
        else:
            return error_of(address, error)
        if (time.monotonic_ns() - begun) / 1e9 > _PATIENCE_S:
            self._crowd._silent[address] = time.monotonic() + _PAUSE_S, found
        elif code is grpc.StatusCode.UNAVAILABLE and not details.startswith(_UNCONNECTED):
            return Again(found)
        return found


def _unexpected(error: grpc.RpcError) -> ProbingError:
    return PeerError(str(error))


class _Received:
    """Messages that have come, as a call."""

    def __init__(self, parts: list[pb.QueryReply]) -> None:
        self._parts = parts

    def __iter__(self) -> Iterator[pb.QueryReply]:
        return iter(self._parts)


def _trailing(error: grpc.RpcError) -> list[Any]:
    return list(error.trailing_metadata() or ())
