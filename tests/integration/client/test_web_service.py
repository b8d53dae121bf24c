"""The page before a real service, which knows tokens, scopes, and the rows of which jobs they allow."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from client_fake_node import process
from query_helpers import logical, operations
from service_helpers import Service, serving
from waiting import until
from web_scene import Page, served

from probing.api.tables import TABLES
from probing.client.cluster import Cluster
from probing.client.web import live
from probing.client.web.visitors import TokenDoor

LIMITED, WHOLE = "0123456789abcdef-limited", "0123456789abcdef-whole"
TOKENS = f"""
[[token]]
name = "team"
jobs = ["mine"]
value = "{LIMITED}"
[[token]]
name = "ops"
scope = "read"
value = "{WHOLE}"
"""
COUNT = {"sql": "SELECT count(*) AS n FROM comm.ops", "all_nodes": False}


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    tokens = tmp_path / "tokens"
    tokens.write_text(TOKENS)
    tokens.chmod(0o640)
    with serving(tmp_path, f"--token_file={tokens}", log=tmp_path / "log") as made:
        rows = [{**row, "job": "mine" if n < 3 else "secret"} for n, row in enumerate(operations(103))]
        made.collector.files.segment("comm.ops", rows)
        live = {name: table for name, table in TABLES.items() if table.live}
        made.collector.files.live_rows |= {name: logical(name, []) for name in live}
        ranks = [process("n0", rank, 100 + rank, job=job) for rank, job in enumerate(("mine", "secret"))]
        made.collector.files.live_rows["process.processes"] = logical("process.processes", ranks)
        yield made


@pytest.fixture
def visitors(service: Service) -> Iterator[tuple[Page, Page]]:
    """Two browsers at one page: that of a token of one job, and that of a token of all."""
    door = TokenDoor(lambda token: Cluster(service.tcp, token=token, tcp_alone=True))
    with Cluster(service.tcp) as cluster, served(cluster, door) as page:
        team, ops = page, Page(page.port)
        assert team.log_in("wrong-" + LIMITED).status == 401
        assert team.log_in(LIMITED).status == 200
        assert ops.log_in(WHOLE).status == 200
        yield team, ops


def test_each_visitor_has_the_rows_of_the_token(visitors: tuple[Page, Page]) -> None:
    assert [page.ask("/api/query", COUNT).data["rows"] for page in visitors] == [[[3]], [[103]]]
    assert [[row["job"] for row in page.ask("/api/ps").data] for page in visitors] == [["mine"], ["mine", "secret"]]
    refused = visitors[0].ask("/api/query", {"sql": "SELECT * FROM gpu.utilization", "all_nodes": False})
    assert (refused.status, "limited to jobs" in refused.json["error"]) == (400, True)
    assert visitors[0].ask("/api/stacks?job=secret").status in (403, 404)


def test_each_visitor_has_a_live_view_of_the_own_jobs(
    visitors: tuple[Page, Page], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "_EVERY_S", 0.2)
    for page, jobs in zip(visitors, (["mine"], ["mine", "secret"]), strict=True):
        with page.events("/api/live/jobs") as events:
            # The second question names devices, which belong to no job.
            for _, (_, shown) in zip(range(3), events, strict=False):
                assert shown["contract"]["answered"] == 1
                assert sorted(job["job"] for job in shown["jobs"]) == jobs


def test_the_audit_log_has_the_names_of_the_tokens(service: Service, visitors: tuple[Page, Page]) -> None:
    for page in visitors:
        page.ask("/api/query", COUNT)
    log = service.root / "log"
    said = until(lambda: text if all(f"({name})" in (text := log.read_text()) for name in ("team", "ops")) else "")
    assert LIMITED not in said
    assert WHOLE not in said


def test_a_token_that_is_taken_out_ends_at_the_next_question(service: Service, visitors: tuple[Page, Page]) -> None:
    tokens = service.root / "tokens"
    tokens.write_text(TOKENS.replace(LIMITED, "another-0123456789abcdef"))
    # Its change is seen by its time.
    until(lambda: visitors[0].ask("/api/query", COUNT).status == 401)
    assert visitors[1].ask("/api/query", COUNT).status == 200
