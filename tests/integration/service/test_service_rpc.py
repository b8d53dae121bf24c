"""The service as clients meet it: a process on a Unix socket, a collector's control socket, real SQL workers."""

from __future__ import annotations

import os
import signal
import socket
import stat
import threading
from pathlib import Path

import duckdb
import grpc
import pytest
from nodes_asked import run
from query_helpers import operations
from service_helpers import BEARER, Service, refused, start, token_file
from waiting import until

from probing.api.proto.probing.v1 import node_pb2 as pb
from probing.api.proto.probing.v1.node_pb2_grpc import NodeStub
from probing.api.tables import TABLES
from probing.api.tables.user import user_table, user_table_to
from probing.api.tables.views import VIEWS
from probing.federation.execution.answer import Reply
from probing.federation.planning.split import plan

FRAME = {"func": "train", "file": "/a/train.py", "lineno": 12, "frame_type": "Python", "ip": 1 << 40}


def test_a_query_streams_arrow_and_an_end(service: Service) -> None:
    service.collector.files.segment("comm.ops", operations(100))
    table, end = service.query("SELECT op, count(*) AS n FROM comm.ops GROUP BY op ORDER BY op")
    assert table.to_pylist() == [{"op": "all_reduce", "n": 80}, {"op": "barrier", "n": 20}]
    assert (end.node, end.rows, end.rows_scanned, list(end.warnings)) == ("n0", 2, 100, [])
    assert end.node_time_ns > 0
    until(lambda: len(service.collector.released) == 1)
    assert [r["tables"] for r in service.collector.requests if r["op"] == "snapshot"] == [["comm.ops"]]


def test_a_node_sends_states_of_aggregates(service: Service) -> None:
    service.collector.files.segment("comm.ops", operations(100))
    split = plan("SELECT op, approx_quantile(seq, 0.5) q, approx_count_distinct(seq) d FROM comm.ops GROUP BY op", 0)
    (part,) = split.parts

    def ask(address: str, sql: str, seconds: float) -> Reply:
        return Reply(address, service.query(sql)[0])

    assert "export_state(" in part.sql
    rows = {row["op"]: row for row in run(split, ["n0", "n1"], ask).table.to_pylist()}
    assert all(abs(rows[op]["d"] - true) <= 2 for op, true in (("all_reduce", 80), ("barrier", 20)))
    assert all(45 <= row["q"] <= 55 for row in rows.values())


def test_a_state_of_another_engine_is_refused(service: Service) -> None:
    sql = "SELECT export_state('1.5.5', approx_quantile(seq, 0.5)) AS s FROM comm.ops"
    code, error = refused(lambda: service.query(sql))
    assert (code, error.kind) == (grpc.StatusCode.INVALID_ARGUMENT, "EngineDiffers")
    assert service.node.Status(pb.StatusRequest(), timeout=10).engine == duckdb.__version__


def test_errors_travel_whole(service: Service) -> None:
    for sql, code, kind, message in (
        ("SELECT * FROM nope", grpc.StatusCode.INVALID_ARGUMENT, "QueryRejected", "there is no table nope"),
        ("SELECT nope FROM comm.ops", grpc.StatusCode.INVALID_ARGUMENT, "QueryError", 'Referenced column "nope"'),
        ("  ", grpc.StatusCode.INVALID_ARGUMENT, "QueryRejected", "the query is empty"),
        ("DROP TABLE x", grpc.StatusCode.INVALID_ARGUMENT, "QueryRejected", "DROP is not allowed"),
        ("SELECT * FROM process.envs", grpc.StatusCode.NOT_FOUND, "NotFound", "no live table process.envs"),
    ):
        found, error = refused(lambda sql=sql: service.query(sql))
        assert (found, error.kind) == (code, kind)
        assert error.message.startswith(message)
        assert error.hint


def test_a_deadline_is_the_nodes_to_tell(service: Service) -> None:
    slow = "SELECT count(*) FROM range(1000000) a, range(1000000) b, range(1000) c"
    code, error = refused(lambda: service.query(slow, timeout_ms=300))
    assert (code, error.kind) == (grpc.StatusCode.DEADLINE_EXCEEDED, "QueryTimeout")
    code, error = refused(lambda: service.query("SELECT * FROM range(1000000)", max_bytes=1000))
    assert (code, error.kind) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "QueryMemory")


def test_a_client_that_cancels_ends_the_worker(service: Service) -> None:
    until(lambda: len(service.inetd.alive()) == 2)
    slow = "SELECT count(*) FROM range(1000000) a, range(1000000) b, range(1000) c"
    call = service.node.Query(pb.QueryRequest(sql=slow), timeout=60)
    until(lambda: any(_busy(child.pid) for child in service.inetd.alive()))
    call.cancel()
    until(lambda: any(child.poll() is not None for child in service.inetd.children))
    assert service.query("SELECT 1")[1].rows == 1


def _busy(pid: int) -> bool:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return False
    return int(fields[11]) + int(fields[12]) > 150


def test_docs_members_and_sources_are_tables(service: Service) -> None:
    table, _ = service.query(
        "SELECT table_schema || '.' || table_name AS t, column_name AS c, description AS d FROM probing.column_docs"
    )
    rows = table.to_pylist()
    tables = [*TABLES.values(), *VIEWS.values()]
    assert {(row["t"], row["c"]) for row in rows} == {(t.name, c.name) for t in tables for c in t.columns}
    assert all(row["d"] for row in rows)
    table, _ = service.query("SELECT count(*) AS n, count(DISTINCT node) AS nodes FROM probing.table_docs")
    assert table.to_pylist() == [{"n": len(TABLES) + len(VIEWS), "nodes": 1}]
    table, _ = service.query("SELECT member, address, state FROM cluster.members ORDER BY state")
    assert table.to_pylist() == [
        {"member": "n0", "address": service.tcp, "state": "healthy"},
        {"member": "", "address": "10.0.0.7:9000", "state": "unknown"},
    ]
    table, _ = service.query("SELECT node, source, state, rows, detail FROM probing.sources")
    assert table.to_pylist() == [{"node": "n0", "source": "gloo", "state": "running", "rows": 7, "detail": "2 files"}]


def test_tables_of_users_probes_are_tables(service: Service) -> None:
    with pytest.raises(grpc.RpcError, match=r"there is no table user\.loads"):
        service.query("SELECT * FROM user.loads")
    table = user_table("loads", "What was loaded.", [("path", "text", "From where.")])
    service.collector.user_tables = [user_table_to(table)]
    assert service.query("SELECT path FROM user.loads")[0].to_pylist() == []
    docs, _ = service.query("SELECT description, live FROM probing.table_docs WHERE table_schema = 'user'")
    assert docs.to_pylist() == [{"description": "What was loaded.", "live": "no"}]
    docs, _ = service.query("SELECT column_name, type, description FROM probing.column_docs WHERE table_name = 'loads'")
    assert docs.num_rows == len(table.columns)
    assert docs.to_pylist()[-1] == {"column_name": "path", "type": "string", "description": "From where."}


def test_stacks_keep_nulls_apart_from_zeros(service: Service) -> None:
    thread = {
        "job": "j",
        "run": "0",
        "rank": 0,
        "pid": 7,
        "start_ns": 10_000_000,
        "tid": 8,
        "thread": "main",
        "state": "sleeping",
        "gil": None,
        "complete": True,
        "frames": [FRAME, {**FRAME, "lineno": None}],
    }
    service.collector.threads = [thread, {**thread, "rank": None, "gil": False, "tid": 9}]
    error = {"kind": "TargetTimeout", "message": "pid 9 does not answer", "hint": "wait"}
    service.collector.failures = [{"pid": 9, "rank": 1, "job": "j", "error": error}]
    reply = service.node.Stacks(pb.StacksRequest(pids=[7, 9], job="j", timeout_ms=500), timeout=10)
    assert reply.node == "n0"
    first, second = reply.threads
    assert (first.rank, first.HasField("rank"), first.HasField("gil")) == (0, True, False)
    assert (second.HasField("rank"), second.HasField("gil"), second.gil) == (False, True, False)
    assert (first.frames[0].lineno, first.frames[0].ip, first.frames[1].HasField("lineno")) == (12, 1 << 40, False)
    assert [(f.pid, f.rank, f.error.kind) for f in reply.failures] == [(9, 1, "TargetTimeout")]
    asked = next(r for r in service.collector.requests if r["op"] == "stacks")
    assert asked == {"op": "stacks", "pids": [7, 9], "job": "j", "timeout_ms": 500, "native": False, "locals": False}


def test_stacks_with_locals_and_native_frames(service: Service) -> None:
    known = {"name": "loss", "type": "float", "value": "0.5", "number": 0.5, "reason": ""}
    unknown = {"name": "x", "type": "", "value": None, "number": None, "reason": "it changed while it was read"}
    thread = {
        "job": "j",
        "run": "0",
        "rank": 0,
        "pid": 7,
        "start_ns": 1,
        "tid": 8,
        "thread": "main",
        "state": "running",
        "gil": None,
        "complete": True,
        "native_missing": "it runs",
        "frames": [{**FRAME, "locals": [known, unknown]}],
    }
    service.collector.threads = [thread]
    request = pb.StacksRequest(native=True, locals=True)
    (told,) = service.node.Stacks(request, timeout=10).threads
    assert told.native_missing == "it runs"
    first, second = told.frames[0].locals
    assert (first.name, first.type, first.value, first.number, first.reason) == ("loss", "float", "0.5", 0.5, "")
    assert (second.HasField("value"), second.HasField("number"), second.reason) == (False, False, unknown["reason"])
    asked = next(r for r in service.collector.requests if r["op"] == "stacks")
    assert (asked["native"], asked["locals"]) == (True, True)


def test_values_of_variables(service: Service) -> None:
    own = {"job": "j", "run": "0", "rank": None, "pid": 7, "start_ns": 1, "tid": 8, "func": "train"}
    service.collector.values = [{**own, "name": "step", "type": "int", "value": "0", "number": 0.0, "reason": ""}]
    reply = service.node.Vars(pb.VarsRequest(job="j", names=["step"]), timeout=10)
    (value,) = reply.values
    assert (reply.node, value.HasField("rank"), value.func, value.variable.number) == ("n0", False, "train", 0.0)
    asked = next(r for r in service.collector.requests if r["op"] == "vars")
    assert (asked["job"], asked["names"]) == ("j", ["step"])
    for names in ([], ["x"] * 65):
        code, error = refused(lambda names=names: service.node.Vars(pb.VarsRequest(names=names), timeout=10))
        assert (code, error.kind) == (grpc.StatusCode.INVALID_ARGUMENT, "UsageError")


def test_changing_a_setting_needs_the_unix_socket(service: Service) -> None:
    change = pb.ConfigRequest(key="sampling.hz", value="99", job="j", for_ms=1000)
    (setting,) = service.node.Config(change, timeout=10).settings
    assert (setting.value, setting.default, setting.job) == ("99", "19", "j")
    asked = next(r for r in service.collector.requests if r["op"] == "config")
    assert (asked["value"], asked["for_ms"], asked["persist"], asked["reset"]) == ("99", 1000, False, False)
    with grpc.insecure_channel(service.tcp) as channel:
        remote = NodeStub(channel)
        assert remote.Config(pb.ConfigRequest(key="sampling.hz"), timeout=10, metadata=BEARER).settings[0].value == "19"
        for other in (change, pb.ConfigRequest(key="sampling.hz", reset=True)):
            code, error = refused(lambda other=other: remote.Config(other, timeout=10, metadata=BEARER))
            assert (code, error.kind) == (grpc.StatusCode.PERMISSION_DENIED, "PrivilegeError")
    assert len([r for r in service.collector.requests if r["op"] == "config"]) == 2


def test_status_and_peers(service: Service) -> None:
    status = service.node.Status(pb.StatusRequest(), timeout=10)
    assert (status.node, status.state, status.store_bytes, status.processes) == ("n0", "running", 1 << 33, 2)
    assert [(s.name, s.rows) for s in status.sources] == [("gloo", 7)]
    assert status.version
    assert status.started_ns < status.node_time_ns
    peers = service.node.Peers(pb.PeersRequest(), timeout=10).peers
    assert [(p.node, p.address) for p in peers] == [("n0", service.tcp), ("", "10.0.0.7:9000")]


def test_without_its_collector_the_service_says_so_and_recovers(service: Service) -> None:
    assert service.node.Status(pb.StatusRequest(), timeout=10).state == "running"
    service.collector.stop()
    _break_connections(service.collector.path)
    status = service.node.Status(pb.StatusRequest(), timeout=10)
    assert (status.state, status.node) == ("lost", "n0")
    assert "collector" in status.reason
    code, error = refused(lambda: service.query("SELECT * FROM comm.ops"))
    assert (code, error.kind) == (grpc.StatusCode.UNAVAILABLE, "PeerError")
    assert error.message == "the collector does not answer"
    assert service.query("SELECT 1")[1].rows == 1
    service.collector.start()
    assert service.node.Status(pb.StatusRequest(), timeout=10).state == "running"


def _break_connections(path: Path) -> None:
    """End this process's side of all connections to the control socket, as its death would."""
    for fd in Path(f"/proc/{os.getpid()}/fd").iterdir():
        try:
            name = fd.readlink()
        except OSError:
            continue
        if str(name).startswith("socket:"):
            _shut(int(fd.name), str(path))


def _shut(fd: int, path: str) -> None:
    with socket.socket(fileno=os.dup(fd)) as sock:
        if sock.family == socket.AF_UNIX and sock.getsockname() == path:
            try:
                sock.shutdown(socket.SHUT_RDWR)
            except OSError:
                return


def test_a_collector_that_hangs_costs_no_more_than_the_deadline(service: Service) -> None:
    # Its workers have started.
    assert service.query("SELECT 1")[1].rows == 1
    service.collector.block = threading.Event()
    code, error = refused(lambda: service.query("SELECT * FROM comm.ops", timeout_ms=300))
    service.collector.block.set()
    assert (code, error.kind) == (grpc.StatusCode.UNAVAILABLE, "PeerError")
    assert "did not answer within" in error.message


def test_pause_needs_the_unix_socket_and_is_audited(service: Service) -> None:
    with grpc.insecure_channel(service.tcp) as channel:
        remote = NodeStub(channel)
        assert remote.Status(pb.StatusRequest(), timeout=10, metadata=BEARER).node == "n0"
        code, error = refused(lambda: remote.Pause(pb.PauseRequest(paused=True), timeout=10, metadata=BEARER))
    assert (code, error.kind) == (grpc.StatusCode.PERMISSION_DENIED, "PrivilegeError")
    assert not service.collector.paused
    assert service.node.Pause(pb.PauseRequest(paused=True), timeout=10).paused
    assert service.collector.paused
    assert service.node.Status(pb.StatusRequest(), timeout=10).state == "paused"
    assert not service.node.Pause(pb.PauseRequest(paused=False), timeout=10).paused
    service.process.send_signal(signal.SIGTERM)
    assert service.process.stderr is not None
    log = service.process.stderr.read().splitlines()
    audit = [line for line in log if "pause asked by " in line or "resume asked by " in line]
    assert len(audit) == 3
    assert "pause asked by tcp: 127.0.0.1" in audit[0]
    assert "refused" in audit[0]
    assert f"pause asked by unix: uid {os.getuid()}, pid {os.getpid()}" in audit[1]


def test_the_socket_is_for_its_group_only(service: Service) -> None:
    mode = (service.root / "s.sock").stat().st_mode
    assert (stat.S_ISSOCK(mode), stat.S_IMODE(mode)) == (True, 0o660)


def test_too_large_a_request_is_refused(service: Service) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        service.query("SELECT 1 -- " + "x" * (2 << 20))
    assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED


def test_many_calls_at_once_are_all_answered(service: Service) -> None:
    service.collector.files.segment("comm.ops", operations(100))
    request = pb.QueryRequest(sql="SELECT count(*) n FROM comm.ops")
    streams = [service.node.Query(request, timeout=60) for _ in range(12)]
    for stream in streams:
        assert list(stream)[-1].end.rows == 1
    assert sorted(service.collector.released) == sorted(set(service.collector.released))
    until(lambda: len(service.collector.released) == 12)


def test_a_socket_that_is_taken_is_an_error_and_a_hint(service: Service) -> None:
    done = start(service.root)
    out, err = done.communicate(timeout=60)
    assert (done.returncode, out) == (78, "")
    assert err.splitlines()[0] == f"error: {service.root}/s.sock is taken: a daemon answers on it"
    assert err.splitlines()[1].startswith("hint: ")
    assert service.query("SELECT 1")[1].rows == 1


def test_the_clear_off_loopback_is_refused(tmp_path: Path) -> None:
    done = start(tmp_path, "--listen=0.0.0.0:0", token_file(tmp_path))
    out, err = done.communicate(timeout=60)
    assert (done.returncode, out) == (78, "")
    assert err.startswith("error: listen = 0.0.0.0:0 would answer unencrypted outside of loopback\nhint: ")


def test_loopback_without_a_token_is_refused(tmp_path: Path) -> None:
    done = start(tmp_path, "--listen=127.0.0.1:0")
    out, err = done.communicate(timeout=60)
    assert (done.returncode, out) == (78, "")
    assert err.startswith("error: listen = 127.0.0.1:0 would answer everybody who can connect")
    assert "token_file" in err.splitlines()[1]


def test_it_starts_before_the_collector_and_over_a_dead_socket(open_tmp_path: Path) -> None:
    stale = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    stale.bind(f"{open_tmp_path}/s.sock")
    stale.close()
    process = start(open_tmp_path)
    try:
        with grpc.insecure_channel(f"unix:{open_tmp_path}/s.sock") as channel:
            grpc.channel_ready_future(channel).result(30)
            status = NodeStub(channel).Status(pb.StatusRequest(), timeout=10)
        assert (status.state, status.reason) == ("starting", "the collector does not answer")
    finally:
        process.terminate()
        out, err = process.communicate(timeout=30)
    assert (process.returncode, out) == (0, "")
    assert "Traceback" not in err
