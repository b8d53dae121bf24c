"""Views that users write: which files count, what is wrong with others, and the examples."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pytest
from fakes import Now

from probing.api.errors import PeerError, QueryRejected
from probing.api.tables import TABLES
from probing.api.tables.user import user_table
from probing.daemon.query.gate import check
from probing.daemon.query.user_views import FRESH_S, MAX_BYTES, MAX_VIEWS, UserViews
from probing.daemon.service.live import live_tables
from probing.federation.sql.dialect import parse
from probing.federation.sql.view_lookup import known_columns, require_columns

EXAMPLES = Path(__file__).resolve().parents[3] / "examples" / "views"
NOW_NS = 1_795_000_000_000_000_000
SECOND = 10**9


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    made = tmp_path / "views.d"
    made.mkdir(mode=0o755)
    made.chmod(0o755)
    return made


def write(directory: Path, name: str, text: str) -> Path:
    path = directory / f"{name}.sql"
    path.write_text(text)
    path.chmod(0o644)
    return path


def problems(views: UserViews) -> dict[str, str]:
    return {row["name"]: row["problem"] for row in views.rows() if row["problem"]}


def test_views_are_read_with_their_docs(directory: Path) -> None:
    write(directory, "slow", "-- What took\n--   long.\nSELECT rank, ts FROM comm.ops -- all\nWHERE duration_ns > 5;\n")
    write(directory, "a_first", "SELECT rank, count(*) AS n FROM view.slow GROUP BY rank")
    (directory / "README").write_text("no view")
    views = UserViews(str(directory))
    assert [(row["name"], row["doc"], row["problem"]) for row in views.rows()] == [
        ("a_first", "", None),
        ("slow", "What took long.", None),
    ]
    assert check("SELECT * FROM view.a_first", NOW_NS, views=views.views).tables == ("comm.ops",)


@pytest.mark.parametrize(
    ("name", "text", "problem"),
    [
        ("empty", "", "a query must be one SELECT"),
        ("two", "SELECT 1; SELECT 2", "a query must be one SELECT"),
        ("writes", "COPY (SELECT 1) TO 'x'", "a query must be one SELECT"),
        ("syntax", "SELECT FROM WHERE", "the SQL cannot be parsed"),
        ("files", "SELECT * FROM read_text('/etc/passwd')", "the function read_text is not allowed"),
        ("table", "SELECT * FROM comm.opps", "there is no table comm.opps"),
        ("bare", "SELECT * FROM ops", "there is no table ops"),
        ("column", "SELECT nope FROM comm.ops", "there is no column nope"),
        ("near", "SELECT o.ranks FROM comm.ops o", "did you mean rank?"),
        ("condition", "SELECT rank FROM comm.ops WHERE jobs = 'j'", "there is no column jobs"),
        ("of_another", "SELECT s.seq FROM comm.ops o JOIN train.steps s USING (pid)", "there is no column s.seq"),
        ("of_a_view", "SELECT wait_s FROM views.op_lag", "there is no column wait_s"),
        ("of_its_own", "SELECT nope FROM view.good", "there is no column nope"),
        ("itself", "SELECT * FROM view.itself", "it reads itself"),
        ("sizes", "SELECT repeat('x', 4000000000)", "repeat"),
        ("Upper", "SELECT 1", "a view's name has at most 41 characters of"),
        ("a" * 42, "SELECT 1", "a view's name has at most 41 characters of"),
        ("large", "SELECT 1 -- " + "x" * MAX_BYTES, "longer than"),
        ("nested", "SELECT " + "(" * 3000 + "1" + ")" * 3000, "nested"),
    ],
)
def test_a_bad_view_says_why(directory: Path, name: str, text: str, problem: str) -> None:
    write(directory, "good", "SELECT 1 AS x")
    write(directory, name, text)
    views = UserViews(str(directory))
    ((known, told),) = problems(views).items()
    assert known == name[:41]
    assert problem in told
    assert check("SELECT * FROM view.good", NOW_NS, views=views.views)
    # Names in a query are lower-cased.
    with pytest.raises(QueryRejected, match="cannot be used" if known == known.lower() else "there is no table"):
        check(f"SELECT * FROM view.{known}", NOW_NS, views=views.views)


@pytest.mark.parametrize(
    "text",
    [
        "SELECT o.rank AS r, r + 1 AS more FROM comm.ops o WHERE r > 0",
        "WITH x AS (SELECT rank AS a FROM comm.ops) SELECT a, x.a AS b FROM x",
        "SELECT q.n FROM (SELECT count(*) AS n FROM comm.ops) AS q WHERE q.n > 1",
        "SELECT frames[1].func AS f, f.anything FROM python.stacks",
        "SELECT k.frames.func FROM (SELECT unnest(frames) AS frames FROM python.stacks) AS k",
        "SELECT list_transform([1], x -> x + 1) AS l FROM comm.ops",
        "SELECT o FROM comm.ops AS o",
        "SELECT t.a FROM comm.ops AS t(a)",
        "SELECT range FROM range(3)",
        "SELECT COLUMNS('r.*') FROM comm.ops",
        "SELECT _host, rank FROM global.comm.ops",
        'SELECT RANK, "Rank" AS again FROM comm.ops',
        "SELECT o.rank FROM comm.ops o WHERE EXISTS (FROM train.steps o WHERE o.step > 1)",
        "SELECT ops.rank FROM comm.ops UNION ALL SELECT ops FROM train.steps",
    ],
)
def test_a_name_that_anything_may_mean_is_no_unknown_column(text: str) -> None:
    require_columns(parse(text), known_columns())


def test_views_of_bad_views_are_bad(directory: Path) -> None:
    for name, reads in (("a", "b"), ("b", "c"), ("c", "a"), ("d", "c"), ("e", "missing")):
        write(directory, name, f"SELECT * FROM view.{reads}")
    told = problems(UserViews(str(directory)))
    assert {name for name, problem in told.items() if "reads itself" in problem} == {"a", "b", "c", "d"}
    assert "there is no table view.missing" in told["e"]


def test_only_files_that_nobody_else_writes_count(directory: Path) -> None:
    write(directory, "open", "SELECT 1").chmod(0o666)
    write(directory, "group", "SELECT 1").chmod(0o664)
    os.mkfifo(directory / "pipe.sql", 0o600)
    (directory / "bytes.sql").write_bytes(b"SELECT '\xff'")
    (directory / "bytes.sql").chmod(0o644)
    (directory / "folder.sql").mkdir()
    (directory / "gone.sql").symlink_to(directory / "nowhere")
    write(directory, "good", "SELECT 1")
    assert set(problems(UserViews(str(directory)))) == {"open", "group", "pipe", "bytes", "folder", "gone"}
    directory.chmod(0o777)
    assert "good" in problems(UserViews(str(directory)))


def test_there_are_so_many_views(directory: Path) -> None:
    for i in range(2 * MAX_VIEWS):
        write(directory, f"v{i:03}", "SELECT 1 AS x")
    assert len(UserViews(str(directory)).rows()) == MAX_VIEWS


def test_changes_are_seen_but_not_looked_for_all_the_time(directory: Path) -> None:
    clock = Now(100.0)
    views = UserViews(str(directory), now_s=clock)
    assert views.rows() == []
    write(directory, "a", "SELECT 1 AS x")
    assert views.rows() == []
    clock.now += FRESH_S
    assert [row["name"] for row in views.rows()] == ["a"]
    (directory / "a.sql").unlink()
    clock.now += FRESH_S
    assert views.rows() == []
    assert UserViews(str(directory / "missing")).rows() == []


def test_tables_of_users_probes_are_asked_for(directory: Path) -> None:
    clock, there = Now(100.0), [False]

    def users() -> dict[str, Any]:
        if not there[0]:
            raise PeerError("the collector does not answer")
        return {"user.sizes": user_table("sizes", "Sizes.", [("size", "u64", "Its size.")])}

    write(directory, "large", "SELECT rank, size FROM user.sizes WHERE size > 1000")
    views = UserViews(str(directory), users, now_s=clock)
    assert "the collector does not answer" in problems(views)["large"]
    there[0] = True
    clock.now += FRESH_S
    assert problems(views) == {}
    assert check("SELECT * FROM view.large", NOW_NS, users, views.views).tables == ("user.sizes",)


WHO = {"node": "n0", "job": "j", "run": "0", "pid": 7, "start_ns": 70, "rank": 3}
ROWS: dict[str, list[dict[str, Any]]] = {
    "train.steps": [
        {
            **WHO,
            "step": 4,
            "ts": 10 * SECOND,
            "t_end": 11 * SECOND,
            "duration_ns": SECOND,
            "source": "variable",
            "confidence": 1.0,
        }
    ],
    "comm.ops": [
        {
            **WHO,
            "ts": 10 * SECOND + 5,
            "op": "all_reduce",
            "seq": 1,
            "bytes": 10,
            "duration_ns": SECOND // 2,
            "comm": "c",
            "t_done_hi": 10 * SECOND + SECOND // 2,
        },
        {
            **WHO,
            "ts": 12 * SECOND,
            "op": "barrier",
            "seq": 2,
            "bytes": 0,
            "duration_ns": 1,
            "comm": "c",
            "t_done_hi": 12 * SECOND + 1,
        },
    ],
    "python.samples": [
        {
            **WHO,
            "ts": 10 * SECOND + 9,
            "thread": "main",
            "stack_id": 5,
            "on_cpu": True,
            "gil": True,
            "duration_ns": 1000,
            "count": 1,
        }
    ],
    "python.stacks": [
        {
            "node": "n0",
            "ts": hour,
            "stack_id": 5,
            "complete": True,
            "frames": [{"func": "forward", "file": "m.py", "lineno": 9}],
        }
        for hour in (0, 3600)
    ],
    "cuda.syncs": [{**WHO, "ts": 10 * SECOND + 7, "op": "stream_synchronize", "duration_ns": 77}],
}


@pytest.mark.parametrize(
    ("sql", "rows"),
    [
        (
            "SELECT rank, op, step, into_step_ns, share_of_step FROM view.operations_in_steps",
            [(3, "all_reduce", 4, 5, 0.5)],
        ),
        (
            "SELECT rank, op, thread, func, lineno, sampled_ns FROM view.python_in_long_operations",
            [(3, "all_reduce", "main", "forward", 9, 1000)],
        ),
        (
            "SELECT epoch(ts), rank, step, operations_ns, bytes, cpu_ns, gpu_wait_ns FROM view.seconds_of_ranks"
            " ORDER BY ts",
            [(10.0, 3, 4, SECOND // 2, 10, 1000, 77), (12.0, 3, 4, 1, 0, 0, 0)],
        ),
    ],
)
def test_examples_of_views(directory: Path, sql: str, rows: list[tuple[Any, ...]]) -> None:
    for path in EXAMPLES.glob("*.sql"):
        write(directory, path.stem, path.read_text())
    views = UserViews(str(directory))
    assert problems(views) == {}
    assert all(row["doc"] for row in views.rows())
    checked = check(sql, NOW_NS, views=views.views)
    with duckdb.connect(config={"threads": "1", "python_enable_replacements": "false"}) as db:
        for name in checked.tables:
            schema = TABLES[name].logical
            full = [{column: row.get(column) for column in schema.names} for row in ROWS[name]]
            db.execute(f"CREATE SCHEMA IF NOT EXISTS {name.split('.')[0]}")
            db.register("given", pa.Table.from_pylist(full, schema=schema))
            db.execute(f"CREATE TABLE {name} AS SELECT * FROM given")
        assert db.sql(checked.sql).fetchall() == rows


def test_views_are_listed_beside_the_tables(directory: Path) -> None:
    write(directory, "bad", "SELECT * FROM read_text('x')")
    write(directory, "good", "-- Good.\nSELECT rank, count(*) AS n FROM comm.ops GROUP BY rank")
    views = UserViews(str(directory))
    makers = live_tables("n0", lambda: NOW_NS, list, dict, views=views.rows)

    def rows(table: str) -> list[dict[str, Any]]:
        with pa.ipc.open_stream(makers[table]()) as reader:
            return [row for row in reader.read_all().to_pylist() if row.get("table_schema") in ("view", None)]

    told = {row["table_name"]: (row["description"], row["live"], row["notes"]) for row in rows("probing.table_docs")}
    assert told["good"] == ("Good.", "view", "comm.ops")
    assert told["bad"][0].startswith("Cannot be used: the function read_text is not allowed")
    assert [(row["table_name"], row["column_name"]) for row in rows("probing.column_docs")] == [
        ("good", "rank"),
        ("good", "n"),
    ]
    assert [(row["node"], row["name"], row["sql"] is None) for row in rows("probing.views")] == [
        ("n0", "bad", True),
        ("n0", "good", False),
    ]
