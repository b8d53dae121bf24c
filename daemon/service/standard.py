"""gRPC's own services, for callers with the scope read: health (grpc.health.v1), and reflection of the protocol."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc.aio
from grpc_health.v1 import health_pb2_grpc
from grpc_health.v1._async import HealthServicer
from grpc_health.v1.health_pb2 import HealthCheckResponse
from grpc_reflection.v1alpha import reflection_pb2_grpc
from grpc_reflection.v1alpha._async import ReflectionServicer

from probing.api.errors import ProbingError
from probing.api.proto.probing.v1 import node_pb2 as pb
from probing.daemon.query.caller import Caller, Scope
from probing.daemon.service.audit import Audit
from probing.daemon.service.auth import require
from probing.daemon.service.errors import abort
from probing.daemon.service.limits import Context

__all__ = ("add_standard_services",)

NODE = pb.DESCRIPTOR.services_by_name["Node"].full_name
NAMES = (NODE, "grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection")
_Admit = Callable[[str, Context], Awaitable[None]]


def add_standard_services(
    server: grpc.aio.Server, identify: Callable[[Context], Awaitable[Caller]], audit: Audit
) -> HealthServicer:
    """Adds both services to ``server``; returns that of health, which reports SERVING until its shutdown.

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
