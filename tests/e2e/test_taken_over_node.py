"""A node that was taken over, with a certificate of its own, beside two honest ones with a job that hangs.

Its name comes before theirs, so that it would diagnose what it takes part in. It has a process that says that it is a
rank of their job, and finds nothing: for its daemon no job ever counts as stalled.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from diagnosis_jobs import Ranks, folder_of_job
from e2e_support import Daemon
from long import long
from network_namespaces import may_make_namespaces
from site_of_nodes import STALL_S, Site, findings, site_of
from waiting import until

from probing.daemon.diagnose.coordination.coordinator import LOOKS

pytestmark = pytest.mark.skipif(not may_make_namespaces(), reason="network namespaces cannot be made here")

TAKEN, HONEST = 0, (1, 2)
CULPRIT = 1
# It waits, connected with the store of rank 0 or with nobody.
_STRANGER = """
import socket, sys, time
held = socket.create_connection((sys.argv[1], int(sys.argv[2]))) if len(sys.argv) > 1 else None
time.sleep(900)
"""


@pytest.fixture
def site(base: Path, make_daemon: Callable[..., Daemon]) -> Iterator[Site]:
    more = [["--diagnose.stall_s=3600", "--net.tcp_interval_s=1"], *(["--net.tcp_interval_s=1"],) * 2]
    with site_of(base, make_daemon, ("-", "n1", "n2"), more=more) as made:
        yield made


@pytest.fixture
def job(site: Site) -> Iterator[Ranks]:
    with folder_of_job() as folder:
        ranks = Ranks("n1", folder, "hangs.py", "stopped", 2)
        try:
            site.start(ranks, HONEST)
            site.await_steps(ranks, HONEST)
            yield ranks
        finally:
            ranks.kill()
            ranks.wait()


def stranger(site: Site, job: Ranks, *connected: str) -> None:
    """Starts the process of the node that was taken over, and waits until the others hear of it."""
    site.run_rank(job, 2, TAKEN, 3, HONEST[0], [sys.executable, "-c", _STRANGER, *connected])
    sql = f"SELECT count(*) AS n FROM process.processes WHERE job = '{job.job}' AND role = 'trainer'"
    until(lambda: site.daemons[TAKEN].rows(sql)[0]["n"] >= 1, what=site.daemons[TAKEN].tail)


def reason(daemon: Daemon) -> str:
    """What `status` says of the diagnosis of jobs."""
    [row] = daemon.rows("SELECT reason FROM probing.sources WHERE source = 'diagnose'")
    return row["reason"] or ""


def the_truth(site: Site, job: Ranks) -> list[dict[str, Any]]:
    """Waits until both honest nodes name the culprit and nobody else, and returns what the hook got."""
    posts = until(site.hangs, what=site.daemons[1].tail)
    assert [(c["rank"], c["node"]) for post in posts for c in post["culprits"]] == [(CULPRIT, "n2")]
    rows = [until(lambda d=site.daemons[at]: findings(d, job), what=site.daemons[at].tail) for at in HONEST]  # type: ignore[misc]
    assert [[(row["ranks"], row["found_by"]) for row in own] for own in rows] == [[(str(CULPRIT), "n1")]] * 2, rows
    return posts


@long
def test_a_node_that_claims_a_job_does_not_keep_it_from_being_diagnosed(site: Site, job: Ranks) -> None:
    stranger(site, job)
    until(lambda: "-" in reason(site.daemons[1]), what=lambda: reason(site.daemons[1]))
    job.go()
    [post] = the_truth(site, job)
    assert any("node - " in text for text in post["missing"])
    assert findings(site.daemons[TAKEN], job) == []
    # Nobody waited for it.
    assert "leads" not in reason(site.daemons[1])


@long
def test_a_node_that_leads_a_job_in_silence_is_replaced_and_named(site: Site, job: Ranks) -> None:
    stranger(site, job)
    until(lambda: "-" in reason(site.daemons[1]), what=lambda: reason(site.daemons[1]))
    # It counts once a process of it is connected with rank 0: nobody can tell that from a rank.
    stranger(site, job, site.spaces[HONEST[0]].address, str(job.port))
    until(lambda: not reason(site.daemons[1]), what=lambda: reason(site.daemons[1]))
    job.go()
    the_truth(site, job)
    until(lambda: "node - leads" in reason(site.daemons[1]), what=lambda: reason(site.daemons[1]))
    print(f"replaced after {LOOKS} looks, with stall_s = {STALL_S:g}")
