"""Queries through the engine and real worker processes, over real files."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import datetime, timedelta
from itertools import takewhile
from pathlib import Path

import pyarrow as pa
import pytest
from query_helpers import (
    NOW_NS,
    SQL_WORKER,
    T0,
    Files,
    FileSegment,
    Inetd,
    Machine,
    answer,
    ask_worker,
    gates,
    logical,
    operations,
)
from waiting import until

from probing.api.errors import ProbingError, QueryError, QueryMemory, QueryRejected, QueryTimeout
from probing.api.tables import TABLES, table_named
from probing.daemon.arrow import batch_of
from probing.daemon.clock import FakeClock
from probing.daemon.confined.sandbox import landlock_abi
from probing.daemon.ipc import connect
from probing.daemon.query.answer import End, QueryProgress
from probing.daemon.query.engine import Engine
from probing.daemon.query.pool import GATE, QUERY, WorkerPool
from probing.daemon.service.collector_client import CollectorClient
from probing.daemon.store import Store
from probing.daemon.store.needs import Need

SLOW = "SELECT count(*) FROM range(1000000) a, range(1000000) b, range(1000) c"


def test_segments_are_shown_as_the_logical_table(machine: Machine) -> None:
    machine.files.segment("comm.ops", operations(10))
    machine.files.segment("comm.ops", operations(10, start=10, rank=1))
    table, end = answer(machine.engine, "SELECT * FROM comm.ops ORDER BY ts, rank")
    assert table.schema.names == TABLES["comm.ops"].logical.names
    assert table.schema.field("ts").type == pa.timestamp("ns")
    row = table.slice(7, 1).to_pylist()[0]
    assert (row["seq"], row["op"], row["duration_ns"]) == (7, "all_reduce", 7000)
    assert _int(row["t_done_hi"]) - _int(row["t_call"]) == 8
    assert row["algbw_gbps"] == pytest.approx(4000 / 7000)
    assert end == End(rows=20, rows_scanned=20, warnings=[])
    assert machine.files.held == 0


def _int(time: datetime) -> int:
    return int((time - datetime(1970, 1, 1)) / timedelta(microseconds=1))


def test_a_stored_table_without_rows_has_its_columns(machine: Machine) -> None:
    table, end = answer(machine.engine, "SELECT * FROM comm.communicators")
    assert table.schema.names == TABLES["comm.communicators"].logical.names
    assert (table.num_rows, end.rows, end.rows_scanned) == (0, 0, 0)


def test_a_column_that_an_old_segment_lacks_is_null(machine: Machine) -> None:
    lacking = ["root", "peer", "done_lo_ns", "done_hi_ns"]
    old = pa.Table.from_batches([batch_of("comm.ops", operations(3))]).drop_columns(lacking)
    # A column that this version does not know is left out.
    old = old.append_column("retired", pa.array([7, 8, 9]))
    machine.files.segment("comm.ops", old)
    assert machine.rows("SELECT count(*), count(root), count(t_done_lo) FROM comm.ops") == [(3, 0, 0)]
    assert "retired" not in answer(machine.engine, "SELECT * FROM comm.ops")[0].column_names
    machine.files.segment("comm.ops", operations(4))
    assert machine.rows("SELECT count(*), count(peer), count(t_done_lo) FROM comm.ops") == [(7, 0, 4)]


def test_rows_of_the_log_and_of_segments_are_one_table(machine: Machine) -> None:
    state = machine.files.root / "real"
    clock = FakeClock(mono_ns=1_000, real_ns=T0)
    with_store = Store.open(state, node="n0", clock=clock)
    try:
        with_store.append({"comm.ops": [batch_of("comm.ops", operations(50))]}, {})
        with_store.append({"comm.ops": [batch_of("comm.ops", operations(50, start=50, rank=1))]}, {})
        with_store.seal(now=True)
        with_store.append({"comm.ops": [batch_of("comm.ops", operations(7, start=100))]}, {})
        with_store.append({"comm.ops": [batch_of("comm.ops", operations(7, start=107, rank=3))]}, {})
        snapshot = with_store.snapshot()
        for segment in snapshot["tables"]["comm.ops"]:
            found = FileSegment(segment["path"], segment["rows"], segment["ts_min"], segment["ts_max"])
            machine.files.segments.setdefault("comm.ops", []).append(found)
        machine.files.parts = [(part["path"], part["length"]) for part in snapshot["parts"]]
        sql = "SELECT rank, count(*) n, sum(seq)::BIGINT s FROM comm.ops GROUP BY 1 ORDER BY 1"
        table, end = answer(machine.engine, sql)
        assert table.to_pylist() == [
            {"rank": 0, "n": 57, "s": sum(range(50)) + sum(range(100, 107))},
            {"rank": 1, "n": 50, "s": sum(range(50, 100))},
            {"rank": 3, "n": 7, "s": sum(range(107, 114))},
        ]
        assert end == End(rows=3, rows_scanned=114, warnings=[])
    finally:
        with_store.close()


def test_segments_outside_the_times_of_a_query_are_not_opened(machine: Machine) -> None:
    machine.files.segment("comm.ops", operations(1000))
    machine.files.segment("comm.ops", operations(1000, start=60_000))
    sql = "SELECT count(*) AS n FROM comm.ops WHERE ts > now() - INTERVAL 5 SECOND"
    table, end = answer(machine.engine, sql)
    assert (table.to_pylist(), end.rows_scanned) == ([{"n": 1000}], 1000)
    table, end = answer(machine.engine, "SELECT count(*) AS n FROM comm.ops WHERE ts > now()")
    assert (table.to_pylist(), end.rows_scanned) == ([{"n": 999}], 1000)


def test_live_tables_are_filled_for_the_query_that_names_them(machine: Machine) -> None:
    machine.files.segment("comm.ops", operations(3))
    machine.files.live_rows["comm.inflight"] = logical("comm.inflight", [{"job": "j", "seq": 2, "age_ns": 5}])
    sql = "SELECT o.seq, i.age_ns FROM comm.ops o LEFT JOIN comm.inflight i USING (job, seq) ORDER BY 1"
    assert machine.rows(sql) == [(0, None), (1, None), (2, 5)]


def test_live_rows_in_another_schema_are_refused(machine: Machine) -> None:
    machine.files.live_rows["comm.inflight"] = logical("process.envs", [{"name": "RANK"}])
    with pytest.raises(ProbingError, match="another schema"):
        machine.rows("SELECT * FROM comm.inflight")


def test_every_table_can_be_asked(machine: Machine) -> None:
    for name, table in TABLES.items():
        if table.live:
            machine.files.live_rows[name] = logical(name, [])
    for name in TABLES:
        table, _ = answer(machine.engine, f"SELECT * FROM {name}")
        assert table.schema.names == table_named(name).logical.names


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("count(*) FILTER (ts > now() - INTERVAL 5 MINUTE)", 100),
        ("count(*) FILTER (ts > now() - INTERVAL '59990 milliseconds')", 89),
        ("count(*) FILTER (ts > now() - INTERVAL '5 minutes')", 100),
        ("count(*) FILTER (ts > current_timestamp - INTERVAL '1 hour 30 minutes')", 100),
        ("count(*) FILTER (ts < localtimestamp - to_seconds(60))", 0),
        ("count(*) FILTER (ts > '2026-01-01')", 100),
        ("count(*) FILTER (ts > '2026-11-18 10:26:40.050')", None),
        ("count(*) FILTER (ts > TIMESTAMP '2026-01-01 00:00:00')", 100),
        ("count(*) FILTER (ts > TIMESTAMPTZ '2026-01-01 00:00:00+02')", 100),
        ("count(*) FILTER (ts > DATE '2026-01-01')", 100),
        ("count(*) FILTER (ts >= today())", 100),
        ("count(*) FILTER (ts >= current_date - 1)", 100),
        ("count(*) FILTER (ts BETWEEN '2026-01-01' AND now())", 100),
        (f"count(*) FILTER (ts >= to_timestamp({T0 // 10**9}))", 100),
        (f"count(*) FILTER (ts >= make_timestamp_ns({T0 + 50_000_000}))", 50),
        (f"count(*) FILTER (ts >= epoch_ms({T0 // 10**6 + 50}))", 50),
        ("count(*) FILTER (ts > TIMESTAMP '2026-01-01 09:00:00' AT TIME ZONE 'Asia/Tokyo')", 100),
        ("count(DISTINCT time_bucket(INTERVAL '10 milliseconds', ts))", 10),
        ("count(DISTINCT date_trunc('minute', ts))", 1),
        ("epoch_ns(max(ts)) - epoch_ns(min(ts))", 99_000_000),
        ("epoch_ns(min(ts))", T0),
        ("epoch_us(min(ts))", T0 // 1000),
        ("epoch(min(ts))::BIGINT", T0 // 10**9),
        ("(max(ts) - min(ts)) = INTERVAL 99 MILLISECOND", True),
        ("(now() - min(ts)) = INTERVAL 1 MINUTE", True),
        ("age(max(ts), min(ts)) = INTERVAL 99 MILLISECOND", True),
        ("age(max(ts)) IS NOT NULL", True),
        ("max(t_done_hi - t_start) = INTERVAL 99 MICROSECOND", True),
        ("date_diff('second', min(ts), now())", 60),
        ("min(ts::DATE)::VARCHAR", "2026-11-18"),
        ("max(extract(year FROM ts))", 2026),
        ("max(hour(ts)) = max(date_part('hour', ts))", True),
        ("min(strftime(ts, '%Y-%m-%d'))", "2026-11-18"),
        ("min(dayname(ts))", "Wednesday"),
        ("min(ts + INTERVAL 1 DAY)::DATE::VARCHAR", "2026-11-19"),
    ],
)
def test_everyday_times(shared: Machine, expression: str, expected: object) -> None:
    ((value,),) = shared.rows(f"SELECT {expression} AS v FROM comm.ops")
    if expected is None:
        assert isinstance(value, int)
    else:
        assert value == expected


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    root = tmp_path_factory.mktemp("shared")
    files = Files(root / "state")
    files.segment("comm.ops", operations(100))
    inetd = Inetd(root / "sql.sock", [f"--state_dir={root}/state"])
    pool = WorkerPool(str(root / "sql.sock"))
    with gates(root) as gate:
        yield Machine(root, files, inetd, pool, Engine(files, pool, gate, now_ns=lambda: NOW_NS), gate)
    pool.close()
    inetd.close()


@pytest.mark.parametrize(
    ("sql", "message", "hint"),
    [
        ("SELECT rnak FROM comm.ops", 'Referenced column "rnak" not found', 'did you mean "rank"'),
        ("SELECT 'x'::INT", "Could not convert string 'x' to INT32", "TRY_CAST"),
        ("SELECT bit_count(op) FROM comm.ops", "No function matches", "add a cast"),
        ("SELECT rank FROM comm.ops GROUP BY op", "must appear in the GROUP BY", "column_docs"),
    ],
)
def test_what_duckdb_refuses_is_one_line_and_a_hint(shared: Machine, sql: str, message: str, hint: str) -> None:
    with pytest.raises(QueryError) as caught:
        shared.rows(sql)
    assert message in caught.value.message
    assert hint in caught.value.hint
    assert "\n" not in caught.value.message
    assert str(shared.root) not in caught.value.message


def test_a_query_past_its_deadline_ends_its_worker_and_no_other(machine: Machine) -> None:
    with pytest.raises(QueryTimeout):
        machine.rows(SLOW, timeout=1.0)
    until(lambda: any(child.poll() is not None for child in machine.inetd.children))
    assert machine.rows("SELECT 1") == [(1,)]


def test_a_huge_scalar_stops_at_the_workers_memory(machine: Machine) -> None:
    reply = ask_worker(machine.root / "sql.sock", "SELECT length(repeat('x', 4000000000))")
    assert reply["error"]["kind"] == "QueryMemory"
    with pytest.raises(QueryRejected):
        machine.rows("SELECT length(repeat('x', 4000000000))")


def test_too_many_groups_are_a_memory_error_and_the_worker_lives(machine: Machine) -> None:
    with pytest.raises(QueryMemory):
        machine.rows("SELECT list(concat(a.range, 'x', b.range)) FROM range(100000) a, range(1000) b")
    assert machine.rows("SELECT 1") == [(1,)]


def test_an_answer_above_its_limit_is_refused(machine: Machine) -> None:
    with pytest.raises(QueryMemory, match="larger than 1000000 bytes"):
        machine.rows("SELECT * FROM range(1000000)", max_bytes=1_000_000)


def test_a_large_answer_comes_in_pieces(machine: Machine) -> None:
    pieces = list(machine.engine.run("SELECT range r FROM range(1000000) ORDER BY r", timeout=60, max_bytes=1 << 30))
    data = [piece for piece in pieces if isinstance(piece, bytes)]
    assert len(data) >= 8
    assert max(map(len, data)) <= 1 << 20
    table = pa.ipc.open_stream(b"".join(data)).read_all()
    assert table.column("r").to_pylist() == list(range(1_000_000))


def test_a_killed_worker_costs_one_query(machine: Machine) -> None:
    machine.rows("SELECT 1")
    failures: list[ProbingError] = []

    def ask() -> None:
        try:
            machine.rows(SLOW)
        except ProbingError as e:
            failures.append(e)

    busy = threading.Thread(target=ask)
    busy.start()
    until(lambda: any(_cpu_ticks(child.pid) > 200 for child in machine.inetd.alive()))
    worker = max(machine.inetd.alive(), key=lambda child: _cpu_ticks(child.pid))
    os.kill(worker.pid, signal.SIGKILL)
    busy.join(30)
    assert [type(e) for e in failures] == [QueryError]
    assert "ended" in failures[0].message
    assert machine.rows("SELECT 1") == [(1,)]


def _cpu_ticks(pid: int) -> int:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0
    return int(fields[11]) + int(fields[12])


def test_idle_workers_that_died_are_passed_over(machine: Machine) -> None:
    until(lambda: len(machine.inetd.alive()) == 2)
    for child in machine.inetd.alive():
        child.kill()
        child.wait(10)
    assert machine.rows("SELECT 1") == [(1,)]


def test_a_caller_that_goes_away_ends_its_worker(machine: Machine) -> None:
    # The worker of this query runs the next one, too, and is warm.
    answer(machine.engine, "SELECT 1")
    with pytest.raises(QueryError, match="cancelled"):
        list(machine.engine.run(SLOW, timeout=60, max_bytes=1 << 20, cancelled=lambda: machine.pool.busy > 0))
    until(lambda: any(child.poll() is not None for child in machine.inetd.children))
    assert machine.files.held == 0


def test_a_worker_is_renewed(machine: Machine) -> None:
    pool = WorkerPool(str(machine.root / "sql.sock"), QUERY._replace(uses=2))
    before = len(machine.inetd.children)
    engine = Engine(machine.files, pool, machine.gate)
    for _ in range(4):
        answer(engine, "SELECT 1")
    until(lambda: len(machine.inetd.children) >= before + 2)
    pool.close()


def test_no_worker_to_be_had_is_said(tmp_path: Path) -> None:
    engine = Engine(Files(tmp_path), *(WorkerPool(str(tmp_path / "sql.sock"), policy) for policy in (QUERY, GATE)))
    with pytest.raises(QueryError, match="no SQL worker") as caught:
        answer(engine, "SELECT 1")
    assert caught.value.hint


@pytest.mark.parametrize("damage", ["footer", "page", "empty", "missing", "foreign"])
def test_a_damaged_segment_is_left_out_and_named(machine: Machine, damage: str) -> None:
    machine.files.segment("comm.ops", operations(100))
    bad = machine.files.segment("comm.ops", operations(5000, start=100))
    machine.files.segment("comm.ops", operations(10, start=6000))
    _DAMAGE[damage](bad)
    sql = "SELECT count(*), sum(seq)::BIGINT, max(done) FROM (SELECT seq, t_done_hi AS done FROM comm.ops)"
    table, end = answer(machine.engine, sql)
    assert list(table.to_pylist()[0].values())[:2] == [110, sum(range(100)) + sum(range(6000, 6010))]
    assert end.warnings == ["comm.ops: a damaged segment was left out: 1.parquet"]
    assert machine.files.reported_damaged == [str(bad)]
    # The next query knows it already.
    table, end = answer(machine.engine, "SELECT count(*) FROM comm.ops")
    assert table.to_pylist() == [{"count(*)": 110}]
    assert end.warnings == ["comm.ops: 1 damaged segment left out"]


def _spoil_pages(path: Path) -> None:
    data = bytearray(path.read_bytes())
    footer = 8 + int.from_bytes(data[-8:-4], "little")
    data[8 : len(data) - footer] = bytes(len(data) - footer - 8)
    path.write_bytes(data)


def _spoil_footer(path: Path) -> None:
    data = bytearray(path.read_bytes())
    start = len(data) - 8 - int.from_bytes(data[-8:-4], "little")
    data[start : start + 64] = bytes(64)
    path.write_bytes(data)


_DAMAGE: dict[str, Callable[[Path], object]] = {
    "footer": _spoil_footer,
    "page": _spoil_pages,
    "empty": lambda path: path.write_bytes(b""),
    "missing": lambda path: path.unlink(),
    "foreign": lambda path: path.write_bytes(b"#!/bin/sh\necho hello\n" * 10),
}


def test_a_damaged_part_of_the_log_is_named(machine: Machine) -> None:
    machine.files.segment("comm.ops", operations(3))
    part = machine.files.root / "000000000001.wal"
    part.write_bytes(b"nonsense" * 100)
    machine.files.parts = [(str(part), 800)]
    table, end = answer(machine.engine, "SELECT count(*) n FROM comm.ops")
    assert table.to_pylist() == [{"n": 3}]
    assert len(end.warnings) == 1
    assert "a part of the log was left out" in end.warnings[0]


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT * FROM read_text('/etc/passwd')",
        "SELECT * FROM glob('/*')",
        "SELECT * FROM '/etc/passwd'",
        "COPY (SELECT 1) TO '{root}/state/x'",
        "SET enable_external_access = true",
        "SELECT 1; SELECT 2",
        "SELECT * FROM read_text('{root}/secret')",
        "SELECT * FROM read_text('{root}/state/secret')",
        "ATTACH '{root}/state/x.db'",
        "INSTALL httpfs",
    ],
)
def test_behind_the_gate_there_is_nothing_to_take(shared: Machine, sql: str) -> None:
    for place in (shared.root, shared.root / "state"):
        (place / "secret").write_text("42")
    before = sorted(shared.files.root.iterdir())
    reply = ask_worker(shared.root / "sql.sock", sql.format(root=shared.root))
    assert "error" in reply
    assert sorted(shared.files.root.iterdir()) == before


@pytest.mark.parametrize("command", [(), SQL_WORKER], ids=["forked", "started"])
def test_a_worker_has_given_up_what_it_had(machine: Machine, command: tuple[str, ...]) -> None:
    path = machine.root / "own.sock"
    inetd = Inetd(path, [f"--state_dir={machine.root}/state"], command)
    pool = WorkerPool(str(path))
    try:
        answer(Engine(machine.files, pool, machine.gate), "SELECT 1")
        child = inetd.alive()[0]
        status = Path(f"/proc/{child.pid}/status").read_text()
        assert "NoNewPrivs:\t1" in status
        limits = Path(f"/proc/{child.pid}/limits").read_text()
        assert "unlimited" not in next(line for line in limits.splitlines() if line.startswith("Max address space"))
    finally:
        pool.close()
        inetd.close()


@pytest.mark.skipif(landlock_abi() < 1, reason="the kernel has no Landlock")
def test_a_worker_can_open_only_the_state_directory(open_tmp_path: Path) -> None:
    (open_tmp_path / "state").mkdir()
    (open_tmp_path / "state" / "inside").write_text("1")
    (open_tmp_path / "outside").write_text("1")
    script = f"""
import json, os, socket, threading
from probing.daemon.confined.sandbox import confine
confine(["{open_tmp_path}/state"])
out = {{}}
def attempt(name, action):
    try:
        action()
        out[name] = "done"
    except OSError as e:
        out[name] = e.strerror
def everything():
    attempt("inside", lambda: open("{open_tmp_path}/state/inside").read())
    attempt("outside", lambda: open("{open_tmp_path}/outside").read())
    attempt("passwd", lambda: open("/etc/passwd").read())
    attempt("list", lambda: os.listdir("/"))
    attempt("write", lambda: open("{open_tmp_path}/state/new", "w"))
    attempt("unlink", lambda: os.unlink("{open_tmp_path}/state/inside"))
thread = threading.Thread(target=everything); thread.start(); thread.join()
print(json.dumps(out))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd="/")
    out = json.loads(done.stdout)
    assert out.pop("inside") == "done"
    # Landlock's words and those of the calls that are refused.
    assert set(out.values()) <= {"Permission denied", "Operation not permitted"}


def test_a_request_that_makes_no_sense_is_answered(machine: Machine) -> None:
    with connect(str(machine.root / "sql.sock")) as channel:
        for payload in (b"", b"{}", b'{"statements": 1}', b"\xff" * 10):
            channel.send({"op": "query", "spec_bytes": len(payload), "live": [["x", 5]]}, payload)
            assert channel.receive(60).header["error"]["kind"] == "InternalError"


def test_queries_run_side_by_side(machine: Machine) -> None:
    machine.files.segment("comm.ops", operations(1000))
    results: list[object] = []
    threads = [
        threading.Thread(target=lambda: results.extend(machine.rows("SELECT count(*) FROM comm.ops"))) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert results == [(1000,)] * 8


def test_waiting_for_other_queries_ends_with_the_deadline(machine: Machine) -> None:
    engine = Engine(machine.files, machine.pool, machine.gate, concurrent=1)
    first = engine.run("SELECT a.range, b.range FROM range(10000) a, range(1000) b", timeout=60, max_bytes=1 << 30)
    assert next(first)
    started = time.monotonic()
    with pytest.raises(QueryTimeout, match="busy"):
        answer(engine, "SELECT 1", timeout=0.2)
    assert time.monotonic() >= started
    first.close()  # type: ignore[attr-defined]
    assert answer(engine, "SELECT 1")[1].rows == 1


def test_segments_of_other_jobs_are_not_opened(machine: Machine) -> None:
    for jobs in ({"a"}, {"a", "b"}, {"c"}, None):
        machine.files.segment("comm.ops", operations(10))
        found = machine.files.segments["comm.ops"]
        found[-1] = replace(found[-1], jobs=None if jobs is None else frozenset(jobs))
    for where, scanned in (("job = 'b'", 20), ("job IN ('b', 'c')", 30), ("job = 'x'", 10), ("job <> 'b'", 40)):
        assert answer(machine.engine, f"SELECT count(*) FROM comm.ops WHERE {where}")[1].rows_scanned == scanned


def test_progress_comes_before_the_rows_of_a_query_that_takes_long(machine: Machine) -> None:
    machine.files.segment("comm.ops", operations(1000))
    sql = "SELECT count(*) FROM comm.ops a, comm.ops b, range(100) c WHERE a.seq + b.seq + c.range >= 0"
    items = list(machine.engine.run(sql, timeout=60, max_bytes=1 << 20, progress=True))
    told = list(takewhile(lambda item: isinstance(item, QueryProgress), items))
    assert told
    assert all(isinstance(item, QueryProgress) and item.rows_to_scan == 1000 and item.fraction <= 1 for item in told)
    elapsed = [item.elapsed_ms for item in told if isinstance(item, QueryProgress)]
    assert elapsed == sorted(elapsed)
    assert [type(item) for item in items[len(told) :]] == [bytes, End]


def test_an_answer_without_a_limit_is_as_long_as_it_is(machine: Machine) -> None:
    assert answer(machine.engine, "SELECT * FROM range(1000000)", max_bytes=0)[1].rows == 1_000_000


def _nothing_is_left(machine: Machine, descriptors: int) -> None:
    assert (machine.engine.running, machine.pool.busy, machine.files.held) == (0, 0, 0)
    # Together: a worker that ended holds its descriptor until ``alive`` has seen it.
    until(lambda: len(machine.inetd.alive()) == 2 and len(list(Path("/proc/self/fd").iterdir())) <= descriptors)


def test_a_caller_that_goes_away_leaves_nothing_in_any_phase(machine: Machine) -> None:
    rows = "SELECT a.range, b.range FROM range(10000) a, range(1000) b"
    assert machine.rows("SELECT 1") == [(1,)]
    until(lambda: len(machine.inetd.alive()) == 2)
    descriptors = len(list(Path("/proc/self/fd").iterdir()))
    engine = machine.engine
    holders = [engine.run(rows, timeout=60, max_bytes=0) for _ in range(4)]
    assert all(isinstance(next(holder), bytes) for holder in holders)
    assert (engine.running, machine.pool.busy) == (4, 4)
    # While it waits for its turn.
    with pytest.raises(QueryError, match="cancelled"):
        list(engine.run("SELECT 1", timeout=60, max_bytes=0, cancelled=lambda: True))
    assert (engine.running, machine.pool.busy) == (4, 4)
    # While it does not take its rows.
    for holder in holders:
        holder.close()  # type: ignore[attr-defined]
    _nothing_is_left(machine, descriptors)
    # While live rows are made, and while the store is asked.
    for name, times in (("comm.inflight", 0), ("comm.inflight", 1), ("comm.ops", 0)):
        with pytest.raises(QueryError, match="cancelled"):
            list(engine.run(f"SELECT * FROM {name}", timeout=60, max_bytes=0, cancelled=_only_later(times)))
        _nothing_is_left(machine, descriptors)
    # While it runs.
    with pytest.raises(QueryError, match="cancelled"):
        list(engine.run(SLOW, timeout=60, max_bytes=0, cancelled=_only_later(5)))
    _nothing_is_left(machine, descriptors)


def _only_later(times: int) -> Callable[[], bool]:
    left = iter([False] * times)
    return lambda: next(left, True)


def test_who_does_not_take_its_answer_keeps_no_worker(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    # Ended long before the deadline, so that the caller learns of the end.
    monkeypatch.setattr("probing.daemon.query.pool.GRACE_S", -58.0)
    stuck = machine.engine.run("SELECT a.range, b.range FROM range(10000) a, range(1000) b", timeout=60, max_bytes=0)
    assert isinstance(next(stuck), bytes)
    before = {child.pid for child in machine.inetd.alive()}
    until(lambda: not before <= {child.pid for child in machine.inetd.alive()})
    with pytest.raises(QueryError, match="ended"):
        list(stuck)
    assert (machine.engine.running, machine.pool.busy, machine.files.held) == (0, 0, 0)


def test_a_collector_that_does_not_answer_is_not_waited_for_by_nobody(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as server:
        server.bind(str(tmp_path / "collector.sock"))
        server.listen(1)
        client = CollectorClient(str(tmp_path / "collector.sock"))
        with pytest.raises(QueryError, match="cancelled"), client.snapshot({"comm.ops": Need()}, 60, lambda: True):
            pass
        with pytest.raises(QueryError, match="cancelled"):
            client.live("comm.inflight", 60, lambda: True)
        client.damaged(["/a"], 0.01)


def test_a_small_query_does_not_wait_for_large_ones(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("probing.daemon.query.engine.LARGE_ROWS", 500)
    machine.files.segment("comm.ops", operations(1000))
    engine = Engine(machine.files, machine.pool, machine.gate, concurrent=2)
    large = "SELECT a.*, r.range FROM comm.ops a, range(10000) r"
    first = engine.run(large, timeout=60, max_bytes=0)
    assert isinstance(next(first), bytes)
    with pytest.raises(QueryTimeout, match="busy"):
        list(engine.run(large, timeout=0.3, max_bytes=0))
    assert answer(engine, "SELECT 1")[1].rows == 1
    assert engine.running == 1
    first.close()  # type: ignore[attr-defined]
    assert isinstance(next(engine.run(large, timeout=60, max_bytes=0)), bytes)


HASTY = "from probing.daemon.confined import sql_checker, sql_worker; sql_checker.CPU_S = 0.02; sql_worker.main()"
MANY = f"SELECT {', '.join(f'{i} + {i} AS c{i}' for i in range(1000))} FROM comm.ops"


def test_a_check_that_takes_too_long_is_given_up(machine: Machine, open_tmp_path: Path) -> None:
    root = open_tmp_path / "hasty"
    root.mkdir()
    with gates(root, "-c", HASTY) as gate:
        engine = Engine(machine.files, machine.pool, gate)
        with pytest.raises(QueryRejected, match="takes too long") as caught:
            answer(engine, MANY)
        assert caught.value.hint
        assert answer(engine, "SELECT 1")[1].rows == 1
    assert len(answer(machine.engine, MANY)[0].column_names) == 1000


def test_the_deadline_reaches_a_check(machine: Machine, open_tmp_path: Path) -> None:
    root = open_tmp_path / "stopped"
    root.mkdir()
    hangs = "import time; time.sleep(3600)"
    with gates(root, "-c", hangs) as gate:
        engine = Engine(machine.files, machine.pool, gate)
        with pytest.raises(QueryTimeout):
            answer(engine, "SELECT 1", timeout=0.3)
        with pytest.raises(QueryError, match="cancelled"):
            next(engine.run("SELECT 1", timeout=60, max_bytes=0, cancelled=lambda: True))
