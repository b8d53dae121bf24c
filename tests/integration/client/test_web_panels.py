"""The panels of the page: each shows what the command of its name prints."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator

import pytest
from client_fake_node import FakeNode
from waiting import until
from web_scene import Page, served

from probing.client.cluster import Cluster
from probing.client.web import live, sql, visitors

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def page(pair: tuple[FakeNode, FakeNode]) -> Iterator[Page]:
    with Cluster(pair[0].address, all_nodes=True) as cluster, served(cluster) as page:
        page.enter()
        yield page


@pytest.mark.parametrize(
    ("address", "command"),
    [
        ("ps", "ps"),
        ("status", "status"),
        ("topo", "topo"),
        ("nccl?job=j1&since=5m", "nccl --job j1 --since 5m"),
        ("balance?job=j1", "balance --job j1"),
        ("history", "diagnose --history"),
        ("stacks?job=j1", "stacks --job j1"),
        ("stacks?job=j1&merge=1", "stacks --job j1 --merge"),
    ],
)
def test_a_panel_shows_what_its_command_prints(page: Page, ctl: Run, address: str, command: str) -> None:
    shown = page.ask(f"/api/{address}").json
    _, printed, _ = ctl("--all-nodes", "-f", "json", *command.split())
    assert without_ages(shown["data"]) == without_ages(json.loads(printed))
    assert (shown["contract"]["asked"], shown["contract"]["answered"]) == (2, 2)


def test_the_target_alone_says_which_nodes_it_knows(page: Page, pair: tuple[FakeNode, FakeNode]) -> None:
    for node in pair:
        for member in pair:
            row = {"node": node.name, "ts": 0, "member": member.name, "address": member.address, "state": "healthy"}
            node.insert("cluster.members", [{**row, "version": "0.1.0"}])
    shown = page.ask("/api/nodes").data
    assert [(row["node"], row["member"]) for row in shown] == [("alpha", "alpha"), ("alpha", "beta")]


def test_questions_whose_tabs_are_closed_give_their_places_back(
    pair: tuple[FakeNode, FakeNode], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(visitors, "_AT_ONCE", 2)
    with Cluster(pair[0].address) as cluster, served(cluster) as page:
        page.enter()
        # The number of lost rows in each answer is a query as well, and kept for a while.
        assert page.ask("/api/status").status == 200
        pair[0].hold, before = threading.Event(), len(pair[0].asked)
        for number in (1, 2):
            with socket.create_connection(("127.0.0.1", page.port)) as tab:
                head = f"GET /api/ps HTTP/1.1\r\nHost: 127.0.0.1:{page.port}\r\nCookie: {page.cookie}\r\n\r\n"
                tab.sendall(head.encode())
                until(lambda number=number: len(pair[0].asked) == before + number)
        # The node still holds both questions.
        assert page.ask("/api/status").data[0]["node"] == "alpha"
        pair[0].hold.set()


def without_ages(value: object) -> object:
    """Returns ``value`` without what differs between two questions."""
    if isinstance(value, dict):
        return {key: without_ages(one) for key, one in value.items() if not key.endswith(("age_ns", "state_ns"))}
    return [without_ages(one) for one in value] if isinstance(value, list) else value


def test_stacks_of_one_process_ask_its_node_alone(page: Page, pair: tuple[FakeNode, FakeNode]) -> None:
    answer = page.ask("/api/stacks?node=beta&pid=1002").json
    assert {(thread["node"], thread["pid"]) for thread in answer["data"]} == {("beta", 1002)}
    assert pair[0].stacks_asked == []


def test_rows_of_sql(page: Page) -> None:
    sql = "SELECT rank, 9007199254740993 AS large, 'NaN'::DOUBLE AS none FROM comm.inflight ORDER BY rank"
    shown = page.ask("/api/query", {"sql": sql, "all_nodes": True}).data
    assert [column["name"] for column in shown["columns"]] == ["rank", "large", "none"]
    assert shown["rows"] == [[rank, "9007199254740993", "NaN"] for rank in (0, 1, 3)]
    assert shown["truncated"] is False


def test_a_long_answer_of_sql_is_cut(page: Page) -> None:
    shown = page.ask("/api/query", {"sql": "SELECT range AS n FROM range(10007)", "all_nodes": False}).data
    assert len(shown["rows"]) == 10_000
    assert shown["truncated"] is True


def test_rows_of_many_bytes_are_cut_and_it_says_so(page: Page, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = {"sql": "SELECT node, seq FROM comm.ops", "all_nodes": True}
    every = page.ask("/api/query", asked).data
    monkeypatch.setattr(sql, "_MOST_BYTES", 1 << 10)
    cut = page.ask("/api/query", asked).data
    assert 0 < len(cut["rows"]) < len(every["rows"])
    assert (every["truncated"], cut["truncated"]) == (False, True)


def test_rows_of_one_large_batch_are_cut(page: Page, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sql, "_MOST_BYTES", 1 << 10)
    shown = page.ask("/api/query", {"sql": "SELECT range AS n FROM range(2000)", "all_nodes": False}).data
    assert 0 < len(shown["rows"]) <= 128
    assert shown["truncated"] is True
    one = page.ask("/api/query", {"sql": "SELECT repeat('x', 2000) AS x", "all_nodes": False})
    assert (one.status, one.json["code"]) == (413, "QueryMemory")


def test_the_plan_says_what_each_node_is_asked(page: Page) -> None:
    steps = page.ask("/api/query/plan", {"sql": "SELECT count(*) FROM comm.ops"}).data
    assert [step["step"] for step in steps] == ["aggregate", "merge"]


def test_tables_have_their_columns_with_docs(page: Page) -> None:
    tables = {table["table"]: table for table in page.ask("/api/tables").data}
    columns = {column["name"] for column in tables["comm.ops"]["columns"]}
    assert {"seq", "duration_ns"} <= columns
    assert all(column["doc"] and column["type"] for column in tables["comm.ops"]["columns"])


def test_the_live_view_has_all_jobs_and_the_ranks_of_one(page: Page) -> None:
    with page.events("/api/live/jobs") as events:
        name, shown = next(events)
    assert name == "jobs"
    assert [(job["job"], job["state"], job["ranks"], job["nodes"]) for job in shown["jobs"]] == [
        ("j1", "WAITS", 4, ["alpha", "beta"])
    ]
    with page.events("/api/live/job?job=j1") as events:
        name, shown = next(events)
    assert name == "job"
    columns = shown["ranks"]["columns"]
    ranks = [dict(zip(columns, row, strict=True)) for row in shown["ranks"]["rows"]]
    assert [(row["rank"], row["op"]) for row in ranks] == [
        (0, "all_reduce"),
        (1, "all_reduce"),
        (2, None),
        (3, "all_reduce"),
    ]


def test_a_node_that_is_gone_is_part_of_the_contract(page: Page, pair: tuple[FakeNode, FakeNode]) -> None:
    pair[1].stop()
    contract = page.ask("/api/ps").json["contract"]
    assert (contract["asked"], contract["answered"]) == (2, 1)
    assert len(contract["failures"]) == 1


def test_an_error_has_a_hint_and_the_name_of_its_class(page: Page) -> None:
    answer = page.ask("/api/diagnose?job=j9")
    assert answer.status == 404
    assert answer.json["code"] == "NotFound"
    assert answer.json["hint"]
    assert page.ask("/api/query", {"sql": "SELEC"}).status == 400
    assert page.ask("/api/nothing").json["code"] == "NotFound"


def test_who_comes_back_sees_what_is_so_now(
    page: Page, pair: tuple[FakeNode, FakeNode], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "_LINGER_S", 0.0)
    # Other tests of this process may have left threads of this name.
    others = fetching()
    with page.events("/api/live/jobs") as events:
        assert next(events)[1]["jobs"][0]["ranks"] == 4
        assert fetching() - others
    until(lambda: fetching() <= others, what="the end of the threads")
    pair[1].replace("process.processes", [])
    with page.events("/api/live/jobs") as events:
        assert next(events)[1]["jobs"][0]["ranks"] == 2


def fetching() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "fetch"}
