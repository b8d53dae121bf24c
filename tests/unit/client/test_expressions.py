"""Tables of expressions: which parts of a query they are, the rows of values of any shape, and the SQL of the rows."""

from __future__ import annotations

import contextlib
import io
from types import SimpleNamespace
from typing import Any

import duckdb
import pyarrow as pa
import pytest

from probing.api.errors import TargetError, UsageError
from probing.client.cluster import Evaluations
from probing.client.expressions import MAX_BYTES, expressions_in, with_rows_of_expressions


class Ranks:
    """Two ranks of each job that run the code in this process. ``names``: what it sees; ``asked``: jobs."""

    def __init__(self, *jobs: str, **names: Any) -> None:
        self.jobs = jobs or ("j",)
        self.names = names
        self.asked: list[str] = []

    def processes(self, where: str) -> Any:
        assert "trainer" in where
        return SimpleNamespace(table=pa.table({"job": list(self.jobs)}))

    def evaluate(self, code: str, pids: Any, job: str, *, seconds: float) -> Evaluations:
        assert (tuple(pids), seconds) == ((), 10.0)
        self.asked.append(job)
        return Evaluations([self._answer(code, job, rank) for rank in range(2)], [])

    def _answer(self, code: str, job: str, rank: int) -> Any:
        out, raised = io.StringIO(), None
        with contextlib.redirect_stdout(out):
            try:
                exec(code, {**self.names, "rank": rank})
            except Exception as e:
                raised = {"type": type(e).__name__, "message": str(e), "frames": []}
        who = {"node": "n1", "job": job, "run": "r", "rank": rank, "pid": 100 + rank}
        return {**who, "output": out.getvalue(), "dropped": 0, "value": None, "type": "", "raised": raised}


def rows(ranks: Ranks, sql: str) -> list[tuple[Any, ...]]:
    return duckdb.sql(with_rows_of_expressions(ranks, sql)).fetchall()  # type: ignore[arg-type]


class Frame:
    def to_dict(self, kind: str) -> list[dict[str, Any]]:
        assert kind == "records"
        return [{"a": 1, "b": None}, {"a": 2, "b": "x'y"}]


class Number:
    size = 1

    def item(self) -> float:
        return 0.25


class Model:
    def __init__(self) -> None:
        self.layers, self.name, self._hidden = 7, "net", 1


@pytest.mark.parametrize(
    ("value", "columns", "expected"),
    [
        (23, "value", [(23,)]),
        ("tex't", "value", [("tex't",)]),
        (None, "value", [(None,)]),
        ([5, 7], "value", [(5,), (7,)]),
        ([{"a": 1}, {"b": 2.5}], "a, b", [(1, None), (None, 2.5)]),
        ({"a": [1, 2], "b": ["x", "y"]}, "a, b", [(1, "x"), (2, "y")]),
        ({"a": [1, 2], "b": 5}, "a, b", [("[1, 2]", 5)]),
        ({"lr": 0.1, "on": True}, 'lr, "on"', [(0.1, True)]),
        (Frame(), "a, b", [(1, None), (2, "x'y")]),
        (Number(), "value", [(0.25,)]),
        (Model(), "layers, name", [(7, "net")]),
        ([1, 2.5], "value", [(1.0,), (2.5,)]),
        ([1, "x"], "value", [("1",), ("x",)]),
        ([1 << 70], "value", [(str(1 << 70),)]),
        ([float("inf"), 1.5], "value", [(float("inf"),), (1.5,)]),
        ([], "count(*)", [(0,)]),
        ({'na"me': 1}, '"na""me"', [(1,)]),
        ({"rank": 99, "x": 1}, "rank, x", [(0, 1)]),
    ],
    ids=lambda value: repr(value)[:30],
)
def test_a_value_of_any_shape_is_rows(value: Any, columns: str, expected: list[tuple[Any, ...]]) -> None:
    found = rows(Ranks(value=value), f"SELECT {columns} FROM python.`value` WHERE rank = 0")
    assert found == expected


def test_each_rank_has_its_rows_and_can_be_grouped() -> None:
    ranks = Ranks(numbers=[5, 7])
    sql = "SELECT rank, sum(value * 2) FROM PYTHON . `[n + rank for n in numbers]` AS t GROUP BY rank ORDER BY rank"
    assert rows(ranks, sql) == [(0, 24), (1, 28)]
    assert ranks.asked == ["j"]


def test_modules_that_the_process_has_loaded_need_no_import() -> None:
    assert rows(Ranks(), "SELECT count(*) FROM python.`time.time()` WHERE value > 1e9") == [(2,)]
    with pytest.raises(TargetError, match="NameError"):
        rows(Ranks(), "SELECT * FROM python.`no_such_module.x`")


def test_several_expressions_are_joined() -> None:
    sql = "SELECT a.rank, a.value, b.value FROM python.`rank * 3` a JOIN python.`rank + 1` b USING (rank) ORDER BY 1"
    assert rows(Ranks(), sql) == [(0, 0, 1), (1, 3, 2)]


@pytest.mark.parametrize(
    ("sql", "codes"),
    [
        ("SELECT 1", []),
        ("SELECT 'python.`x`' FROM python.`a.b[\"c\"]`", ['a.b["c"]']),
        ('SELECT "python.`x`" -- python.`y`\nFROM python.`z`', ["z"]),
        ("SELECT /* python.`x` */ 'it''s python.`y`'", []),
        ("SELECT * FROM python.`'a' + \"b\"`, python.`2`", ["'a' + \"b\"", "2"]),
        ("SELECT * FROM my_python.`x`", []),
    ],
)
def test_only_tables_are_expressions(sql: str, codes: list[str]) -> None:
    assert [code for _, _, code in expressions_in(sql)] == codes


def test_the_job_is_the_one_that_the_sql_names_or_the_only_one() -> None:
    ranks = Ranks("j", "k's")
    rows(ranks, "SELECT * FROM python.`1` WHERE job = 'k''s'")
    assert ranks.asked == ["k's"]
    with pytest.raises(UsageError, match="2 jobs run"):
        rows(ranks, "SELECT * FROM python.`1`")
    ranks.jobs = ()
    with pytest.raises(UsageError, match="no job runs"):
        rows(ranks, "SELECT * FROM python.`1`")


@pytest.mark.parametrize("code", ["x = 1", "1) or print(2", "import os", "f(", "1; 2", "\0"])
def test_what_is_no_expression_never_reaches_a_process(code: str) -> None:
    ranks = Ranks()
    with pytest.raises(UsageError, match="not a Python expression"):
        rows(ranks, f"SELECT * FROM python.`{code}`")
    assert ranks.asked == []


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("1 / 0", "rank 0: .* raised ZeroDivisionError"),
        ("print('loud') or 1", "lines that are not rows"),
        ("print('[') or 1", "lines that are not rows"),
        ("print('{[]: 1}') or 1", "lines that are not rows"),
        ("['x' * 900] * 400", "take 7"),
    ],
)
def test_what_goes_wrong_is_said(code: str, message: str) -> None:
    with pytest.raises((TargetError, UsageError), match=message):
        rows(Ranks(), f"SELECT * FROM python.`{code}`")


def test_a_query_without_expressions_is_unchanged_and_asks_nobody() -> None:
    ranks = Ranks()
    sql = "SELECT * FROM comm.ops WHERE op = 'x' || '" + "y" * MAX_BYTES + "'"
    assert with_rows_of_expressions(ranks, sql) == sql  # type: ignore[arg-type]
    assert ranks.asked == []
