"""How soon the Job screen of the page names the culprit of a real job that hangs, diverges or dies.

The tab shows the job before the fault. The daemon's table of findings and the text of the screen are read in turn.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import pytest
from browser import Tab, chromium, opened
from diagnosis_corpus import Case, await_fault, await_steps, cases_of, fits, start, watching
from diagnosis_faults import DEATHS, DIVERGENCES, HANGS
from diagnosis_jobs import Ranks
from e2e_support import Daemon, remove
from page_server import Address, page_server
from playwright.sync_api import Browser, expect

from probing.api.text import sql_text
from probing.client.cluster import Cluster

ALL = (*HANGS, *DIVERGENCES, *DEATHS)
# The longest time from the moment when the finding can be read by a query to its text on the screen, s.
BOUND_S = 2.0
_POLL_S = 0.05
_FINDINGS = "SELECT verdict, state, sentence, ranks FROM diagnosis.findings WHERE job = {job} AND severity <> 'note'"
_READ = """() => {
  const texts = (selector) => [...document.querySelectorAll(selector)].map((element) => element.innerText);
  return {sentence: texts("h1.sentence").join(), verdict: texts(".finding-head code").join(),
          ranks: texts(".who .culprit .who-rank a")};
}"""
# Lengths of time in a sentence grow, and a culprit that runs goes on to another line.
_MOVES = re.compile(r"\d+(?:\.\d+)? ?(?:ms|s|min|h)\b|(?<=\.py:)\d+")


@dataclass
class Measured:
    """What is known of a case: when the last query began that did not have its finding, and when the screen named the
    culprits (monotonic s), the sentence there, and the sentences of its findings."""

    row_at: float = 0.0
    page_at: float = 0.0
    sentence: str = ""
    sentences: frozenset[str] = frozenset()

    @property
    def complete(self) -> bool:
        return bool(self.row_at and self.page_at)

    @property
    def delay_s(self) -> float:
        """The most that the screen may have come after the finding."""
        return self.page_at - self.row_at


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as found:
        yield found


@pytest.fixture(scope="module")
def daemon(module_base: Path) -> Iterator[Daemon]:
    # A daemon of its own: it diagnoses after two seconds without progress.
    daemon = watching(Daemon(module_base, "n1"), logs={"enabled": True}, host={"memory_interval_s": 1})
    yield daemon.start()
    remove(daemon)


@pytest.fixture(scope="module")
def address(daemon: Daemon) -> Iterator[Address]:
    with page_server(daemon) as address:
        yield address


@pytest.fixture(scope="module")
def delays() -> Iterator[dict[str, float]]:
    """The delays by case, which are printed after the last one: ``pytest -s`` shows them."""
    found: dict[str, float] = {}
    yield found
    for name, delay in sorted(found.items(), key=lambda item: item[1]):
        print(f"\n{name}: {delay:+.2f} s from the finding to the screen, at most", end="")
    print()


@pytest.mark.timeout(300)
@cases_of(ALL, ())
def test_the_culprit_is_on_the_screen_in_time(
    daemon: Daemon, address: Address, browser: Browser, delays: dict[str, float], case: Case
) -> None:
    with contextlib.ExitStack() as stack:
        ranks = start(case, daemon.name, stack)
        await_steps(daemon, case, ranks)
        tab = stack.enter_context(opened(browser, address.origin))
        tab.go(address.entry)
        tab.go(f"/job/{quote(ranks.job_at(daemon.name), safe='')}")
        expect(tab.page.locator(".finding-head")).to_be_visible()
        expect(tab.page.get_by_label(re.compile(rf"Grid of {case.ranks} ranks"))).to_be_visible()
        ranks.go()
        await_fault(case, ranks)
        cluster = stack.enter_context(Cluster(daemon.target))
        measured = measure(cluster, tab, case, ranks)
        delays[case.name] = measured.delay_s
        assert measured.sentence in measured.sentences
        assert measured.delay_s <= BOUND_S
        assert tab.complaints == []


def measure(cluster: Cluster, tab: Tab, case: Case, ranks: Ranks) -> Measured:
    """Reads the findings and the screen in turn until both name the culprits of ``case``."""
    sql = _FINDINGS.format(job=sql_text(ranks.job_at("n1")))
    right = {case.verdict, *case.also}
    measured = Measured()
    deadline = time.monotonic() + case.patience_s
    begun = before = time.monotonic()
    while not measured.complete:
        before, begun = begun, time.monotonic()
        rows = cluster.query(sql).to_pylist()
        measured.sentences = frozenset(timeless(row["sentence"]) for row in rows if row["verdict"] in right)
        if not measured.row_at and any(fits(case, row) for row in rows):
            measured.row_at = before
        shown = tab.page.evaluate(_READ)
        named = {int(number) for text in shown["ranks"] for number in re.findall(r"\d+", text)}
        if not measured.page_at and named == case.culprits and shown["verdict"] in right:
            measured.page_at, measured.sentence = time.monotonic(), timeless(shown["sentence"])
        assert time.monotonic() < deadline, f"{shown}\n{rows}\n{ranks.output()}"
        time.sleep(_POLL_S)
    return measured


def timeless(sentence: str) -> str:
    """Returns a sentence without its lengths of time, its line of Python, and its capital, which the screen adds."""
    return _MOVES.sub("#", sentence).casefold()
