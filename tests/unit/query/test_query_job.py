"""One query as a worker runs it, in this process."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from probing.api.errors import QueryError, QueryMemory
from probing.api.tables import table_named
from probing.daemon.query.database import Instance, explain
from probing.daemon.query.job import Database, Job, Outcome


def _losses(path: Path, rows: int) -> Path:
    schema = table_named("probing.losses").physical
    data = {name: [None] * rows for name in schema.names}
    data["count"] = list(range(rows))
    data["reason"] = [f"reason {i * 7919}" for i in range(rows)]
    pq.write_table(pa.table(data, schema=schema), path, compression="none", use_dictionary=False)
    return path


def run(
    job: Job,
    send: Callable[[memoryview], None],
    outcome: Outcome,
    tell: Callable[[float], None] | None = None,
) -> None:
    with closing(Database(job, Instance(1 << 29, 1), outcome)) as database:
        for sql in job.statements:
            database.answer(sql, send, tell)


def _job(sql: str, *segments: Path) -> Job:
    return Job([sql], {"probing.losses": [str(path) for path in segments]}, [], {}, 1 << 30)


def test_a_segment_that_breaks_after_rows_went_out_ends_the_answer_and_is_named(tmp_path: Path) -> None:
    good = _losses(tmp_path / "good.parquet", 10)
    bad = _losses(tmp_path / "bad.parquet", 1000)
    data = bytearray(bad.read_bytes())
    at = data.index(b"reason 7919")
    data[at - 60 : at + 3000] = bytes(3060)
    bad.write_bytes(data)
    sent: list[bytes] = []

    def send(piece: memoryview) -> None:
        if sent:
            raise duckdb.IOException("IO Error: read of a page failed")
        sent.append(bytes(piece))

    outcome = Outcome()
    # The damaged column is not asked for, so that the answer begins; a byte limit above 1 MB makes two pieces.
    job = _job('SELECT a."count", b.range FROM probing.losses a, range(1000) b', good, bad)
    with pytest.raises(QueryError, match="some rows were sent already"):
        run(job, send, outcome)
    assert outcome.damaged == [str(bad)]
    assert outcome.warnings == ["probing.losses: a damaged segment was left out: bad.parquet"]
    assert job.segments == {"probing.losses": [str(good)]}


def test_an_error_of_the_query_blames_no_segment(tmp_path: Path) -> None:
    outcome = Outcome()
    job = _job("SELECT strptime(reason, '%Y') FROM probing.losses", _losses(tmp_path / "a.parquet", 10))
    with pytest.raises(QueryError, match="Could not parse"):
        run(job, lambda piece: None, outcome)
    assert outcome.damaged == []


def test_memory_that_is_too_short_to_try_a_segment_is_an_error_of_the_query(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Short:
        def sql(self, _: str) -> None:
            raise duckdb.OutOfMemoryException("Out of Memory Error: failed to allocate data")

        def close(self) -> None: ...

    bad = _losses(tmp_path / "bad.parquet", 10)
    bad.write_bytes(bad.read_bytes()[:-3])
    unlocked, made = Instance.unlocked, list[Instance]()

    def second_is_short(instance: Instance) -> object:
        made.append(instance)
        return unlocked(instance) if len(made) == 1 else Short()

    monkeypatch.setattr(Instance, "unlocked", second_is_short)
    outcome = Outcome()
    with pytest.raises(QueryMemory):
        run(_job("SELECT reason FROM probing.losses", bad), lambda piece: None, outcome)
    assert outcome.damaged == []


def test_an_error_of_the_channel_goes_through(tmp_path: Path) -> None:
    def send(piece: memoryview) -> None:
        raise KeyError("not an error of a query")

    with pytest.raises(KeyError):
        run(_job("SELECT 1"), send, Outcome())


@pytest.mark.parametrize(
    ("text", "kind", "message"),
    [
        ("Out of Memory Error: failed to allocate", "QueryMemory", "the query needs more memory than a worker has"),
        ("INTERRUPT Error: Interrupted!", "QueryTimeout", "the query was interrupted"),
        ('IO Error: No files found that match "/var/x/y"', "QueryError", "a file of the store could not be read"),
        ("Binder Error: no such thing in /var/lib/x.parquet\n\nLINE 1", "QueryError", "no such thing in a file"),
        ("malloc of size 123 failed", "QueryMemory", "the query needs more memory than a worker has"),
        ("", "QueryError", "the query failed"),
    ],
)
def test_errors_are_one_line_without_paths(text: str, kind: str, message: str) -> None:
    error = explain(duckdb.Error(text))
    assert (error.kind, error.message) == (kind, message)


def test_a_zone_mismatch_says_how_to_write_it() -> None:
    text = "Binder Error: Cannot compare values of type TIMESTAMP_NS and type TIMESTAMP WITH TIME ZONE"
    assert "TIMESTAMP '2026" in explain(duckdb.BinderException(text)).hint


def test_progress_is_sent_before_the_first_piece_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("probing.daemon.query.job.PROGRESS_S", 0.001)
    events: list[float | None] = []
    job = _job("SELECT sum(a.range * b.range) FROM range(4000) a, range(4000) b")
    job.progress = True
    run(job, lambda piece: events.append(None), Outcome(), events.append)
    assert events.index(None) == len(events) - 1 > 0
    assert all(fraction is None or fraction <= 1 for fraction in events)
    count = len(events)
    job.progress = False
    run(job, lambda piece: None, Outcome(), events.append)
    assert len(events) == count


def _rows(instance: Instance, job: Job) -> list[int]:
    pieces: list[bytes] = []
    with closing(Database(job, instance, Outcome())) as database:
        database.answer(job.statements[0], lambda piece: pieces.append(bytes(piece)))
    rows: list[int] = pa.ipc.open_stream(b"".join(pieces)).read_all().column(0).to_pylist()
    return rows


def test_a_request_sees_nothing_of_those_before(tmp_path: Path) -> None:
    instance = Instance(1 << 29, 1)
    count = 'SELECT "count" FROM probing.losses'
    for rows in (7, 5, 23):
        assert _rows(instance, _job(count, _losses(tmp_path / f"{rows}.parquet", rows))) == list(range(rows))
    # No request for the table, no table.
    for name in ("probing.losses", '"rows of probing.losses"'):
        with pytest.raises(QueryError, match="does not exist"):
            _rows(instance, Job([f"SELECT 1 FROM {name}"], {}, [], {}, 0))
    with pytest.raises(QueryError, match="Could not convert"):
        _rows(instance, _job("SELECT reason::INT FROM probing.losses", _losses(tmp_path / "a.parquet", 10)))
    assert _rows(instance, _job(count, tmp_path / "7.parquet")) == list(range(7))


def test_a_request_opens_files_of_its_tables_alone(tmp_path: Path) -> None:
    instance = Instance(1 << 29, 1)
    path = tmp_path / "probing.losses" / "date=2026-09-21" / "0.parquet"
    path.parent.mkdir(parents=True)
    _losses(path, 7)
    (tmp_path / "secret").write_text("42")
    for text in (f"SELECT * FROM read_text('{tmp_path}/secret')", "SELECT * FROM glob('/*')"):
        with pytest.raises(QueryError, match="a file of the store could not be read"):
            _rows(instance, _job(text, path))
        assert _rows(instance, _job('SELECT "count" FROM probing.losses', path)) == list(range(7))


def test_long_values_come_in_batches_of_few_rows(tmp_path: Path) -> None:
    sql = "SELECT concat(repeat('x', 100000), i) AS x FROM range(400) AS r(i)"
    pieces: list[bytes] = []
    run(_job(sql, _losses(tmp_path / "a.parquet", 10)), lambda piece: pieces.append(bytes(piece)), Outcome())
    with pa.ipc.open_stream(b"".join(pieces)) as reader:
        batches = list(reader)
    assert [x for batch in batches for x in batch["x"].to_pylist()] == [f"{'x' * 100_000}{i}" for i in range(400)]
    assert max(batch.nbytes for batch in batches) <= 5 << 20


def test_a_row_that_is_longer_than_a_batch_is_a_batch(tmp_path: Path) -> None:
    sql = "SELECT string_agg(repeat('x', 100000), '') AS x FROM range(100) UNION ALL SELECT 'y'"
    pieces: list[bytes] = []
    run(_job(sql, _losses(tmp_path / "a.parquet", 10)), lambda piece: pieces.append(bytes(piece)), Outcome())
    with pa.ipc.open_stream(b"".join(pieces)) as reader:
        assert sorted(map(len, reader.read_all()["x"].to_pylist())) == [1, 10_000_000]
