"""Which nodes answered, which failed, and strange answers."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pyarrow as pa
import pytest
from federation_support import CATALOG, NOW_NS, Nodes
from nodes_asked import QUICK, Ask, fan_out, run

from probing.api.errors import (
    NotFound,
    PartialAnswer,
    PeerError,
    QueryError,
    QueryMemory,
    QueryRejected,
    QueryTimeout,
)
from probing.federation.execution.answer import Reply
from probing.federation.planning.split import plan

ROWS = {"comm.ops": [{"ts": NOW_NS, "op": "send", "seq": i, "bytes": 2**62} for i in range(4)]}


@pytest.fixture
def nodes() -> Iterator[Nodes]:
    made = Nodes([ROWS, ROWS, ROWS])
    yield made
    made.close()


def ask_all_but(nodes: Nodes, missing: str, error: Exception) -> Ask:
    def ask(address: str, sql: str, seconds: float) -> Reply:
        if address == missing:
            raise error
        return nodes.ask(address, sql, seconds)

    return ask


def test_a_missing_node_is_named_with_its_reason(nodes: Nodes) -> None:
    ask = ask_all_but(nodes, "n1", PeerError("n1 does not answer: connection refused", reason="connection refused"))
    answer = run(nodes.plan("SELECT node, count(*) AS n FROM comm.ops GROUP BY node ORDER BY node"), nodes.names, ask)
    assert answer.table.to_pylist() == [{"node": "n0", "n": 4}, {"node": "n2", "n": 4}]
    report = answer.gathered.report()
    assert report["asked"] == ["n0", "n1", "n2"]
    assert [a["node"] for a in report["answered"]] == ["n0", "n2"]
    assert report["failed"] == [{"address": "n1", "node": None, "kind": "PeerError", "reason": "connection refused"}]


def test_strict_makes_a_missing_node_an_error(nodes: Nodes) -> None:
    ask = ask_all_but(nodes, "n2", PeerError("n2 does not answer: connection refused", reason="connection refused"))
    with pytest.raises(PartialAnswer, match=r"1 of 3 nodes did not answer: n2 \(connection refused\)") as caught:
        run(nodes.plan("SELECT count(*) FROM comm.ops"), nodes.names, ask, strict=True)
    assert caught.value.exit_code == 4


def test_an_error_that_all_nodes_agree_on_is_that_error(nodes: Nodes) -> None:
    def ask(address: str, sql: str, seconds: float) -> Reply:
        raise QueryRejected("the function getenv is not allowed", hint="use another")

    with pytest.raises(QueryRejected, match="getenv") as caught:
        run(nodes.plan("SELECT count(*) FROM comm.ops"), nodes.names, ask)
    assert caught.value.hint == "use another"


def test_nobody_answers(nodes: Nodes) -> None:
    def ask(address: str, sql: str, seconds: float) -> Reply:
        raise PeerError(f"{address} does not answer: {'refused' if address == 'n0' else 'no such socket'}")

    with pytest.raises(PeerError, match="none of 3 nodes answered"):
        run(nodes.plan("SELECT count(*) FROM comm.ops"), nodes.names, ask)


def test_a_node_that_hangs_does_not_hold_the_others_up(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()

    def ask(address: str, sql: str, seconds: float) -> Reply:
        if address == "n0":
            release.wait(60)
        return nodes.ask(address, sql, seconds)

    try:
        answer = run(nodes.plan("SELECT count(*) AS n FROM comm.ops"), nodes.names, ask, timeout=0.8)
    finally:
        release.set()
    assert answer.table.to_pylist() == [{"n": 8}]
    assert [(f.address, f.reason) for f in answer.gathered.failed] == [("n0", "no answer within 0.8 s")]


def test_two_addresses_of_one_node_do_not_count_twice(nodes: Nodes) -> None:
    def ask(address: str, sql: str, seconds: float) -> Reply:
        return Reply("n0", nodes.ask("n0", sql, seconds).table)

    answer = run(nodes.plan("SELECT count(*) AS n FROM comm.ops"), ["one", "other", "one"], ask)
    assert answer.table.to_pylist() == [{"n": 4}]
    assert "answers as n0, the name of the node at one" in answer.gathered.failed[0].reason
    assert answer.gathered.asked == ("one", "other")


@pytest.mark.parametrize(
    "strange",
    [
        pa.table({"x": ["text for a number"]}),
        pa.table({"x": [1], "y": [2]}),
        pa.table({"x": [[1, 2]]}),
        pa.table({}),
    ],
)
def test_an_answer_of_other_columns_is_a_failure_of_that_node(nodes: Nodes, strange: pa.Table) -> None:
    def ask(address: str, sql: str, seconds: float) -> Reply:
        return Reply("n1", strange) if address == "n1" else nodes.ask(address, sql, seconds)

    answer = run(nodes.plan("SELECT count(*) AS n FROM comm.ops"), nodes.names, ask)
    assert answer.table.to_pylist() == [{"n": 8}]
    assert [f.node for f in answer.gathered.failed] == ["n1"]


def test_the_answers_together_are_bounded(nodes: Nodes) -> None:
    with pytest.raises(QueryMemory, match="larger than 200 B together"):
        run(nodes.plan("SELECT * FROM comm.ops"), nodes.names, nodes.ask, max_bytes=200)


@pytest.mark.parametrize(
    "column",
    [
        pa.nulls(1 << 24),
        pa.DictionaryArray.from_arrays(pa.array([0] * 200_000, pa.int8()), pa.array(["x" * 4096])),
    ],
    ids=["nulls", "dictionary"],
)
def test_rows_that_grow_when_they_are_read_are_bounded(nodes: Nodes, column: pa.Array) -> None:
    held = pa.total_allocated_bytes()

    def ask(address: str, sql: str, seconds: float) -> Reply:
        return Reply(address, pa.table({"op": pa.chunked_array([column] * 8)}))

    with pytest.raises(QueryMemory, match=r"the nodes' answers are larger than 20 MiB together"):
        run(nodes.plan("SELECT op FROM comm.ops ORDER BY op"), nodes.names, ask, max_bytes=20 << 20)
    assert pa.total_allocated_bytes() <= held


def test_the_last_step_has_a_deadline() -> None:
    endless = plan("SELECT count(*) FROM range(1000000) a, range(1000000) b WHERE a.range <> b.range", NOW_NS)
    assert endless.kind == "local"
    with pytest.raises(QueryTimeout):
        run(endless, [], lambda *_: Reply("n", pa.table({})), timeout=0.2)


@pytest.mark.parametrize(
    ("sql", "message"),
    [
        ("SELECT repeat('x', 4000000000)", "repeat: the size is above"),
        ("SELECT lpad(max(op) OVER (), 4000000000, 'x') FROM comm.ops", "lpad and rpad: the size is above"),
        ("SELECT * FROM range(100000000000)", "range and generate_series: the size is above"),
        ("SELECT list_resize([1], 4000000000)", "the function list_resize is not allowed"),
        ("SELECT current_setting('memory_limit')", "the function current_setting is not allowed"),
    ],
)
def test_the_asker_computes_nothing_that_a_node_would_refuse(sql: str, message: str) -> None:
    with pytest.raises(QueryRejected, match=message):
        plan(sql, NOW_NS, CATALOG)


def test_an_error_after_the_first_rows_of_the_last_step_is_the_error() -> None:
    late = plan("SELECT CAST(CASE WHEN range = 900000 THEN 'x' ELSE '1' END AS INT) AS n FROM range(1000000)", NOW_NS)
    with pytest.raises(QueryError, match=r"^Could not convert string 'x' to INT32"):
        run(late, [], lambda *_: Reply("n", pa.table({})))


def test_the_rows_of_the_last_step_are_bounded() -> None:
    many = plan("SELECT a.range AS x FROM range(1000000) AS a, range(1000000) AS b", NOW_NS)
    with pytest.raises(QueryMemory, match="the answer is larger than"):
        run(many, [], lambda *_: Reply("n", pa.table({})), max_bytes=1 << 20, timeout=60)


@pytest.mark.parametrize(
    "sql",
    ["SELECT * FROM read_csv('/etc/passwd')", "SELECT * FROM read_text('/etc/passwd')", "SELECT * FROM glob('/*')"],
)
def test_the_last_step_reaches_nothing_outside(sql: str) -> None:
    with pytest.raises(QueryError):
        run(plan(sql, NOW_NS), [], lambda *_: Reply("n", pa.table({})))


@pytest.mark.parametrize(
    ("sql", "error", "message"),
    [
        ("SELECT * FROM comm.opss", NotFound, "there is no table comm.opss"),
        ("SELECT opp FROM comm.ops", QueryError, "opp"),
        ("SELECT", QueryError, "."),
        ("DELETE FROM comm.ops", QueryRejected, "a query must be one SELECT"),
        ("SELECT 1; SELECT 2", QueryRejected, "a query must be one SELECT"),
        ("COPY comm.ops TO '/tmp/x'", QueryRejected, "a query must be one SELECT"),
        ("ATTACH 'x' AS y", QueryRejected, "a query must be one SELECT"),
        ("SET threads = 1", QueryRejected, "a query must be one SELECT"),
        ("SELECT FROM WHERE (", QueryError, "."),
        ("", QueryRejected, "a query must be one SELECT"),
        ("SELECT 1 -- " + "x" * 70_000, QueryRejected, "longer than 64 KiB"),
        ("SELECT " + "(" * 5000 + "1" + ")" * 5000, QueryRejected, "nested too deeply"),
    ],
)
def test_what_is_no_query_is_refused_before_any_node_is_asked(sql: str, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message) as caught:
        plan(sql, NOW_NS, CATALOG)
    assert "\n" not in str(caught.value)


def test_a_near_name_is_offered() -> None:
    with pytest.raises(NotFound) as caught:
        plan("SELECT * FROM process.processses", NOW_NS)
    assert "process.processes" in caught.value.hint


def test_fan_out_over_nobody() -> None:
    gathered = fan_out([], lambda *_: ("n", 1), 1.0)
    assert gathered.asked == ()
    gathered.require(strict=True)


def test_more_silent_nodes_than_calls_at_once_hold_up_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    silent = threading.Event()

    def ask(address: str, seconds: float) -> tuple[str, int]:
        if address.startswith("silent"):
            silent.wait(60)
        return address, 1

    asked = [*(f"silent{i}" for i in range(70)), "n0", "n1"]
    try:
        gathered = fan_out(asked, ask, 5.0, QUICK._replace(at_once=64, patience_s=0.1))
    finally:
        silent.set()
    assert [answered.node for answered in gathered.answered] == ["n0", "n1"]
    assert {failed.reason for failed in gathered.failed} == {"no answer within 5 s"}


def test_a_bug_in_asking_is_not_hidden() -> None:
    def ask(address: str, seconds: float) -> tuple[str, int]:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fan_out(["a"], ask, 1.0)
