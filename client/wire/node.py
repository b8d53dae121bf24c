"""Calls nodes. Every call has a deadline, and every error names the node and the reason."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from typing import Any, TypeVar

import grpc
import grpc.aio

from probing.api.errors import BROKEN, PeerError, ProbingError, QueryRejected
from probing.api.proto.probing.v1 import node_pb2 as pb
from probing.api.wire import MAX_STATEMENTS, NODE_KEY, UNLIMITED, reported_error
from probing.client.wire.channels import Channel, Channels
from probing.client.wire.credentials import Credentials, Tls
from probing.client.wire.errors import error_of, too_old
from probing.client.wire.stream import Messages, Room, Stream, Watch, read_replies
from probing.federation.execution.answer import Reply
from probing.federation.execution.clocks import measured

__all__ = ("Call", "Node", "Wire", "query_of")

T = TypeVar("T")
_SILENT = (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.UNAVAILABLE)
# If a node does not answer a call for longer than _PATIENCE_S, further calls to the node fail at once for _PAUSE_S.
_PATIENCE_S = 1.0
_PAUSE_S = 10.0
# How much earlier than the deadline of gRPC the node's own deadline ends, s, so that the node can still report what
# took too long.
_MARGIN_S = 0.3
# The time that AwaitFinding gets for its answer beyond the wait that the caller asked for, s.
_ANSWERS_S = 10.0
_MAX_FACTS = 256 << 20
_ONE_JOB = "ask for one job"
# The name that a statement without a name gets.
_ONLY = "query"


class Wire:
    """Makes the calls to the nodes of one cluster, in the loop."""

    def __init__(self, credentials: Credentials, tls: Tls | None) -> None:
        self.credentials = credentials
        self.channels = Channels(credentials.token, tls)
        # For each address that timed out: the time (time.monotonic()) until which calls fail at once, and the error
        # that they raise.
        self.silent: dict[str, tuple[float, ProbingError]] = {}
        # The calls in flight.
        self.calls: set[Call] = set()

    def call(self, address: str, method: str, request: Any, seconds: float, *, apart: bool = False) -> Call:
        """Begins a call, which the caller must end. Raises the errors of ``Channels.take``; if a call to the node timed
        out in the last 10 s, raises the error of that call. ``apart``: the call gets its own connection."""
        silent = self.silent.get(address)
        if silent is not None and time.monotonic() < silent[0]:
            raise silent[1]
        # ``request`` may be an iterator of requests, which has no descriptor.
        if "timeout_ms" in getattr(getattr(request, "DESCRIPTOR", None), "fields_by_name", ()):
            request.timeout_ms = max(1, int(seconds * 1000))
        channel = self.channels.take(address, apart=apart)
        begun = getattr(channel.stub, method)(
            request, timeout=seconds + _MARGIN_S, metadata=self.credentials.metadata(address)
        )
        call = Call(self, channel, begun, seconds)
        self.calls.add(call)
        return call

    def cancel(self) -> None:
        """Ends the calls in flight."""
        for call in list(self.calls):
            call.end()

    async def close(self) -> None:
        self.cancel()
        await self.channels.close()


class Call:
    """A call in flight."""

    def __init__(self, wire: Wire, channel: Channel, call: Any, seconds: float) -> None:
        self._wire = wire
        self._channel = channel
        self._call = call
        self._seconds = seconds
        self._begun = time.monotonic()

    async def reply(self) -> Any:
        """Returns the reply of a call that has one reply."""
        try:
            return await self._call
        except grpc.RpcError as e:
            raise await self._failed(e) from None

    async def next(self) -> Any:
        """Returns the next message; None at the end."""
        try:
            message = await self._call.read()
        except grpc.RpcError as e:
            raise await self._failed(e) from None
        return None if message is grpc.aio.EOF else message

    async def sent_name(self) -> str | None:
        """Returns the name of the node, which is sent before the rows; None for older nodes."""
        sent = dict(await self._call.initial_metadata() or ()).get(NODE_KEY)
        return sent[:256].decode("utf-8", "replace") if isinstance(sent, bytes) else None

    def end(self) -> None:
        """Ends the call, so that the node stops working on it."""
        self._call.cancel()
        if self in self._wire.calls:
            self._wire.calls.discard(self)
            self._wire.channels.give_back(self._channel)

    async def _failed(self, error: grpc.RpcError) -> ProbingError:
        if self._channel.problem:
            return self._channel.problem
        if (reported := reported_error(error)) is not None:
            return reported
        is_silent = error.code() in _SILENT and time.monotonic() - self._begun > _PATIENCE_S
        address, connected = self._channel.address, self._channel.connected
        problem = await error_of(address, error, self._seconds, connected=connected)
        # A node whose connection broke may answer the next call.
        if is_silent and problem.code != BROKEN:
            self._wire.silent[address] = time.monotonic() + _PAUSE_S, problem
        return problem


def query_of(statements: Mapping[str, str], max_bytes: int, *, named: bool) -> pb.QueryRequest:
    """Returns the request for the rows of ``statements`` (SQL by name); if not ``named``, there must be one
    statement.
    """
    if not named:
        return pb.QueryRequest(sql=next(iter(statements.values())), max_bytes=max_bytes)
    several = [pb.Statement(name=name or _ONLY, sql=sql) for name, sql in statements.items()]
    return pb.QueryRequest(statements=several, max_bytes=max_bytes)


class Node:
    """The node at ``address``, ``unix:PATH`` or ``HOST:PORT``. ``seconds``: the limit for a call. Calls run in the
    loop.

    The methods raise the node's errors, PeerError if it does not answer, and UsageError as ``Channels.take`` does.
    """

    def __init__(self, address: str, wire: Wire) -> None:
        self.address = address
        self._wire = wire

    async def replies(
        self,
        statements: Mapping[str, str],
        seconds: float,
        room: Room,
        *,
        watch: Watch | None = None,
        strict: bool = False,
        apart: bool = False,
        may_lack: bool = False,
    ) -> list[Reply]:
        """Returns the rows of each of ``statements`` (SQL by name), read from one snapshot of the node.

        More than MAX_STATEMENTS statements need several requests. ``watch`` is called with the progress. With
        ``may_lack`` a table that the node lacks is no error: ``lacks`` of the reply has the error. Raises QueryMemory
        if there is no ``room``, PartialAnswer under ``strict`` if rows are missing, and the error of the first
        statement that failed.
        """
        deadline = time.monotonic() + seconds
        names = list(statements)
        replies: list[Reply] = []
        for first in range(0, len(names), MAX_STATEMENTS):
            some = {name: statements[name] for name in names[first : first + MAX_STATEMENTS]}
            request = query_of(some, room.max_bytes, named=may_lack or len(names) > 1)
            left = max(deadline - time.monotonic(), 0.001)
            replies += await self._some(request, left, room, watch, strict=strict, apart=apart)
        if not may_lack and (lacks := next((reply.lacks for reply in replies if reply.lacks), None)):
            raise lacks
        return replies

    async def _some(
        self,
        request: pb.QueryRequest,
        seconds: float,
        room: Room,
        watch: Watch | None,
        *,
        strict: bool,
        apart: bool,
    ) -> list[Reply]:
        request.progress, request.whole = watch is not None, watch is None
        begun_ns, sent_ns = time.monotonic_ns(), time.time_ns()
        call = self._wire.call(self.address, "Query", request, seconds, apart=apart)

        async def receive() -> pb.QueryReply | None:
            try:
                part: pb.QueryReply | None = await call.next()
            except QueryRejected as e:
                # An older node does not know ``statements``: it finds no SQL in the request, and its refusal has no
                # error code.
                raise e if e.code or not request.statements else too_old(self.address) from None
            return part

        messages = Messages(receive, room, watch)
        try:
            replies, node_ns = await read_replies(messages.next, request, strict=strict)
        except BaseException:
            room.give_back(messages.size)
            raise
        finally:
            call.end()
        clock = measured(sent_ns, sent_ns + messages.last_ns - begun_ns, node_ns)
        for reply in replies:
            self.check(reply.node)
        return [replace(reply, clock=clock) for reply in replies]

    async def stream(self, sql: str, seconds: float, *, watch: Watch | None = None, strict: bool = False) -> Stream:
        """Returns a stream of batches at once; closing it ends the query at the node."""
        request = pb.QueryRequest(sql=sql, max_bytes=UNLIMITED, progress=watch is not None)
        call = self._wire.call(self.address, "Query", request, seconds)

        async def name() -> str:
            sent = await call.sent_name()
            return (await self.status(seconds)).node if sent is None else sent

        messages = Messages(call.next, Room(UNLIMITED), watch)
        return Stream(messages.next, name=name, check=self.check, end=call.end, strict=strict)

    async def facts(self, request: pb.FactsRequest, seconds: float) -> pb.FactsReply:
        """Returns the facts of all runs. Raises PeerError if they are too large or cannot be facts of a node."""
        call = self._wire.call(self.address, "Facts", request, seconds)
        facts = pb.FactsReply()
        try:
            while (reply := await call.next()) is not None:
                facts.MergeFrom(reply)
                if sum(map(len, facts.facts)) > _MAX_FACTS:
                    raise PeerError(f"{self.address} has more than {_MAX_FACTS} bytes of facts", hint=_ONE_JOB)
        finally:
            call.end()
        self.check(facts.node)
        return facts

    async def await_finding(self, job: str, stored: int, wait_s: float) -> int:
        """Waits at most ``wait_s`` until the node's number of stored rows about findings of ``job`` differs from
        ``stored``. Returns that number."""
        request = pb.AwaitFindingRequest(job=job, stored=stored, wait_ms=round(wait_s * 1000))
        reply = await self._ask(pb.AwaitFindingReply, "AwaitFinding", request, wait_s + _ANSWERS_S)
        return reply.stored

    async def stacks(self, request: pb.StacksRequest, seconds: float) -> pb.StacksReply:
        return await self._ask(pb.StacksReply, "Stacks", request, seconds)

    async def variables(self, request: pb.VarsRequest, seconds: float) -> pb.VarsReply:
        return await self._ask(pb.VarsReply, "Vars", request, seconds)

    async def evaluate(self, request: pb.EvalRequest, seconds: float) -> pb.EvalReply:
        return await self._ask(pb.EvalReply, "Eval", request, seconds)

    async def annotate(self, request: pb.AnnotateRequest, seconds: float) -> pb.AnnotateReply:
        return await self._ask(pb.AnnotateReply, "Annotate", request, seconds)

    async def group(self, request: pb.GroupRequest, seconds: float) -> pb.GroupReply:
        return await self._ask(pb.GroupReply, "Group", request, seconds)

    async def group_log(self, request: pb.GroupLogRequest, seconds: float) -> pb.GroupLogReply:
        return await self._ask(pb.GroupLogReply, "GroupLog", request, seconds)

    def work(self, reports: AsyncIterator[pb.WorkReport], seconds: float) -> Call:
        """Begins a launcher's call, on a separate channel: the launcher sends ``reports`` and reads orders."""
        return self._wire.call(self.address, "Work", reports, seconds, apart=True)

    async def preflight(self, request: pb.PreflightRequest, seconds: float) -> pb.PreflightReply:
        return await self._ask(pb.PreflightReply, "Preflight", request, seconds)

    async def config(self, request: pb.ConfigRequest, seconds: float) -> pb.ConfigReply:
        return await self._ask(pb.ConfigReply, "Config", request, seconds)

    async def status(self, seconds: float) -> pb.StatusReply:
        return await self._ask(pb.StatusReply, "Status", pb.StatusRequest(), seconds)

    async def peers(self, seconds: float) -> pb.PeersReply:
        return await self._ask(pb.PeersReply, "Peers", pb.PeersRequest(), seconds)

    async def pause(self, paused: bool, seconds: float) -> pb.PauseReply:
        return await self._ask(pb.PauseReply, "Pause", pb.PauseRequest(paused=paused), seconds)

    async def _ask(self, _kind: type[T], method: str, request: object, seconds: float) -> T:
        call = self._wire.call(self.address, method, request, seconds)
        try:
            reply: T = await call.reply()
        finally:
            call.end()
        # Replies to Peers and Pause do not name the node.
        if node := getattr(reply, "node", ""):
            self.check(node)
        return reply

    def check(self, node: str) -> None:
        """Raises PeerError if the target says that this address belongs to another node than ``node``."""
        self._wire.credentials.check(self.address, node)
