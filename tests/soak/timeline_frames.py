"""The timeline of the page with 1,000,000 operations in a browser: load time, frames while it moves, and memory.

``python tests/soak/timeline_frames.py [--rounds 3]`` prints a table for docs/benchmarks.md. The operations of 64 ranks
are those of ``web/fixtures/serve.mjs big``. Chromium renders by software. A frame's length is the time between two
calls of requestAnimationFrame.
"""

from __future__ import annotations

import argparse
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))

from browser import Tab, chromium, memory_of_tab, opened
from page_tools import WEB, node
from playwright.sync_api import Browser, expect
from ports import free_port
from statistics_of_blocks import table

OPERATIONS = "1,000,000"
PATIENCE_MS = 60_000
# Not whole turns to and fro, so that the timeline ends elsewhere.
MOVES = 230
BUDGETS = {"load": "5 s", "p95 of a frame while it pans": "17 ms", "memory of the tab": "500 MB"}
_RECORD = """() => {
  window.frames_ms = [];
  let before = performance.now();
  const next = (now) => {
    window.frames_ms.push(now - before);
    before = now;
    window.recording = requestAnimationFrame(next);
  };
  window.recording = requestAnimationFrame(next);
}"""
_STOP = "() => { cancelAnimationFrame(window.recording); return window.frames_ms.slice(1); }"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    figures: dict[str, list[float]] = {}
    with fixture() as origin, chromium() as browser:
        for _ in range(options.rounds):
            for name, value in measured(browser, origin).items():
                print(f"{name}: {value:.2f}", file=sys.stderr, flush=True)
                figures.setdefault(name, []).append(value)
    print(table([_row(name, values) for name, values in figures.items()]))


def _row(name: str, values: list[float]) -> Mapping[str, str]:
    what, _, unit = name.rpartition(", ")
    shown = f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f}) {unit}"
    return {"what": what, "median (range)": shown, "budget": BUDGETS.get(what, "")}


@contextmanager
def fixture() -> Iterator[str]:
    """Serves the page with the answers of the fixture; yields its origin."""
    port = free_port()
    words = [node(), "fixtures/serve.mjs", str(port), "big"]
    with subprocess.Popen(words, cwd=WEB, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            server.stdout.readline()
            yield f"http://127.0.0.1:{port}"
        finally:
            server.kill()


def measured(browser: Browser, origin: str) -> dict[str, float]:
    """Returns the figures of a new tab, by name and unit."""
    with opened(browser, origin) as tab:
        expect.set_options(timeout=PATIENCE_MS)
        tab.page.set_default_timeout(PATIENCE_MS)
        begun = time.monotonic()
        tab.go("/job/llm-7b/timeline?since=5m")
        expect(tab.page.get_by_text(f"{OPERATIONS} operations").first).to_be_visible()
        tab.page.evaluate("() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
        loaded = time.monotonic() - begun
        whole = frames(tab, wheel=False)
        for _ in range(6):
            tab.page.get_by_label("zoom in", exact=False).click()
        expect(tab.page).to_have_url(re.compile("view="))
        before = tab.page.url
        near = frames(tab, wheel=False)
        tab.page.wait_for_url(lambda url: "view=" in url and url != before)
        zooming = frames(tab, wheel=True)
        assert tab.complaints == [], tab.complaints
        return {
            "load, s": loaded,
            "p95 of a frame while it pans, ms": _p95(near),
            "p95 of a frame while all operations are in sight and it pans, ms": _p95(whole),
            "p95 of a frame while it zooms, ms": _p95(zooming),
            "memory of the tab, MB": memory_of_tab() / 1e6,
        }


def frames(tab: Tab, *, wheel: bool) -> list[float]:
    """Returns the lengths of the frames (ms) while the pointer drags the timeline to and fro, or the wheel zooms it."""
    box = tab.page.get_by_label(re.compile("Timeline of operations")).bounding_box()
    assert box is not None
    x, y = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
    tab.page.mouse.move(x, y)
    if wheel:
        tab.page.keyboard.down("Control")
    else:
        tab.page.mouse.down()
    tab.page.evaluate(_RECORD)
    for step in range(MOVES):
        forth = step % 80 < 40
        if wheel:
            tab.page.mouse.wheel(0, -40 if forth else 40)
        else:
            x += 7 if forth else -7
            tab.page.mouse.move(x, y)
    lengths: list[float] = tab.page.evaluate(_STOP)
    if wheel:
        tab.page.keyboard.up("Control")
    else:
        tab.page.mouse.up()
    return lengths


def _p95(values: list[float]) -> float:
    return sorted(values)[int(len(values) * 0.95)]


if __name__ == "__main__":
    main()
