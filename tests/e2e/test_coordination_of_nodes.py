"""Three daemons with addresses of their own, each with one rank: one of them names the culprit, for all, once.

``make coordination`` has the time-outs that people use, more clocks apart, and prints how long each verdict takes.
"""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from diagnosis_jobs import Ranks, folder_of_job
from e2e_support import Daemon
from long import long
from network_namespaces import may_make_namespaces
from site_of_nodes import MOVED, STALL_S, Site, findings, site_of
from waiting import until

pytestmark = pytest.mark.skipif(not may_make_namespaces(), reason="network namespaces cannot be made here")

CULPRIT = 1
IN_STEP = (0.0, 0.0, 0.0)
# How far the clock of each node is ahead of the machine's, s.
CLOCKS = [IN_STEP, (0.0, 0.05, -0.05), (5.0, 0.0, -5.0), (0.0, 5.0, 5.0)]


@pytest.fixture
def site(request: pytest.FixtureRequest, base: Path, make_daemon: Callable[..., Daemon]) -> Iterator[Site]:
    with site_of(base, make_daemon, clocks=getattr(request, "param", IN_STEP)) as made:
        yield made


@pytest.fixture
def job(site: Site) -> Iterator[Ranks]:
    with folder_of_job() as folder:
        ranks = Ranks("n1", folder, "hangs.py", "stopped", 3)
        try:
            site.start(ranks)
            site.await_steps(ranks)
            yield ranks
        finally:
            ranks.kill()
            ranks.wait()


def named(site: Site, job: Ranks, asked: int = 0) -> dict[str, Any]:
    """Makes the job hang, and returns the one finding that the webhook gets."""
    job.go()
    began = time.monotonic()
    [post] = until(site.hangs, what=site.daemons[asked].tail)
    print(f"named {time.monotonic() - began:.1f} s after the fault, with stall_s = {STALL_S:g}")
    return post


@long
@pytest.mark.parametrize("site", CLOCKS, indirect=True, ids=str)
def test_the_coordinator_names_the_culprit_on_all_nodes(request: pytest.FixtureRequest, site: Site, job: Ranks) -> None:
    ahead = request.node.callspec.params["site"]
    _, report = site.ask("SELECT count(*) FROM probing.sources")
    assert len(report["answered"]) == 3
    for answered in report["answered"]:
        apart_ns = ahead[int(answered["node"][1:]) - 1] * 1e9
        assert abs(answered["clock_offset_ns"] - apart_ns) <= answered["clock_error_ns"] + 1e6
    post = named(site, job)
    assert [(c["rank"], c["node"]) for c in post["culprits"]] == [(CULPRIT, "n2")], post["missing"]
    assert post["node"] == "n1"
    rows = [until(lambda d=d: findings(d, job), what=d.tail) for d in site.daemons]  # type: ignore[misc]
    assert [[row["found_by"] for row in own] for own in rows] == [["n1"]] * 3
    assert {row["finding_id"] for own in rows for row in own} == {post["finding_id"]}
    # The stacks are those of the culprit's node and of a victim.
    roles = {(stack["node"], stack["role"]) for stack in json.loads(rows[2][0]["stacks"])}
    assert ("n2", "culprit") in roles
    assert "victim" in {role for _, role in roles}

    # WHEN the coordinator is killed, the next node goes on, and the hook is not started again
    site.kill(0)
    until(lambda: site.states(1)["n1"] == "failed", what=lambda: site.states(1))
    sql = f"SELECT count(*) AS n FROM diagnosis.findings WHERE job = '{job.job}' AND found_by = 'n2'"
    until(lambda: site.daemons[1].rows(sql)[0]["n"], what=site.daemons[1].tail)
    assert len(site.hangs()) == 1
    # The verdict lacks a witness.
    [row] = findings(site.daemons[2], job)
    assert row["ranks"] == str(CULPRIT)


@long
def test_the_next_node_names_the_culprit_where_the_coordinator_died(site: Site, job: Ranks) -> None:
    site.kill(0)
    post = named(site, job, 1)
    assert [(c["rank"], c["node"]) for c in post["culprits"]] == [(CULPRIT, "n2")], post["missing"]
    assert post["node"] == "n2"
    assert any("n1" in text for text in post["missing"])
    [row] = until(lambda: findings(site.daemons[2], job), what=site.daemons[2].tail)
    assert row["found_by"] == "n2"


@long
def test_states_follow_links_and_daemons(site: Site) -> None:
    def answering() -> tuple[list[str], list[str]]:
        """Returns the nodes that answer the first one, and those that it names as failed."""
        rows, report = site.ask("SELECT node, count(*) AS n FROM probing.sources GROUP BY node ORDER BY node")
        return [row["node"] for row in rows], [failed["node"] for failed in report["failed"]]

    assert answering() == (["n1", "n2", "n3"], [])
    # A link that is cut.
    site.spaces[2].cut()
    site.await_state(2, "suspect")
    site.await_state(2, "failed")
    assert answering() == (["n1", "n2"], ["n3"])
    # Beyond the cut, the others are gone.
    assert site.states(2)["n1"] == "failed"
    site.spaces[2].join()
    site.await_state(2, "healthy")
    assert answering() == (["n1", "n2", "n3"], [])
    # A daemon that is paused.
    site.signal(1, signal.SIGSTOP)
    site.await_state(1, "failed", seen_by=2)
    site.await_state(1, "failed")
    assert answering() == (["n1", "n3"], ["n2"])
    site.signal(1, signal.SIGCONT)
    site.await_state(1, "healthy")
    # A daemon that is stopped, and comes back with another address.
    site.daemons[2].stop()
    site.await_state(2, "failed")
    site.spaces[2].move(int(MOVED.rpartition(".")[2]))
    site.listen()
    site.daemons[2].start()
    site.await_state(2, "healthy")
    site.await_state(2, "healthy", seen_by=1)
    assert answering() == (["n1", "n2", "n3"], [])
