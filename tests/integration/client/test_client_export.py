"""Exports: every row of a range once, in files that other engines read, or nothing."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import duckdb
import pyarrow.parquet as pq
import pytest
from client_fake_node import FakeNode, operation, process, sample, stack

from probing.api.errors import QueryError
from probing.api.tables import TABLES
from probing.api.text import size
from probing.client.export import files as export_files

Run = Callable[..., tuple[int, str, str]]
DAY = 86_400_000_000_000
# 2026-11-19 00:00 UTC.
MIDNIGHT = 1_795_046_400_000_000_000


def _operations(node: str, job: str = "j1") -> list[dict[str, Any]]:
    """100 rows over three days, some of them at midnight to the nanosecond."""
    edges = [MIDNIGHT - 1, MIDNIGHT, MIDNIGHT + 1, MIDNIGHT + DAY - 1, MIDNIGHT + DAY]
    times = edges + [MIDNIGHT + i * DAY // 50 for i in range(95)]
    return [operation(node, 0, seq, ts=ts, job=job) for seq, ts in enumerate(times)]


def _docs(node: str) -> dict[str, list[dict[str, Any]]]:
    tables = [
        ("comm.ops", "no"),
        ("python.samples", "no"),
        ("python.stacks", "no"),
        ("probing.losses", "no"),
        ("process.processes", "yes"),
        ("train.step", "view"),
        ("../../evil", "no"),
    ]
    return {
        "probing.table_docs": [
            {
                "node": node,
                "ts": 0,
                "table_schema": name.partition(".")[0],
                "table_name": name.partition(".")[2],
                "description": "",
                "live": live,
            }
            for name, live in tables
        ],
        "probing.column_docs": [
            {
                "node": node,
                "ts": 0,
                "table_schema": name.partition(".")[0],
                "table_name": name.partition(".")[2],
                "column_name": column,
                "type": "",
                "description": "",
            }
            for name, _ in tables
            if name in TABLES
            for column in TABLES[name].logical.names
        ],
    }


@pytest.fixture
def pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[FakeNode, FakeNode]]:
    nodes = []
    for name in ("alpha", "be/ta"):
        rows = {
            **_docs(name),
            "comm.ops": _operations(name) + _operations(name, "j2"),
            "python.samples": [sample(name, 0, 7, 3, ts=MIDNIGHT)],
            "python.stacks": [stack(name, 7, ("f", "f.py", 1)) | {"ts": MIDNIGHT - 50 * 60 * 1_000_000_000}],
            "process.processes": [process(name, 0, 1000)],
        }
        nodes.append(FakeNode(tmp_path, name.replace("/", ""), rows))
        nodes[-1].name = name
    monkeypatch.setenv("PROBING_TARGET", nodes[0].address)
    yield nodes[0], nodes[1]
    for node in nodes:
        node.stop()


def _both(pair: tuple[FakeNode, FakeNode]) -> tuple[str, str]:
    return "--nodes", ",".join(node.address for node in pair)


def _files(root: Path) -> list[str]:
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())


def test_a_directory_has_every_row_once(pair: tuple[FakeNode, FakeNode], ctl: Run, tmp_path: Path) -> None:
    target = tmp_path / "out"
    code, out, err = ctl("export", *_both(pair), "-o", str(target))
    assert (code, err) == (0, "")
    assert [line.split()[:3] for line in out.splitlines()[1:]] == [
        ["comm.ops", "400", "6"],
        ["probing.losses", "0", "0"],
        ["python.samples", "2", "2"],
        ["python.stacks", "2", "2"],
    ]
    days = ["2026-11-18", "2026-11-19", "2026-11-20"]
    assert [f for f in _files(target) if f.startswith("comm.ops/")] == [
        f"comm.ops/date={day}/{node}-0.parquet" for day in days for node in ("alpha", "be_ta")
    ]
    with duckdb.connect() as db:
        read = f"read_parquet('{target}/comm.ops/*/*.parquet', hive_partitioning = true)"
        assert db.sql(f"SELECT count(*), count(DISTINCT (node, job, seq)) FROM {read}").fetchall() == [(400, 400)]
        wrong = f"SELECT count(*) FROM {read} WHERE epoch_ns(ts) // {DAY} <> epoch_ns(CAST(date AS TIMESTAMP)) // {DAY}"
        assert db.sql(wrong).fetchall() == [(0,)]
        kept = db.sql(f"SELECT ts FROM {read} WHERE node = 'alpha' AND job = 'j1'").to_arrow_table()
    assert sorted(kept.column("ts").cast("int64").to_pylist()) == sorted(row["ts"] for row in _operations("alpha"))
    report = json.loads((target / "export.json").read_text())
    assert [node["node"] for node in report["nodes"]] == ["alpha", "be/ta"]
    assert report["nodes"][0]["tables"]["comm.ops"]["rows"] == 200
    assert (report["since"], report["format"], report["failed"]) == (None, "parquet", [])
    assert report["nodes"][0]["version"] == "0.1.0"
    assert oct(target.stat().st_mode & 0o777) == oct(0o777 & ~_umask())


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_a_range_a_job_and_other_formats(pair: tuple[FakeNode, FakeNode], ctl: Run, tmp_path: Path) -> None:
    span = ("--since", "2026-11-19T00:00:00Z", "--until", "2026-11-20")
    rows = [r for r in _operations("alpha") if MIDNIGHT <= r["ts"] < MIDNIGHT + DAY]
    for kind in ("csv", "jsonl"):
        target = tmp_path / kind
        code, _, err = ctl("export", *span, "--job", "j1", "-f", kind, "-o", str(target))
        assert (code, err) == (0, "")
        assert _files(target) == [
            f"comm.ops/date=2026-11-19/alpha-0.{kind}",
            "export.json",
            f"python.samples/date=2026-11-19/alpha-0.{kind}",
            # Stacks are written down once an hour: those before the range belong to its samples.
            f"python.stacks/date=2026-11-18/alpha-0.{kind}",
        ]
        with duckdb.connect() as db:
            read = "read_csv" if kind == "csv" else "read_json"
            found = db.sql(f"SELECT count(*) FROM {read}('{target}/comm.ops/*/*.{kind}')").fetchall()
        assert found == [(len(rows),)]
        report = json.loads((target / "export.json").read_text())
        assert report["nodes"][0]["left_out"] == ["probing.losses"]
        assert report["job"] == "j1"


def test_one_table_into_one_file(pair: tuple[FakeNode, FakeNode], ctl: Run, tmp_path: Path) -> None:
    target = tmp_path / "ops.parquet"
    code, out, err = ctl("export", *_both(pair), "--tables", "comm.ops", "-o", str(target))
    assert (code, err) == (0, "")
    assert pq.read_metadata(target).num_rows == 400
    assert out.splitlines()[1].split() == ["comm.ops", "400", "1", *size(target.stat().st_size).split()]
    code, _, err = ctl("export", "--tables", "comm.ops", "-o", str(target), "-f", "csv")
    assert (code, "ops.parquet is not a name for csv" in err) == (2, True)


def test_a_live_table_is_taken_as_it_is(pair: tuple[FakeNode, FakeNode], ctl: Run, tmp_path: Path) -> None:
    target = tmp_path / "out"
    assert ctl("export", "--tables", "process.processes", "--since", "5m", "-o", str(target))[0] == 0
    today = datetime.fromtimestamp(time.time(), timezone.utc)
    assert _files(target) == ["export.json", f"process.processes/date={today:%Y-%m-%d}/alpha-0.parquet"]


def test_many_rows_are_several_files(
    pair: tuple[FakeNode, FakeNode], ctl: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(export_files.Directory.__init__, "__defaults__", (1,))
    target = tmp_path / "out"
    assert ctl("export", "--tables", "comm.ops,python.samples", "-o", str(target))[0] == 0
    with duckdb.connect() as db:
        assert db.sql(f"SELECT count(*) FROM '{target}/comm.ops/*/*.parquet'").fetchall() == [(200,)]


def test_a_node_that_fails_leaves_no_rows(pair: tuple[FakeNode, FakeNode], ctl: Run, tmp_path: Path) -> None:
    def fail() -> None:
        if 'SELECT * FROM "python"' in pair[1].asked[-1]:
            raise QueryError("the disk is gone")

    pair[1].meanwhile = fail
    target = tmp_path / "out"
    code, _, err = ctl("export", *_both(pair), "-o", str(target))
    assert code == 0
    assert "is missing: " in err
    assert not [name for name in _files(target) if "be_ta" in name]
    report = json.loads((target / "export.json").read_text())
    assert [node["address"] for node in report["failed"]] == [pair[1].address]
    strict = tmp_path / "strict"
    assert ctl("export", *_both(pair), "--strict", "-o", str(strict))[0] == 4
    pair[0].meanwhile = fail
    pair[0].asked.append("")
    pair[0].error = QueryError("the disk is gone")
    alone = tmp_path / "alone"
    assert ctl("export", "-o", str(alone))[0] == 1
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == ["out"]


def test_a_file_without_rows_has_its_columns(pair: tuple[FakeNode, FakeNode], ctl: Run, tmp_path: Path) -> None:
    for kind in ("parquet", "csv"):
        target = tmp_path / f"losses.{kind}"
        assert ctl("export", *_both(pair), "--tables", "probing.losses", "-o", str(target))[::2] == (0, "")
        with duckdb.connect() as db:
            assert db.sql(f"SELECT * FROM '{target}'").columns == list(TABLES["probing.losses"].logical.names)
    # A node without rows changes nothing for those that have some.
    ops = tmp_path / "ops.parquet"
    words = ("--tables", "comm.ops", "--job", "j1", "--since", "2026-11-18", "--until", "2026-11-30", "-o", str(ops))
    pair[1].replace("comm.ops", [])
    assert ctl("export", *_both(pair), *words)[0] == 0
    assert pq.read_table(ops).num_rows == 100


@pytest.mark.parametrize("name", ["out", "ops.parquet"])
def test_an_export_that_lacks_rows_is_none_under_strict(
    pair: tuple[FakeNode, FakeNode], ctl: Run, tmp_path: Path, name: str
) -> None:
    pair[1].warnings = ["1 damaged segment left out"]
    words = ("export", *_both(pair), "--tables", "comm.ops", "-o", str(tmp_path / name))
    code, _, err = ctl(*words, "--strict")
    assert (code, "be/ta does not have all rows: 1 damaged segment left out" in err) == (4, True)
    assert not (tmp_path / name).exists()
    code, _, err = ctl(*words)
    assert (code, err) == (0, "warning: be/ta: comm.ops: 1 damaged segment left out\n")


def test_an_export_warns_of_a_table_of_which_no_day_is_left(
    pair: tuple[FakeNode, FakeNode], ctl: Run, tmp_path: Path
) -> None:
    pair[0].warnings = ["1 damaged segment left out"]
    code, _, err = ctl("export", "--tables", "probing.losses", "-o", str(tmp_path / "out"))
    assert (code, err) == (0, "warning: alpha: probing.losses: 1 damaged segment left out\n")


def test_wrong_use(pair: tuple[FakeNode, FakeNode], ctl: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    cases: tuple[tuple[tuple[str, ...], str], ...] = (
        ((), "export needs a directory or a file to write"),
        (("-o", "out", "-f", "json"), "export cannot write json"),
        (("-o", "out", "--tables", "x"), "not a valid name of a table"),
        (("-o", "out", "--since", "5m", "--until", "10m"), "is not after"),
        (("-o", "out", "--since", "2026-99-99"), "is not a time"),
        (("-o", "."), "exists already"),
        (("-o", "out", "--tables", "no.such"), "there is no table no.such"),
        (("-o", "/nonexistent/out"), "cannot write"),
    )
    for arguments, message in cases:
        code, _, err = ctl("export", *arguments)
        assert code in (1, 2)
        assert message in err.splitlines()[0]
        assert len(err.splitlines()) == 2
        assert not (tmp_path / "out").exists()
