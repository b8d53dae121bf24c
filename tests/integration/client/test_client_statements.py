"""Commands with several questions ask each node once; what the answers of a node must be like."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest
from client_fake_node import FakeNode, hung_job, operation

from probing.api.errors import PartialAnswer, PeerError, ProbingError, QueryError, QueryMemory, QueryRejected
from probing.api.proto.probing.v1 import node_pb2 as pb
from probing.api.wire import MAX_PARTS
from probing.client.cluster import Cluster
from probing.client.main import main

QUESTIONS = {
    "ops": "SELECT node, rank, seq FROM comm.ops ORDER BY ALL",
    "ranks": "SELECT rank, count(*) AS n FROM comm.ops GROUP BY rank ORDER BY rank",
    "joined": "SELECT o.rank, p.pid FROM comm.ops o JOIN process.processes p USING (node, rank) ORDER BY ALL",
}
COUNT = "SELECT count(*) AS n FROM comm.ops"


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[tuple[FakeNode, FakeNode]]:
    nodes = hung_job(tmp_path)
    yield nodes
    for node in nodes:
        node.stop()


def statements_of(node: FakeNode) -> list[int]:
    """How many statements each request had."""
    return [len(request.statements) for request in node.requests]


@pytest.mark.parametrize("command", [("nccl",), ("top", "--once")])
def test_a_command_asks_each_node_once(
    pair: tuple[FakeNode, FakeNode], command: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    addresses = ",".join(node.address for node in pair)
    assert main([*command, "--nodes", addresses]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert "not in it: 2" in out or "rank 2" in out
    for node in pair:
        first, *silent = statements_of(node)
        # One request for all questions, and one for what is known of ranks that show no operation.
        assert first >= 6
        assert silent in ([], [3])


def test_the_rows_are_those_of_single_queries(pair: tuple[FakeNode, FakeNode]) -> None:
    for options in ({}, {"nodes": [node.address for node in pair]}):
        with Cluster(pair[0].address, **options) as cluster:
            found = cluster.query_all({**QUESTIONS, "each": COUNT}, each=("each",))
            for name, sql in QUESTIONS.items():
                assert found[name].to_pylist() == cluster.query(sql).to_pylist()
            expected = [row for table in cluster.query_each(COUNT) for row in table.to_pylist()]
            assert found["each"].to_pylist() == expected
            assert len(expected) == len(options.get("nodes", [0]))


def test_more_statements_than_a_request_takes(pair: tuple[FakeNode, FakeNode]) -> None:
    with Cluster(pair[0].address) as cluster:
        found = cluster.query_all({str(number): f"SELECT {number} AS x" for number in range(40)})
    assert [table.to_pylist() for table in found.values()] == [[{"x": number}] for number in range(40)]
    assert statements_of(pair[0]) == [16, 16, 8]


def test_an_error_names_its_statement(pair: tuple[FakeNode, FakeNode]) -> None:
    with Cluster(pair[0].address) as cluster, pytest.raises(ProbingError, match=r"^wrong: "):
        cluster.query_all({"right": "SELECT 1", "wrong": "SELECT nope FROM comm.ops", "more": "SELECT 1"})


def test_a_node_without_rows_is_partial(pair: tuple[FakeNode, FakeNode]) -> None:
    pair[0].warnings = ["comm.ops: 1 damaged segment left out"]
    with Cluster(pair[0].address, strict=True) as cluster, pytest.raises(PartialAnswer, match="1 damaged segment"):
        cluster.query_all(QUESTIONS)


def test_the_bytes_of_a_node_are_bounded(pair: tuple[FakeNode, FakeNode]) -> None:
    pair[0].insert("comm.ops", [operation("alpha", 0, seq) for seq in range(1000)])
    with Cluster(pair[0].address, max_bytes=60_000) as cluster:
        assert cluster.query_all({"a": COUNT, "b": COUNT})["b"].num_rows == 1
        everything = "SELECT seq FROM comm.ops"
        assert cluster.query_all({"a": everything, "b": COUNT})["a"].num_rows > 1000
        with pytest.raises(QueryMemory, match="larger than"):
            cluster.query_all(dict.fromkeys("abcdefgh", everything))


def rows(number: int) -> list[pb.QueryReply]:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, pa.schema([("n", pa.int64())])) as writer:
        writer.write_table(pa.table({"n": range(number)}))
    return [pb.QueryReply(arrow=sink.getvalue().to_pybytes())]


def end(name: str, number: int) -> list[pb.QueryReply]:
    return [pb.QueryReply(statement=pb.StatementEnd(name=name, rows=number))]


LAST = [pb.QueryReply(end=pb.QueryEnd(node="alpha"))]
FAILED = [pb.QueryReply(statement=pb.StatementEnd(name="a", error=pb.Error(kind="QueryError", message="no luck")))]


@pytest.mark.parametrize(
    ("sent", "kind", "message"),
    [
        ([], PeerError, "broke off"),
        (LAST, PeerError, "broke off"),
        (rows(2), PeerError, "broke off"),
        (rows(2) + LAST, PeerError, "broke off"),
        (rows(2) + end("a", 2), PeerError, "broke off"),
        (rows(2) + end("b", 2) + LAST, PeerError, "a statement other than"),
        (rows(2) + end("a", 3) + rows(1) + end("b", 1) + LAST, PeerError, "broke off"),
        (end("a", 0) + rows(1) + end("b", 1) + LAST, PeerError, "not an Arrow stream"),
        (rows(2) + end("a", 2) + rows(1) + end("b", 1), PeerError, "broke off"),
        (rows(2) + end("a", 2) + rows(1) + end("b", 1) + rows(1) + LAST, PeerError, "broke off"),
        (rows(2) + rows(2) + end("a", 2) + rows(1) + end("b", 1) + LAST, PeerError, "more after its end"),
        (FAILED + rows(1) + end("b", 1) + LAST, QueryError, "a: no luck"),
        ([pb.QueryReply(arrow=rows(2)[0].arrow[:-30]), *FAILED, *rows(1), *LAST], QueryError, "a: no luck"),
    ],
)
def test_what_is_no_answer_is_an_error(
    pair: tuple[FakeNode, FakeNode], sent: list[pb.QueryReply], kind: type[ProbingError], message: str
) -> None:
    for messages in (sent, [pb.QueryReply(parts=sent)]):
        pair[0].garbage = messages
        with Cluster(pair[0].address) as cluster, pytest.raises(kind, match=message):
            cluster.query_all({"a": "SELECT 1", "b": "SELECT 2"})


def test_parts_of_one_message_are_an_answer_and_too_many_are_not(pair: tuple[FakeNode, FakeNode]) -> None:
    whole = [*rows(2), *end("a", 2), *rows(1), *end("b", 1), *LAST]
    with Cluster(pair[0].address) as cluster:
        for messages in (whole, [pb.QueryReply(parts=whole)], [pb.QueryReply(parts=whole[:3]), *whole[3:]]):
            pair[0].garbage = messages
            tables = cluster.query_all({"a": "SELECT 1", "b": "SELECT 2"})
            assert [table.num_rows for table in tables.values()] == [2, 1]
        pair[0].garbage = [pb.QueryReply(parts=[pb.QueryReply()] * MAX_PARTS + whole)]
        with pytest.raises(PeerError, match=f"a reply message has {MAX_PARTS + len(whole)} parts"):
            cluster.query_all({"a": "SELECT 1", "b": "SELECT 2"})


def test_a_node_of_before_says_that_it_is_older(pair: tuple[FakeNode, FakeNode]) -> None:
    pair[0].error = QueryRejected("the query is empty")
    pair[0].statements_known = False
    with Cluster(pair[0].address) as cluster, pytest.raises(PeerError, match="does not know this request") as caught:
        cluster.query_all(QUESTIONS)
    assert "older" in caught.value.hint
