"""Requests with several statements, as they come over the wire."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import grpc
import pyarrow as pa
from query_helpers import logical, operations
from service_helpers import Service, refused
from waiting import until

from probing.api.proto.probing.v1 import node_pb2 as pb
from probing.api.wire import MAX_STATEMENTS, parts_of
from probing.daemon.service.answering import CallKind
from probing.daemon.service.spool import MAX_RESTING_EACH

ENDLESS = "SELECT a.range, b.range AS r FROM range(1000000) a, range(1000000) b"
SLOW = "SELECT count(*) FROM range(1000000) a, range(1000000) b, range(1000) c"
STREAMED = (1 << 64) - 1


@dataclass
class Answered:
    """``tables`` and ``ends`` by name of the statement, in the order in which they came."""

    tables: dict[str, pa.Table] = field(default_factory=dict)
    ends: dict[str, pb.StatementEnd] = field(default_factory=dict)
    end: pb.QueryEnd | None = None


def ask(service: Service, statements: dict[str, str], **fields: int) -> Answered:
    return answered(service.node.Query(request(statements, **fields), timeout=60))


def answered(parts: Iterable[pb.QueryReply]) -> Answered:
    found, chunks = Answered(), list[bytes]()
    for part in parts:
        assert found.end is None
        kind = part.WhichOneof("part")
        if kind == "arrow":
            chunks.append(part.arrow)
        elif kind == "statement":
            name = part.statement.name
            found.ends[name] = part.statement
            if not part.statement.HasField("error"):
                found.tables[name] = pa.ipc.open_stream(b"".join(chunks)).read_all()
            chunks.clear()
        elif kind == "end":
            found.end = part.end
    assert found.end is not None
    return found


def request(statements: dict[str, str], **fields: int) -> pb.QueryRequest:
    asked = [pb.Statement(name=name, sql=sql) for name, sql in statements.items()]
    return pb.QueryRequest(statements=asked, **fields)


def test_a_caller_who_waits_for_the_whole_answer_gets_it_in_few_replies(service: Service) -> None:
    service.collector.files.segment("comm.ops", operations(100))
    statements = {"ops": "SELECT * FROM comm.ops", "wrong": "SELECT nope", "large": "SELECT * FROM range(60000)"}

    def answer(**fields: int) -> list[pb.QueryReply]:
        replies = list(service.node.Query(request(statements, **fields), timeout=60))
        parts_of(replies[-1])[-1].end.ClearField("node_time_ns")
        return replies

    apart, gathered = answer(), answer(whole=True)
    assert [len(reply.parts) for reply in apart] == [0] * len(apart)
    parts = [part for reply in gathered for part in parts_of(reply)]
    assert [part.WhichOneof("part") for part in parts] == [part.WhichOneof("part") for part in apart]
    # The bytes of values that are NULL are anything.
    assert answered(parts) == answered(apart)
    assert len(gathered) < len(apart) / 2
    assert max(reply.ByteSize() for reply in gathered) < 4 << 20
    # A caller who wants to see the progress cannot wait for the whole.
    assert all(not reply.parts for reply in answer(whole=True, progress=True))


def test_rows_errors_and_warnings_are_those_of_their_statement(service: Service) -> None:
    service.collector.files.segment("comm.ops", operations(100))
    service.collector.files.live_rows["comm.inflight"] = logical("comm.inflight", [{"rank": 3}, {"rank": 1}])
    statements = {
        "ops": "SELECT op, count(*) AS n FROM comm.ops GROUP BY op ORDER BY op",
        "wrong": "SELECT nope FROM comm.ops",
        "refused": "DELETE FROM comm.ops",
        "in flight": "SELECT rank FROM comm.inflight ORDER BY rank",
        "again": "SELECT count(*) AS n FROM comm.inflight, comm.ops",
        "all": "SELECT count(*) AS n FROM global.comm.ops",
    }
    found = ask(service, statements)
    assert list(found.ends) == list(statements)
    for name in ("ops", "in flight", "again"):
        assert found.tables[name].equals(service.query(statements[name])[0])
        assert (found.ends[name].rows, list(found.ends[name].warnings)) == (found.tables[name].num_rows, [])
    assert found.tables["again"].to_pylist() == [{"n": 200}]
    (wrong, no) = (found.ends[name].error for name in ("wrong", "refused"))
    assert (wrong.kind, no.kind) == ("QueryError", "QueryRejected")
    assert wrong.message.startswith('Referenced column "nope"')
    assert wrong.hint
    assert "only this node was asked" in found.ends["all"].warnings[0]
    assert (found.end.node, found.end.rows, found.end.rows_scanned) == ("n0", 6, 100)
    assert list(found.end.warnings) == []


def test_there_is_one_snapshot_and_one_filling(service: Service) -> None:
    service.collector.files.segment("comm.ops", operations(100))
    service.collector.files.live_rows["comm.inflight"] = logical("comm.inflight", [{"rank": 3}])
    sql = "SELECT count(*) FROM comm.ops, comm.inflight"
    ask(service, {str(number): sql for number in range(MAX_STATEMENTS)})
    until(lambda: len(service.collector.released) == 1)
    asked = [r["op"] for r in service.collector.requests if r["op"] in ("snapshot", "live", "release")]
    assert asked == ["live", "snapshot", "release"]


def test_what_is_no_request_is_refused(service: Service) -> None:
    for asked, message in (
        (request(dict.fromkeys(map(str, range(MAX_STATEMENTS + 1)), "SELECT 1")), "more than 16 statements"),
        (request({"": "SELECT 1"}), "the names of statements"),
        (request({"x" * 101: "SELECT 1"}), "the names of statements"),
        (pb.QueryRequest(statements=[pb.Statement(name="a", sql="SELECT 1")] * 2), "the names of statements"),
        (pb.QueryRequest(sql="SELECT 1", statements=[pb.Statement(name="a", sql="SELECT 1")]), "the request has both"),
        (request({"a": "SELECT 1", "b": " "}), "a statement is empty"),
    ):
        code, error = refused(lambda asked=asked: list(service.node.Query(asked, timeout=60)))
        assert (code, error.kind) == (grpc.StatusCode.INVALID_ARGUMENT, "QueryRejected")
        assert error.message.startswith(message)
        assert error.hint or "names" in message or "empty" in message


def test_bounds_are_of_the_whole_request(service: Service) -> None:
    rows = "SELECT * FROM range(100000)"
    found = ask(service, {"a": rows, "b": rows, "c": "SELECT 1"}, max_bytes=1_000_000)
    assert found.tables["a"].num_rows == 100_000
    assert found.ends["b"].error.kind == "QueryMemory"
    code, error = refused(lambda: ask(service, {"a": "SELECT 1", "b": SLOW}, timeout_ms=500))
    assert (code, error.kind) == (grpc.StatusCode.DEADLINE_EXCEEDED, "QueryTimeout")


def test_a_request_counts_as_one_query(service: Service) -> None:
    statements = dict.fromkeys(map(str, range(MAX_STATEMENTS)), SLOW)
    calls = [service.node.Query(request(statements), timeout=60) for _ in range(CallKind.QUERY.each)]
    for call in calls:
        assert call.initial_metadata()
    code, error = refused(lambda: ask(service, {"one more": "SELECT 1"}))
    assert (code, error.kind) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "Overloaded")
    for call in calls:
        call.cancel()
    until(lambda: _answers(service))


def _answers(service: Service) -> bool:
    try:
        return ask(service, {"a": "SELECT 1 AS x"}).tables["a"].to_pylist() == [{"x": 1}]
    except grpc.RpcError:
        return False


def test_those_who_do_not_read_keep_nobody_waiting(service: Service) -> None:
    service.collector.files.segment("comm.ops", operations(100))
    calls = []
    for _ in range(MAX_RESTING_EACH):
        call = service.node.Query(request({"a": "SELECT 1", "b": ENDLESS}, max_bytes=STREAMED), timeout=60)
        calls.append(call)
        assert next(iter(call)).WhichOneof("part") == "arrow"
    assert service.query("SELECT count(*) n FROM comm.ops")[0].to_pylist() == [{"n": 100}]
    for call in calls:
        call.cancel()
