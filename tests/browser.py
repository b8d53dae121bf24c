"""A headless Chromium for tests of the page, what axe-core finds wrong with a screen, and what the browser refused."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest
from page_tools import WEB, node
from playwright.sync_api import Browser, Page, expect, sync_playwright

__all__ = ("SIZES", "Tab", "chromium", "memory_of_tab", "opened")

SIZES = {"laptop": (1280, 800), "desk": (1920, 1080), "phone": (390, 844)}
AXE = WEB / "node_modules" / "axe-core" / "axe.min.js"
# On a machine that does other things as well.
PATIENCE_MS = 30_000
LEVELS = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa"]


@contextmanager
def chromium() -> Iterator[Browser]:
    """Starts Debian's Chromium; skips where there is none."""
    program = shutil.which("chromium")
    if program is None:
        pytest.skip("no chromium here")
    expect.set_options(timeout=PATIENCE_MS)
    with sync_playwright() as playwright:
        # Root has no sandbox, and machines of tests have no GPU.
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox", "--disable-gpu"])
        yield browser
        browser.close()


@dataclass
class Tab:
    """A tab of the browser. ``complaints``: errors of its console and of its scripts. ``strange``: addresses of other
    origins that it asked."""

    page: Page
    origin: str
    complaints: list[str] = field(default_factory=list)
    strange: list[str] = field(default_factory=list)

    def go(self, path: str) -> None:
        self.page.goto(f"{self.origin}{path}")

    def picture(self, name: str) -> None:
        """Writes the window to ``name``.png in the folder that PROBINGD_PICTURES names (``make pictures``)."""
        if folder := os.environ.get("PROBINGD_PICTURES"):
            self.page.evaluate("scrollTo(0, 0)")
            self.page.screenshot(path=Path(folder) / f"{name}.png", animations="disabled")

    def violations(self) -> list[str]:
        """Returns what axe-core finds wrong by levels A and AA."""
        node()
        self.page.evaluate(AXE.read_text())
        found = self.page.evaluate(
            "levels => axe.run(document, {runOnly: {type: 'tag', values: levels}}).then(r => r.violations)", LEVELS
        )
        return [f"{one['id']}: {[element['html'][:200] for element in one['nodes']][:5]}" for one in found]

    def overflows(self) -> bool:
        """Whether the page is wider than its window."""
        return bool(self.page.evaluate("document.documentElement.scrollWidth > innerWidth"))


@contextmanager
def opened(browser: Browser, origin: str, size: str = "laptop", theme: str = "light", **options: str) -> Iterator[Tab]:
    """Opens a tab in a window of ``size``; ``origin`` as ``http://127.0.0.1:7088``. ``options``: of the context."""
    width, height = SIZES[size]
    context = browser.new_context(
        viewport={"width": width, "height": height},
        color_scheme=theme,  # type: ignore[arg-type]
        **options,  # type: ignore[arg-type]
    )
    tab = Tab(context.new_page(), origin)
    tab.page.set_default_timeout(PATIENCE_MS)
    tab.page.on("pageerror", lambda error: tab.complaints.append(str(error)))
    tab.page.on("console", lambda said: tab.complaints.append(said.text) if said.type == "error" else None)
    tab.page.on("request", lambda asked: tab.strange.append(asked.url) if not _own(asked.url, origin) else None)
    try:
        yield tab
    finally:
        context.close()


def memory_of_tab() -> float:
    """Returns the memory of the process that renders the tab, bytes: the largest renderer below this process."""
    below = psutil.Process().children(recursive=True)
    return float(max(one.memory_full_info().pss for one in below if "--type=renderer" in one.cmdline()))


def _own(url: str, origin: str) -> bool:
    return url.startswith((f"{origin}/", "data:", "blob:"))
