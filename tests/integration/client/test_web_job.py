"""The panels of a job and of a rank: what the page shows that no command prints in this form."""

from __future__ import annotations

import json
import struct
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from client_fake_node import SECOND, FakeNode
from client_top_scene import SENTENCE, Scene
from test_client_diagnose import hung
from web_scene import Page, served

from probing.api.errors import QueryRejected
from probing.client.cluster import Cluster
from probing.client.web import live
from probing.diagnosis.facts_file import to_json


@pytest.fixture
def page(pair: tuple[FakeNode, FakeNode]) -> Iterator[Page]:
    pair[0].facts = {"j1": [to_json(hung("alpha", 0, 1))]}
    pair[1].facts = {"j1": [to_json(hung("beta", 2, 3))]}
    with Cluster(pair[0].address, all_nodes=True) as cluster, served(cluster) as page:
        page.enter()
        yield page


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Page]:
    """A stuck, a slow and a plain job with GPUs."""
    with Scene(tmp_path) as made, Cluster(made.first.address, all_nodes=True) as cluster, served(cluster) as page:
        page.enter()
        yield page


def test_the_diagnosis_names_the_culprit_with_both_stacks(page: Page) -> None:
    found = page.ask("/api/diagnose?job=j1").data
    assert [culprit["rank"] for culprit in found["culprits"]] == [2]
    assert {stack["role"] for stack in found["stacks"]} == {"culprit", "victim"}


def test_the_file_of_a_finding_has_a_policy_of_its_own(page: Page) -> None:
    answer = page.ask("/api/finding.html?job=j1")
    assert answer.status == 200
    assert "they part here" in answer.body.decode()
    policy = answer.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; style-src 'sha256-")
    assert "script-src" not in policy


def test_who_waits_for_whom(page: Page) -> None:
    shown = page.ask("/api/waits?job=j1").data
    assert [(row["rank"], row["node"]) for row in shown["ranks"]] == [
        (0, "alpha"),
        (1, "alpha"),
        (2, "beta"),
        (3, "beta"),
    ]
    edges = {(edge["from_rank"], edge["to_rank"], edge["comm_name"], edge["seq"]) for edge in shown["edges"]}
    assert edges == {(rank, 2, "default_pg", 50) for rank in (0, 1, 3)}
    (operation,) = shown["operations"]
    assert (operation["waiters"], operation["awaited"]) == ("0-1,3", "2")
    assert shown["truncated"] is False


def test_steps_of_all_ranks(page: Page, pair: tuple[FakeNode, FakeNode]) -> None:
    for node, ranks in zip(pair, ((0, 1), (2, 3)), strict=True):
        node.insert(
            "train.steps", [step(node.name, rank, n) for rank in ranks for n in range(1, 24) if (rank, n) != (3, 7)]
        )
    shown = page.ask("/api/steps?job=j1&since=10m").data
    assert shown["ranks"] == [0, 1, 2, 3]
    assert shown["steps"] == list(range(1, 24))
    assert shown["duration_ns"][2] == [2 * SECOND + n for n in range(1, 24)]
    assert shown["duration_ns"][3][6] is None


def step(node: str, rank: int, number: int) -> dict[str, object]:
    """A row of train.steps of this minute; rank r takes r seconds and as many ns as the number of the step."""
    began, length = int(time.time()) * SECOND - 20 * SECOND + number, rank * SECOND + number
    who = {"node": node, "job": "j1", "run": "r1", "pid": 1000 + rank, "start_ns": SECOND, "rank": rank}
    return {**who, "ts": began, "step": number, "duration_ns": length}


def test_a_job_without_steps_has_none(page: Page) -> None:
    assert page.ask("/api/steps?job=j1").data["steps"] == []


def test_a_profile_is_a_tree_with_the_ranks_of_each_frame(page: Page) -> None:
    root = page.ask("/api/profile?job=j1&since=5m&by=rank").data
    # 100 samples of 10 ms of each of four ranks.
    assert root["value"] == 4 * SECOND
    (main,) = {child["name"].partition(" ")[0]: child for child in root["children"]}.values()
    reading = next(child for child in main["children"] if child["name"].startswith("read_batch"))
    assert reading["value"] == (90 + 3 * 25) * SECOND // 100
    assert reading["ranks"] == "0-3"


def test_the_difference_of_two_ranks(page: Page) -> None:
    root = page.ask("/api/profile/diff?job=j1&a=rank:2&b=rank:0").data
    assert (root["value"], root["base"]) == (SECOND, SECOND)
    reading = next(child for child in root["children"][0]["children"] if child["name"].startswith("read_batch"))
    assert (reading["value"], reading["base"]) == (90 * SECOND // 100, 25 * SECOND // 100)


def test_a_rank_has_its_process_operations_findings_and_figures(scene: Page) -> None:
    shown = scene.ask("/api/rank?job=llm-7b&run=r1&node=beta&pid=1002").data
    assert (shown["process"]["rank"], shown["process"]["job"]) == (2, "llm-7b")
    assert [row["sentence"] for row in shown["findings"]] == [SENTENCE]
    assert shown["ops"][0]["op"] == "all_reduce"
    assert {"cpu_pct", "rss_bytes", "gpu_pct", "power_w"} <= shown["series"].keys()
    cpu = shown["series"]["cpu_pct"]
    assert cpu["unit"] == "%"
    assert len(cpu["t"]) == len(cpu["v"]) >= 59
    assert scene.ask("/api/rank?job=llm-7b&node=beta&pid=77").status == 404


def test_jobs_in_trouble_come_first_with_their_finding(scene: Page) -> None:
    with scene.events("/api/live/jobs") as events:
        shown = next(shown for _, shown in events if all(job["finding"] for job in shown["jobs"][:2]))
    assert [(job["job"], job["state"]) for job in shown["jobs"]] == [
        ("llm-7b", "STUCK"),
        ("bert", "SLOW"),
        ("resnet", "OK"),
    ]
    finding = shown["jobs"][0]["finding"]
    assert (finding["sentence"], finding["culprits"], finding["victims"]) == (SENTENCE, [2], [0, 1, 3])
    with scene.events("/api/live/job?job=llm-7b") as events:
        columns, rows = next(
            (shown["ranks"]["columns"], shown["ranks"]["rows"])
            for _, shown in events
            if any("read_batch" in str(row) for row in shown["ranks"]["rows"])
        )
    blame = {row[columns.index("rank")]: row[columns.index("blame")] for row in rows}
    assert blame == {0: "victim", 1: "victim", 2: "culprit", 3: "victim"}


def test_a_finding_is_seen_without_the_next_round_of_questions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # No node is asked a second time within the test, unless a finding was stored.
    monkeypatch.setattr(live, "_EVERY_S", 3600.0)
    with Scene(tmp_path) as made, Cluster(made.first.address, all_nodes=True) as cluster:
        made.findings = False
        for node in made.nodes.values():
            node.count_findings(0)
        with served(cluster) as page:
            page.enter()
            with page.events("/api/live/job?job=llm-7b") as events:
                assert not any(shown["job"]["finding"] for _, shown in islice(events, 2))
                made.findings = True
                made.nodes["alpha"].count_findings(1)
                shown = next(shown for _, shown in events if shown["job"]["finding"])
    assert (shown["job"]["finding"]["sentence"], shown["job"]["finding"]["culprits"]) == (SENTENCE, [2])


def test_rows_of_sql_as_files(page: Page, tmp_path: Path) -> None:
    sql = {"sql": "SELECT rank, op FROM comm.inflight ORDER BY rank", "all_nodes": True}
    answer = page.ask("/api/query/download", {**sql, "format": "csv"})
    assert answer.body == b"rank,op\n0,all_reduce\n1,all_reduce\n3,all_reduce\n"
    assert answer.headers["content-disposition"] == 'attachment; filename="rows.csv"'
    (tmp_path / "rows.parquet").write_bytes(page.ask("/api/query/download", {**sql, "format": "parquet"}).body)
    assert pq.read_table(tmp_path / "rows.parquet").column("rank").to_pylist() == [0, 1, 3]
    assert page.ask("/api/query/download", {**sql, "format": "exe"}).status == 400


def test_the_timeline_as_columns_and_as_a_trace(scene: Page) -> None:
    answer = scene.ask("/api/timeline?job=llm-7b&from=5m")
    assert answer.headers["content-type"] == "application/x-probing-columns"
    assert answer.body[:8] == b"PRBCOLS1"
    (size,) = struct.unpack("<I", answer.body[8:12])
    header = json.loads(answer.body[12 : 12 + size])
    # Twelve operations of four ranks.
    assert header["sections"]["ops"]["rows"] == 4 * 12
    assert {rank["rank"] for rank in header["dictionaries"]["ranks"]} == {0, 1, 2, 3}
    trace = scene.ask("/api/timeline/download?job=llm-7b&from=5m&format=pftrace")
    assert trace.status == 200, trace.body
    assert trace.headers["content-disposition"] == 'attachment; filename="timeline.pftrace"'
    assert b"all_reduce" in trace.body
    events = scene.ask("/api/timeline/download?job=llm-7b&from=5m&format=json").json["traceEvents"]
    assert {"all_reduce"} <= {event["name"] for event in events}
    file = scene.ask("/api/timeline/download?job=llm-7b&from=5m&format=html")
    assert file.headers["content-disposition"] == 'attachment; filename="timeline.html"'
    assert file.headers["content-type"] == "text/html; charset=utf-8"
    assert file.body.endswith(b"</html>\n")
    assert scene.ask("/api/timeline/download?job=llm-7b&format=doc").status == 400
    assert scene.ask("/api/timeline?job=nobody").json["code"] == "NotFound"


def test_a_token_that_is_limited_to_jobs_has_a_live_view(tmp_path: Path) -> None:
    with Scene(tmp_path) as made, Cluster(made.first.address, all_nodes=True) as cluster, served(cluster) as page:
        for node in made.nodes.values():
            node.broken = {"gpu.utilization": QueryRejected("the token is limited to jobs")}
        page.enter()
        with page.events("/api/live/job?job=llm-7b") as events:
            # The first question names no device.
            for _, (_, shown) in zip(range(3), events, strict=False):
                assert (shown["contract"]["answered"], len(shown["ranks"]["rows"])) == (2, 4)


def test_a_node_that_joins_is_part_of_the_live_view(
    pair: tuple[FakeNode, FakeNode], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "_LOOK_EVERY_S", 0.1)
    monkeypatch.setattr(live, "_EVERY_S", 0.1)
    peers = list(pair[0].peers)
    del pair[0].peers[1]
    with Cluster(pair[0].address, all_nodes=True) as cluster, served(cluster) as page:
        page.enter()
        with page.events("/api/live/jobs") as events:
            assert next(events)[1]["jobs"][0]["nodes"] == ["alpha"]
            pair[0].peers[:] = peers
            assert any(shown["jobs"][0]["nodes"] == ["alpha", "beta"] for _, shown in events)
