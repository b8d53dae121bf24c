"""The page before a real daemon: a job that trains and a job that hangs, read from what the browser shows."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from urllib.parse import quote

import pytest
from browser import Tab, chromium
from diagnosis_jobs import Ranks, folder_of_job
from e2e_support import Daemon
from long import long
from page_server import page_of
from playwright.sync_api import Browser, expect
from waiting import until

from probing.client.cluster import Cluster
from probing.client.wire.loop import wait

NAMED_MS = 60_000


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as found:
        yield found


@contextmanager
def running(script: str, case: str, size: int) -> Iterator[Ranks]:
    """Runs a job of ``size`` ranks with a fault, which begins when ``go`` is called."""
    with folder_of_job() as folder:
        job = Ranks("n1", folder, script, case, size)
        try:
            job.start()
            yield job
        finally:
            job.kill()
            job.wait()


@pytest.fixture
def hanging() -> Iterator[Ranks]:
    """Rank 1 of four waits for a lock that a thread of its own holds, once ``go`` is called."""
    with running("hangs.py", "lock", 4) as job:
        yield job


def shown(tab: Tab) -> None:
    """Waits until all panels of the screen have their answer."""
    expect(tab.page.locator("main .panel").first).to_be_visible()
    expect(tab.page.locator("main .loading")).to_have_count(0)


@pytest.mark.timeout(300)
def test_the_culprit_of_a_hang_and_its_line(
    make_daemon: Callable[..., Daemon], hanging: Ranks, browser: Browser
) -> None:
    # A daemon of its own: the hang must be the only trouble that it knows.
    daemon = make_daemon("n1", "--diagnose.stall_s", "5").start()
    ranks = f"SELECT DISTINCT rank FROM comm.ops WHERE job = '{hanging.job}' AND op = 'all_reduce'"
    until(lambda: len(daemon.rows(ranks)) == 4, what=hanging.output)
    with page_of(daemon, browser) as tab:
        job = tab.page.locator(".jobs tbody tr", has_text=str(hanging.port))
        expect(job).to_contain_text("4 of 4")
        hanging.go()
        expect(job.locator(".sentence")).to_contain_text("ank 1", timeout=NAMED_MS)
        # The call by which an open Job screen learns of it.
        with Cluster(daemon.target) as cluster:
            assert wait(cluster.node(daemon.target).await_finding(hanging.job, 0, 20.0)) > 0
        # First click: who, and the line of Python.
        job.locator("th a").click()
        culprit = tab.page.locator(".who .culprit")
        expect(culprit).to_contain_text("rank 1")
        expect(culprit.locator(".line")).to_contain_text(re.compile(r"hangs\.py:\d+"))
        expect(tab.page.locator(".side.culprit .frame.fault")).to_contain_text("record_metrics")
        expect(tab.page.locator(".side.victim")).to_contain_text("all_reduce")
        expect(tab.page.locator(".wait-box.culprit")).to_contain_text("rank 1")
        expect(tab.page.locator(".next .copy").first).to_be_visible()
        shown(tab)
        tab.picture("hung-job")
        assert tab.violations() == []
        # Second click: the rank, its stack of now.
        culprit.locator("a").click()
        expect(tab.page.locator("h1")).to_contain_text("Rank 1")
        expect(tab.page.locator(".stack").first).to_contain_text("record_metrics")
        path = f"/job/{quote(hanging.job, safe='')}"
        tab.go(path)
        tab.page.get_by_text("Timeline of its begin").click()
        timeline = tab.page.get_by_label(re.compile("Timeline of operations"))
        timeline.press(".")
        expect(tab.page.locator(".chosen")).to_contain_text("all_reduce")
        tab.picture("timeline")
        tab.go(f"{path}/flame?stacks=1")
        shown(tab)
        expect(tab.page.locator(".flame-shown")).to_contain_text("0-3")


@pytest.fixture
def slow() -> Iterator[Ranks]:
    """Rank 1 of two sleeps in each step, once ``go`` is called."""
    with running("slow.py", "sleeps", 2) as job:
        yield job


@long
@pytest.mark.timeout(600)
def test_a_rank_that_slows_the_others(make_daemon: Callable[..., Daemon], slow: Ranks, browser: Browser) -> None:
    # A daemon of its own: the slow rank must be the only trouble that it knows.
    daemon = make_daemon("n1").start()
    steps = f"SELECT count(*) AS n FROM train.steps WHERE job = '{slow.job}'"
    until(lambda: daemon.rows(steps)[0]["n"] > 23, seconds=120, what=slow.output)
    with page_of(daemon, browser) as tab:
        job = tab.page.locator(".jobs tbody tr", has_text=str(slow.port))
        expect(job).to_contain_text("2 of 2")
        slow.go()
        expect(job.locator(".sentence")).to_contain_text("ank 1", timeout=5 * NAMED_MS)
        job.locator("th a").click()
        expect(tab.page.locator(".who .culprit")).to_contain_text("rank 1")
        shown(tab)
        tab.picture("slow-rank")


@pytest.mark.timeout(240)
def test_each_screen_of_a_job_that_trains(daemon: Daemon, stepping: str, browser: Browser) -> None:
    path = f"/job/{quote(stepping, safe='')}"
    with page_of(daemon, browser) as tab:
        expect(tab.page.locator(".jobs tbody tr", has_text=stepping.rpartition(":")[2])).to_be_visible()
        screens = {
            path: "nothing is wrong",
            f"{path}/rank/1": "train",
            f"{path}/timeline?since=1m": "operations",
            f"{path}/flame": "_engine_run_backward",
            f"{path}/flame?stacks=1": "Ranks 0,1",
            "/sql?q=SELECT+rank%2C+step+FROM+train.steps": "rows in",
            "/nodes": "n1",
        }
        for screen, text in screens.items():
            tab.go(screen)
            expect(tab.page.locator("main")).to_contain_text(text)
            shown(tab)
            assert tab.violations() == [], screen
            assert not tab.overflows(), screen
        tab.page.get_by_role("button", name="Check the nodes").click()
        expect(tab.page.locator(".checks tbody tr", has_text="clocks")).to_be_visible()
        assert tab.violations() == []
        assert not tab.overflows()
