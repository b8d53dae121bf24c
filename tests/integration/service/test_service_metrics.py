"""/metrics of a real service: the rows of tables by real SQL workers, the page by promtool's rules, the token."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import ProxyHandler, Request, build_opener

import pytest
from ports import free_port
from prometheus_client.parser import text_string_to_metric_families
from query_helpers import logical
from service_helpers import TOKEN, Service, serving

from probing.daemon.service.metrics.parts import PARTS

WHO = {"node": "n0", "job": "j", "run": "0", "start_ns": 10_000_000}
_opener = build_opener(ProxyHandler({}))


@pytest.fixture
def http() -> str:
    return f"127.0.0.1:{free_port()}"


@pytest.fixture
def service(open_tmp_path: Path, http: str) -> Iterator[Service]:
    with serving(open_tmp_path, f"--http={http}") as made:
        yield made


def fetch(address: str, path: str = "/metrics", token: str = TOKEN) -> str:
    request = Request(f"http://{address}{path}", headers={"Authorization": f"Bearer {token}"} if token else {})
    with _opener.open(request, timeout=60) as answer:
        return str(answer.read().decode())


def fill(service: Service) -> None:
    """A job of two ranks; rank 1 lags, waits in one operation, and has a thousand communicators."""
    now = time.time_ns()
    files = service.collector.files
    processes = [
        {**WHO, "ts": now, "pid": 100 + n, "rank": n, "role": "trainer", "state": "running", "world_size": 2}
        for n in (0, 1)
    ]
    progress = [
        {**WHO, "ts": now, "pid": 100 + n, "rank": n, "comm": f"c{c}", "calls": 3, "last_call": now - 5 * 10**9}
        for n in (0, 1)
        for c in range(1000)
    ]
    inflight = [{**WHO, "ts": now, "pid": 101, "rank": 1, "comm": f"c{c}", "age_ns": 7 * 10**9} for c in range(1000)]
    files.live_rows = {
        "process.processes": logical("process.processes", processes),
        "comm.progress": logical("comm.progress", progress),
        "comm.inflight": logical("comm.inflight", inflight),
        "probing.store": logical(
            "probing.store",
            [
                {"node": "n0", "ts": now, "kind": "log", "files": 1, "bytes": 4096},
                {
                    "node": "n0",
                    "ts": now,
                    "kind": "segments",
                    "table_name": "comm.ops",
                    "files": 2,
                    "bytes": 9,
                    "rows": 5,
                    "oldest": now - 3600 * 10**9,
                },
            ],
        ),
    }
    files.segment(
        "train.steps",
        [
            {
                **WHO,
                "ts": now - (10 - s) * 10**9,
                "pid": 100 + n,
                "rank": n,
                "step": s,
                "duration_ns": 10**9,
                "comm_ns": 4 * 10**8,
                "wait_ns": 3 * 10**8 * (1 - n),
            }
            for n in (0, 1)
            for s in range(10)
        ],
    )
    files.segment(
        "comm.ops",
        [
            {
                **WHO,
                "ts": now - 10**9,
                "pid": 100 + n,
                "rank": n,
                "comm": "c0",
                "seq": 1,
                "op": "all_reduce",
                "bytes": 8,
                "backend": "gloo",
                "comm_size": 2,
                "timing_source": "exact",
                "start_ns_after": 0,
                "done_hi_ns": 2 * 10**6,
            }
            for n in (0, 1)
        ],
    )
    finding = {"node": "n0", "job": "j", "run": "0", "verdict": "slow_rank", "severity": "warning"}
    files.segment(
        "diagnosis.findings",
        [
            {**finding, "ts": now - 9 * 10**9, "finding_id": "a", "state": "open"},
            {**finding, "ts": now - 9 * 10**9, "finding_id": "b", "state": "open"},
            {**finding, "ts": now - 10**9, "finding_id": "b", "state": "closed"},
        ],
    )
    gpu = {"node": "n0", "ts": now - 10**9, "device_id": 3, "uuid": "GPU-1", "gpu_util_pct": 50.0}
    files.segment("gpu.utilization", [{**gpu, "clock_event_reasons": "sw_power_cap,hw_thermal"}])
    cost = {"node": "n0", "ts": now - 10**9, "process": "collector", "pid": 7, "cpu_pct": 0.5, "rss_bytes": 1000}
    files.segment("probing.cost", [cost])
    memory = {**WHO, "ts": now - 10**9, "pid": 100, "rank": 0, "role": "trainer", "rss_bytes": 4096}
    files.segment("process.memory", [memory])


def test_rows_become_metrics(service: Service, http: str) -> None:
    fill(service)
    service.query("SELECT 1")
    text = fetch(http)
    found = {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }

    def rank(name: str, n: int) -> float:
        return found[name, (("rank", str(n)), ("training_job", "j"))]

    assert {part.name: found["probingd_scrape_success", (("part", part.name),)] for part in PARTS} == {
        part.name: 1 for part in PARTS
    }
    assert found["probingd_job_ranks", (("training_job", "j"),)] == 2
    assert rank("probingd_rank_since_last_collective_seconds", 0) == pytest.approx(5)
    assert (rank("probingd_rank_communicators", 1), rank("probingd_rank_collectives_in_flight", 1)) == (1000, 1000)
    assert rank("probingd_rank_collective_in_flight_seconds", 1) == 7
    assert [rank("probingd_rank_lag_seconds", n) for n in (0, 1)] == [0, pytest.approx(0.3)]
    assert 0 < rank("probingd_rank_steps_per_second", 0) <= 1
    operation = (("backend", "gloo"), ("op", "all_reduce"), ("training_job", "j"))
    assert found["probingd_collective_seconds", operation] == pytest.approx(0.002)
    severity = (("severity", "warning"), ("training_job", "j"), ("verdict", "slow_rank"))
    assert found["probingd_findings_open", severity] == 1
    gpu = (("gpu", "3"), ("mig", ""), ("uuid", "GPU-1"))
    assert (found["probingd_gpu_utilization_ratio", gpu], found["probingd_gpu_throttled", gpu]) == (0.5, 1)
    assert found["probingd_process_cpu_ratio", (("process", "collector"),)] == pytest.approx(0.005)
    assert rank("probingd_rank_resident_memory_bytes", 0) == 4096
    assert found["probingd_query_duration_seconds_count", (("outcome", "ok"),)] == 1
    assert found["probingd_request_duration_seconds_count", (("method", "Query"), ("outcome", "ok"))] == 1
    assert found["probingd_table_segments", (("table", "comm.ops"),)] == 2
    assert found["probingd_table_oldest_row_age_seconds", (("table", "comm.ops"),)] == pytest.approx(3600)
    assert (found["probingd_log_bytes", ()], found["probingd_queries_waiting", ()]) == (4096, 0)
    # AND the page is as short with a thousand communicators as with one
    assert len(found) < 200


def test_the_rules_of_listening_hold(service: Service, http: str) -> None:
    assert fetch(http, "/healthz", token="") == "running\n"
    with pytest.raises(HTTPError, match="401"):
        fetch(http, token="x" * 20)
