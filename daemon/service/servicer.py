"""What the node answers over gRPC."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from functools import wraps
from typing import Any, TypeVar

import grpc

from probing.api.errors import InternalError, PeerError, ProbingError, QueryRejected, UsageError
from probing.api.proto.probing.v1 import node_pb2 as pb
from probing.api.proto.probing.v1.node_pb2_grpc import NodeServicer
from probing.daemon.query.engine import End, Engine, Progress
from probing.daemon.service.auth import Scope, require
from probing.daemon.service.collector_client import CollectorClient
from probing.daemon.service.errors import abort
from probing.daemon.service.messages import config_reply, stacks_reply, status_fields, vars_reply
from probing.daemon.supervisor.fatal import RESTARTED

__all__ = ("Limits", "Node", "NodeService")

# The answer of the node must be on its way before the caller's own deadline ends.
MARGIN_S = 0.1
MIN_TIMEOUT_S = 0.05
UNREAD_S = 1.0
START_UP_S = 15.0
MAX_PIDS = 4096
MAX_NAMES = 64
# As max_bytes: the caller takes the rows as they come, so that their sum needs no bound.
UNLIMITED = (1 << 64) - 1
# Says who answers, ahead of the rows.
NODE_KEY = "probing-node-bin"
_log = logging.getLogger(__name__)
_audit = logging.getLogger("probing.audit")
_Reply = TypeVar("_Reply")
_Replies = Generator[pb.QueryReply, None, None]


@dataclass(frozen=True)
class Limits:
    """``query_s``: deadline of a query that names none, and its upper bound; ``max_bytes`` of an answer likewise.

    ``stream_s`` is the upper bound where the caller streams: it may write for long what is read at once.
    """

    query_s: float = 30.0
    stream_s: float = 3600.0
    max_bytes: int = 1 << 30
    stacks_s: float = 2.0
    stacks_max_s: float = 30.0
    control_s: float = 5.0


@dataclass(frozen=True)
class Node:
    """Who answers. ``peers`` are addresses; ``address`` is where this node itself is asked."""

    name: str
    version: str
    instance: str
    address: str
    peers: tuple[str, ...] = ()

    def members(self) -> list[dict[str, Any]]:
        """Rows of cluster.members: this node, and the peers, of which no more is known than where they are."""
        own = {"member": self.name, "address": self.address, "state": "healthy", "version": self.version}
        return [own, *({"member": "", "address": peer, "state": "unknown"} for peer in self.peers)]


def _answering(method: Callable[..., _Reply]) -> Callable[..., _Reply]:
    """Errors end the call as errors.py says; a bug is logged here and told as one."""

    @wraps(method)
    def answer(self: NodeService, request: Any, context: grpc.ServicerContext) -> _Reply:
        try:
            return method(self, request, context)
        except ProbingError as e:
            abort(context, e)
        except Exception as e:
            if not context.is_active():
                raise
            _log.exception("%s failed", method.__name__)
            abort(context, InternalError(f"{method.__name__} failed: {type(e).__name__}"))

    return answer


class NodeService(NodeServicer):
    """The service probing.v1.Node; calls come on many threads."""

    def __init__(
        self,
        node: Node,
        collector: CollectorClient,
        engine: Engine,
        limits: Limits | None = None,
        now_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self._node = node
        self._collector = collector
        self._engine = engine
        self._limits = limits or Limits()
        self._now_ns = now_ns
        self._started_ns = now_ns()
        self._started = time.monotonic()
        self._collector_seen = False

    def Query(self, request: pb.QueryRequest, context: grpc.ServicerContext) -> Iterator[pb.QueryReply]:  # noqa: N802
        replies = self._query(request, context)
        try:
            while (reply := self._next(replies, context)) is not None:
                yield reply
        finally:
            replies.close()

    @_answering
    def _next(self, replies: _Replies, context: grpc.ServicerContext) -> pb.QueryReply | None:  # noqa: ARG002
        return next(replies, None)

    def _query(self, request: pb.QueryRequest, context: grpc.ServicerContext) -> _Replies:
        require(context, Scope.READ)
        limits = self._limits
        if not request.sql.strip():
            raise QueryRejected("the query is empty")
        streamed = request.max_bytes == UNLIMITED
        most_s = max(limits.query_s, limits.stream_s) if streamed else limits.query_s
        context.send_initial_metadata(((NODE_KEY, self._node.name.encode()),))
        timeout = _timeout(context, request.timeout_ms, limits.query_s, most_s)
        parts = self._engine.run(
            request.sql,
            timeout=timeout,
            max_bytes=0 if streamed else min(request.max_bytes or limits.max_bytes, limits.max_bytes),
            cancelled=lambda: not context.is_active(),
            progress=request.progress,
        )
        # A caller that takes no rows blocks this thread where the engine's deadline does not reach.
        unread = threading.Timer(timeout + UNREAD_S, context.cancel)
        unread.daemon = True
        unread.start()
        try:
            for part in parts:
                yield self._reply(part)
        finally:
            unread.cancel()

    def _reply(self, part: bytes | Progress | End) -> pb.QueryReply:
        if isinstance(part, End):
            return pb.QueryReply(end=self._end(part))
        if isinstance(part, Progress):
            progress = pb.QueryProgress(
                fraction=part.fraction, rows_to_scan=part.rows_to_scan, elapsed_ms=part.elapsed_ms
            )
            return pb.QueryReply(progress=progress)
        return pb.QueryReply(arrow=part)

    def _end(self, end: End) -> pb.QueryEnd:
        return pb.QueryEnd(
            node=self._node.name,
            rows=end.rows,
            rows_scanned=end.rows_scanned,
            warnings=end.warnings,
            node_time_ns=self._now_ns(),
        )

    @_answering
    def Stacks(self, request: pb.StacksRequest, context: grpc.ServicerContext) -> pb.StacksReply:  # noqa: N802
        require(context, Scope.READ)
        timeout = self._time_for(request, context)
        found = self._collector.stacks(
            request.pids, request.job, timeout, native=request.native, with_locals=request.locals
        )
        return stacks_reply(self._node.name, found)

    @_answering
    def Vars(self, request: pb.VarsRequest, context: grpc.ServicerContext) -> pb.VarsReply:  # noqa: N802
        require(context, Scope.READ)
        if not 0 < len(request.names) <= MAX_NAMES:
            raise UsageError(f"{len(request.names)} names", hint=f"give 1 to {MAX_NAMES} names of variables")
        timeout = self._time_for(request, context)
        return vars_reply(
            self._node.name, self._collector.variables(request.pids, request.job, request.names, timeout)
        )

    def _time_for(self, request: pb.StacksRequest | pb.VarsRequest, context: grpc.ServicerContext) -> float:
        if len(request.pids) > MAX_PIDS:
            raise UsageError(f"more than {MAX_PIDS} processes", hint="ask for a job instead")
        return _timeout(context, request.timeout_ms, self._limits.stacks_s, self._limits.stacks_max_s)

    @_answering
    def Config(self, request: pb.ConfigRequest, context: grpc.ServicerContext) -> pb.ConfigReply:  # noqa: N802
        changes = request.HasField("value") or request.reset
        fields: dict[str, Any] = {"key": request.key, "job": request.job, "pid": request.pid}
        if changes:
            fields |= {"for_ms": request.for_ms, "persist": request.persist, "reset": request.reset}
            if request.HasField("value"):
                fields["value"] = request.value
        asked = f"config {request.key!r}={request.value!r} job {request.job!r} pid {request.pid} reset={request.reset}"
        try:
            require(context, Scope.PROBE if changes else Scope.READ)
            settings = self._collector.config(fields, self._limits.control_s)
        except ProbingError as e:
            if changes:
                _audit.warning("%s asked by %s: refused: %s", asked, context.peer(), e.message)
            raise
        if changes:
            _audit.warning("%s asked by %s: done", asked, context.peer())
        return config_reply(self._node.name, settings)

    @_answering
    def Status(self, request: pb.StatusRequest, context: grpc.ServicerContext) -> pb.StatusReply:  # noqa: ARG002, N802
        require(context, Scope.READ)
        reply = pb.StatusReply(
            node=self._node.name,
            version=self._node.version,
            instance=self._node.instance,
            started_ns=self._started_ns,
        )
        timeout = _timeout(context, 0, self._limits.control_s, self._limits.control_s)
        try:
            fields = status_fields(self._collector.status(timeout))
        except PeerError as e:
            reply.state, reply.reason = self._without_collector(), e.message
        else:
            self._collector_seen = True
            reply.MergeFrom(fields)
        if restarted := os.environ.get(RESTARTED):
            reply.reason = "; ".join(filter(None, (reply.reason, f"the service was started again: {restarted}")))
        reply.node_time_ns = self._now_ns()
        return reply

    def _without_collector(self) -> str:
        young = time.monotonic() - self._started < START_UP_S
        return "starting" if young and not self._collector_seen else "lost"

    @_answering
    def Peers(self, request: pb.PeersRequest, context: grpc.ServicerContext) -> pb.PeersReply:  # noqa: ARG002, N802
        require(context, Scope.READ)
        return pb.PeersReply(
            peers=[pb.Peer(node=m["member"], address=m["address"], state=m["state"]) for m in self._node.members()]
        )

    @_answering
    def Pause(self, request: pb.PauseRequest, context: grpc.ServicerContext) -> pb.PauseReply:  # noqa: N802
        verb = "pause" if request.paused else "resume"
        try:
            require(context, Scope.PROBE)
            paused = self._collector.pause(request.paused, self._limits.control_s)
        except ProbingError as e:
            _audit.warning("%s asked by %s: refused: %s", verb, context.peer(), e.message)
            raise
        _audit.warning("%s asked by %s: done, paused=%s", verb, context.peer(), paused)
        return pb.PauseReply(paused=paused)


def _timeout(context: grpc.ServicerContext, asked_ms: int, default: float, most: float) -> float:
    """Seconds that the node may take."""
    wanted = min(asked_ms / 1000 if asked_ms else default, most)
    left = context.time_remaining()
    return max(wanted if left is None else min(wanted, left - MARGIN_S), MIN_TIMEOUT_S)
