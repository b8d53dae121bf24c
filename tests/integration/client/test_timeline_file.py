"""The timeline as one HTML file, in a browser without a network: what it shows, what it asks for, hostile names."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest
from browser import Tab, chromium, opened
from client_fake_node import SECOND, FakeNode, operation
from playwright.sync_api import Browser, expect
from test_web_page import entered
from web_scene import served

from probing.api.errors import PeerError
from probing.client.cluster import Cluster

Run = Callable[..., tuple[int, str, str]]
HOSTILE = "</script><img src=x onerror=alert(1)><!--\u202e"
SHOWN = "</script><img src=x onerror=alert(1)><!--\\u202e"
TABLES = {
    "process.processes": "command",
    "comm.ops": "comm_name",
    "comm.inflight": "comm_name",
    "python.samples": "thread",
}


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as found:
        yield found


@pytest.fixture
def file(pair: tuple[FakeNode, FakeNode], ctl: Run, tmp_path: Path) -> Path:
    """The timeline of a job that hangs in its last operation, whose name and texts are hostile."""
    for node in pair:
        node.timed = True
        with node.database("process.processes") as cursor:
            # As in the other tables: the same processes.
            cursor.execute("UPDATE process.processes SET start_ns = ?", [SECOND])
        for table, column in TABLES.items():
            with node.database(table) as cursor:
                cursor.execute(f"UPDATE {table} SET job = ?, {column} = ?", [HOSTILE, HOSTILE])
    return written(ctl, tmp_path, HOSTILE)


def written(ctl: Run, directory: Path, job: str) -> Path:
    """Writes the range from 0.93 s before the last operation, nine operations earlier, until now."""
    path = directory / "x.html"
    called = datetime.fromtimestamp(operation("alpha", 0, 50)["t_call"] / 1e9, timezone.utc)
    begin = f"{called - timedelta(seconds=0.93):%Y-%m-%dT%H:%M:%S.%f}Z"
    code, _, err = ctl("timeline", "--all-nodes", "--job", job, "--from", begin, "-o", str(path))
    assert code == 0, err
    return path


@contextmanager
def shown(browser: Browser, path: Path, size: str = "laptop", theme: str = "light") -> Iterator[Tab]:
    with opened(browser, "file:", size, theme) as tab:
        tab.page.on("request", lambda asked: tab.strange.append(asked.url))
        tab.page.context.set_offline(True)
        tab.page.goto(path.as_uri())
        yield tab


# Which share of each rank's row, right of its name, is not empty.
FILLED = """canvas => {
  const panel = parseInt(getComputedStyle(document.documentElement).getPropertyValue("--panel").trim().slice(1), 16);
  const ratio = devicePixelRatio, left = 100 * ratio, width = canvas.width - left;
  return [52, 74, 116, 138].map(y => {
    const { data } = canvas.getContext("2d").getImageData(left, (y + 5) * ratio, width, 1);
    let filled = 0;
    for (let i = 0; i < data.length; i += 4) filled += ((data[i] << 16) | (data[i + 1] << 8) | data[i + 2]) !== panel;
    return filled / width;
  });
}"""


@pytest.mark.parametrize(("size", "theme"), [("laptop", "light"), ("phone", "dark")])
def test_the_file_shows_the_timeline_without_a_network(browser: Browser, file: Path, size: str, theme: str) -> None:
    with shown(browser, file, size, theme) as tab:
        expect(tab.page.locator("h1")).to_contain_text(f"Timeline · {SHOWN} 39 operations")
        assert tab.page.title() == f"Timeline · {SHOWN}"
        expect(tab.page.locator(".file-range")).to_contain_text(re.compile(r"^20\d\d-.*Z – 20\d\d-.*Z \("))
        expect(tab.page.locator(".contract").first).to_contain_text("2 of 2 nodes answered")
        expect(tab.page.locator(".contract").first).to_contain_text(re.compile("no rows lost.*clocks agree to"))
        canvas = tab.page.get_by_label(re.compile("Timeline of operations"))
        # The operation in flight fills the rows of the three ranks that wait.
        tab.page.wait_for_function(f"canvas => ({FILLED})(canvas)[3] > 0.5", arg=canvas.element_handle())
        filled = canvas.evaluate(FILLED)
        assert [share > 0.5 for share in filled] == [True, True, False, True]
        box = canvas.bounding_box()
        assert box is not None
        canvas.click(position={"x": 0.9 * box["width"], "y": 60})
        expect(tab.page.locator(".chosen")).to_contain_text(f"all_reduce #50 {SHOWN}")
        expect(tab.page.locator(".chosen")).to_contain_text(re.compile("rank 0 · waits .* · not ended"))
        expect(tab.page.locator("tbody tr")).to_have_count(3)
        expect(tab.page.locator(".row-chosen")).to_contain_text("alpha")
        canvas.press("[")
        expect(tab.page.locator(".range-head")).to_be_visible()
        # There is no page to which a link could lead.
        assert tab.page.locator("a, img").count() == 0
        assert tab.violations() == []
        assert not tab.overflows()
        assert tab.complaints == []
        assert set(tab.strange) == {file.as_uri()}


def test_the_language_of_the_browser_is_spoken(browser: Browser, file: Path) -> None:
    with opened(browser, "file:", locale="zh-CN") as tab:
        tab.page.goto(file.as_uri())
        expect(tab.page.locator("h1")).to_contain_text("时间线")
        expect(tab.page.locator("html")).to_have_attribute("lang", "zh-Hans")


def test_a_node_that_stops_answering_is_named(
    browser: Browser, pair: tuple[FakeNode, FakeNode], ctl: Run, tmp_path: Path
) -> None:
    pair[1].broken = {"gpu.utilization": PeerError("the collector is gone")}
    with shown(browser, written(ctl, tmp_path, "j1")) as tab:
        expect(tab.page.locator(".contract").first).to_contain_text("1 of 2 nodes answered")
        tab.page.locator(".contract summary").click()
        expect(tab.page.locator(".contract li")).to_contain_text("gpu.utilization: the collector is gone")


def test_a_file_that_is_cut_says_so(browser: Browser, file: Path) -> None:
    text = file.read_text()
    begin = text.index('id="columns">\n') + 14
    half = begin + (text.index("</script>", begin) - begin) // 8 * 4
    file.write_text(text[:half] + text[text.index("</script>", begin) :])
    with shown(browser, file) as tab:
        expect(tab.page.get_by_role("alert")).to_contain_text("this file is cut or changed")
    file.write_text(text[:half])
    with shown(browser, file) as tab:
        expect(tab.page.locator("main")).to_contain_text("If this text stays, the file is cut")


def test_without_javascript_the_file_says_what_to_do_instead(browser: Browser, file: Path) -> None:
    context = browser.new_context(java_script_enabled=False)
    plain = context.new_page()
    plain.goto(file.as_uri())
    assert "probingctl timeline" in plain.locator("main").inner_text()
    context.close()


def test_the_page_saves_its_timeline_as_such_a_file(
    browser: Browser, pair: tuple[FakeNode, FakeNode], tmp_path: Path
) -> None:
    with Cluster(pair[0].address, all_nodes=True) as cluster, served(cluster) as page, entered(browser, page) as tab:
        tab.go("/job/j1/timeline?since=5m")
        with tab.page.expect_download() as saved:
            tab.page.get_by_role("link", name="Save as one file").click()
        path = tmp_path / saved.value.suggested_filename
        saved.value.save_as(path)
    assert path.name == "timeline.html"
    with shown(browser, path) as tab:
        # With the operations in flight.
        expect(tab.page.locator("h1")).to_contain_text("Timeline · j1 203 operations")
        assert tab.complaints == []
