"""Large answers: rows go through as they come, in every format, and nothing half is left behind."""

from __future__ import annotations

import asyncio
import csv
import gc
import io
import json
import math
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import duckdb
import grpc
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from client_fake_node import FakeNode, operation
from hypothesis import given, settings
from hypothesis import strategies as st
from long import examples

from probing.api.errors import PartialAnswer, PeerError, ProbingError, QueryError, QueryMemory
from probing.api.proto.probing.v1 import node_pb2 as pb
from probing.api.proto.probing.v1.node_pb2_grpc import NodeStub
from probing.client.cluster import Cluster
from probing.client.main import main
from probing.client.render.progress import Progress
from probing.client.render.writers import writer_of
from probing.client.wire.arrow import ArrowReader
from probing.client.wire.stream import Stream, batches

Run = Callable[..., tuple[int, str, str]]
ROWS = 1500


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[FakeNode, FakeNode]]:
    root = tmp_path_factory.mktemp("nodes")
    with FakeNode(root, "alpha") as first, FakeNode(root, "beta") as second:
        for node in (first, second):
            # One row makes them all: a list of dicts would take longer than the test.
            node.insert("comm.ops", [operation(node.name, 0, 0, ts=0)])
            rows = f"SELECT o.* REPLACE (i AS seq) FROM comm.ops AS o, range(1, {ROWS}) AS r(i)"
            with node.database("comm.ops") as db:
                db.execute(f"INSERT INTO comm.ops {rows}")
        yield first, second


@pytest.fixture
def ctl(pair: tuple[FakeNode, FakeNode], monkeypatch: pytest.MonkeyPatch, capsysbinary: Any) -> Run:
    monkeypatch.setenv("PROBING_TARGET", pair[0].address)

    def run(*arguments: str) -> tuple[int, str, str]:
        code = main(list(arguments))
        out, err = capsysbinary.readouterr()
        assert b"Traceback" not in err
        return code, out.decode("latin-1"), err.decode()

    return run


def _both(pair: tuple[FakeNode, FakeNode]) -> str:
    return ",".join(node.address for node in pair)


def test_every_format_of_one_node_and_of_all(pair: tuple[FakeNode, FakeNode], ctl: Run, tmp_path: Path) -> None:
    sql = "SELECT node, seq, ts FROM comm.ops"
    for where, total in ((("-t", pair[0].address), ROWS), (("--nodes", _both(pair)), 2 * ROWS)):
        for kind in ("csv", "json", "jsonl", "arrow", "parquet", "table"):
            code, out, err = ctl("query", sql, *where, "-f", kind)
            assert (code, err) == (0, "")
            path = tmp_path / "out"
            assert ctl("query", sql, *where, "-f", kind, "-o", str(path)) == (0, "", "")
            for data in (out.encode("latin-1"), path.read_bytes()):
                found = _read(kind, data)
                assert len(found) == total
                assert {seq for _, seq in found} == set(range(ROWS))


def _read(kind: str, data: bytes) -> list[tuple[str, int]]:
    if kind == "csv":
        return [(row["node"], int(row["seq"])) for row in csv.DictReader(io.StringIO(data.decode()))]
    if kind in ("json", "jsonl"):
        rows = json.loads(data) if kind == "json" else [json.loads(line) for line in data.splitlines()]
        return [(row["node"], row["seq"]) for row in rows]
    if kind == "table":
        return [(words[0], int(words[1])) for words in map(str.split, data.decode().splitlines()[1:])]
    with pa.BufferReader(data) as file:
        table = pa.ipc.open_stream(file).read_all() if kind == "arrow" else pq.read_table(file)
    return list(zip(table.column("node").to_pylist(), table.column("seq").to_pylist(), strict=True))


def test_an_answer_without_rows(ctl: Run) -> None:
    sql = "SELECT node, seq FROM comm.ops WHERE seq < 0"
    expected = {"csv": "node,seq\n", "json": "[]\n", "jsonl": "", "table": "node  seq\n(no rows)\n"}
    for kind, text in expected.items():
        assert ctl("query", sql, "-f", kind) == (0, text, "")
    assert _read("parquet", ctl("query", sql, "-f", "parquet")[1].encode("latin-1")) == []


def test_parameters(ctl: Run) -> None:
    sql = "SELECT count(*) AS n FROM comm.ops WHERE seq < $most AND node = $node"
    for more in ((), ("--all-nodes",)):
        given = ("--param", "most=7", "--param", "node=alpha", *more)
        assert json.loads(ctl("query", sql, *given, "-f", "json")[1]) == [{"n": 7}]
    code, _, err = ctl("query", sql, "--param", "most=7")
    assert (code, err.splitlines()[0]) == (2, "error: there is no value for $node")


def test_no_bound_for_streams_and_one_for_what_is_held(pair: tuple[FakeNode, FakeNode]) -> None:
    addresses = [node.address for node in pair]
    with Cluster(nodes=addresses, max_bytes=50_000) as cluster:
        with cluster.stream("SELECT * FROM comm.ops WHERE seq >= $first", {"first": 10}) as rows:
            assert sum(batch.num_rows for batch in rows) == 2 * (ROWS - 10)
        with pytest.raises(QueryMemory) as caught:
            cluster.stream("SELECT * FROM comm.ops ORDER BY duration_ns + seq")
    assert "without ORDER BY" in caught.value.hint


def test_who_does_not_answer_is_missing_and_twins_count_once(pair: tuple[FakeNode, FakeNode]) -> None:
    gone = "unix:/nonexistent/node.sock"
    sql = "SELECT seq FROM comm.ops"
    with Cluster(nodes=[gone, pair[0].address]) as cluster:
        with cluster.stream(sql) as rows:
            assert sum(batch.num_rows for batch in rows) == ROWS
        assert [failed.address for failed in cluster.outcomes[-1].failed] == [gone]
    with (
        Cluster(nodes=[gone, pair[0].address], strict=True) as cluster,
        cluster.stream(sql) as rows,
        pytest.raises(PartialAnswer),
    ):
        list(rows)
    twin = pair[1].name
    pair[1].name = pair[0].name
    try:
        with Cluster(nodes=[node.address for node in pair]) as cluster, cluster.stream(sql) as rows:
            assert sum(batch.num_rows for batch in rows) == ROWS
    finally:
        pair[1].name = twin


def _whole(pair: tuple[FakeNode, FakeNode], sql: str = "SELECT seq, op FROM comm.ops") -> list[pb.QueryReply]:
    """The answer of a node, as messages."""
    with grpc.insecure_channel(pair[0].address) as channel:
        return list(NodeStub(channel).Query(pb.QueryRequest(sql=sql), timeout=30))


def test_what_breaks_off_is_an_error_and_leaves_no_file(
    pair: tuple[FakeNode, FakeNode], ctl: Run, tmp_path: Path
) -> None:
    whole = _whole(pair)
    target = tmp_path / "rows.csv"
    target.write_text("before")
    cases = {
        "half": whole[: len(whole) // 2],
        "no end": whole[:-1],
        "fewer rows than it says": [*whole[:-1], pb.QueryReply(end=pb.QueryEnd(node="alpha", rows=ROWS + 1))],
        "more after the end": [*whole[:-1], pb.QueryReply(arrow=b"x"), whole[-1]],
    }
    try:
        for name, garbage in cases.items():
            pair[0].garbage = garbage
            # A node that breaks off before its first row is missing, as one that is not there.
            for where in ((), ("--nodes", _both(pair)))[: 1 if name == "half" else 2]:
                code, out, err = ctl("query", "SELECT seq, op FROM comm.ops", "-f", "csv", "-o", str(target), *where)
                assert (code, out) == (1, ""), name
                assert err.startswith("error: "), name
                assert target.read_text() == "before"
                assert list(tmp_path.iterdir()) == [target]
    finally:
        pair[0].garbage = None


def _stream(parts: list[pb.QueryReply]) -> Iterator[pa.RecordBatch]:
    messages = iter(parts)

    async def receive() -> pb.QueryReply | None:
        return next(messages, None)

    return batches(Stream(receive))


def _answer(table: pa.Table, options: pa.ipc.IpcWriteOptions | None = None) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema, options=options) as writer:
        writer.write_table(table)
    return bytes(sink.getvalue().to_pybytes())


def test_hostile_batches_are_refused_before_they_are_decoded() -> None:
    table = pa.table({"x": ["a" * 100_000], "d": pa.array(["b"]).dictionary_encode()})
    end = pb.QueryReply(end=pb.QueryEnd(node="n", rows=1))
    assert pa.Table.from_batches(list(_stream([pb.QueryReply(arrow=_answer(table)), end]))).equals(table)
    packed = _answer(table, pa.ipc.IpcWriteOptions(compression="zstd"))
    with pytest.raises(PeerError, match="compressed"):
        list(_stream([pb.QueryReply(arrow=packed), end]))
    with pytest.raises(PeerError, match="a batch of 16777217 rows"):
        list(_stream([pb.QueryReply(arrow=_answer(pa.table({"x": pa.nulls((1 << 24) + 1)}))), end]))


def test_arrow_holds_nothing_of_an_answer_that_was_read() -> None:
    messages = iter([pb.QueryReply(arrow=_answer(pa.table({"x": [1]}))), pb.QueryReply(end=pb.QueryEnd(rows=1))])

    async def receive() -> pb.QueryReply | None:
        return next(messages, None)

    async def read() -> weakref.ref[ArrowReader]:
        reader = ArrowReader(receive)
        while await reader.next() is not None:
            pass
        return weakref.ref(reader)

    assert asyncio.run(read())() is None


_FEW = pa.array(["u", "v"]).dictionary_encode()
_GOOD = _answer(pa.table({"n": [1, 2], "t": ["x", None], "l": [[1], []], "d": _FEW}))


@settings(deadline=None, max_examples=examples(150))
@given(data=st.data())
def test_a_damaged_answer_is_rows_or_a_known_error(data: st.DataObject) -> None:
    damaged = bytearray(_GOOD)
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(1, 400))
    chunks = [bytes(damaged[i : i + cut]) for i in range(0, len(damaged), cut)]
    end = pb.QueryReply(end=pb.QueryEnd(node="n", rows=2))
    try:
        for batch in _stream([*(pb.QueryReply(arrow=chunk) for chunk in chunks), end]):
            batch.validate(full=True)
    except ProbingError:
        pass


_TYPES = """
SELECT 'nan'::DOUBLE AS nan, '-inf'::FLOAT AS inf, 123456789012345678901234567890::HUGEINT AS huge,
1.50::DECIMAL(9, 2) AS dec, TIMESTAMP_NS '2026-11-21 08:19:20.123456789' AS ns,
TIMESTAMPTZ '2026-11-21 10:19:20+02' AS tz, DATE '2026-11-21' AS day,
TIME '08:19:20' AS clock, INTERVAL '1 month 2 days 3.5 seconds' AS iv, 'a\\x00b'::BLOB AS bytes, [1, NULL] AS list,
{'a': [TIMESTAMP_NS '2026-11-21 08:19:20.123456789'], 'b': 'nan'::DOUBLE} AS nested, MAP {'k': 1} AS map, true AS yes,
'x'::ENUM ('x', 'y') AS enum, NULL AS nothing, 'a,"b' AS text, DATE '290000-01-01' AS far,
TIMESTAMP 'infinity' AS never, TIME_NS '08:19:20.123456789' AS fine, 1 AS twice, 2 AS twice,
union_value(n := 1) AS one_of
"""
_SHOWN = {
    "nan": None,
    "inf": None,
    "huge": 123456789012345678901234567890,
    "dec": 1.5,
    "ns": "2026-11-21T08:19:20.123456789Z",
    "tz": "2026-11-21T08:19:20.000000000Z",
    "day": "2026-11-21",
    "clock": "08:19:20",
    "iv": "P1M2DT3.5S",
    "bytes": "610062",
    "list": [1, None],
    "map": [["k", 1]],
    "nested": {"a": ["2026-11-21T08:19:20.123456Z"], "b": None},
    "yes": True,
    "enum": "x",
    "nothing": None,
    "text": 'a,"b',
    "far": None,
    "never": None,
    "fine": "08:19:20.123456",
    "twice": 1,
    "twice_1": 2,
    "one_of": 1,
}


def _text(value: Any) -> str:
    if isinstance(value, (list, dict, bool)):
        return json.dumps(value, separators=(",", ":"))
    return "" if value is None else str(value)


def test_every_type_in_every_format() -> None:
    with duckdb.connect() as db:
        table = db.sql(_TYPES).to_arrow_table()
    written = {}
    for kind in ("json", "jsonl", "csv", "arrow", "parquet", "table"):
        sink = io.BytesIO()
        writer = writer_of(kind, sink, table.schema, terminal=False)
        for batch in table.to_batches():
            writer.write(batch)
        writer.end()
        written[kind] = sink.getvalue()
    assert json.loads(written["json"]) == [_SHOWN]
    assert json.loads(written["jsonl"]) == _SHOWN
    (row,) = csv.DictReader(io.StringIO(written["csv"].decode()))
    assert row == {name: _text(value) for name, value in _SHOWN.items()}
    stored = pq.read_table(pa.BufferReader(written["parquet"]))
    assert stored.column("iv").to_pylist() == ["P1M2DT3.5S"]
    assert stored.column("ns").type == pa.timestamp("ns")
    assert math.isnan(stored.column("nan").to_pylist()[0])
    assert pa.ipc.open_stream(pa.BufferReader(written["arrow"])).read_all().schema == table.schema


def test_what_csv_quotes_is_read_again() -> None:
    table = pa.table(
        {
            "i": [1, None],
            "f": [1.5, 1e300],
            "b": [True, None],
            "s": ["x y", ""],
            "l": [[1], None],
            "t": pa.array([5, None], pa.timestamp("ns")),
            "u": pa.array([1 << 63, 0], pa.uint64()),
        }
    )
    assert _csv(table) == (
        "i,f,b,s,l,t,u\n1,1.5,true,x y,[1],1970-01-01T00:00:00.000000005Z,9223372036854775808\n,1e+300,,,,,0\n"
    )
    for text in ('a"b', "a,b", "a\nb", "\rb"):
        quoted = _csv(table.append_column("q", pa.array([text, text])))
        rows = list(csv.DictReader(io.StringIO(quoted, newline="")))
        assert [row.pop("q") for row in rows] == [text, text]
        assert rows == list(csv.DictReader(io.StringIO(_csv(table), newline="")))


def _csv(table: pa.Table) -> str:
    sink = io.BytesIO()
    writer = writer_of("csv", sink, table.schema, terminal=False)
    for batch in table.to_batches():
        writer.write(batch)
    writer.end()
    return sink.getvalue().decode()


def test_parquet_that_breaks_off_is_not_ended() -> None:
    batch = pa.record_batch({"n": range(200_000)})
    sink, closed = io.BytesIO(), io.BytesIO()
    for file in (sink, closed):
        writer = writer_of("parquet", file, batch.schema, terminal=False)
        writer.write(batch)
        if file is closed:
            file.close()
        # A file that is closed by now is no unraisable error, which would fail the test.
        del writer
        gc.collect()
    written = sink.getvalue()
    assert (written[:4], len(written) > 4, written[-4:] == b"PAR1") == (b"PAR1", True, False)


def test_a_table_for_people_keeps_its_values_whole_beyond_the_first_rows() -> None:
    sink = io.BytesIO()
    schema = pa.schema([("n", pa.int64()), ("t", pa.string())])
    writer = writer_of("table", sink, schema, terminal=False)
    writer.write(pa.record_batch([[1] * 1000, ["x"] * 1000], schema=schema))
    writer.write(pa.record_batch([[123456], ["much longer"]], schema=schema))
    writer.end()
    lines = sink.getvalue().decode().splitlines()
    assert (len(lines), lines[1], lines[-1]) == (1002, "1  x", "123456  much longer")


def test_progress_says_what_is_known() -> None:
    progress = Progress()
    assert progress.line(1.0) == "1.0 s, Ctrl-C ends it"
    progress.update("a", pb.QueryProgress(fraction=-1, rows_to_scan=2_000_000))
    assert progress.line(1.0) == "2,000,000 rows to scan, 1.0 s, Ctrl-C ends it"
    progress.update("a", pb.QueryProgress(fraction=0.5, rows_to_scan=2_000_000))
    progress.update("b", pb.QueryProgress(fraction=1.5, rows_to_scan=1))
    assert progress.line(2.0) == " 75% of 2,000,001 rows on 2 nodes, 2.0 s, Ctrl-C ends it"
    progress.done(1, 2)
    assert progress.line(2.0) == " 75% of 2,000,001 rows on 1 of 2 nodes, 2.0 s, Ctrl-C ends it"


def test_progress_reaches_who_asks(pair: tuple[FakeNode, FakeNode]) -> None:
    reported: list[tuple[str, float]] = []
    pair[0].garbage = [pb.QueryReply(progress=pb.QueryProgress(fraction=0.25)), *_whole(pair, "SELECT 1 AS x")]
    try:
        with Cluster(pair[0].address) as cluster:
            cluster.watch = lambda address, progress: reported.append((address, progress.fraction))
            with cluster.stream("SELECT 1 AS x") as rows:
                assert [batch.num_rows for batch in rows] == [1]
    finally:
        pair[0].garbage = None
    assert reported == [(pair[0].address, 0.25)]


def test_an_error_of_the_node_comes_before_any_row(pair: tuple[FakeNode, FakeNode]) -> None:
    pair[0].error = QueryError("no such thing", hint="look")
    try:
        with Cluster(pair[0].address) as cluster, pytest.raises(QueryError, match="no such thing"):
            cluster.stream("SELECT 1")
    finally:
        pair[0].error = None


def test_rows_without_bytes_come_in_small_batches(pair: tuple[FakeNode, FakeNode]) -> None:
    rows = 1 << 20
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, pa.schema([("op", pa.null())])) as writer:
        writer.write_batch(pa.record_batch([pa.nulls(rows)], ["op"]))
    end = pb.QueryEnd(node=pair[1].name, rows=rows)
    pair[1].garbage = [pb.QueryReply(arrow=sink.getvalue().to_pybytes()), pb.QueryReply(end=end)]
    try:
        with (
            Cluster(nodes=[node.address for node in pair]) as cluster,
            cluster.stream("SELECT op FROM comm.ops") as found,
        ):
            sizes = [batch.num_rows for batch in found]
    finally:
        pair[1].garbage = None
    assert sum(sizes) == rows + ROWS
    assert max(sizes) <= 1 << 16
