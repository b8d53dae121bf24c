"""One node over gRPC: every call has a deadline, and every error names the node and the reason."""

from __future__ import annotations

import ipaddress
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakSet

import grpc

from probing.api.errors import (
    PeerError,
    ProbingError,
    QueryRejected,
    UsageError,
)
from probing.api.proto.probing.v1 import node_pb2 as pb
from probing.api.proto.probing.v1.node_pb2_grpc import NodeStub
from probing.api.wire import UNLIMITED
from probing.client.interrupt import closed, sheltered
from probing.client.wire.credentials import Credentials
from probing.client.wire.errors import error_of, too_old
from probing.client.wire.statements import read_statements
from probing.client.wire.stream import Stream
from probing.client.wire.tls import Tls, credentials_of
from probing.federation.execution.answer import Reply
from probing.federation.execution.clocks import measured

if TYPE_CHECKING:
    from probing.client.wire.proven import ProvenRoute

__all__ = ("OPTIONS", "Connection", "checked", "route_of", "target_of")

T = TypeVar("T")
# What a node answers that does not know statements.
_NO_SQL = "the query is empty"
_SILENT = (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.UNAVAILABLE)
# A command asks a node several questions. After a timeout of so many seconds the others fail at once, for a while.
_PATIENCE_S = 1.0
_PAUSE_S = 10.0
_MAX_MESSAGE = 64 << 20
_MAX_FACTS = 256 << 20
_ONE_JOB = "ask for one job"
OPTIONS = (
    ("grpc.max_receive_message_length", _MAX_MESSAGE),
    ("grpc.enable_http_proxy", 0),
    ("grpc.enable_retries", 0),
    # gRPC would wait for up to two minutes before it connects again to a daemon that is back.
    ("grpc.max_reconnect_backoff_ms", 5000),
)


class Connection:
    """``address`` is ``unix:PATH`` or ``HOST:PORT``. Safe to use from several threads."""

    def __init__(
        self, address: str, *, token: str = "", credentials: Credentials | None = None, tls: Tls | None = None
    ) -> None:
        """Does not connect yet; TCP speaks TLS with ``tls``. ``credentials``: in place of ``token``. Raises UsageError
        for a wrong address, a file that cannot be read, or a token that would travel in the clear."""
        self._credentials = credentials or Credentials(token)
        in_the_clear = self._credentials.token if tls is None else ""
        self.address = checked(address, in_the_clear)
        self._metadata = self._credentials.metadata(address)
        self._route = route_of(address, in_the_clear)
        target = self._route.target if self._route else target_of(address)
        files = None if tls is None or address.startswith("unix:") else credentials_of(tls)
        self._channel = sheltered(
            lambda: (
                grpc.insecure_channel(target, options=OPTIONS)
                if files is None
                else grpc.secure_channel(target, files, options=OPTIONS)
            )
        )
        # The generated stub has no types; the methods below give them.
        self._stub: Any = sheltered(lambda: NodeStub(self._channel))
        self._calls: WeakSet[Any] = WeakSet()
        # After a timeout: the time (time.monotonic()) until which calls fail at once, and their error.
        self._silence: tuple[float, ProbingError] | None = None

    def __enter__(self) -> Connection:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends the calls in flight, and waits for their end, but not long."""
        # A channel that is left open may not meet another socket at the target of its route.
        if closed(self._channel.close) and self._route:
            self._route.close()

    def query(
        self,
        sql: str,
        timeout: float,
        max_bytes: int,
        watch: Callable[[pb.QueryProgress], None] | None = None,
        *,
        strict: bool = False,
    ) -> Reply:
        """Returns the rows of ``sql`` at the node; ``watch`` is called with the progress of the query.

        Raises QueryMemory above ``max_bytes`` of Arrow, PartialAnswer under ``strict`` where rows are missing, and the
        node's errors.
        """
        begun, sent_ns = time.monotonic_ns(), time.time_ns()
        with self.stream(sql, timeout, max_bytes=max_bytes, watch=watch, strict=strict) as stream:
            # Imported while the node works on the query.
            import pyarrow as pa

            table = pa.Table.from_batches(list(stream), stream.schema)
        clock = measured(sent_ns, sent_ns + time.monotonic_ns() - begun, stream.node_time_ns)
        return Reply(stream.node, table, stream.rows_scanned, stream.warnings, clock)

    def query_all(
        self,
        statements: Mapping[str, str],
        timeout: float,
        max_bytes: int,
        watch: Callable[[pb.QueryProgress], None] | None = None,
        *,
        strict: bool = False,
    ) -> list[Reply]:
        """Returns the rows of each of ``statements`` (SQL by name), read from one snapshot of the node.

        ``timeout`` and ``max_bytes`` bound the whole request. Raises the error of the first statement that failed, with
        its name, and whatever ``query`` raises.
        """
        asked = [pb.Statement(name=name, sql=sql) for name, sql in statements.items()]
        begun = time.monotonic()
        call = self._query_call(pb.QueryRequest(statements=asked, max_bytes=max_bytes), timeout, watch)
        try:
            replies = read_statements(
                call,
                list(statements),
                lambda e: self._failed(e, begun),
                max_bytes=max_bytes,
                watch=watch,
                strict=strict,
            )
            for reply in replies:
                self._check(reply.node)
            return replies
        except QueryRejected as e:
            if e.message == _NO_SQL:
                raise too_old(self.address) from None
            raise
        finally:
            closed(call.cancel)

    def stream(
        self,
        sql: str,
        timeout: float,
        *,
        max_bytes: int = UNLIMITED,
        watch: Callable[[pb.QueryProgress], None] | None = None,
        strict: bool = False,
    ) -> Stream:
        """As ``query``, but returns at once, with a stream of batches; to close it ends the query at the node."""
        begun = time.monotonic()
        call = self._query_call(pb.QueryRequest(sql=sql, max_bytes=max_bytes), timeout, watch)
        return Stream(
            call,
            lambda e: self._failed(e, begun),
            max_bytes=max_bytes,
            watch=watch,
            ask_name=lambda: self.status(timeout).node,
            check=self._check,
            strict=strict,
        )

    def _query_call(
        self, request: pb.QueryRequest, timeout: float, watch: Callable[[pb.QueryProgress], None] | None
    ) -> Any:
        request.timeout_ms = _milliseconds(timeout)
        request.progress = watch is not None
        self._require_speech()
        # The node's own deadline is earlier, so that the node reports what took too long.
        call = sheltered(lambda: self._stub.Query(request, timeout=timeout + 0.3, metadata=self._metadata))
        self._calls.add(call)
        return call

    def cancel(self) -> None:
        """Ends the queries in flight."""
        for call in list(self._calls):
            closed(call.cancel)

    def stacks(self, request: pb.StacksRequest, timeout: float) -> pb.StacksReply:
        request.timeout_ms = _milliseconds(timeout)
        return self._simple(pb.StacksReply, self._stub.Stacks, request, timeout + 0.3)

    def variables(self, request: pb.VarsRequest, timeout: float) -> pb.VarsReply:
        request.timeout_ms = _milliseconds(timeout)
        return self._simple(pb.VarsReply, self._stub.Vars, request, timeout + 0.3)

    def facts(self, request: pb.FactsRequest, timeout: float) -> pb.FactsReply:
        """Returns the facts of all runs. Raises PeerError where they are too large, or no node's."""
        request.timeout_ms = _milliseconds(timeout)
        self._require_speech()
        begun = time.monotonic()
        call = sheltered(lambda: self._stub.Facts(request, timeout=timeout + 0.3, metadata=self._metadata))
        found = pb.FactsReply()
        try:
            for reply in iter(lambda: sheltered(lambda: next(call, None)), None):
                found.MergeFrom(reply)
                if sum(map(len, found.facts)) > _MAX_FACTS:
                    raise PeerError(f"{self.address} has more than {_MAX_FACTS} bytes of facts", hint=_ONE_JOB)
        except grpc.RpcError as e:
            raise self._failed(e, begun) from None
        finally:
            closed(call.cancel)
        self._check(found.node)
        return found

    def preflight(self, request: pb.PreflightRequest, timeout: float) -> pb.PreflightReply:
        request.timeout_ms = _milliseconds(timeout)
        return self._simple(pb.PreflightReply, self._stub.Preflight, request, timeout + 0.3)

    def config(self, request: pb.ConfigRequest, timeout: float) -> pb.ConfigReply:
        return self._simple(pb.ConfigReply, self._stub.Config, request, timeout)

    def status(self, timeout: float) -> pb.StatusReply:
        return self._simple(pb.StatusReply, self._stub.Status, pb.StatusRequest(), timeout)

    def peers(self, timeout: float) -> pb.PeersReply:
        return self._simple(pb.PeersReply, self._stub.Peers, pb.PeersRequest(), timeout)

    def pause(self, paused: bool, timeout: float) -> pb.PauseReply:
        return self._simple(pb.PauseReply, self._stub.Pause, pb.PauseRequest(paused=paused), timeout)

    def _simple(self, _kind: type[T], method: Callable[..., T], request: object, timeout: float) -> T:
        self._require_speech()
        begun = time.monotonic()
        try:
            reply = sheltered(lambda: method(request, timeout=timeout, metadata=self._metadata))
        except grpc.RpcError as e:
            raise self._failed(e, begun) from None
        # Peers and Pause name no node.
        if node := getattr(reply, "node", ""):
            self._check(node)
        return reply

    def _check(self, node: str) -> None:
        """Raises PeerError for the answer of another node than the target knows here."""
        self._credentials.check(self.address, node)

    def _require_speech(self) -> None:
        """Raises the error of the last call while calls fail at once."""
        if self._silence is not None and time.monotonic() < self._silence[0]:
            raise self._silence[1]

    def _failed(self, error: grpc.RpcError, begun: float) -> ProbingError:
        """Returns the error of a call that began at ``begun``; after a timeout, calls fail at once for a while."""
        if self._route and self._route.problem:
            return self._route.problem
        found = error_of(self.address, error)
        if error.code() in _SILENT and time.monotonic() - begun > _PATIENCE_S:
            self._silence = (time.monotonic() + _PAUSE_S, found)
        return found


def _milliseconds(seconds: float) -> int:
    return max(1, int(seconds * 1000))


def checked(address: str, token: str) -> str:
    """Returns ``address``. Raises UsageError where it is none, or where ``token`` would travel in the clear."""
    if address.startswith("unix:"):
        if len(address) == len("unix:"):
            raise UsageError("unix: needs a path", hint="give unix:/run/probingd/probingd.sock or HOST:PORT")
        return address
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise UsageError(f"{address} is no address of a node", hint="give unix:PATH or HOST:PORT")
    if token and not _loopback(host):
        raise UsageError(
            f"the token would travel in the clear to {address}",
            hint="use TLS (--tls-ca FILE), or a tunnel to a loopback port, or leave the token out",
        )
    return address


def route_of(address: str, clear_token: str) -> ProvenRoute | None:
    """Returns the way by which ``clear_token``, which no TLS protects, goes to ``address``; None: there is none."""
    if not clear_token or address.startswith("unix:"):
        return None
    # Imported late: the event loop takes long.
    from probing.client.wire.proven import ProvenRoute

    return ProvenRoute(address)


def target_of(address: str) -> str:
    """Returns what gRPC connects to for ``address``."""
    return address if address.startswith("unix:") else f"dns:///{address}"


def _loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
