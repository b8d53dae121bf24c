"""The service probing.v1.Node of all simulated nodes; the address of the connection chooses the node."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import grpc
import grpc.aio

from probing.api.errors import NotFound, ProbingError
from probing.api.proto.probing.v1 import node_pb2 as pb
from probing.api.proto.probing.v1.node_pb2_grpc import NodeServicer
from probing.daemon.service.errors import abort, to_proto
from probing.daemon.service.limits import Limits
from probing.daemon.service.outgoing import Outgoing
from probing.daemon.service.query_many import QueryMany
from probing.federation.engine import engine_version
from simulator.answers import Answers, operations
from simulator.cast import Cast
from simulator.hung_job import JobNodes
from simulator.relay import number_of

__all__ = ("Service",)

Context = grpc.aio.ServicerContext[Any, Any]


class Service(NodeServicer):
    def __init__(self, cast: Cast, kept: int) -> None:
        """``kept``: channels of all nodes that ask others."""
        self._cast = cast
        self._jobs = JobNodes(cast) if cast.jobs_ns else None
        self._answers = self._jobs or Answers(operations(cast.rows))
        self._known = frozenset(cast.addresses)
        self._many = QueryMany(Outgoing(), Limits(), kept=kept)
        self._calls: dict[int, int] = {}
        self.took_ns: list[int] = []

    def _clock_ns(self, number: int) -> int:
        return time.time_ns() + self._cast.clock_ns(number)

    async def Query(self, request: pb.QueryRequest, context: Context) -> None:
        begun = time.perf_counter_ns()
        number = number_of(context.peer())
        calls = self._calls[number] = self._calls.get(number, 0) + 1
        if self._cast.delay_s:
            await asyncio.sleep(self._cast.delay_s)
        if self._cast.loses(number) and calls % 2:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the connection was lost")
        if self._cast.slow(number) and calls % 2:
            await asyncio.sleep(self._cast.slow_s)
        name = self._cast.name(number)
        total = 0
        replies: list[pb.QueryReply] = []
        for statement in request.statements or [pb.Statement(sql=request.sql)]:
            try:
                stream, rows = await self._answers.rows(statement.sql, number)
            except ProbingError as e:
                if not request.statements:
                    await abort(context, e)
                end = pb.StatementEnd(name=statement.name, error=to_proto(e))
                replies.append(pb.QueryReply(statement=end))
                continue
            total += rows
            replies.append(pb.QueryReply(arrow=stream))
            if request.statements:
                replies.append(pb.QueryReply(statement=pb.StatementEnd(name=statement.name, rows=rows)))
        end = pb.QueryEnd(node=name, rows=total, rows_scanned=total, node_time_ns=self._clock_ns(number))
        replies.append(pb.QueryReply(end=end))
        # No answer here is larger than a message may be.
        for reply in [pb.QueryReply(parts=replies)] if request.whole else replies:
            await context.write(reply)
        self.took_ns.append(time.perf_counter_ns() - begun)
        del self.took_ns[:-10_000]

    async def QueryMany(self, request: pb.QueryManyRequest, context: Context) -> None:
        number = number_of(context.peer())
        if self._cast.breaks_in_the_middle(number):
            request.addresses[:] = request.addresses[: len(request.addresses) // 2]
            await self._many.answer(request, context, self._known)
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the connection was lost")
        await self._many.answer(request, context, self._known)

    async def Status(self, request: pb.StatusRequest, context: Context) -> pb.StatusReply:
        number = number_of(context.peer())
        now = self._clock_ns(number)
        reply = self._jobs.status(number, now) if self._jobs else pb.StatusReply()
        reply.MergeFrom(
            pb.StatusReply(
                node=self._cast.name(number),
                state="running",
                version="0.1.0",
                node_time_ns=now,
                engine=engine_version(),
            )
        )
        return reply

    async def Facts(self, request: pb.FactsRequest, context: Context) -> None:
        jobs, number = await self._with_jobs(context), number_of(context.peer())
        facts = [jobs.hardware(number)] if request.hardware else jobs.facts(request.job, number)
        if not facts:
            await abort(context, NotFound(f"there is no job '{request.job}'"))
        name = self._cast.name(number)
        await context.write(pb.FactsReply(node=name, received_ns=self._clock_ns(number)))
        await asyncio.sleep(self._cast.delay_s)
        for one in facts:
            await context.write(pb.FactsReply(node=name, facts=[one]))

    async def Stacks(self, request: pb.StacksRequest, context: Context) -> pb.StacksReply:
        return (await self._with_jobs(context)).stacks(request, number_of(context.peer()))

    async def AwaitFinding(self, request: pb.AwaitFindingRequest, context: Context) -> pb.AwaitFindingReply:
        await self._with_jobs(context)
        # The finding was stored before, and no other follows.
        if request.stored == 1:
            await asyncio.sleep(request.wait_ms / 1000)
        return pb.AwaitFindingReply(node=self._cast.name(number_of(context.peer())), stored=1)

    async def _with_jobs(self, context: Context) -> JobNodes:
        if self._jobs is None:
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, "")
        assert self._jobs is not None
        return self._jobs

    async def Peers(self, request: pb.PeersRequest, context: Context) -> pb.PeersReply:
        peers = [
            pb.Peer(node=self._cast.name(number), address=self._cast.address(number), state="healthy")
            for number in range(self._cast.count)
        ]
        return pb.PeersReply(peers=peers)
