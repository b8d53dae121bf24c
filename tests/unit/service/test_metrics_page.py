"""The page of /metrics: what it shows, its bounds, and the rules that promtool tests."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import subprocess
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("prometheus_client")

from prometheus_client.parser import text_string_to_metric_families

from probing.api.errors import PeerError, QueryTimeout
from probing.api.tables import TABLES
from probing.daemon.arrow import batch_of, ipc_bytes
from probing.daemon.query.answer import StatementEnd
from probing.daemon.service.metrics import scrape
from probing.daemon.service.metrics.page import MAX_LABEL, Readings, RequestTimes, metric_names, page_text
from probing.daemon.service.metrics.parts import MOST_SERIES, PARTS
from probing.daemon.service.metrics.scrape import Scraper

ROOT = Path(__file__).resolve().parents[3]
STATUS = {
    "state": "running",
    "processes": 2,
    "store_bytes": 1 << 33,
    "store_segments": 3,
    "drain_backlog_bytes": 0,
    "drain_age_ms": 40,
    "waiting_rows": 3,
    "losses": [{"source": "gloo", "stage": "ring", "reported": 2}],
    "sources": [
        {"name": "gloo", "state": "running", "rows": 7, "lost": 1},
        {"name": "cuda", "state": "degraded", "rows": 0, "lost": 0},
    ],
}


def rows(labels: dict[str, str], **values: float) -> list[dict[str, Any]]:
    return [{**labels, **values}]


def full() -> Readings:
    """Readings with a row of every part."""
    made = {
        part.name: rows(
            {column: f"{column}-1" for column in part.labels.values()},
            **{metric.column: 1.5e9 for metric in part.metrics},
        )
        for part in PARTS
    }
    return Readings(
        "1.2", "n0", made, {}, STATUS, running_queries=1, seconds=0.25, waiting_queries=2, calls={"query": 5}
    )


def samples(page: bytes) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(page.decode())
        for sample in family.samples
    }


def test_values_are_in_base_units_and_by_rank() -> None:
    found = samples(page_text(full(), RequestTimes()))
    rank = (("rank", "rank-1"), ("training_job", "job-1"))
    assert found["probingd_rank_since_last_collective_seconds", rank] == 1.5
    assert found["probingd_rank_lag_seconds", rank] == 1.5
    gpu = (("gpu", "device_id-1"), ("mig", "mig-1"), ("uuid", "uuid-1"))
    assert found["probingd_gpu_sm_clock_hertz", gpu] == 1.5e15
    assert found["probingd_build_info", (("node", "n0"), ("version", "1.2"))] == 1
    assert found["probingd_source_lost_rows_total", (("source", "gloo"),)] == 1
    assert found["probingd_source_running", (("source", "cuda"),)] == 0
    assert found["probingd_state", (("state", "running"),)] == 1


def test_the_daemon_s_own_health_is_shown() -> None:
    times = RequestTimes()
    for method, outcome in (("Query", "ok"), ("DoGet", "failed"), ("Status", "ok"), ("Status", "cancelled")):
        times.call(method, 0.02, outcome)
    found = samples(page_text(full(), times))
    states = {
        dict(own)["state"]: value
        for (name, own), value in found.items()
        if name == "probingd_source_state" and ("source", "cuda") in own
    }
    assert states == {"running": 0, "degraded": 1, "paused": 0, "stopped": 0, "other": 0}
    assert found["probingd_losses_total", (("source", "gloo"), ("stage", "ring"))] == 2
    assert found["probingd_drain_age_seconds", ()] == pytest.approx(0.04)
    assert found["probingd_waiting_rows", ()] == 3
    assert found["probingd_table_oldest_row_age_seconds", (("table", "table_name-1"),)] == 1.5
    assert found["probingd_log_bytes", ()] == 1.5e9
    assert (found["probingd_queries_waiting", ()], found["probingd_calls_running", (("kind", "query"),)]) == (2, 5)
    calls = {own: value for (name, own), value in found.items() if name == "probingd_request_duration_seconds_count"}
    assert sum(calls.values()) == 4
    assert calls[(("method", "Status"), ("outcome", "cancelled"))] == 1
    # AND what answers with rows counts as a query
    assert found["probingd_query_duration_seconds_count", (("outcome", "failed"),)] == 1


def test_hooks_are_counted_by_outcome_where_one_is_configured() -> None:
    hooks = {"started": 23, "failed": 7, "lost": 5}
    found = samples(page_text(replace(full(), hooks=hooks), RequestTimes()))
    assert {outcome: found["probingd_hooks_total", (("outcome", outcome),)] for outcome in hooks} == hooks
    assert not any(name.startswith("probingd_hooks") for name, _ in samples(page_text(full(), RequestTimes())))


def test_what_was_not_read_is_absent_and_named() -> None:
    readings = Readings("1", "n", {"findings": []}, {"steps": "late"}, {"state": "lost"})
    found = samples(page_text(readings, RequestTimes()))
    assert found["probingd_scrape_success", (("part", "findings"),)] == 1
    assert found["probingd_scrape_success", (("part", "steps"),)] == 0
    assert found["probingd_state", (("state", "lost"),)] == 1
    assert not any(name.startswith("probingd_rank") for name, _ in found)


def test_a_thousand_communicators_and_many_ranks_give_a_bounded_page() -> None:
    # GIVEN a node with 5,000 jobs whose names are hostile, each rank with 1,000 communicators
    many = [
        {
            "job": f'j\n"{n}\ud800{"x" * 5000}',
            "rank": n,
            "since_ns": 1,
            "communicators": 1000,
            "operations": 1000,
            "age_ns": n,
        }
        for n in range(5000)
    ]
    page = page_text(Readings("1", "n", {"progress": many, "inflight": many}, {}, STATUS), RequestTimes())
    found = samples(page)
    # THEN no label names a communicator, and a part has at most so many series
    labels = {name for _, own in found for name, _ in own}
    own = {"source", "state", "stage", "part", "version", "node"}
    assert labels <= {label for part in PARTS for label in part.labels} | own
    assert labels.isdisjoint({"comm", "comm_name", "seq", "pid"})
    assert sum(name == "probingd_rank_communicators" for name, _ in found) == MOST_SERIES
    assert found["probingd_scrape_truncated", (("part", "progress"),)] == 1
    assert max(len(value) for _, own in found for _, value in own) == MAX_LABEL
    assert len(page) < 2 << 20


def test_labels_that_are_equal_after_the_cut_share_a_series() -> None:
    long = "x" * 500
    twice = [{"job": long + end, "rank": 0, "since_ns": ns} for end, ns in (("a", 1e9), ("b", 3e9))]
    found = samples(page_text(Readings("1", "n", {"progress": twice}), RequestTimes()))
    assert [value for (name, _), value in found.items() if "since_last" in name] == [3.0]


def test_no_statement_groups_by_what_jobs_make_many_of() -> None:
    for part in PARTS:
        assert part.statement.endswith(f"LIMIT {MOST_SERIES + 1}")
        grouped = re.findall(r"GROUP BY ([\w, ]+)", part.statement)
        assert not {"comm", "seq", "pid", "run"} & {word.strip() for words in grouped for word in words.split(",")}
        named = set(re.findall(r"\b(?:FROM|JOIN) (\w+\.\w+)", part.statement))
        assert named <= TABLES.keys()


def promtool() -> str | None:
    """The path of promtool, which CI must have."""
    tool = shutil.which("promtool") or next(map(str, (ROOT / ".build/promtool").glob("promtool")), None)
    assert tool or os.environ.get("CI") != "true", "packaging/dev/promtool.sh gets promtool"
    return tool


def lint(page: bytes) -> list[str]:
    """What promtool says of a page; without promtool, what these rules say."""
    if tool := promtool():
        done = subprocess.run([tool, "check", "metrics"], input=page, capture_output=True, timeout=60)
        return (done.stdout + done.stderr).decode().splitlines()
    found = []
    for family in text_string_to_metric_families(page.decode()):
        if not family.documentation:
            found.append(f"{family.name} no help text")
        named = re.fullmatch(r"probingd(_[a-z]+)+", family.name)
        if not named or re.search(r"_(ms|ns|pct|gbps|mhz|count)\b", family.name):
            found.append(f"{family.name} is not a valid name of a metric")
        if family.samples and (family.type == "counter") != all(s.name.endswith("_total") for s in family.samples):
            found.append(f"{family.name} is a {family.type}")
    return found


def test_the_page_passes_promtool() -> None:
    times = RequestTimes()
    times.call("Query", 0.02, "ok")
    assert lint(page_text(full(), times)) == []
    assert lint(page_text(Readings("1", "n"), RequestTimes())) == []


def test_promtool_or_the_rules_find_a_bad_name() -> None:
    assert lint(b"# HELP probingd_x_ms x\n# TYPE probingd_x_ms gauge\nprobingd_x_ms 1\n")


class FakeEngine:
    """Answers every statement with the same live row, or raises."""

    def __init__(self, fail: str = "") -> None:
        self.running = self.waiting = 0
        self.calls = 0
        self.fail = fail
        self.gate = threading.Event()
        self.gate.set()

    def run_all(self, statements: list[str], *, timeout: float, max_bytes: int, caller: object) -> Any:
        self.calls += 1
        assert self.gate.wait(30)
        for index, _ in enumerate(statements):
            if self.fail == "late" and index == 2:
                raise QueryTimeout("too late")
            if self.fail == "one" and index == 1:
                yield StatementEnd(index, error=QueryTimeout("this one"))
                continue
            yield ipc_bytes(batch_of("comm.inflight", [{"job": "j", "rank": 1, "age_ns": 7}]))
            yield StatementEnd(index, 1)


def test_scrapes_at_the_same_time_read_once_and_the_page_is_kept_for_a_second() -> None:
    async def scrape() -> None:
        clock = [100.0]
        engine = FakeEngine()
        engine.gate.clear()
        scraper = Scraper("n", "1", engine, lambda _: STATUS, lambda: clock[0])
        asked = [asyncio.create_task(scraper.page()) for _ in range(20)]
        # One that goes away takes nobody's page with it.
        await asyncio.sleep(0)
        asked.pop().cancel()
        engine.gate.set()
        pages = await asyncio.gather(*asked)
        assert engine.calls == 1
        assert len(set(pages)) == 1
        await scraper.page()
        assert engine.calls == 1
        clock[0] += 1.5
        await scraper.page()
        assert engine.calls == 2
        scraper.close()

    asyncio.run(scrape())


@pytest.mark.parametrize(("fail", "read"), [("", len(PARTS)), ("one", len(PARTS) - 1), ("late", 2)])
def test_a_part_that_fails_costs_only_itself(fail: str, read: int) -> None:
    async def scrape() -> bytes:
        scraper = Scraper("n", "1", FakeEngine(fail), lambda _: STATUS)
        return await scraper.page()

    found = samples(asyncio.run(scrape()))
    assert sum(value for (name, _), value in found.items() if name == "probingd_scrape_success") == read


@pytest.mark.parametrize(
    ("remembered", "later", "state"),
    [
        ("running", 10.0, "running"),
        ("degraded", 14.0, "degraded"),
        ("running", 16.0, "lost"),
        ("starting", 2.0, "starting"),
    ],
)
def test_health_is_remembered_while_the_collector_is_slow(
    remembered: str, later: float, state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scrape, "STATUS_S", 0.05)
    slow, released = threading.Event(), threading.Event()

    def status(seconds: float) -> dict[str, Any]:
        if slow.is_set():
            released.wait(30)
        return {"state": remembered}

    async def ask() -> None:
        clock = [100.0]
        scraper = Scraper("n", "1", FakeEngine(), status, lambda: clock[0])
        assert await scraper.health() == remembered
        slow.set()
        clock[0] += later
        # However many ask, one question to the collector is under way.
        assert set(await asyncio.gather(*(scraper.health() for _ in range(100)))) == {state}
        released.set()
        await until_health(scraper, remembered)
        scraper.close()

    async def until_health(scraper: Scraper, wanted: str) -> None:
        while await scraper.health() != wanted:
            await asyncio.sleep(0.01)

    asyncio.run(ask())


def test_without_the_collector_there_is_a_page_that_says_so() -> None:
    def status(seconds: float) -> dict[str, Any]:
        raise PeerError("the collector does not answer")

    async def scrape() -> tuple[bytes, str]:
        scraper = Scraper("n", "1", FakeEngine(), status)
        return await scraper.page(), await scraper.health()

    page, health = asyncio.run(scrape())
    assert health == "lost"
    assert samples(page)["probingd_state", (("state", "lost"),)] == 1


def test_every_metric_of_the_dashboard_and_the_alerts_exists() -> None:
    yaml = pytest.importorskip("yaml")
    names = metric_names()
    dashboard = json.loads((ROOT / "packaging/grafana/probingd.json").read_text())
    targets = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())]
    variables = [json.dumps(variable.get("query", "")) for variable in dashboard["templating"]["list"]]
    alerts = yaml.safe_load((ROOT / "packaging/prometheus/probingd-alerts.yml").read_text())
    rules = [rule for group in alerts["groups"] for rule in group["rules"]]
    texts = [*targets, *variables, *(rule["expr"] for rule in rules)]
    used = {name for text in texts for name in re.findall(r"\bprobingd_\w+", text)}
    assert len(targets) > 12
    assert len(rules) > 6
    assert used - names == set()
    assert all(rule["annotations"]["summary"] and rule["annotations"]["description"] for rule in rules)
    # AND the page of the documents names each that exists, and no other
    documented = set(re.findall(r"`(probingd_\w+)`", (ROOT / "docs/metrics.md").read_text()))
    shown = {re.sub(r"_(bucket|sum|count)$", "", name) for name in names}
    assert documented == shown


def test_the_alerts_pass_promtool() -> None:
    tool = promtool()
    if tool is None:
        pytest.skip("promtool is not installed; packaging/dev/promtool.sh gets it")
    path = ROOT / "packaging/prometheus/probingd-alerts.yml"
    done = subprocess.run([tool, "check", "rules", "--lint-fatal", str(path)], capture_output=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
