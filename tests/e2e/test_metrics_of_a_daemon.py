"""The health of a real daemon on /metrics: sources, gaps, the log, calls by method."""

from __future__ import annotations

import os
import pwd
from collections.abc import Callable
from pathlib import Path
from urllib.request import ProxyHandler, Request, build_opener

from e2e_support import Daemon
from ports import free_port
from prometheus_client.parser import text_string_to_metric_families
from waiting import until

TOKEN = "a-token-of-a-test-of-metrics"
_opener = build_opener(ProxyHandler({}))
Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def scraped(address: str) -> Samples:
    request = Request(f"http://{address}/metrics", headers={"Authorization": f"Bearer {TOKEN}"})
    with _opener.open(request, timeout=60) as answer:
        families = text_string_to_metric_families(answer.read().decode())
        return {(s.name, tuple(sorted(s.labels.items()))): s.value for family in families for s in family.samples}


def test_a_daemon_shows_its_own_health(make_daemon: Callable[..., Daemon], base: Path) -> None:
    token = base / "token"
    token.write_text(TOKEN)
    token.chmod(0o640)
    os.chown(token, 0, pwd.getpwnam("probing-service").pw_gid)
    address = f"127.0.0.1:{free_port()}"
    daemon = make_daemon("n1", "--http", address, "--token-file", str(token)).start()
    # GIVEN a gap of every ring
    daemon.ctl("pause")
    daemon.ctl("pause", "--resume")
    gap = ("probingd_losses_total", (("source", "collectives"), ("stage", "kernel")))
    log = ("probingd_log_bytes", ())
    found = until(lambda: (page := scraped(address)).get(gap) and page[log] and page, what="the gap and its record")
    # THEN the parts of the page that come from the daemon itself are whole
    own = ("cost", "segments", "log")
    assert [found["probingd_scrape_success", (("part", part),)] for part in own] == [1, 1, 1]
    names = {row["source"] for row in daemon.rows("SELECT source FROM probing.sources")}
    states = {key: value for key, value in found.items() if key[0] == "probingd_source_state"}
    assert {dict(labels)["source"] for _, labels in states} == names
    assert sum(states.values()) == len(names)
    assert found["probingd_drain_age_seconds", ()] < 60
    paused = found["probingd_request_duration_seconds_count", (("method", "Pause"), ("outcome", "ok"))]
    assert paused == 2
