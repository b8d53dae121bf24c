"""Clients that do not read, do not send, do not stop and do not know the token; and everybody else meanwhile."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from long import long_unless
from ports import free_port
from query_helpers import operations
from service_helpers import BEARER, Service, refused, serving, start, token_file
from waiting import until

from probing.api.proto.probing.v1 import node_pb2 as pb
from probing.api.proto.probing.v1.node_pb2_grpc import NodeStub
from probing.daemon.service.answering import CallKind
from probing.daemon.service.spool import MAX_RESTING_EACH

ORDINARY = 65534
HERE = Path(__file__).parents[1]
ENDLESS = "SELECT a.range, b.range AS r FROM range(1000000) a, range(1000000) b"
# Takes a snapshot, whose release shows that the query ended.
ENDLESS_OPS = "SELECT a.range, b.range AS r, o.seq FROM comm.ops o, range(1000000) a, range(1000000) b"
SLOW = "SELECT count(*) FROM range(1000000) a, range(1000000) b, range(1000) c"
STREAMED = (1 << 64) - 1
needs_root = pytest.mark.skipif(os.getuid() != 0, reason="starts processes of another user")


@pytest.fixture
def shared(open_tmp_path: Path) -> Iterator[Service]:
    """A service whose socket an ordinary user may use."""
    with serving(open_tmp_path, f"--users.group={ORDINARY}") as made:
        yield made


@contextmanager
def ordinary(script: str, *args: str) -> Iterator[tuple[subprocess.Popen[str], list[str]]]:
    """Runs ``script`` as an ordinary user: the process, once it has sent everything, and its lines until then."""
    argv = [sys.executable, str(HERE / script), *args]
    if os.getuid() == 0:
        # Popen(user=) forks with Python code in the child, which crashes beside the threads of gRPC.
        argv = ["setpriv", f"--reuid={ORDINARY}", f"--regid={ORDINARY}", "--clear-groups", *argv]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd="/") as process:
        assert process.stdout is not None
        lines = iter(process.stdout.readline, "")
        yield process, list(iter(lambda: next(lines), "open\n"))
        process.kill()


def answered(service: Service) -> None:
    assert service.node.Status(pb.StatusRequest(), timeout=20).node == "n0"
    assert service.query("SELECT count(*) n FROM comm.ops")[0].to_pylist() == [{"n": 100}]


def unread(service: Service, sql: str = ENDLESS) -> grpc.Call:
    """A stream whose first rows were read, and no more."""
    stream = service.node.Query(pb.QueryRequest(sql=sql, max_bytes=STREAMED, timeout_ms=600_000), timeout=600)
    assert next(stream).arrow
    return stream


def test_streams_that_are_not_read_keep_nobody_waiting(service: Service) -> None:
    service.collector.files.segment("comm.ops", operations(100))
    streams = [unread(service) for _ in range(6)]
    for _ in range(5):
        answered(service)
    for stream in streams:
        # It goes on where its reader goes on.
        assert sum(len(next(stream).arrow) for _ in range(20)) > 0
        stream.cancel()


def test_an_answer_that_fits_needs_no_reader(service: Service) -> None:
    sql = "SELECT range FROM range(300000)"
    streams = [
        service.node.Query(pb.QueryRequest(sql=sql, max_bytes=STREAMED, timeout_ms=600_000), timeout=600)
        for _ in range(4)
    ]
    until(lambda: len([child for child in service.inetd.children if child.poll() is None]) >= 2)
    answered_rows = [sum(part.end.rows for part in stream) for stream in streams]
    assert answered_rows == [300_000] * 4


def test_a_stream_without_progress_ends_and_says_why(open_tmp_path: Path) -> None:
    with serving(open_tmp_path, "--query.unread_s=0.5") as service:
        service.collector.files.segment("comm.ops", operations(1))
        stream = unread(service, ENDLESS_OPS)
        # The end of a worker alone does not show it: a busy machine starts one too many, and ends it.
        until(lambda: len(service.collector.released) == 1)
        code, error = refused(lambda: list(stream))
    assert (code, error.kind) == (grpc.StatusCode.DEADLINE_EXCEEDED, "QueryTimeout")
    assert "its caller read no rows for" in error.message
    assert "-o" in error.hint


def test_of_too_many_streams_that_are_not_read_some_end(service: Service) -> None:
    service.collector.files.segment("comm.ops", operations(1))
    streams = [unread(service, ENDLESS_OPS) for _ in range(MAX_RESTING_EACH + 2)]
    until(lambda: len(service.collector.released) >= 2)
    ends = [end for stream in streams if (end := _end_within(stream, 60))]
    assert len(ends) == 2
    assert all("too many queries wait" in str(end.details()) for end in ends)
    for stream in streams:
        stream.cancel()


def _end_within(stream: grpc.Call, parts: int) -> grpc.RpcError | None:
    """The error that ends ``stream``, if it does within so many parts."""
    try:
        for _ in range(parts):
            next(stream)
    except grpc.RpcError as e:
        return e
    return None


@needs_root
@pytest.mark.parametrize(
    ("listener", "method"),
    [("unix", "Query"), ("tcp", "Status"), long_unless(False, "unix", "Status"), long_unless(False, "tcp", "Query")],
)
def test_calls_that_never_send_their_message_shut_nobody_out(shared: Service, listener: str, method: str) -> None:
    shared.collector.files.segment("comm.ops", operations(100))
    address, *more = (f"unix:{shared.root}/s.sock",) if listener == "unix" else (shared.tcp, "=".join(BEARER[0]))
    with ordinary("http2_flood.py", address, "24", "64", f"/probing.v1.Node/{method}", *more):
        for _ in range(3):
            answered(shared)
        with grpc.insecure_channel(shared.tcp) as channel:
            assert NodeStub(channel).Status(pb.StatusRequest(), timeout=20, metadata=BEARER).node == "n0"


@needs_root
def test_an_ordinary_users_queries_leave_root_its_places(shared: Service) -> None:
    shared.collector.files.segment("comm.ops", operations(100))
    with ordinary("many_queries.py", f"unix:{shared.root}/s.sock", "40", SLOW) as (flood, lines):
        assert flood.stdout is not None
        first = lines or [flood.stdout.readline()]
        assert first[0].startswith("RESOURCE_EXHAUSTED")
        assert f"uid {ORDINARY}" in first[0]
        answered(shared)
        stacks = shared.node.Stacks(pb.StacksRequest(pids=[7]), timeout=20)
        assert stacks.node == "n0"
        assert shared.node.Pause(pb.PauseRequest(paused=True), timeout=20).paused


def test_one_callers_slow_queries_do_not_keep_its_next_waiting(service: Service) -> None:
    service.collector.files.segment("comm.ops", operations(100))
    calls = [service.node.Query(pb.QueryRequest(sql=SLOW), timeout=60) for _ in range(4)]
    until(lambda: len(service.inetd.children) >= 5)
    answered(service)
    assert all(call.is_active() for call in calls)
    for call in calls:
        call.cancel()


def test_a_caller_with_too_many_calls_is_refused_at_once(service: Service) -> None:
    request = pb.QueryRequest(sql=SLOW)
    calls = [service.node.Query(request, timeout=60) for _ in range(CallKind.QUERY.each)]
    until(lambda: len(service.inetd.children) >= 5)
    code, error = refused(lambda: service.query("SELECT 1"))
    assert (code, error.kind) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "Overloaded")
    assert error.hint
    assert service.node.Status(pb.StatusRequest(), timeout=20).node == "n0"
    for call in calls:
        call.cancel()
    until(lambda: _again(lambda: service.query("SELECT 1")))


def _again(call: Callable[[], object]) -> bool:
    try:
        call()
    except grpc.RpcError as e:
        if e.code() is not grpc.StatusCode.RESOURCE_EXHAUSTED:
            raise
        return False
    return True


def test_tcp_wants_the_token(service: Service) -> None:
    with grpc.insecure_channel(service.tcp) as channel:
        remote = NodeStub(channel)
        for metadata in ((), (("authorization", "Bearer wrong"),), (("authorization", ""),)):
            asked: dict[str, Any] = {"timeout": 20, "metadata": metadata}
            calls: list[Callable[[], object]] = [
                lambda asked=asked: remote.Status(pb.StatusRequest(), **asked),
                lambda asked=asked: list(remote.Query(pb.QueryRequest(sql="SELECT 1"), **asked)),
            ]
            for call in calls:
                code, error = refused(call)
                assert (code, error.kind) == (grpc.StatusCode.UNAUTHENTICATED, "Unauthenticated"), metadata
                assert "--token-file" in error.hint
        assert remote.Status(pb.StatusRequest(), timeout=20, metadata=BEARER).node == "n0"
    service.process.terminate()
    assert service.process.stderr is not None
    lines = [line for line in service.process.stderr.read().splitlines() if "a call asked by" in line]
    assert len(lines) == 1
    assert f"tcp: 127.0.0.1, uid {os.getuid()}: refused: " in lines[0]


def test_a_new_token_is_read(service: Service) -> None:
    path = service.root / "token.new"
    path.write_text("another-token-of-24-bytes")
    path.chmod(0o640)
    path.rename(service.root / "token")
    with grpc.insecure_channel(service.tcp) as channel:
        remote = NodeStub(channel)
        refused(lambda: remote.Status(pb.StatusRequest(), timeout=20, metadata=BEARER))
        new = (("authorization", "Bearer another-token-of-24-bytes"),)
        assert remote.Status(pb.StatusRequest(), timeout=20, metadata=new).node == "n0"


@pytest.mark.parametrize(("text", "mode"), [("short", 0o640), ("x" * 32, 0o644), ("x y" * 10, 0o600), ("", 0o600)])
def test_a_token_file_that_cannot_serve_is_an_error(tmp_path: Path, text: str, mode: int) -> None:
    option = token_file(tmp_path)
    path = tmp_path / "token"
    path.write_text(text)
    path.chmod(mode)
    done = start(tmp_path, "--listen=127.0.0.1:0", option)
    out, err = done.communicate(timeout=60)
    assert (done.returncode, out) == (78, "")
    assert err.startswith(f"error: token_file {path} ")
    assert err.splitlines()[1].startswith("hint: ")


def test_a_port_that_is_taken_is_reported_and_tried_again(open_tmp_path: Path) -> None:
    port = free_port()
    with socket.create_server(("127.0.0.1", port)) as squatter:
        process = start(open_tmp_path, f"--listen=127.0.0.1:{port}", token_file(open_tmp_path))
        with grpc.insecure_channel(f"unix:{open_tmp_path}/s.sock") as channel:
            grpc.channel_ready_future(channel).result(30)
            node = NodeStub(channel)
            (source,) = node.Status(pb.StatusRequest(), timeout=20).sources
            assert (source.name, source.state) == ("tcp", "degraded")
            assert f"cannot listen on 127.0.0.1:{port}: Address already in use" in source.reason
            squatter.close()
            until(lambda: not node.Status(pb.StatusRequest(), timeout=20).sources)
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        assert NodeStub(channel).Status(pb.StatusRequest(), timeout=20, metadata=BEARER).state == "starting"
    process.terminate()
    assert f"cannot listen on 127.0.0.1:{port}" in process.communicate(timeout=30)[1]


def test_a_collector_that_hangs_is_lost_at_once(service: Service) -> None:
    assert service.node.Status(pb.StatusRequest(), timeout=20).state == "running"
    service.collector.block = threading.Event()
    status = service.node.Status(pb.StatusRequest(), timeout=5)
    service.collector.block.set()
    assert (status.state, status.node) == ("lost", "n0")
    assert "did not answer within 0.8 s" in status.reason
