"""Preflight over gRPC: the tables by real SQL workers, the rights of callers, and the client's checks on top."""

from __future__ import annotations

import os
import time
from pathlib import Path

import grpc
import pytest
from query_helpers import logical
from service_helpers import BEARER, Service, serving

from probing.api.proto.probing.v1 import node_pb2 as pb
from probing.api.proto.probing.v1.node_pb2_grpc import NodeStub
from probing.client.cluster import Cluster
from probing.client.preflight.asking import Wanted, gathered
from probing.diagnosis.facts_file import decoded
from probing.diagnosis.preflight.env_file import Plan
from probing.diagnosis.preflight.facts import NodeFacts
from probing.diagnosis.preflight.run import results

GIB = 1 << 30


@pytest.fixture
def service(service: Service) -> Service:
    """A node with a GPU, a port, file systems, and a rank of job j."""
    now = time.time_ns() - 10**9
    own = {"node": "n0", "ts": now}
    who = {**own, "job": "j", "run": "0", "pid": 7, "start_ns": 1, "rank": 0}
    files = service.collector.files
    trainer = {**who, "local_rank": 0, "world_size": 1, "role": "trainer", "state": "running"}
    files.live_rows = {
        "gpu.devices": logical("gpu.devices", [{**own, "device_id": 0, "uuid": "GPU-1", "name": "H", "state": "ok"}]),
        "process.processes": logical("process.processes", [trainer]),
        "process.envs": logical("process.envs", [{**who, "name": "NCCL_SOCKET_IFNAME", "value": "lo"}]),
    }
    files.segment(
        "gpu.utilization",
        [
            {**own, "ts": now - n, "uuid": "GPU-1", "device_id": 0, "temperature_c": 91.0 - 10**-9 * n}
            for n in (0, 10**9)
        ],
    )
    files.segment("rdma.ports", [{**own, "hca": "mlx5_0", "port": 1, "state": "ACTIVE", "rate_gbps": 200.0}])
    files.segment(
        "host.file_systems",
        [{**own, "mount_point": "/dev/shm", "size_bytes": GIB, "available_bytes": 64 << 20, "answers": True}],
    )
    return service


def test_the_checks_see_what_the_tables_have(service: Service) -> None:
    with Cluster(f"unix:{service.root}/s.sock") as cluster:
        case = gathered(cluster, Wanted(job="j"), Plan())
    [node] = case.nodes
    assert node.problems == ()
    assert (node.node, node.devices[0].temperature_c, node.ports[0].rate_gbps) == ("n0", 91.0, 200.0)
    found = {(result.check, result.state) for result in results(case)}
    assert {
        ("gpu_health", "fail"),
        ("shared_memory", "fail"),
        ("infiniband", "pass"),
        ("interface", "pass"),
        ("ranks", "pass"),
        ("nodes", "pass"),
    } <= found
    offset, error = case.offsets["n0"]
    assert abs(offset) <= error + 1e8


def test_by_tcp_nothing_is_started(service: Service) -> None:
    with grpc.insecure_channel(service.tcp) as channel:
        request = pb.PreflightRequest(python="/usr/bin/python3", peers=["127.0.0.1:1"])
        reply = NodeStub(channel).Preflight(request, metadata=BEARER, timeout=30)
    facts = decoded(NodeFacts, reply.facts)
    assert "admin" in facts.problem("versions")
    assert facts.reached[0].why.startswith("not measured")
    assert reply.received_ns <= reply.node_time_ns


def test_interpreters_that_are_asked_for_have_a_bounded_number_of_lines(service: Service) -> None:
    request = pb.PreflightRequest(python="/opt/python", timeout_ms=1)
    with grpc.insecure_channel(service.tcp) as channel:
        for _ in range(30):
            NodeStub(channel).Preflight(request, metadata=BEARER, timeout=30)
    service.node.Preflight(request, timeout=30)
    service.process.terminate()
    assert service.process.stderr is not None
    lines = [line for line in service.process.stderr.read().splitlines() if "preflight python='/opt/python'" in line]
    # A refusal that is repeated has one line in 10 s.
    assert 1 <= sum(" refused: " in line for line in lines) < 30
    assert f"asked by unix: uid {os.getuid()}, pid {os.getpid()}: done" in lines[-1]


def test_an_interpreter_that_cannot_be_started_is_a_problem(service: Service) -> None:
    # There is no supervisor here which would start the process.
    reply = service.node.Preflight(pb.PreflightRequest(python="/usr/bin/python3", timeout_ms=30_000), timeout=60)
    facts = decoded(NodeFacts, reply.facts)
    assert facts.problem("versions")
    assert facts.devices


def test_bandwidth_is_measured_where_the_node_allows_it(open_tmp_path: Path) -> None:
    with serving(open_tmp_path, f"--cluster.bandwidth_test_bytes={5 << 20}") as service:
        request = pb.PreflightRequest(peers=[service.tcp, "127.0.0.1:1"], bandwidth=True)
        facts = decoded(NodeFacts, service.node.Preflight(request, timeout=30).facts)
        known, strange = facts.transfers
        # Its own address is one that it knows; ten chunks of 512 KiB are the cap.
        assert (known.address, known.sent_bytes, known.why) == (service.tcp, 5 << 20, "")
        assert known.duration_ns > 0
        assert strange.why.startswith("not measured")
        # AND at once again it is refused, so that nobody keeps a link busy
        again = decoded(NodeFacts, service.node.Preflight(request, timeout=30).facts)
        assert again.transfers[0].why == "another measurement runs here"
        # AND who sends more than the cap is cut off
        with pytest.raises(grpc.RpcError):
            service.node.Sink(iter([pb.SinkRequest(data=bytes(1 << 19))] * 20), timeout=30)


def test_bandwidth_is_off_by_default(service: Service) -> None:
    request = pb.PreflightRequest(peers=[service.tcp], bandwidth=True)
    [transfer] = decoded(NodeFacts, service.node.Preflight(request, timeout=30).facts).transfers
    assert transfer.why == "cluster.bandwidth_test_bytes is not set"
    with pytest.raises(grpc.RpcError, match="bandwidth_test_bytes is not set"):
        service.node.Sink(iter([pb.SinkRequest(data=b"x")]), timeout=30)
