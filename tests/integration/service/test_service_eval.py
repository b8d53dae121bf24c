"""Eval of the service: closed unless it is enabled, for the scope admin alone, and told to all who look."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from service_helpers import BEARER, Service, refused, serving

from probing.api.proto.probing.v1 import node_pb2 as pb
from probing.api.proto.probing.v1.node_pb2_grpc import NodeStub

REQUEST = pb.EvalRequest(pids=[7], code="6 * 7", limit_ms=2500)


@pytest.fixture
def enabled(open_tmp_path: Path) -> Iterator[Service]:
    with serving(open_tmp_path, "--inject.enabled=true", log=open_tmp_path / "log") as made:
        yield made


def test_without_enabling_no_request_reaches_the_collector(service: Service) -> None:
    for request in (REQUEST, pb.EvalRequest(job="j", code="1"), pb.EvalRequest(rank=0, code="1")):
        code, error = refused(lambda request=request: service.node.Eval(request, timeout=20))  # type: ignore[misc]
        assert (code, error.kind) == (grpc.StatusCode.PERMISSION_DENIED, "PrivilegeError")
        assert "not enabled on node n0" in error.message
        assert "inject.enabled" in error.hint
    assert [request["op"] for request in service.collector.requests if request["op"] == "eval"] == []
    assert not service.node.Status(pb.StatusRequest(), timeout=20).notices


def test_what_the_collector_answers(enabled: Service) -> None:
    frames = [["a.py", 3, "f"], ["<eval>", 1, "<module>"]]
    enabled.collector.evaluated = [
        {"job": "j", "run": "r", "rank": 0, "pid": 7, "start_ns": 5, "value": "42", "type": "int", "output": "x\n"}
        | {"dropped": 2, "seconds": 0.5, "stops": 3, "longest_stop_us": 250},
        {"pid": 8, "error": {"type": "E", "message": "m", "frames": frames}},
    ]
    error = {"kind": "TargetTimeout", "message": "late", "hint": "wait"}
    enabled.collector.failures = [{"pid": 9, "rank": 1, "job": "j", "error": error}]
    reply = enabled.node.Eval(REQUEST, timeout=20)
    first, second = reply.results
    assert (first.job, first.run, first.rank, first.pid, first.value, first.type) == ("j", "r", 0, 7, "42", "int")
    assert (first.output, first.dropped, first.seconds, first.stops, first.longest_stop_us) == ("x\n", 2, 0.5, 3, 250)
    assert not first.HasField("raised")
    assert not second.HasField("value")
    assert [[f.file, f.line, f.function] for f in second.raised.frames] == frames
    assert (reply.failures[0].pid, reply.failures[0].error.message) == (9, "late")
    [asked] = [request for request in enabled.collector.requests if request["op"] == "eval"]
    assert (asked["pids"], asked["job"], asked["rank"], asked["code"], asked["seconds"]) == (
        [7],
        "",
        None,
        "6 * 7",
        2.5,
    )
    assert asked["caller"] == f"unix: uid {os.getuid()}, pid {os.getpid()}"


def test_who_looks_at_the_node_is_told(enabled: Service) -> None:
    assert not enabled.node.Status(pb.StatusRequest(), timeout=20).notices
    enabled.collector.evaluated = [{"pid": 7, "value": "1", "type": "int"}]
    enabled.node.Eval(REQUEST, timeout=20)
    [notice] = enabled.node.Status(pb.StatusRequest(), timeout=20).notices
    assert re.fullmatch(r"n0: unix: uid \d+, pid \d+ had code run in 1 process at [\d: -]+Z; .*probing.audit.*", notice)
    [line] = [line for line in (enabled.root / "log").read_text().splitlines() if "eval '6 * 7'" in line]
    assert f"asked by unix: uid {os.getuid()}" in line
    assert line.endswith(": done")


def test_a_token_without_the_scope_is_refused(enabled: Service) -> None:
    with grpc.insecure_channel(enabled.tcp) as channel:
        code, error = refused(lambda: NodeStub(channel).Eval(REQUEST, timeout=20, metadata=BEARER))
    assert (code, error.kind) == (grpc.StatusCode.PERMISSION_DENIED, "PrivilegeError")
    assert "the scope admin is needed" in error.message
    assert [request for request in enabled.collector.requests if request["op"] == "eval"] == []


def test_requests_without_sense(enabled: Service) -> None:
    for request in (pb.EvalRequest(pids=[1]), pb.EvalRequest(pids=[1], code=" \n")):
        assert refused(lambda request=request: enabled.node.Eval(request, timeout=20))[0] is (  # type: ignore[misc]
            grpc.StatusCode.INVALID_ARGUMENT
        )


def test_an_answer_without_sense_is_an_error(enabled: Service) -> None:
    for row in ({"pid": "x"}, {}, {"pid": 1, "error": {"type": "E"}}, {"pid": 1, "seconds": "x"}):
        enabled.collector.evaluated = [json.loads(json.dumps(row))]
        assert refused(lambda: enabled.node.Eval(REQUEST, timeout=20))[1].kind == "InternalError"
