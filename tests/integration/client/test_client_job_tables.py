"""Tables that only the nodes of a job have: the other nodes have no rows, and a table that no node has is an error."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa
import pytest
from client_fake_node import FakeNode, operation

from probing.api.errors import NO_TABLE, NotFound, PartialAnswer, QueryRejected
from probing.api.proto.probing.v1 import node_pb2 as pb
from probing.client.cluster import Cluster
from probing.client.main import main

LOSSES = [(0, 0.5), (1, 0.25)]


def _described(name: str, kind: str, table: str = "losses") -> dict[str, object]:
    of_table = {"table_schema": "python", "table_name": table, "description": ""}
    return {"node": "alpha", "ts": 0, **of_table, "column_name": name, "type": kind}


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[FakeNode, FakeNode]]:
    """Of two nodes with operations, only the first has python.losses. See ``uneven`` for python.scores."""
    folder = tmp_path_factory.mktemp("nodes")
    common = [("node", "string"), ("rank", "int64")]
    columns = [
        [_described(name, kind) for name, kind in (*common, ("loss", "double"))]
        + [_described(name, kind, "scores") for name, kind in (*common, ("tag", "string"), ("lr", "double"))],
        [_described(name, kind, "scores") for name, kind in (*common, ("tag", "int64"))],
    ]
    tables = [
        {"comm.ops": [operation(name, 0, seq, ts=seq) for seq in range(3)], "probing.column_docs": described}
        for name, described in zip(("alpha", "beta"), columns, strict=True)
    ]
    with FakeNode(folder, "alpha", tables[0]) as first, FakeNode(folder, "beta", tables[1]) as second:
        with first.database("") as db:
            db.execute(
                "CREATE SCHEMA IF NOT EXISTS python; CREATE TABLE python.losses (node TEXT, rank INT8, loss REAL)"
            )
            db.executemany("INSERT INTO python.losses VALUES ('alpha', ?, ?)", LOSSES)
        yield first, second


@pytest.fixture(autouse=True)
def lacking(nodes: tuple[FakeNode, FakeNode]) -> QueryRejected:
    error = QueryRejected("there is no table python.losses", code=NO_TABLE)
    nodes[0].broken, nodes[1].broken = {}, {"python.losses": error}
    return error


@pytest.fixture
def cluster(nodes: tuple[FakeNode, FakeNode]) -> Iterator[Cluster]:
    with Cluster(nodes=[node.address for node in nodes], strict=True) as made:
        yield made


@pytest.mark.parametrize(
    ("sql", "rows"),
    [
        ("SELECT rank, loss FROM python.losses", [{"rank": rank, "loss": loss} for rank, loss in LOSSES]),
        ("SELECT loss FROM python.losses ORDER BY loss LIMIT 1", [{"loss": 0.25}]),
        ("SELECT count(*) AS n, min(loss) AS least FROM python.losses", [{"n": 2, "least": 0.25}]),
        ("SELECT node, count(*) AS n FROM python.losses GROUP BY node", [{"node": "alpha", "n": 2}]),
        ("SELECT median(rank) AS m FROM python.losses", [{"m": 0.5}]),
        ("SELECT loss, _host FROM global.python.losses WHERE rank = 0", [{"loss": 0.5, "_host": "alpha"}]),
        # The rows of the other table count on both nodes.
        (
            "SELECT o.node, count(loss) AS n FROM comm.ops AS o LEFT JOIN python.losses AS l"
            " ON l.rank = o.rank AND l.node = o.node GROUP BY o.node ORDER BY o.node",
            [{"node": "alpha", "n": 3}, {"node": "beta", "n": 0}],
        ),
    ],
)
def test_a_node_without_the_table_has_no_rows(cluster: Cluster, sql: str, rows: list[dict[str, object]]) -> None:
    assert cluster.query(sql).to_pylist() == rows
    with cluster.stream(sql) as found:
        assert [row for batch in found for row in batch.to_pylist()] == rows
    assert {(len(outcome.answered), len(outcome.failed)) for outcome in cluster.outcomes} == {(2, 0)}
    assert {a.node for outcome in cluster.outcomes for a in outcome.answered} == {"alpha", "beta"}


def test_it_warns_about_no_node(nodes: tuple[FakeNode, FakeNode], capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["--nodes", ",".join(node.address for node in nodes), "--strict", "-f", "csv"]
    for sql in ("SELECT loss FROM python.losses", "SELECT sum(loss) AS loss FROM python.losses"):
        assert main(["query", sql, *asked]) == 0
        assert capsys.readouterr().err == ""


@pytest.mark.parametrize("sql", ["SELECT loss FROM python.losses", "SELECT count(*) AS n FROM python.losses"])
def test_a_table_that_no_node_has_any_more_is_an_error(
    nodes: tuple[FakeNode, FakeNode], cluster: Cluster, lacking: QueryRejected, sql: str
) -> None:
    nodes[0].broken = {"python.losses": lacking}
    for ask in (cluster.query, lambda text: [*cluster.stream(text)]):
        with pytest.raises(QueryRejected, match=r"^there is no table python\.losses$"):
            ask(sql)


def test_a_misspelt_table_is_an_error(cluster: Cluster) -> None:
    with pytest.raises((NotFound, QueryRejected), match=r"there is no table python\.lossses"):
        cluster.query("SELECT loss FROM python.lossses")


def test_a_table_of_ours_that_a_node_lacks_counts_as_a_failure(
    nodes: tuple[FakeNode, FakeNode], cluster: Cluster, lacking: QueryRejected
) -> None:
    of_ours = QueryRejected("there is no table comm.ops", code=NO_TABLE)
    nodes[1].broken = {"python.losses": lacking, "comm.ops": of_ours}
    for sql in ("SELECT seq FROM comm.ops", "SELECT loss FROM python.losses, comm.ops"):
        with pytest.raises(PartialAnswer, match=r"there is no table comm\.ops"):
            cluster.query(sql)


def test_each_node_alone_fails_without_the_table(cluster: Cluster) -> None:
    with pytest.raises(PartialAnswer, match=r"1 of 2 nodes did not answer: .*there is no table python\.losses"):
        cluster.query_each("SELECT loss FROM python.losses")


@pytest.fixture
def uneven(nodes: tuple[FakeNode, FakeNode]) -> Iterator[None]:
    """Both nodes have python.scores: the first with a column more, and one that is text there and a number here."""
    for node, made, rows in (
        (nodes[0], "rank INT8, tag TEXT, lr DOUBLE, node TEXT", [(0, "99", 0.5, "alpha")]),
        (nodes[1], "rank INT8, node TEXT, tag INT8", [(1, "beta", 100)]),
    ):
        with node.database("") as db:
            db.execute(f"CREATE SCHEMA IF NOT EXISTS python; CREATE TABLE python.scores ({made})")
            db.executemany(f"INSERT INTO python.scores VALUES ({', '.join('?' * len(rows[0]))})", rows)
    yield
    for node in nodes:
        with node.database("") as db:
            db.execute("DROP TABLE python.scores")


@pytest.mark.parametrize(
    ("sql", "rows"),
    [
        ("SELECT lr FROM python.scores ORDER BY rank", [{"lr": 0.5}, {"lr": None}]),
        ("SELECT max(tag) AS tag, count(lr) AS n FROM python.scores", [{"tag": "99", "n": 1}]),
        ("SELECT python.scores.rank FROM python.scores WHERE scores.lr IS NULL", [{"rank": 1}]),
        ("SELECT s.rank FROM python.scores AS s JOIN python.scores AS o ON s.lr = o.lr", [{"rank": 0}]),
        ("SELECT rank FROM python.scores WHERE tag < '2'", [{"rank": 1}]),
    ],
)
@pytest.mark.usefixtures("uneven")
def test_a_column_that_a_node_lacks_or_has_with_another_type(
    cluster: Cluster, sql: str, rows: list[dict[str, object]]
) -> None:
    assert cluster.query(sql).to_pylist() == rows


@pytest.mark.usefixtures("uneven")
def test_whole_rows_have_the_columns_of_all_nodes(cluster: Cluster) -> None:
    rows = sorted(cluster.query("SELECT * FROM python.scores").to_pylist(), key=lambda row: row["rank"])
    assert rows == [
        {"node": "alpha", "rank": 0, "tag": "99", "lr": 0.5},
        {"node": "beta", "rank": 1, "tag": "100", "lr": None},
    ]


def test_a_node_that_answers_the_question_for_columns_with_other_columns(
    nodes: tuple[FakeNode, FakeNode], cluster: Cluster
) -> None:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, pa.schema([("x", pa.int64())])) as writer:
        writer.write_batch(pa.record_batch([pa.array([1])], ["x"]))
    end = pb.QueryReply(end=pb.QueryEnd(node="beta", rows=1))
    nodes[1].garbage = [pb.QueryReply(arrow=sink.getvalue().to_pybytes()), end]
    try:
        with Cluster(nodes=[node.address for node in nodes]) as calm:
            assert calm.query("SELECT rank FROM python.losses").num_rows == len(LOSSES)
            assert [f.address for f in calm.outcomes[0].failed] == [nodes[1].address]
    finally:
        nodes[1].garbage = None


@pytest.mark.parametrize(
    ("name", "kind", "table"),
    [
        ("lr", "no such type", "losses"),
        ("LOSS", "double", "losses"),
        ("Loss\x1b[31m", "double", "losses"),
        ("lr", "double", 'los"ses'),
        (None, "double", "losses"),
        ("lr", None, "losses"),
        ("lr", "double", None),
    ],
)
def test_columns_that_no_table_can_have_are_left_out(
    nodes: tuple[FakeNode, FakeNode], cluster: Cluster, name: str, kind: str, table: str
) -> None:
    with nodes[1].database("probing.column_docs") as db:
        db.execute("CREATE TABLE kept AS FROM probing.column_docs")
    try:
        nodes[1].insert("probing.column_docs", [_described(name, kind, table)])
        found = cluster.query("SELECT * FROM python.losses")
        assert (found.column_names, found.num_rows) == (["node", "rank", "loss"], len(LOSSES))
    finally:
        with nodes[1].database("probing.column_docs") as db:
            db.execute("DELETE FROM probing.column_docs; INSERT INTO probing.column_docs FROM kept; DROP TABLE kept")
