"""Implements probing.v1.Node: identifies the caller, runs the call in a thread, and answers."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import grpc
import grpc.aio

from probing.api.errors import PeerError, PrivilegeError, UsageError
from probing.api.proto.probing.v1 import node_pb2 as pb
from probing.api.proto.probing.v1.node_pb2_grpc import NodeServicer
from probing.api.text import plural, utc_second
from probing.daemon.cluster import Member
from probing.daemon.diagnose.coordination.peers import Sight
from probing.daemon.diagnose.gather.gatherer import Gatherer
from probing.daemon.query.caller import Caller, Scope
from probing.daemon.query.engine import Engine
from probing.daemon.service.answering import CallAdmission, CallKind, Timed, answering
from probing.daemon.service.audit import MAX_WORD, Audit
from probing.daemon.service.collector_client import CollectorClient
from probing.daemon.service.gossip import COMPRESS_BYTES, Gossip
from probing.daemon.service.groups import Groups
from probing.daemon.service.limits import Context, Limits, seconds_for
from probing.daemon.service.members import packed_peer
from probing.daemon.service.messages import (
    config_reply,
    eval_reply,
    stacks_reply,
    status_fields,
    status_for_jobs,
    vars_reply,
)
from probing.daemon.service.outgoing import Outgoing
from probing.daemon.service.peer_identity import proves_node
from probing.daemon.service.preflight.gather import Preflight
from probing.daemon.service.preflight.request import asked_of
from probing.daemon.service.query_many import QueryMany
from probing.daemon.service.stored_findings import StoredFindings
from probing.daemon.service.streams import Form, Streams
from probing.daemon.supervisor.health import RESTARTED
from probing.diagnosis.facts_file import encoded, to_json
from probing.federation.engine import engine_version
from probing.groups.group import Group

__all__ = ("Node", "NodeService")

START_UP_S = 15.0
MAX_PIDS = 4096
MAX_NAMES = 64
_Rows = TypeVar("_Rows", pb.StacksReply, pb.VarsReply)


@dataclass(frozen=True, slots=True)
class Node:
    """This node, with its ``name`` and ``address``. ``known`` returns this node and the other members."""

    name: str
    version: str
    instance: str
    address: str
    known: Callable[[], Sequence[Member]] = tuple

    def members(self) -> Sequence[Member]:
        """Returns the members; only this node if ``known`` returns none."""
        return self.known() or (Member(self.name, self.address, "healthy", version=self.version),)


def _of_jobs(reply: _Rows, caller: Caller, field: str) -> _Rows:
    """Returns ``reply`` without the entries of ``field`` whose jobs the caller has no right to see."""
    if caller.jobs is not None:
        for name in (field, "failures"):
            rows = getattr(reply, name)
            kept = [row for row in rows if row.job in caller.jobs]
            del rows[:]
            rows.extend(kept)
    return reply


class NodeService(NodeServicer):
    """The service probing.v1.Node. Belongs to one event loop; calls that block run in threads."""

    hints = False

    def __init__(
        self,
        node: Node,
        collector: CollectorClient,
        engine: Engine,
        identify: Callable[[Context], Awaitable[Caller]],
        limits: Limits,
        *,
        gatherer: Gatherer,
        preflight: Preflight,
        sources: Callable[[], list[pb.Source]] = list,
        now_ns: Callable[[], int] = time.time_ns,
        timed: Timed = lambda *_: None,
        audit: Audit | None = None,
        gossip: Gossip | None = None,
        outgoing: Outgoing | None = None,
        take_findings: Callable[[bytes, Caller], int] = lambda *_: 0,
        sight: Callable[[str, str], Sight] = lambda *_: Sight(),
        evaluates: bool = False,
        groups: Groups | None = None,
        findings: StoredFindings | None = None,
    ) -> None:
        """Makes the service. ``identify`` returns the caller of a call, or raises PrivilegeError. ``sources`` returns
        sources that Status shows in addition to the collector's. ``timed``: see ``Guarded``. ``take_findings`` stores
        findings of another node, the caller, and returns their number. ``sight`` returns the connections of a run's
        ranks. ``evaluates``: whether Eval is enabled. ``groups`` is None if groups of workers are not enabled, and
        ``findings`` is None if no finding is stored."""
        self._node = node
        self._collector = collector
        self.identify = identify
        self.limits = limits
        self._gatherer = gatherer
        self._preflight = preflight
        self._sources = sources
        self.audit = audit or Audit()
        self._gossip = gossip
        self._now_ns = now_ns
        self.timed = timed
        self._take_findings = take_findings
        self._sight = sight
        self._evaluates = evaluates
        self._groups = groups
        self._findings = findings or StoredFindings()
        self._code_was_run = ""
        self._admission = CallAdmission()
        self._streams = Streams(node.name, engine, self._admission, self.limits, now_ns)
        self._outgoing = outgoing or Outgoing()
        self._many = QueryMany(self._outgoing, self.limits)
        self._started_ns = now_ns()
        self._started = time.monotonic()
        self._collector_seen = False

    @property
    def calls(self) -> dict[str, int]:
        """Returns the number of calls in progress, by kind."""
        return self._admission.counts

    def close(self) -> None:
        self._admission.close()
        self._preflight.close()

    @answering
    async def Query(self, request: pb.QueryRequest, context: Context, caller: Caller) -> None:  # noqa: N802
        await self.query(request, context, caller)

    async def query(self, request: pb.QueryRequest, context: Context, caller: Caller, form: Form | None = None) -> None:
        """Answers a Query of ``caller``, who has the scope for it. ``form``: the form of the messages; None: the form
        of Query.
        """
        await self._streams.answer(request, context, caller, form)

    @answering
    async def QueryMany(  # noqa: N802
        self, request: pb.QueryManyRequest, context: Context, caller: Caller
    ) -> None:
        with self._admission.counted(CallKind.MANY, caller):
            known = {member.address for member in self._node.members()} - {self._node.address}
            if caller.listener != "unix":
                # A daemon on a Unix socket would identify the caller by this service's user, not by the caller's token.
                known = {address for address in known if not address.startswith("unix:")}
            await self._many.answer(request, context, known)

    @answering
    async def Stacks(  # noqa: N802
        self, request: pb.StacksRequest, context: Context, caller: Caller
    ) -> pb.StacksReply:
        timeout = self._time_for(request, context)

        def ask() -> pb.StacksReply:
            found = self._collector.stacks(
                request.pids, request.job, timeout, native=request.native, with_locals=request.locals
            )
            return _of_jobs(stacks_reply(self._node.name, *found), caller, "threads")

        return await self._admission.run(CallKind.TARGETS, caller, ask)

    @answering
    async def Vars(self, request: pb.VarsRequest, context: Context, caller: Caller) -> pb.VarsReply:  # noqa: N802
        if not 0 < len(request.names) <= MAX_NAMES:
            message = f"the request names {len(request.names)} variables"
            raise UsageError(message, hint=f"give 1 to {MAX_NAMES} names of variables")
        timeout = self._time_for(request, context)

        def ask() -> pb.VarsReply:
            found = self._collector.variables(request.pids, request.job, request.names, timeout)
            return _of_jobs(vars_reply(self._node.name, found), caller, "values")

        return await self._admission.run(CallKind.TARGETS, caller, ask)

    @answering
    async def Eval(self, request: pb.EvalRequest, context: Context, caller: Caller) -> pb.EvalReply:  # noqa: N802
        if not self._evaluates:
            raise PrivilegeError(
                f"running code in processes is not enabled on node {self._node.name}",
                hint="its administrator can set inject.enabled and list jobs or users; `probingctl vars` and `stacks` "
                "need nothing in the process",
            )
        if not request.code.strip():
            raise UsageError("there is no code to run")
        if len(request.pids) > MAX_PIDS:
            raise UsageError(f"the request names more than {MAX_PIDS} processes", hint="ask for a job instead")
        timeout = seconds_for(context, request.timeout_ms, self.limits.eval_max_s, self.limits.eval_max_s)
        wanted = request.limit_ms / 1000 if request.limit_ms else self.limits.eval_s
        fields = {
            "pids": list(request.pids),
            "job": request.job,
            "rank": request.rank if request.HasField("rank") else None,
            "code": request.code,
            "seconds": min(wanted, timeout),
            "session": request.session,
            "ends": request.ends,
            "caller": str(caller),
        }

        def ask() -> pb.EvalReply:
            return eval_reply(self._node.name, self._collector.evaluate(fields, timeout))

        reply = await self._admission.run(CallKind.EVAL, caller, ask)
        if reply.results:
            where = plural(len(reply.results), "process")
            self._code_was_run = f"{caller} had code run in {where} at {utc_second(self._now_ns())}"
        return reply

    def _time_for(self, request: pb.StacksRequest | pb.VarsRequest, context: Context) -> float:
        if len(request.pids) > MAX_PIDS:
            raise UsageError(f"more than {MAX_PIDS} processes", hint="ask for a job instead")
        return seconds_for(context, request.timeout_ms, self.limits.stacks_s, self.limits.stacks_max_s)

    @answering
    async def Facts(self, request: pb.FactsRequest, context: Context, caller: Caller) -> None:  # noqa: N802
        timeout = seconds_for(context, request.timeout_ms, self.limits.facts_s, self.limits.facts_s)
        # This reply is sent at once, so that the caller can compute the difference between the clocks.
        await context.write(pb.FactsReply(node=self._node.name, received_ns=self._now_ns()))
        if request.connections:
            shown = await self._admission.run(CallKind.TARGETS, caller, partial(self._sight, request.job, request.run))
            reply = pb.FactsReply(node=self._node.name, addresses=shown.addresses, peers=shown.peers)
            await asyncio.wait_for(context.write(reply), self.limits.unread_s)
            return

        def ask() -> list[bytes]:
            if request.hardware:
                return [to_json(self._gatherer.hardware(timeout=timeout))]
            found = self._gatherer.facts(request.job, run=request.run, deep=not request.shallow, timeout=timeout)
            return [to_json(one) for one in found if caller.jobs is None or one.job in caller.jobs]

        found = await self._admission.run(CallKind.TARGETS, caller, ask)
        # Each message contains one run, which may have hundreds of ranks.
        for facts in found:
            await asyncio.wait_for(
                context.write(pb.FactsReply(node=self._node.name, facts=[facts])), self.limits.unread_s
            )

    @answering
    async def Record(self, request: pb.RecordRequest, context: Context, caller: Caller) -> pb.RecordReply:  # noqa: N802
        del context
        taken = await asyncio.to_thread(self._take_findings, request.findings, caller)
        return pb.RecordReply(node=self._node.name, taken=taken)

    @answering
    async def AwaitFinding(  # noqa: N802
        self, request: pb.AwaitFindingRequest, context: Context, caller: Caller
    ) -> pb.AwaitFindingReply:
        most = self.limits.finding_s
        with self._admission.counted(CallKind.FINDINGS, caller):
            seconds = seconds_for(context, request.wait_ms, most, most)
            stored = await self._findings.beyond(request.job, request.stored, seconds)
        return pb.AwaitFindingReply(node=self._node.name, stored=stored)

    @answering
    async def Preflight(  # noqa: N802
        self, request: pb.PreflightRequest, context: Context, caller: Caller
    ) -> pb.PreflightReply:
        received = self._now_ns()
        timeout = seconds_for(context, request.timeout_ms, self.limits.preflight_s, self.limits.preflight_max_s)
        allowed = self._outgoing.allowed
        known = {m.address for m in self._node.members()}
        if allowed:
            known = await allowed.among(known.intersection(request.peers))
        asked = asked_of(request, caller, known)
        try:
            with self._admission.counted(CallKind.PREFLIGHT, caller):
                facts = await self._preflight.facts(asked, timeout)
        finally:
            if request.python:
                # A part that is refused does not end the call.
                refusal = PrivilegeError(asked.refused[0].why) if asked.refused else None
                self.audit.call(caller, f"preflight python={request.python[:MAX_WORD]!r}", Scope.ADMIN, refusal)
        return pb.PreflightReply(
            node=self._node.name, facts=encoded(facts), received_ns=received, node_time_ns=self._now_ns()
        )

    @answering
    async def Sink(self, request: Any, context: Context, caller: Caller) -> pb.SinkReply:  # noqa: N802
        del context, caller
        return pb.SinkReply(received_bytes=await self._preflight.bandwidth.take(request))

    @answering
    async def Config(  # noqa: N802
        self, request: pb.ConfigRequest, context: Context, caller: Caller
    ) -> pb.ConfigReply:
        del context
        changes = request.HasField("value") or request.reset
        fields: dict[str, str | int] = {"key": request.key, "job": request.job, "pid": request.pid}
        if request.HasField("propose_value"):
            fields["propose_value"] = request.propose_value
        if request.propose_reset:
            fields["propose_reset"] = True
        if not changes:
            return await self._config(fields, caller)
        fields |= {"for_ms": request.for_ms, "persist": request.persist, "reset": request.reset, "yes": request.yes}
        if request.HasField("value"):
            fields["value"] = request.value
        return await self._config(fields, caller)

    async def _config(self, fields: Mapping[str, Any], caller: Caller) -> pb.ConfigReply:
        ask = partial(self._collector.config, fields, self.limits.control_s)
        return config_reply(self._node.name, await self._admission.run(CallKind.CONTROL, caller, ask))

    @answering
    async def Status(  # noqa: N802
        self, request: pb.StatusRequest, context: Context, caller: Caller
    ) -> pb.StatusReply:
        del request
        reply = pb.StatusReply(
            node=self._node.name,
            version=self._node.version,
            instance=self._node.instance,
            started_ns=self._started_ns,
            engine=engine_version(),
        )
        timeout = seconds_for(context, 0, self.limits.status_s, self.limits.status_s)
        try:
            found = await self._admission.run(CallKind.CONTROL, caller, partial(self._collector.status, timeout))
        except PeerError as e:
            reply.state, reply.reason = self._without_collector(), e.message
        else:
            self._collector_seen = True
            reply.MergeFrom(status_fields(found))
        if restarted := os.environ.get(RESTARTED):
            reply.reason = "; ".join(filter(None, (reply.reason, f"the service was started again: {restarted}")))
        if self._code_was_run:
            reply.notices.append(f"{self._node.name}: {self._code_was_run}; the table probing.audit lists all of it")
        reply.sources.extend(self._sources())
        reply.node_time_ns = self._now_ns()
        return reply if caller.jobs is None else status_for_jobs(reply)

    def _without_collector(self) -> str:
        young = time.monotonic() - self._started < START_UP_S
        return "starting" if young and not self._collector_seen else "lost"

    @answering
    async def Peers(self, request: pb.PeersRequest, context: Context, caller: Caller) -> pb.PeersReply:  # noqa: N802
        del request, context, caller
        named = {self._node.address, *(self._outgoing.allowed.named if self._outgoing.allowed else ())}
        return pb.PeersReply(peers=[packed_peer(member, named) for member in self._node.members()])

    @answering
    async def Gossip(  # noqa: N802
        self, request: pb.GossipRequest, context: Context, caller: Caller
    ) -> pb.GossipReply:
        if self._gossip is None:
            raise UsageError("this node has no cluster")
        certified = proves_node(caller, request.message.sender.name)
        reply = pb.GossipReply(message=await self._gossip.answer(request.message, certified=certified))
        if reply.ByteSize() > COMPRESS_BYTES:
            context.set_compression(grpc.Compression.Gzip)
        return reply

    @answering
    async def Work(self, request: Any, context: Context, caller: Caller) -> None:  # noqa: N802
        await self._enabled_groups().launchers.work(request, context, caller)

    @answering
    async def Group(self, request: pb.GroupRequest, context: Context, caller: Caller) -> pb.GroupReply:  # noqa: N802
        del context
        groups = self._enabled_groups()
        if request.WhichOneof("change") != "create":
            return await groups.group(request, caller)
        # Parsing a group of thousands of workers takes 0.1 s or more, and a local user may send any number of such
        # requests, so parsing is subject to admission.
        new = await self._admission.run(CallKind.CONTROL, caller, partial(Group.from_json, request.create))
        return await groups.group(request, caller, new)

    @answering
    async def GroupLog(  # noqa: N802
        self, request: pb.GroupLogRequest, context: Context, caller: Caller
    ) -> pb.GroupLogReply:
        del context
        return await self._enabled_groups().launchers.log(request, caller)

    @answering
    async def Agree(self, request: pb.AgreeRequest, context: Context, caller: Caller) -> pb.AgreeReply:  # noqa: N802
        del context
        return await self._enabled_groups().agree(request, caller)

    def _enabled_groups(self) -> Groups:
        if self._groups is None:
            raise PrivilegeError(
                f"groups of workers are not enabled on node {self._node.name}",
                hint="its administrator can set groups.enabled in the configuration",
            )
        return self._groups

    @answering
    async def Annotate(  # noqa: N802
        self, request: pb.AnnotateRequest, context: Context, caller: Caller
    ) -> pb.AnnotateReply:
        del context
        if len(request.pids) > MAX_PIDS:
            raise UsageError(f"more than {MAX_PIDS} processes", hint="name a job instead")
        if not request.pids and not request.job:
            raise UsageError("no rank is named", hint="give a job or a pid")
        fields: dict[str, object] = {"labels": dict(request.labels), "pids": list(request.pids), "job": request.job}
        if request.HasField("rank"):
            fields["rank"] = request.rank
        ask = partial(self._collector.label, fields, self.limits.control_s)
        return pb.AnnotateReply(node=self._node.name, ranks=await self._admission.run(CallKind.CONTROL, caller, ask))

    @answering
    async def Pause(self, request: pb.PauseRequest, context: Context, caller: Caller) -> pb.PauseReply:  # noqa: N802
        del context
        ask = partial(self._collector.pause, request.paused, self.limits.control_s)
        return pb.PauseReply(paused=await self._admission.run(CallKind.CONTROL, caller, ask))
