"""gRPC's own services: health, and reflection that lists the protocol, for callers that may read."""

from __future__ import annotations

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from service_helpers import BEARER, Service, refused

NODE = "probing.v1.Node"


def test_health_and_reflection(service: Service) -> None:
    with grpc.insecure_channel(f"unix:{service.root}/s.sock") as channel:
        health = health_pb2_grpc.HealthStub(channel)
        for name in ("", NODE):
            assert health.Check(health_pb2.HealthCheckRequest(service=name), timeout=20).status == 1
        with pytest.raises(grpc.RpcError, match="NOT_FOUND"):
            health.Check(health_pb2.HealthCheckRequest(service="nope"), timeout=20)
        found = ProtoReflectionDescriptorDatabase(channel)
        assert NODE in found.get_services()
        assert "Query" in [method.name for method in found.FindFileContainingSymbol(NODE).service[0].method]
        watch = health.Watch(health_pb2.HealthCheckRequest(service=NODE), timeout=60)
        assert next(watch).status == 1
        service.process.terminate()
        assert next(watch).status == 2


def test_both_want_the_token(service: Service) -> None:
    request = health_pb2.HealthCheckRequest()
    with grpc.insecure_channel(service.tcp) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        assert refused(lambda: health.Check(request, timeout=20))[0] is grpc.StatusCode.UNAUTHENTICATED
        with pytest.raises(grpc.RpcError, match="UNAUTHENTICATED"):
            ProtoReflectionDescriptorDatabase(channel).get_services()
        assert health.Check(request, timeout=20, metadata=BEARER).status == 1
