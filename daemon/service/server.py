"""Starts gRPC on an inner socket and relays the public sockets to it. A TCP port that fails is tried again.

Adds gRPC's own services for callers with the scope read: health (grpc.health.v1), and reflection of the protocol.

Refuses requests that are too large or malformed. gRPC itself would log nothing for a request that is too large, and a
traceback for each malformed request, even from a caller without a token.
"""

from __future__ import annotations

import asyncio
import contextlib
import grp
import inspect
import logging
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import grpc.aio
from grpc_health.v1 import health_pb2_grpc
from grpc_health.v1._async import HealthServicer
from grpc_health.v1.health_pb2 import HealthCheckResponse
from grpc_reflection.v1alpha import reflection_pb2_grpc
from grpc_reflection.v1alpha._async import ReflectionServicer

from probing.api.errors import ConfigError, PrivilegeError, ProbingError, Unauthenticated, UsageError
from probing.api.proto.probing.v1 import node_pb2 as pb
from probing.api.proto.probing.v1.node_pb2_grpc import NodeServicer, add_NodeServicer_to_server
from probing.daemon.query.caller import Caller, Scope
from probing.daemon.service.audit import Audit
from probing.daemon.service.auth import Doorkeeper, require
from probing.daemon.service.errors import abort
from probing.daemon.service.limits import Context
from probing.daemon.service.listening import Listeners, TcpPort
from probing.daemon.service.relay import Relay
from probing.daemon.service.tls import Tls
from probing.daemon.supervisor.ports import bind

if TYPE_CHECKING:
    from probing.api.proto.arrow.flight.Flight_pb2_grpc import FlightServiceServicer

__all__ = ("Server",)


class _Refused(NamedTuple):
    why: str


_MALFORMED = _Refused("the request is malformed")


class _MalformedRequests(grpc.aio.ServerInterceptor):
    """Refuses requests that are malformed or larger than ``most`` bytes. ``refused`` is called with the context of such
    a call, and the reason.
    """

    def __init__(self, refused: Callable[[Any, str], None], most: int) -> None:
        self._refused = refused
        self._most = most

    async def intercept_service(self, continuation: Callable[[Any], Awaitable[Any]], details: Any) -> Any:
        handler = await continuation(details)
        if handler is None or handler.request_deserializer is None:
            return handler
        deserialized = handler.request_deserializer

        def parsed(data: bytes) -> Any:
            if len(data) > self._most:
                return _Refused(f"the request has {len(data)} bytes, at most {self._most} are read")
            try:
                return deserialized(data)
            except Exception:
                return _MALFORMED

        changed: dict[str, Any] = {"request_deserializer": parsed}
        for kind in ("unary_unary", "unary_stream", "stream_unary", "stream_stream"):
            if (answer := getattr(handler, kind)) is not None:
                changed[kind] = self._for_stream(answer) if kind.startswith("stream") else self._for_one(answer)
        return handler._replace(**changed)

    def _for_one(self, answer: Callable[[Any, Any], Awaitable[Any]]) -> Callable[[Any, Any], Awaitable[Any]]:
        async def checked(request: Any, context: Any) -> Any:
            if isinstance(request, _Refused):
                await self._abort(context, request.why)
            return await answer(request, context)

        return checked

    def _for_stream(self, answer: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        async def checked(requests: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
            async for request in requests:
                if isinstance(request, _Refused):
                    await self._abort(context, request.why)
                yield request

        # gRPC calls async generators and coroutines in different ways, so the wrapper is of the same kind as
        # ``answer``.
        if inspect.isasyncgenfunction(answer):

            async def replies(requests: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
                async for reply in answer(checked(requests, context), context):
                    yield reply

            return replies

        async def reply(requests: AsyncIterator[Any], context: Any) -> Any:
            return await answer(checked(requests, context), context)

        return reply

    async def _abort(self, context: Any, why: str) -> None:
        self._refused(context, why)
        await abort(context, UsageError(why))


NODE = pb.DESCRIPTOR.services_by_name["Node"].full_name
NAMES = (NODE, "grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection")
_Admit = Callable[[str, Context], Awaitable[None]]


def _add_standard_services(
    server: grpc.aio.Server, identify: Callable[[Context], Awaitable[Caller]], audit: Audit
) -> HealthServicer:
    """Adds gRPC's own services to ``server``. Returns the health service, which reports SERVING until its shutdown.

    ``identify`` returns the caller of a call, or raises Unauthenticated or PrivilegeError.
    """

    async def admit(method: str, context: Context) -> None:
        try:
            caller = await identify(context)
            try:
                require(caller, Scope.READ)
            except ProbingError as e:
                audit.call(caller, method, Scope.READ, e)
                raise
        except ProbingError as e:
            await abort(context, e)
        audit.call(caller, method, Scope.READ, None)

    health = _Health(admit)
    health_pb2_grpc.add_HealthServicer_to_server(health, server)
    reflection_pb2_grpc.add_ServerReflectionServicer_to_server(_Reflection(admit), server)
    return health


class _Health(HealthServicer):  # type: ignore[misc]
    def __init__(self, admit: _Admit) -> None:
        super().__init__()
        self._admit = admit
        self._server_status[NODE] = HealthCheckResponse.SERVING

    async def Check(self, request: Any, context: Any) -> Any:  # noqa: N802
        await self._admit("health", context)
        return await super().Check(request, context)

    async def Watch(self, request: Any, context: Any) -> None:  # noqa: N802
        await self._admit("health", context)
        await super().Watch(request, context)


class _Reflection(ReflectionServicer):  # type: ignore[misc]
    def __init__(self, admit: _Admit) -> None:
        super().__init__(NAMES)
        self._admit = admit

    async def ServerReflectionInfo(self, requests: Any, context: Any) -> AsyncIterator[Any]:  # noqa: N802
        await self._admit("reflection", context)
        async for reply in super().ServerReflectionInfo(requests, context):
            yield reply


GRACE_S = 1.0
# The delay of the answer to a wrong token, s.
WRONG_TOKEN_S = 1.0
MAX_CALLS = 32
MAX_REQUEST = 1 << 20
MAX_METADATA = 16 << 10
_OPTIONS = (
    # gRPC ends a call with a larger request without logging it. _MalformedRequests refuses and logs requests above
    # MAX_REQUEST up to this size.
    ("grpc.max_receive_message_length", 2 * MAX_REQUEST),
    ("grpc.max_metadata_size", MAX_METADATA),
    # The limit for each connection; the relay limits the number of connections.
    ("grpc.max_concurrent_streams", MAX_CALLS),
    ("grpc.so_reuseport", 0),
)
_log = logging.getLogger(__name__)


class Server:
    """Listens on the Unix socket ``path`` for root and ``group``, and on ``tcp`` (HOST:PORT, or empty)."""

    def __init__(
        self,
        path: str,
        group: str,
        tcp: str,
        keeper: Doorkeeper,
        tls: Tls,
        audit: Audit,
        listeners: Listeners | None = None,
    ) -> None:
        self._path = path
        self._group = group
        self._keeper = keeper
        self._audit = audit
        self._health: HealthServicer | None = None
        # The inner socket is in the directory of the public socket, and only this user may connect.
        self._inner = str(Path(path).with_name("rpc.sock"))
        self._relay = Relay(self._inner, tls, audit)
        self._server = grpc.aio.server(
            options=_OPTIONS, interceptors=[_MalformedRequests(self._malformed, MAX_REQUEST)]
        )
        self._port = TcpPort("tcp", tcp, partial(self._relay.serve, known=False), listeners) if tcp else None

    async def start(self, servicer: NodeServicer, flight: FlightServiceServicer | None = None) -> None:
        """Starts to answer calls, including Arrow Flight if ``flight`` is given. Raises ConfigError if the Unix socket
        is taken or cannot be created. A TCP port that is taken is tried again."""
        add_NodeServicer_to_server(servicer, self._server)
        if flight:
            from probing.api.proto.arrow.flight.Flight_pb2_grpc import add_FlightServiceServicer_to_server

            add_FlightServiceServicer_to_server(flight, self._server)
        self._health = _add_standard_services(self._server, self.identify, self._audit)
        public = _bind_public(self._path, self._group)
        with _umask(0o177):
            _unlink(self._inner)
            try:
                self._server.add_insecure_port(f"unix:{self._inner}")
            except RuntimeError as e:
                raise ConfigError(f"cannot listen on {self._inner}", hint=_DIRECTORY) from e
        await self._server.start()
        await self._relay.serve(public, known=True)
        if self._port:
            await self._port.start()

    async def stop(self) -> None:
        if self._port:
            self._port.stop()
        if self._health:
            await self._health.enter_graceful_shutdown()
        await self._server.stop(GRACE_S)
        self._relay.close()
        _unlink(self._inner)

    async def identify(
        self, context: grpc.aio.ServicerContext[Any, Any], shown: Sequence[tuple[str, str | bytes]] | None = None
    ) -> Caller:
        """Returns the caller of a call. ``shown``: metadata to use in place of the call's.

        Raises Unauthenticated on TCP without token or certificate, Overloaded for too many calls, and PrivilegeError
        for a call that did not come through a public socket.
        """
        link = self._relay.link(context.peer())
        if link is None:
            raise PrivilegeError("the connection did not come through a public socket", hint=f"connect to {self._path}")
        if link.caller.listener == "tcp":
            try:
                if shown is None:
                    shown = tuple(context.invocation_metadata() or ())
                caller = self._keeper.identified(link.caller, shown, link.certificate)
            except Unauthenticated:
                await asyncio.sleep(WRONG_TOKEN_S)
                if link.certificate is not None:
                    # The caller's certificate may have expired: a new connection shows the new certificate.
                    asyncio.get_running_loop().call_later(WRONG_TOKEN_S, link.close)
                raise
            self._relay.know(link, caller)
            return caller
        return link.caller

    def _malformed(self, context: grpc.aio.ServicerContext[Any, Any], why: str) -> None:
        if link := self._relay.link(context.peer()):
            self._audit.refused(link.caller, "a call", why)

    def sources(self) -> list[pb.Source]:
        """Returns the state of TCP for Status if it is degraded."""
        return self._port.sources() if self._port else []


_DIRECTORY = "its directory must exist and belong to the service's user"


def _bind_public(path: str, group: str) -> socket.socket:
    if _answers(path):
        raise ConfigError(f"{path} is taken: a daemon answers on it", hint="stop it, or choose another --socket")
    # With this umask no user outside the group can connect before the mode is set.
    with _umask(0o117):
        _unlink(path)
        try:
            listener = bind(socket.AF_UNIX, path)
        except OSError as e:
            raise ConfigError(f"cannot listen on unix:{path}", hint=_DIRECTORY) from e
    _give_to_group(path, group)
    return listener


@contextlib.contextmanager
def _umask(mask: int) -> Iterator[None]:
    old = os.umask(mask)
    try:
        yield
    finally:
        os.umask(old)


def _unlink(path: str) -> None:
    with contextlib.suppress(OSError):
        if Path(path).is_socket():
            Path(path).unlink()


def _give_to_group(path: str, group: str) -> None:
    try:
        gid = int(group) if group.isdigit() else grp.getgrnam(group).gr_gid
        os.chown(path, -1, gid)
    except (KeyError, PermissionError) as e:
        _log.warning("only this user can use %s: its group cannot be changed to %s (%s)", path, group, e)
    Path(path).chmod(0o660)


def _answers(path: str) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.settimeout(1.0)
        try:
            sock.connect(path)
        except OSError:
            return False
    return True
