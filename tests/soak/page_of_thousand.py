"""The page of ``probingctl web --all-nodes`` over 1,000 simulated nodes with a hung job of 8,000 ranks, in a browser.

``python tests/soak/page_of_thousand.py [--nodes 1000] [--rounds 3]`` prints a table for docs/benchmarks.md. It ends
with 1 if the page shows something wrong: another culprit, fewer ranks, fewer nodes; not because it is slow.

The nodes are ``tests/simulator``: real sockets and gRPC, in two processes, with answers that they prepared in an
unmeasured round. Nodes, server and browser share the CPUs, so the times have the work of all nodes in them. Chromium
renders by software.
"""

from __future__ import annotations

import argparse
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))

import psutil
from browser import Tab, chromium, memory_of_tab, opened
from playwright.sync_api import Browser, Locator, expect
from ports import free_port
from simulator.cast import Cast
from simulator.hung_job import EACH, HEALTHY, HUNG, culprit_of
from simulator.running import simulated
from statistics_of_blocks import table

PROCESSES = 2
PATIENCE_MS = 120_000
STEADY_S = 30.0
BUDGETS = {"first paint": "1 s", "Job screen: grid and finding": "3 s", "memory of the tab": "500 MB"}
_PAINT = "performance.getEntriesByName('first-contentful-paint')[0]?.startTime ?? 0"
_CTL = Path(sys.executable).parent / "probingctl"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    cast = Cast(options.nodes, free_port(), processes=PROCESSES, jobs_ns=time.time_ns())
    figures: dict[str, list[float]] = {}
    with simulated(cast), chromium() as browser:
        # The nodes prepare their answers.
        Round(cast, browser, {}).run()
        for _ in range(options.rounds):
            Round(cast, browser, figures).run()
    print(table([_row(what, values) for what, values in figures.items()]))


def _row(what: str, values: list[float]) -> Mapping[str, str]:
    name, _, unit = what.rpartition(", ")
    shown = f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f}) {unit}"
    return {"what": name, "median (range)": shown, "budget": BUDGETS.get(name, "")}


class Round:
    """A new server, whose screens are opened one after the other. ``found`` gets the figures by name and unit."""

    def __init__(self, cast: Cast, browser: Browser, found: dict[str, list[float]]) -> None:
        self._cast = cast
        self._browser = browser
        self._found = found
        self._culprit = culprit_of(cast.count)

    def run(self) -> None:
        """Opens all screens. Raises AssertionError for a screen that shows something wrong."""
        with self._server() as (server, origin, entry), opened(self._browser, origin) as tab:
            tab.page.set_default_timeout(PATIENCE_MS)
            expect.set_options(timeout=PATIENCE_MS)
            self._timed("Jobs screen of a new server", lambda: tab.go(entry), lambda: self._jobs(tab))
            self._note("first paint, s", tab.page.evaluate(_PAINT) / 1e3)
            link = tab.page.locator(".jobs tbody tr", has_text=HUNG).locator("th a")
            self._timed("Job screen by a click: the finding's sentence", link.click, lambda: self._sentence(tab))
            address = tab.page.url
            self._timed("Jobs screen", lambda: tab.go("/jobs"), lambda: self._jobs(tab))
            self._timed("Job screen: grid and finding", lambda: tab.page.goto(address), lambda: self._grid(tab))
            self._timed("Job screen: all panels, with both stacks", lambda: None, lambda: self._panels(tab))
            self._steady(server)
            self._note("memory of the tab, MB", memory_of_tab() / 1e6)
            self._timed("Nodes screen", lambda: tab.go("/nodes"), lambda: self._nodes(tab))
            self._timed("Nodes screen: all panels", lambda: None, lambda: _filled(tab))
            self._note("memory of the server, MB", server.memory_info().rss / 1e6)
            assert tab.complaints == [], tab.complaints

    @contextmanager
    def _server(self) -> Iterator[tuple[psutil.Process, str, str]]:
        words = [_CTL, "-t", self._cast.address(0), "--all-nodes", "web", "--port", "0", "--no-browser"]
        with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as server:
            try:
                assert server.stdout is not None
                address = re.search(r"(http://127\.0\.0\.1:\d+)(/\?key=\S+)", server.stdout.readline())
                assert address is not None
                yield psutil.Process(server.pid), address[1], address[2]
            finally:
                server.kill()

    def _timed(self, what: str, begin: Callable[[], object], seen: Callable[[], None]) -> None:
        begun = time.monotonic()
        begin()
        seen()
        self._note(f"{what}, s", time.monotonic() - begun)

    def _note(self, what: str, value: float) -> None:
        self._found.setdefault(what, []).append(value)
        print(f"{what}: {value:.2f}", file=sys.stderr, flush=True)

    def _jobs(self, tab: Tab) -> None:
        hung = tab.page.locator(".jobs tbody tr").first
        expect(hung.locator(".sentence")).to_contain_text(f"ank {self._culprit} ")
        expect(hung).to_contain_text(str(self._ranks))
        expect(tab.page.locator(".jobs tbody tr", has_text=HEALTHY)).to_be_visible()
        self._contract(tab.page.locator("main .panel"))

    def _sentence(self, tab: Tab) -> None:
        expect(tab.page.locator("h1.sentence")).to_contain_text(f"ank {self._culprit} ")

    def _grid(self, tab: Tab) -> None:
        self._sentence(tab)
        expect(tab.page.locator(".who .culprit").first).to_contain_text(f"rank {self._culprit}")
        expect(tab.page.get_by_label(re.compile(rf"Grid of {self._ranks} ranks"))).to_be_visible()

    def _panels(self, tab: Tab) -> None:
        _filled(tab)
        expect(tab.page.locator(".side.culprit .frame.fault")).to_contain_text("read_batch")
        self._contract(tab.page.locator("main .panel"))

    def _nodes(self, tab: Tab) -> None:
        expect(tab.page.locator("main .panel").first.locator("tbody tr")).to_have_count(self._cast.count)
        self._contract(tab.page.locator("main .panel"))

    def _contract(self, panels: Locator) -> None:
        every = self._cast.count
        expect(panels.first).to_contain_text(re.compile(rf"{every} of {every} nodes"))

    def _steady(self, server: psutil.Process) -> None:
        """Notes what the live view costs while nothing happens."""
        nodes = [one for one in psutil.Process().children() if "simulator" in one.cmdline()]
        before, begun = [_cpu_s(one) for one in (server, *nodes)], time.monotonic()
        time.sleep(STEADY_S)
        passed = time.monotonic() - begun
        own, *others = (_cpu_s(one) - spent for one, spent in zip((server, *nodes), before, strict=True))
        self._note("CPU of the server beside an open Job screen, % of a core", own / passed * 100)
        self._note("CPU of a simulated node, % of a core", sum(others) / passed * 100 / self._cast.count)

    @property
    def _ranks(self) -> int:
        return self._cast.count * EACH


def _filled(tab: Tab) -> None:
    expect(tab.page.locator("main .loading")).to_have_count(0)
    said = tab.page.locator("[role=alert]").all_inner_texts()
    assert said == [], said


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


if __name__ == "__main__":
    main()
