"""Several SELECTs in one request: one snapshot, one gate visit, one worker; rows, errors and bounds of each."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest
from query_helpers import NOW_NS, T0, Machine, answer, answers, logical, operations
from waiting import until

from probing.api.errors import ProbingError, QueryError, QueryMemory, QueryRejected, QueryTimeout
from probing.api.wire import MAX_STATEMENTS
from probing.daemon.arrow import batch_of
from probing.daemon.clock import FakeClock
from probing.daemon.query.answer import End, QueryProgress, StatementEnd
from probing.daemon.query.engine import Engine
from probing.daemon.store import Store
from probing.daemon.store.needs import Need

QUESTIONS = (
    "SELECT * FROM comm.ops ORDER BY ts, rank",
    "SELECT op, count(*) AS n, sum(duration_ns)::BIGINT AS ns FROM comm.ops GROUP BY op ORDER BY op",
    "SELECT max(seq) AS last FROM comm.ops WHERE ts > now() - INTERVAL 59950 MILLISECOND",
    "SELECT rank, op FROM comm.inflight ORDER BY rank",
    "SELECT count(*) AS n FROM comm.ops JOIN comm.inflight USING (rank)",
    "SELECT now() AS t",
    "SELECT * FROM comm.communicators",
)


def filled(machine: Machine) -> None:
    machine.files.segment("comm.ops", operations(40))
    machine.files.segment("comm.ops", operations(60, start=40, rank=1))
    inflight = [{"node": "n0", "ts": T0, "job": "j", "run": "0", "rank": rank, "op": "barrier"} for rank in (1, 0)]
    machine.files.live_rows["comm.inflight"] = logical("comm.inflight", inflight)


def test_the_rows_are_those_of_single_requests(machine: Machine) -> None:
    filled(machine)
    alone = [answer(machine.engine, sql) for sql in QUESTIONS]
    machine.files.snapshots.clear()
    machine.files.filled.clear()
    together, end = answers(machine.engine, QUESTIONS)
    for table, (expected, _) in zip(together, alone, strict=True):
        assert isinstance(table, pa.Table)
        assert table.equals(expected)
    assert end == End(sum(table.num_rows for table, _ in alone), 100, [])
    # One snapshot, and one filling of the live table that two statements name.
    assert machine.files.snapshots == [{"comm.ops": Need(), "comm.communicators": Need()}]
    assert machine.files.filled == ["comm.inflight"]
    assert machine.files.held == 0


def test_a_statement_that_reads_no_row_is_not_run_where_only_rows_count(machine: Machine) -> None:
    filled(machine)
    names = {"comm.ops": 100, "comm.communicators": 0, "comm.inflight": 2, "process.events": 0}
    joined = "comm.communicators AS c FULL JOIN comm.inflight AS i USING (rank)"
    statements = [*(f"SELECT rank FROM {name}" for name in names), f"SELECT rank FROM {joined}", "SELECT 1 AS one"]
    items = list(machine.engine.run_all(statements, timeout=60, max_bytes=0, rows_only=True))
    ends = [item for item in items if isinstance(item, StatementEnd)]
    assert [end.rows for end in ends] == [*names.values(), 2, 0]
    # A statement that is run has a stream.
    assert sum(isinstance(item, bytes) for item in items) == 3
    # Without the promise every statement has a stream.
    items = list(machine.engine.run_all(statements, timeout=60, max_bytes=0))
    assert sum(isinstance(item, bytes) for item in items) == len(statements)


def test_now_is_the_same_in_all(machine: Machine) -> None:
    ticks = iter(range(NOW_NS, NOW_NS + 1000))
    engine = Engine(machine.files, machine.pool, machine.gate, now_ns=lambda: next(ticks))
    tables, _ = answers(engine, ["SELECT epoch_ns(now()) AS t"] * 3)
    assert [table.column("t").to_pylist() for table in tables] == [[NOW_NS // 1000 * 1000]] * 3


def test_each_table_is_needed_as_far_as_any_statement_needs_it(machine: Machine) -> None:
    filled(machine)
    where = ("job = 'a' AND ts > '2026-01-01'", "job IN ('b', 'c') AND ts > '2026-02-01'")
    answers(machine.engine, [f"SELECT count(*) FROM comm.ops WHERE {condition}" for condition in where])
    (needs,) = machine.files.snapshots
    single = [machine.engine.run(f"SELECT 1 FROM comm.ops WHERE {w}", timeout=60, max_bytes=0) for w in where]
    for one in single:
        list(one)
    first, second = (asked["comm.ops"] for asked in machine.files.snapshots[1:])
    assert needs == {"comm.ops": Need(first.times, frozenset("abc"))}
    assert first.either(second) == needs["comm.ops"]


def test_rows_that_come_between_statements_are_in_none(machine: Machine, open_tmp_path: Path) -> None:
    store = Store.open(machine.files.root / "real", node="n0", clock=FakeClock(mono_ns=1_000, real_ns=T0))
    try:
        store.append({"comm.ops": [batch_of("comm.ops", operations(50))]}, {})
        snapshot = store.snapshot()
        machine.files.parts = [(part["path"], part["length"]) for part in snapshot["parts"]]
        # The first answer is longer than what waits for its reader: the worker stands still before the next statement.
        wide = "SELECT seq, repeat('x', 4000) AS text, r.range FROM comm.ops, range(400) r"
        items = machine.engine.run_all([wide, "SELECT count(*) AS n FROM comm.ops"], timeout=60, max_bytes=0)
        assert isinstance(next(items), bytes)
        store.append({"comm.ops": [batch_of("comm.ops", operations(50, start=50))]}, {})
        pieces: list[bytes] = []
        ends: list[StatementEnd] = []
        for item in items:
            if isinstance(item, StatementEnd):
                ends.append(item)
            elif isinstance(item, bytes) and ends:
                pieces.append(item)
        assert [end.rows for end in ends] == [50 * 400, 1]
        assert pa.ipc.open_stream(b"".join(pieces)).read_all().to_pylist() == [{"n": 50}]
        later = store.snapshot()
        machine.files.parts = [(part["path"], part["length"]) for part in later["parts"]]
        assert machine.rows("SELECT count(*) FROM comm.ops") == [(100,)]
    finally:
        store.close()


def test_an_error_is_that_of_its_statement(machine: Machine) -> None:
    filled(machine)
    found, end = answers(
        machine.engine,
        [
            "SELECT * FROM comm.nope",
            "SELECT count(*) AS n FROM comm.ops",
            "SELECT 'x'::INT FROM comm.ops",
            "DROP TABLE x",
            "SELECT * FROM process.envs",
            "SELECT rank FROM comm.inflight ORDER BY rank",
            "SELECT rnak FROM comm.ops",
        ],
    )
    # process.envs is live, and this store has no rows of it.
    kinds = [one.kind if isinstance(one, ProbingError) else one.to_pylist() for one in found]
    assert kinds == [
        "QueryRejected",
        [{"n": 100}],
        "QueryError",
        "QueryRejected",
        "NotFound",
        [{"rank": 0}, {"rank": 1}],
        "QueryError",
    ]
    assert (end.rows, end.warnings, machine.files.held) == (3, [], 0)


def test_a_statement_that_runs_out_of_memory_leaves_the_others(machine: Machine) -> None:
    filled(machine)
    large = "SELECT list(concat(a.range, 'x', b.range)) FROM range(100000) a, range(1000) b"
    (one, failed, two), _ = answers(machine.engine, ["SELECT 1 AS x", large, "SELECT count(*) AS x FROM comm.ops"])
    assert isinstance(failed, QueryMemory)
    assert [table.to_pylist() for table in (one, two)] == [[{"x": 1}], [{"x": 100}]]


def test_no_snapshot_is_taken_where_nothing_can_run(machine: Machine) -> None:
    found, end = answers(machine.engine, ["SELECT * FROM nope", "SELECT * FROM nope2"])
    assert [type(one) for one in found] == [QueryRejected, QueryRejected]
    assert (end, machine.files.snapshots) == (End(0, 0), [])


def test_a_damaged_segment_is_left_out_of_all_statements(machine: Machine) -> None:
    filled(machine)
    path = machine.files.segment("comm.ops", operations(10, start=100))
    path.write_bytes(path.read_bytes()[:200])
    found, end = answers(machine.engine, ["SELECT sum(seq) AS s FROM comm.ops", "SELECT count(*) AS n FROM comm.ops"])
    assert [table.to_pylist() for table in found] == [[{"s": sum(range(100))}], [{"n": 100}]]
    assert end.warnings == [f"comm.ops: a damaged segment was left out: {path.name}"]
    assert machine.files.reported_damaged == [str(path)]


def test_bounds_are_of_the_whole_request(machine: Machine) -> None:
    with pytest.raises(QueryRejected, match=f"more than {MAX_STATEMENTS} statements"):
        answers(machine.engine, ["SELECT 1"] * (MAX_STATEMENTS + 1))
    assert len(answers(machine.engine, ["SELECT 1"] * MAX_STATEMENTS)[0]) == MAX_STATEMENTS
    million = "SELECT * FROM range(100000)"
    found, _ = answers(machine.engine, [million, million], max_bytes=1_000_000)
    assert isinstance(found[0], pa.Table)
    assert isinstance(found[1], QueryMemory)
    slow = "SELECT count(*) FROM range(1000000) a, range(1000000) b, range(1000) c"
    with pytest.raises(QueryTimeout):
        answers(machine.engine, ["SELECT 1", slow], timeout=1.0)
    until(lambda: machine.engine.running == 0)


def test_a_killed_check_refuses_the_request(machine: Machine) -> None:
    deep = "SELECT " + " + ".join(["1"] * 100_000)
    found, _ = answers(machine.engine, ["SELECT 1 AS x", deep])
    assert isinstance(found[0], pa.Table)
    assert isinstance(found[1], QueryRejected)


def test_all_statements_have_one_slot_and_one_worker(machine: Machine) -> None:
    engine = Engine(machine.files, machine.pool, machine.gate, concurrent=1)
    rows = "SELECT a.range, b.range FROM range(10000) a, range(1000) b"
    items = engine.run_all([rows, rows, rows], timeout=60, max_bytes=0)
    assert isinstance(next(items), bytes)
    assert (engine.running, machine.pool.busy) == (1, 1)
    items.close()
    until(lambda: (engine.running, machine.pool.busy) == (0, 0))


def test_the_rows_to_scan_of_all_statements_make_a_request_large(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("probing.daemon.query.engine.LARGE_ROWS", 250)
    filled(machine)
    grown: list[object] = []
    monkeypatch.setattr(machine.engine._slots, "grow", grown.append)
    answers(machine.engine, ["SELECT count(*) FROM comm.ops"] * 2)
    assert grown == []
    answers(machine.engine, ["SELECT count(*) FROM comm.ops"] * 3)
    assert len(grown) == 1


def test_progress_goes_on_from_statement_to_statement(machine: Machine) -> None:
    machine.files.segment("comm.ops", operations(1000))
    slow = "SELECT count(*) FROM comm.ops a, comm.ops b, range(100) c WHERE a.seq + b.seq + c.range >= 0"
    items = list(machine.engine.run_all([slow, slow], timeout=60, max_bytes=1 << 20, progress=True))
    fractions = [item.fraction for item in items if isinstance(item, QueryProgress)]
    assert all(fraction <= 1 for fraction in fractions)
    second = items.index(next(item for item in items if isinstance(item, StatementEnd)))
    later = [item.fraction for item in items[second:] if isinstance(item, QueryProgress) and item.fraction >= 0]
    assert all(fraction >= 0.5 for fraction in later)


def test_a_worker_that_ends_between_statements_is_an_error_of_the_request(machine: Machine) -> None:
    rows = "SELECT a.range, b.range FROM range(10000) a, range(1000) b"
    items = machine.engine.run_all(["SELECT 1", rows], timeout=60, max_bytes=0)
    while not isinstance(next(items), StatementEnd):
        pass
    for child in machine.inetd.alive():
        child.kill()
    with pytest.raises(QueryError, match="the worker that ran the query ended"):
        list(items)
    assert (machine.engine.running, machine.files.held) == (0, 0)
