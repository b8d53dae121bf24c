"""The page in a browser, before nodes that answer from tables: screens, keys, states, hostile names, accessibility."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from browser import SIZES, Tab, chromium, opened
from client_fake_node import FakeNode
from client_top_scene import SENTENCE, Scene
from playwright.sync_api import Browser, expect
from test_client_diagnose import hung
from web_scene import KEY, Page, served

from probing.api.errors import PrivilegeError
from probing.client.cluster import Cluster
from probing.diagnosis.facts_file import to_json

JOB = "llm-7b"
SCREENS = {
    "jobs": "/jobs",
    "job": f"/job/{JOB}",
    "ranks as a table": f"/job/{JOB}?ranks=table",
    "ranks by lag": f"/job/{JOB}?by=lag_ns",
    "rank": f"/job/{JOB}/rank/2",
    "timeline": f"/job/{JOB}/timeline?since=5m",
    "flame graph": f"/job/{JOB}/flame",
    "difference": f"/job/{JOB}/flame?rank=2&against=0",
    "merged stacks": f"/job/{JOB}/flame?stacks=1",
    "sql": "/sql?q=SELECT+ts%2C+node%2C+rank%2C+step+FROM+train.steps",
    "chart": "/sql?q=SELECT+ts%2C+rank%2C+step+FROM+train.steps&show=chart",
    "nodes": "/nodes",
}


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as found:
        yield found


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    """A stuck, a slow and a plain job with GPUs, on two nodes."""
    with Scene(tmp_path) as made:
        for node, ranks in (("alpha", (0, 1)), ("beta", (2, 3))):
            made.nodes[node].facts = {JOB: [to_json(replace(hung(node, *ranks), job=JOB))]}
        yield made


@pytest.fixture
def page(scene: Scene) -> Iterator[Page]:
    with Cluster(scene.first.address, all_nodes=True) as cluster, served(cluster) as page:
        yield page


@contextmanager
def entered(browser: Browser, page: Page, size: str = "laptop", theme: str = "light") -> Iterator[Tab]:
    with opened(browser, f"http://127.0.0.1:{page.port}", size, theme) as tab:
        tab.go(f"/?key={KEY}")
        yield tab


@pytest.fixture
def tab(browser: Browser, page: Page) -> Iterator[Tab]:
    with entered(browser, page) as found:
        yield found


def shown(tab: Tab) -> None:
    """Waits until all panels of the screen have their answer."""
    expect(tab.page.locator("main .panel").first).to_be_visible()
    expect(tab.page.locator("main .loading")).to_have_count(0)


@pytest.mark.parametrize(("size", "theme"), [("laptop", "light"), ("phone", "dark")])
def test_each_screen_is_accessible_and_fits_its_window(browser: Browser, page: Page, size: str, theme: str) -> None:
    assert size in SIZES
    with entered(browser, page, size, theme) as tab:
        wrong = {}
        for name, path in SCREENS.items():
            tab.go(path)
            shown(tab)
            assert tab.page.locator("[role=alert]").all_inner_texts() == [], name
            wrong[name] = tab.violations() + (["it is wider than its window"] if tab.overflows() else [])
        assert {name: found for name, found in wrong.items() if found} == {}
        # The Content-Security-Policy has refused nothing, and nobody else was asked.
        assert tab.complaints == []
        assert tab.strange == []


def test_the_line_of_python_is_two_clicks_from_the_start(tab: Tab) -> None:
    first = tab.page.locator(".jobs tbody tr").first
    expect(first).to_contain_text(SENTENCE[1:])
    first.locator("th a").click()
    expect(tab.page.locator(".who .culprit")).to_contain_text("rank 2")
    expect(tab.page.locator(".who .line")).to_contain_text("train.py:31")
    # Both stacks, with the frame where they part.
    expect(tab.page.locator(".side.culprit .frame.fault")).to_contain_text("read_batch")
    expect(tab.page.locator(".side.victim")).to_contain_text("all_reduce")
    expect(tab.page.locator(".frame.parted")).to_have_count(2)
    tab.page.locator(".who .culprit a").click()
    expect(tab.page.locator("h1")).to_contain_text("Rank 2")
    expect(tab.page.locator(".stack").first).to_contain_text("read_batch")


def test_who_waits_for_whom_is_drawn(browser: Browser, pair: tuple[FakeNode, FakeNode]) -> None:
    pair[0].facts = {"j1": [to_json(hung("alpha", 0, 1))]}
    pair[1].facts = {"j1": [to_json(hung("beta", 2, 3))]}
    with Cluster(pair[0].address, all_nodes=True) as cluster, served(cluster) as page, entered(browser, page) as tab:
        tab.go("/job/j1")
        expect(tab.page.locator(".wait-box")).to_have_count(2)
        expect(tab.page.locator(".wait-box.culprit")).to_contain_text("rank 2")
        expect(tab.page.locator(".wait-arrow")).to_contain_text("all_reduce #50")


def test_a_pasted_address_comes_back_to_the_same_view(tab: Tab) -> None:
    tab.go(f"/job/{JOB}")
    tab.page.get_by_role("combobox", name="Coloured by").select_option("cpu_pct")
    tab.page.get_by_role("button", name="As a table").click()
    address = tab.page.url
    assert "by=cpu_pct" in address
    tab.go("/nodes")
    tab.page.goto(address)
    expect(tab.page.get_by_role("combobox", name="Coloured by")).to_have_value("cpu_pct")
    expect(tab.page.get_by_role("button", name="As a grid")).to_be_visible()


def test_the_grid_is_used_by_keys_alone(tab: Tab) -> None:
    tab.go(f"/job/{JOB}")
    grid = tab.page.get_by_label(re.compile("Grid of 4 ranks"))
    grid.focus()
    # The culprit comes first.
    expect(tab.page.locator(".grid-shown")).to_contain_text("rank 2")
    grid.press("ArrowRight")
    expect(tab.page.locator(".grid-shown")).to_contain_text("rank 3")
    grid.press("Enter")
    expect(tab.page.locator("h1")).to_contain_text("Rank 3")


def test_the_timeline_is_used_by_keys_alone(tab: Tab) -> None:
    tab.go(f"/job/{JOB}/timeline?since=5m")
    timeline = tab.page.get_by_label(re.compile("Timeline of operations"))
    timeline.focus()
    timeline.press("+")
    timeline.press("+")
    expect(tab.page).to_have_url(re.compile(r"view=\d"))
    timeline.press("0")
    expect(tab.page).not_to_have_url(re.compile("view="))
    timeline.press(".")
    expect(tab.page.locator(".chosen")).to_contain_text("all_reduce")
    timeline.press("[")
    expect(tab.page.locator(".range-head a")).to_have_attribute("href", re.compile(r"/flame\?from=20\d\d-.*wall=1"))
    expect(tab.page.locator(".two table").first).to_contain_text("all_reduce")
    timeline.press("Escape")
    expect(tab.page.locator(".range-head")).to_have_count(0)


def test_the_pointer_zooms_pans_and_selects(tab: Tab) -> None:
    tab.go(f"/job/{JOB}/timeline?since=5m")
    box = tab.page.get_by_label(re.compile("Timeline of operations")).bounding_box()
    assert box is not None
    middle = box["x"] + box["width"] / 2, box["y"] + 70
    tab.page.mouse.move(*middle)
    tab.page.keyboard.down("Control")
    tab.page.mouse.wheel(0, -400)
    tab.page.keyboard.up("Control")
    expect(tab.page).to_have_url(re.compile(r"view=\d"))
    before = tab.page.url
    drag(tab, middle, 150)
    tab.page.wait_for_url(lambda url: "view=" in url and url != before)
    tab.page.keyboard.down("Shift")
    drag(tab, middle, 90)
    tab.page.keyboard.up("Shift")
    expect(tab.page).to_have_url(re.compile(r"range=\d"))
    expect(tab.page.locator(".range-head")).to_be_visible()


def drag(tab: Tab, start: tuple[float, float], by: float) -> None:
    tab.page.mouse.move(*start)
    tab.page.mouse.down()
    tab.page.mouse.move(start[0] + by, start[1], steps=5)
    tab.page.mouse.up()


def test_a_statement_runs_by_keys_and_its_rows_can_be_taken_away(tab: Tab) -> None:
    tab.go("/sql")
    editor = tab.page.get_by_label(re.compile("SQL statement"))
    editor.click()
    tab.page.keyboard.press("Control+a")
    tab.page.keyboard.insert_text("SELECT DISTINCT rank FROM process.processes WHERE job = 'llm-7b' ORDER BY rank")
    tab.page.keyboard.press("Control+Enter")
    expect(tab.page.locator(".result tbody tr")).to_have_count(4)
    assert "q=SELECT+DISTINCT+rank" in tab.page.url
    with tab.page.expect_download() as saved:
        tab.page.get_by_role("button", name="CSV").click()
    assert Path(saved.value.path()).read_text() == "rank\n0\n1\n2\n3\n"
    tab.page.get_by_role("button", name="Plan").click()
    expect(tab.page.locator(".plan")).to_contain_text("each of 2 nodes")
    tab.page.keyboard.press("Escape")
    editor.click()
    tab.page.keyboard.press("Control+a")
    tab.page.keyboard.insert_text("SELECT nope FROM comm.ops")
    tab.page.keyboard.press("Control+Enter")
    expect(tab.page.locator(".trouble")).to_contain_text("nope")


def test_tables_and_columns_are_completed(tab: Tab) -> None:
    tab.go("/sql?q=SELECT+1")
    expect(tab.page.locator(".tables summary").first).to_be_visible()
    tab.page.get_by_label(re.compile("SQL statement")).click()
    tab.page.keyboard.press("Control+a")
    tab.page.keyboard.type("SELECT * FROM comm.op")
    expect(tab.page.locator(".cm-tooltip-autocomplete")).to_contain_text("ops")


def test_colours_and_language_are_chosen_and_kept(tab: Tab) -> None:
    root = tab.page.locator("html")
    expect(root).to_have_attribute("data-theme", "light")
    tab.page.get_by_label("Colours").select_option("dark")
    tab.page.get_by_label("Language").select_option("zh")
    expect(root).to_have_attribute("data-theme", "dark")
    expect(root).to_have_attribute("lang", "zh-Hans")
    tab.go("/nodes")
    expect(tab.page.locator("h1")).to_contain_text("节点")
    expect(root).to_have_attribute("data-theme", "dark")


def test_a_finding_in_chinese_has_the_english_sentence_with_it(tab: Tab) -> None:
    tab.page.get_by_label("Language").select_option("zh")
    expect(tab.page.locator(".jobs tbody tr").first).to_contain_text("rank 2 没有加入")
    tab.go(f"/job/{JOB}")
    expect(tab.page.locator("h1.sentence")).to_contain_text("rank 2 没有加入其他 rank 正在等待的操作")
    expect(tab.page.locator(".finding-head .original")).to_contain_text(SENTENCE[1:])
    expect(tab.page.locator(".history li").first).to_contain_text("影响 3 个 rank")


def test_a_node_that_leaves_is_named(tab: Tab, scene: Scene) -> None:
    tab.go("/jobs")
    expect(tab.page.locator(".contract")).to_contain_text("2 of 2 nodes answered")
    scene.leave("beta")
    expect(tab.page.locator(".contract")).to_contain_text("1 of 2 nodes answered")
    tab.page.locator(".contract summary").click()
    expect(tab.page.locator(".contract li")).to_contain_text("beta")


def test_a_node_that_the_target_knows_and_cannot_reach_is_listed(tab: Tab, scene: Scene) -> None:
    known = {"node": "alpha", "ts": 0, "version": "0.1.0", "incarnation": 1}
    away = {"member": "gamma", "address": "10.9.9.9:7077", "state": "failed"}
    scene.first.insert("cluster.members", [{**known, **away}])
    tab.go("/nodes")
    expect(tab.page.locator("tr", has_text="gamma")).to_contain_text("failed")


def test_what_is_refused_is_said_with_what_to_do(browser: Browser, scene: Scene, page: Page) -> None:
    scene.first.broken = {"calls": PrivilegeError("stacks need the scope probe", hint="ask for a token with it")}
    with entered(browser, page) as tab:
        tab.go(f"/job/{JOB}/flame?stacks=1")
        expect(tab.page.locator(".trouble, .contract .bad-news").first).to_be_visible()


def test_a_server_that_ends_leaves_a_page_that_says_so(browser: Browser, scene: Scene) -> None:
    with Cluster(scene.first.address, all_nodes=True) as cluster, ExitStack() as server:
        page = server.enter_context(served(cluster))
        with entered(browser, page) as tab:
            expect(tab.page.locator(".jobs tbody tr").first).to_contain_text(JOB)
            server.close()
            expect(tab.page.locator(".banner")).to_contain_text("probingctl web")
            # What was known stays.
            expect(tab.page.locator(".jobs tbody tr").first).to_contain_text(JOB)


def test_without_the_key_nothing_is_shown(browser: Browser, page: Page) -> None:
    with opened(browser, f"http://127.0.0.1:{page.port}") as tab:
        tab.go("/jobs")
        expect(tab.page.locator(".login")).to_contain_text("probingctl web")
        assert JOB not in tab.page.content()


def test_without_javascript_the_page_says_what_to_do_instead(browser: Browser, page: Page) -> None:
    context = browser.new_context(java_script_enabled=False)
    plain = context.new_page()
    plain.goto(f"http://127.0.0.1:{page.port}/jobs")
    assert "probingctl diagnose --all-nodes" in plain.locator(".without-script").inner_text()
    context.close()


HOSTILE = "<img src=x onerror=\"document.title='run'\">\u202e\x1b]0;x\x07" + "A" * 2000


def test_hostile_names_are_text(browser: Browser, pair: tuple[FakeNode, FakeNode]) -> None:
    for node in pair:
        with node.database("process.processes") as cursor:
            cursor.execute("UPDATE process.processes SET job = ?, command = ?", [HOSTILE, HOSTILE])
    with Cluster(pair[0].address, all_nodes=True) as cluster, served(cluster) as page, entered(browser, page) as tab:
        expect(tab.page.locator(".jobs .c-job").first).to_contain_text("<img src=x onerror=")
        expect(tab.page.locator(".jobs .c-job").first).to_contain_text("\\u202e\\x1b]0;x\\x07")
        assert tab.page.locator("main img").count() == 0
        assert tab.page.title() != "run"
        tab.page.locator(".jobs .c-job a").first.click()
        expect(tab.page.locator(".job-name")).to_contain_text("<img src=x")
        assert tab.page.locator("img").count() == 0
        assert not tab.overflows()
        assert [said for said in tab.complaints if "Content" in said] == []
