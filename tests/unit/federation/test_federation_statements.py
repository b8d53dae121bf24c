"""Several questions by one request to each node: the rows are those of each question alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import pytest
from federation_support import CATALOG, NOW_NS, Nodes
from nodes_asked import by_threads

from probing.api.errors import PeerError, QueryMemory
from probing.federation.execution.answer import Answer, Reply
from probing.federation.execution.merge import run_all
from probing.federation.planning.split import each_node

QUESTIONS = {
    "rows": "SELECT * EXCLUDE (ts) FROM comm.ops ORDER BY ALL",
    "groups": "SELECT op, count(*) AS n, avg(bytes) AS b FROM comm.ops GROUP BY op ORDER BY op",
    "top": "SELECT seq, op, rank FROM comm.ops ORDER BY seq DESC, rank, op LIMIT 3",
    "joined": "SELECT o.seq, p.pid FROM comm.ops o JOIN process.processes p USING (job, rank) ORDER BY ALL",
    "none": "SELECT 1 AS x",
}


@pytest.fixture
def nodes() -> Iterator[Nodes]:
    def rows(first: int) -> dict[str, list[dict[str, object]]]:
        numbers = range(first, first + 5)
        ops = [{"ts": NOW_NS, "job": "j", "rank": i % 3, "op": "ab"[i % 2], "seq": i, "bytes": i} for i in numbers]
        return {"comm.ops": ops, "process.processes": [{"job": "j", "rank": i % 3, "pid": i} for i in numbers]}

    made = Nodes([rows(0), rows(3), {}])
    yield made
    made.close()


class Asked:
    def __init__(self, nodes: Nodes) -> None:
        self.nodes = nodes
        self.requests: list[tuple[str, list[str]]] = []

    def __call__(self, address: str, statements: Mapping[str, str], seconds: float) -> list[Reply]:
        self.requests.append((address, list(statements)))
        return [self.nodes.ask(address, sql, seconds) for sql in statements.values()]


def together(nodes: Nodes, asked: Asked) -> dict[str, Answer]:
    return run_all({name: nodes.plan(sql) for name, sql in QUESTIONS.items()}, nodes.names, by_threads(asked))


def test_the_rows_are_those_of_each_question_alone(nodes: Nodes) -> None:
    asked = Asked(nodes)
    found = together(nodes, asked)
    assert list(found) == list(QUESTIONS)
    for name, sql in QUESTIONS.items():
        assert found[name].table.equals(nodes.together(sql).table), name
        assert found[name].table.to_pylist() == nodes.reference(sql).to_pylist(), name
    parts = ["rows", "groups", "top", "joined comm.ops", "joined process.processes"]
    assert sorted(asked.requests) == [(name, parts) for name in nodes.names]


def test_rows_of_each_node_by_itself_are_one_after_the_other(nodes: Nodes) -> None:
    sql = "SELECT node, count(*) AS n, max(seq) OVER () AS last FROM comm.ops GROUP BY node, seq"
    plans = {"each": each_node(sql, NOW_NS, CATALOG), "all": nodes.plan("SELECT count(*) AS n FROM comm.ops")}
    found = run_all(plans, nodes.names, by_threads(Asked(nodes)))
    expected = [row for name in nodes.names for row in nodes.ask(name, sql, 1.0).table.to_pylist()]
    assert found["each"].table.to_pylist() == expected
    assert {row["last"] for row in expected if row["node"] == "n0"} == {4}
    assert found["all"].table.to_pylist() == [{"n": 10}]


def test_a_node_that_fails_is_missing_in_all_answers(nodes: Nodes) -> None:
    class Broken(Asked):
        def __call__(self, address: str, statements: Mapping[str, str], seconds: float) -> list[Reply]:
            if address == "n1":
                raise PeerError("n1 does not answer: gone")
            return super().__call__(address, statements, seconds)

    found = together(nodes, Broken(nodes))
    assert {row["node"] for row in found["rows"].table.to_pylist()} == {"n0"}
    assert {len(answer.gathered.failed) for answer in found.values()} == {1}


def test_a_node_whose_rows_do_not_fit_is_missing_in_all_answers(nodes: Nodes) -> None:
    class Strange(Asked):
        def __call__(self, address: str, statements: Mapping[str, str], seconds: float) -> list[Reply]:
            replies = super().__call__(address, statements, seconds)
            return [replies[0], replies[0], *replies[2:]] if address == "n0" else replies

    found = together(nodes, Strange(nodes))
    assert {row["node"] for row in found["rows"].table.to_pylist()} == {"n1"}
    assert [failed.node for failed in found["groups"].gathered.failed] == ["n0"]


def test_the_bytes_of_all_answers_are_bounded_together(nodes: Nodes) -> None:
    plans = {str(number): nodes.plan("SELECT * FROM comm.ops") for number in range(10)}
    with pytest.raises(QueryMemory, match="larger than 4 KiB together"):
        run_all(plans, nodes.names, by_threads(Asked(nodes)), max_bytes=4096)
