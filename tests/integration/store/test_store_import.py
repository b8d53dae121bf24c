"""`probingd import`: rows of other state directories and of Parquet files, each once."""

from __future__ import annotations

import os
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from probing.api.errors import StateLocked, StoreError, StoreFull, UsageError
from probing.api.tables import TABLES
from probing.daemon.arrow import batch_of
from probing.daemon.store import Store, StoreLimits
from probing.daemon.store.decoder import Decoder
from probing.daemon.store.importing import importer as importing
from probing.daemon.store.importing.importer import Imported, import_sources
from probing.daemon.store.importing.journal import Journal
from probing.daemon.store.importing.target import Target
from probing.daemon.store.tasks import segment_output

GOLDEN = Path(__file__).resolve().parents[2] / "golden" / "store-v1"
PROBINGD = Path(sys.executable).with_name("probingd")
NOW_NS = 1_790_003_600_000_000_000
LIMITS = StoreLimits(keep_free_bytes=0)
Rows = list[dict[str, Any]]
Import = Callable[..., Imported]


@pytest.fixture(scope="module")
def decoder() -> Iterator[Decoder]:
    with Decoder() as one:
        yield one


@pytest.fixture
def bring(tmp_path: Path, decoder: Decoder) -> Import:
    (tmp_path / "here").mkdir()

    def run(*sources: Path, table: str = "", now_ns: int = NOW_NS, limits: StoreLimits = LIMITS) -> Imported:
        target = Target(tmp_path / "here", "here", limits, TABLES)
        return import_sources(target, sources, decoder, table=table, now_ns=now_ns)

    return run


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return Path(shutil.copytree(GOLDEN, tmp_path / "dead"))


def stored(root: Path, table: str = "comm.ops") -> Rows:
    with Store.open(root, node="here", limits=LIMITS, background=False) as store:
        rows = store.rows(table)
    times = [name for name in rows.column_names if pa.types.is_timestamp(rows.schema.field(name).type)]
    for name in times:
        rows = rows.set_column(rows.column_names.index(name), name, rows.column(name).cast(pa.int64()))
    return sorted(rows.to_pylist(), key=str)


def a_row(i: int, node: str = "far") -> dict[str, Any]:
    return {
        "node": node,
        "ts": NOW_NS - 10**9 + i * 1000,
        "job": "j",
        "run": "1",
        "pid": 1,
        "rank": i % 2,
        "seq": i,
        "op": "all_reduce",
        "bytes": 4096,
        "comm_size": 2,
        "timing_source": "exact" if i % 3 else "sync",
        "launch_ns_after": i if i % 5 else None,
        "start_ns_after": 10 + i,
        "done_lo_ns": 1000 + i,
        "done_hi_ns": 1000 + i if i % 3 else 5000 + i,
    }


def make_state(root: Path, rows: Sequence[dict[str, Any]], *, seal: bool, node: str = "far") -> Path:
    """Appends ``rows`` as one record to the state directory ``root``."""
    with Store.open(root, node=node, limits=LIMITS, background=False) as store:
        store.append({"comm.ops": [batch_of("comm.ops", rows)]}, {})
        if seal:
            store.seal(now=True)
    return root


def shown(rows: Rows) -> pa.Table:
    """Returns rows of comm.ops as queries show them, by the table's own SQL."""
    import duckdb

    with duckdb.connect() as connection:
        connection.register("stored", pa.Table.from_batches([batch_of("comm.ops", rows)]))
        return connection.sql(f"SELECT {TABLES['comm.ops'].select_list} FROM stored").to_arrow_table()


def test_a_dead_nodes_directory_comes_in_once(bring: Import, source: Path, tmp_path: Path) -> None:
    before = {p: p.read_bytes() for p in source.rglob("*") if p.is_file()}
    done = bring(source)
    assert (done.files, done.already, done.problems) == (4, 0, [])
    assert done.rows == {"comm.ops": 220, "probing.losses": 9}
    again = bring(source)
    assert (again.files, again.already, again.rows, again.problems) == (0, 4, {}, [])
    assert {p: p.read_bytes() for p in source.rglob("*") if p.is_file()} == before
    rows = stored(tmp_path / "here")
    assert rows == stored(source)
    assert {row["node"] for row in rows} == {"golden"}


def test_what_was_sealed_or_merged_since_is_known(bring: Import, tmp_path: Path) -> None:
    far = make_state(tmp_path / "far", [a_row(i) for i in range(10)], seal=False)
    assert bring(far).rows == {"comm.ops": 10}
    with Store.open(far, node="far", limits=LIMITS, background=False) as store:
        store.seal(now=True)
    assert bring(far).rows == {}
    make_state(far, [a_row(i) for i in range(10, 14)], seal=True)
    assert bring(far).rows == {"comm.ops": 4}
    assert len(stored(tmp_path / "here")) == 14


def test_another_node_with_the_same_parts_is_another(bring: Import, tmp_path: Path) -> None:
    a = make_state(tmp_path / "a", [a_row(i, "a") for i in range(6)], seal=True, node="a")
    b = make_state(tmp_path / "b", [a_row(i, "b") for i in range(6)], seal=False, node="b")
    assert bring(a, b).rows == {"comm.ops": 12}


@pytest.mark.parametrize("as_shown", [False, True])
def test_a_parquet_file_of_stored_or_shown_rows(as_shown: bool, bring: Import, tmp_path: Path) -> None:
    rows = [a_row(i) for i in range(60)]
    table = shown(rows) if as_shown else pa.Table.from_batches([batch_of("comm.ops", rows)])
    (tmp_path / "comm.ops").mkdir()
    pq.write_table(table, tmp_path / "comm.ops" / "some.parquet")
    assert bring(tmp_path / "comm.ops").rows == {"comm.ops": 60}
    kept = stored(tmp_path / "here")
    assert shown(kept).sort_by("seq").equals(shown(rows).sort_by("seq"))


def test_of_a_damaged_segment_the_good_row_groups_come_in(
    bring: Import, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(segment_output, "ROW_GROUP", 17)
    far = make_state(tmp_path / "far", [a_row(i) for i in range(5 * 17)], seal=True)
    path = next(far.rglob("*.parquet"))
    data = bytearray(path.read_bytes())
    group = pq.read_metadata(path).row_group(2)
    data[group.column(0).data_page_offset + 5] ^= 1
    path.write_bytes(data)
    done = bring(far)
    (problem,) = done.problems
    assert "row group 2 with 17 rows is damaged" in problem.what
    assert done.rows == {"comm.ops": 4 * 17}
    assert len(stored(tmp_path / "here")) == 4 * 17
    assert bring(far).rows == {}


def test_files_that_cannot_be_taken_are_named(bring: Import, source: Path, tmp_path: Path) -> None:
    damaged = next(source.rglob("*.parquet"))
    data = bytearray(damaged.read_bytes())
    data[len(data) // 2] ^= 1
    damaged.write_bytes(data)
    ops = shown([a_row(i) for i in range(4)])
    pq.write_table(ops.drop_columns(["t_done_hi"]), tmp_path / "half.parquet")
    pq.write_table(ops.append_column("extra", pa.array([1] * 4)), tmp_path / "extra.parquet")
    pq.write_table(ops.drop_columns(["node"]), tmp_path / "whose.parquet")
    (tmp_path / "empty.parquet").write_bytes(b"PAR1")
    (tmp_path / "link.parquet").symlink_to(tmp_path / "half.parquet")
    files = [tmp_path / f"{name}.parquet" for name in ("half", "extra", "whose", "empty")]
    done = bring(source, *files, table="comm.ops")
    problems = {Path(p.path).name: p.what for p in done.problems}
    assert set(problems) == {damaged.name, *(path.name for path in files)}
    assert "checksum" in problems[damaged.name]
    assert "t_done_hi" in problems["half.parquet"]
    assert "extra" in problems["extra.parquet"]
    assert "which every row of" in problems["whose.parquet"]
    assert done.files == 3
    with pytest.raises(UsageError):
        bring(tmp_path / "link.parquet")
    pq.write_table(ops, tmp_path / "unnamed.parquet")
    assert "--table" in bring(tmp_path / "unnamed.parquet").problems[0].what


def test_rows_that_would_go_at_once_are_refused(bring: Import, source: Path, tmp_path: Path) -> None:
    done = bring(source, now_ns=NOW_NS + 30 * 86_400 * 10**9)
    assert (done.files, len(done.problems)) == (0, 4)
    assert "store.max_age_days" in done.problems[0].what
    assert bring(source).files == 4
    future = make_state(tmp_path / "future", [{**a_row(1), "ts": NOW_NS * 2}], seal=False)
    assert "from now" in bring(future).problems[0].what
    with pytest.raises(StoreFull):
        bring(source, limits=StoreLimits(max_bytes=1000, keep_free_bytes=0))


def test_nobody_else_may_use_the_directories(bring: Import, source: Path, tmp_path: Path) -> None:
    with Store.open(tmp_path / "here", node="here", limits=LIMITS, background=False), pytest.raises(StateLocked) as e:
        bring(source)
    assert "probingd stop" in e.value.hint
    with Store.open(source, node="golden", limits=LIMITS, background=False), pytest.raises(StateLocked):
        bring(source)
    with pytest.raises(UsageError):
        bring(tmp_path / "here")
    (tmp_path / "here").rename(tmp_path / "gone")
    with pytest.raises(StoreError):
        bring(source)


@pytest.mark.parametrize("slices", [False, True])
def test_a_kill_between_any_two_steps_and_a_repeat(
    bring: Import, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slices: bool
) -> None:
    """Every call that changes the disk fails once, with all calls after it, as after a kill. ``slices``: the pieces of
    ten rows are too large for a record.
    """
    far = make_state(tmp_path / "far", [a_row(i) for i in range(5)], seal=False)
    monkeypatch.setattr(importing, "PIECE_ROWS", 10)
    rows = [a_row(i) for i in range(5, 26)]
    if slices:
        monkeypatch.setattr(importing, "MAX_PIECE_BYTES", batch_of("comm.ops", rows[:7]).nbytes)
        monkeypatch.setattr(importing, "SLICE_ROWS", 4)
    pq.write_table(pa.Table.from_batches([batch_of("comm.ops", rows)]), tmp_path / "comm.ops.parquet")
    sources = (far, tmp_path / "comm.ops.parquet")
    steps = 0
    for fatal in range(0, 100, 2):
        shutil.rmtree(tmp_path / "here")
        (tmp_path / "here").mkdir()
        with monkeypatch.context() as patch:
            calls = _fail_from(patch, fatal)
            try:
                bring(*sources)
            except _Killed:
                pass
            else:
                steps = calls()
        if steps:
            break
        bring(*sources)
        with Store.open(tmp_path / "here", node="here", limits=LIMITS, background=False) as store:
            assert sorted(store.rows("comm.ops", ["seq"]).column("seq").to_pylist()) == list(range(5 + len(rows)))
    assert steps >= (20 if slices else 10)


class _Killed(BaseException):
    pass


def _fail_from(patch: pytest.MonkeyPatch, fatal: int) -> Callable[[], int]:
    count = 0

    def failing(original: Callable[..., Any], *, after: bool) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal count
            count += 1
            if count > fatal and not after:
                raise _Killed
            done = original(*args, **kwargs)
            if count > fatal:
                raise _Killed
            return done

        return call

    for owner, name in ((Store, "append"), (Store, "sync"), (Store, "seal"), (Journal, "_write")):
        patch.setattr(owner, name, failing(getattr(owner, name), after=fatal % 4 == 0))
    # Of a process that was killed only the lock is given back.
    patch.setattr(Store, "close", lambda store: os.close(store._lock_fd))
    return lambda: count


def test_the_command(source: Path, open_tmp_path: Path) -> None:
    days = (time.time_ns() - NOW_NS) / 86_400e9 + 7
    command = [
        PROBINGD,
        "import",
        source,
        "--state-dir",
        open_tmp_path / "here",
        "--node-name",
        "here",
        f"--store.max-age-days={days}",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == [
        "comm.ops: 220 rows",
        "probing.losses: 9 rows",
        "4 files imported, 0 were here before",
    ]
    assert stat.S_IMODE((open_tmp_path / "here").stat().st_mode) == 0o750
    nothing = subprocess.run(command[:2], capture_output=True, text=True, check=False)
    assert nothing.returncode == 2


def test_a_file_that_ends_its_decoder_is_named(bring: Import, tmp_path: Path, decoder: Decoder) -> None:
    pq.write_table(pa.Table.from_batches([batch_of("comm.ops", [a_row(1)])]), tmp_path / "comm.ops.parquet")
    decoder.close()
    with dying(decoder):
        done = bring(tmp_path / "comm.ops.parquet")
    assert "ended" in done.problems[0].what
    assert bring(tmp_path / "comm.ops.parquet").files == 1


@contextmanager
def dying(decoder: Decoder) -> Iterator[None]:
    """A decoder whose process is killed as soon as it has started."""
    start = decoder._start

    def started() -> Any:
        child = start()
        os.kill(child.process.pid, signal.SIGKILL)
        child.process.wait()
        return child

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decoder, "_start", started)
        yield
