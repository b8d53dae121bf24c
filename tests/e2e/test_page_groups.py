"""Groups of workers on the page: made, started, failing, changed and deleted by click, before real daemons."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from browser import SIZES, Tab, chromium, opened
from e2e_support import BIN, Daemon, end_process, start_process
from groups_scene import Launchers, User, living
from long import long
from page_server import page_of
from playwright.sync_api import Browser, Locator, expect
from ports import free_port
from test_web import served
from waiting import until

GROUPS = "--groups.enabled=true"
PEER = "peer-0123456789abcdef"
LAUNCH = "launch-0123456789abcdef"
_POST = """
async ([address, body]) => {
  const headers = {"Content-Type": "application/json", "X-Probing": "1"};
  const answer = await fetch(address, {method: "POST", headers, body: JSON.stringify(body)});
  return [answer.status, await answer.json()];
}
"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as found:
        yield found


@pytest.fixture
def user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> User:
    made = User(tmp_path / "user")
    for name, value in made.env.items():
        monkeypatch.setenv(name, value)
    return made


@pytest.fixture
def launchers(user: User) -> Iterator[Launchers]:
    made = Launchers(user)
    yield made
    made.close()


@pytest.fixture
def pair(make_daemon: Callable[..., Daemon], base: Path) -> list[Daemon]:
    """Two daemons that know each other, and the token of their user in the file ``token``."""
    ports, tokens = (free_port(), free_port()), tokens_in(base, {"peer": PEER, "launch": LAUNCH})
    (base / "token").write_text(LAUNCH)
    seeds = f"--cluster.seeds=127.0.0.1:{ports[0]}"
    daemons = [
        make_daemon(f"n{number}", GROUPS, f"--listen=127.0.0.1:{port}", f"--token_file={tokens}", seeds)
        for number, port in enumerate(ports, start=1)
    ]
    return [daemon.start() for daemon in daemons]


def tokens_in(base: Path, values: dict[str, str]) -> Path:
    """Returns a file of tokens, by scope."""
    path = base / "tokens"
    entries = (
        f'[[token]]\nname = "{scope}"\nscope = "{scope}"\nvalue = "{value}"\n' for scope, value in values.items()
    )
    path.write_text("".join(entries))
    path.chmod(0o600)
    shutil.chown(path, "probing-service")
    return path


def serving(launchers: Launchers, daemon: Daemon, slots: int) -> None:
    """Starts a launcher, and waits until its workers are there."""
    launchers.start(daemon, "--slots", str(slots), "--allow", "*")
    until(lambda: len(daemon.rows("FROM cluster.workers")) == slots, what=daemon.tail)


def row_of(tab: Tab, rank: int) -> Locator:
    return tab.page.locator(".group-ranks tbody tr").nth(rank)


def button(tab: Tab, name: str) -> Locator:
    return tab.page.get_by_role("button", name=name, exact=True)


def start(tab: Tab) -> None:
    """Starts the group although checks fail, as they may on a machine of tests."""
    button(tab, "Start").click()
    expect(
        tab.page.locator(".orders [role=status]").filter(has_text="starts").or_(button(tab, "Start anyway"))
    ).to_be_visible()
    if button(tab, "Start anyway").is_visible():
        button(tab, "Start anyway").click()


@long
@pytest.mark.timeout(300)
def test_a_group_from_its_workers_to_its_end(
    pair: list[Daemon], user: User, launchers: Launchers, browser: Browser
) -> None:
    first, second = pair
    serving(launchers, first, 2)
    serving(launchers, second, 1)
    known = "SELECT count(*) AS n FROM cluster.members WHERE state = 'healthy'"
    until(lambda: first.rows(known) == [{"n": 2}], what=first.tail)
    words = ("--token-file", str(first.base / "token"), "--all-nodes")
    with page_of(first, browser, *words) as tab:
        page = tab.page
        page.get_by_role("link", name="Workers").click()
        expect(page.locator(".workers tbody tr")).to_have_count(3)
        expect(page.locator(".workers tbody tr").last).to_contain_text("n2-0")
        checked(tab)

        page.get_by_role("link", name="Groups").click()
        page.get_by_role("link", name="New group").click()
        page.get_by_label("Name", exact=True).fill("gpt")
        # By keys alone: a node's workers, and one more.
        page.get_by_label("All workers of n1").focus()
        page.keyboard.press("Space")
        page.get_by_label("n2-0").check()
        page.get_by_label("Command (as in a shell").fill(" ".join(user.command))
        page.get_by_label("Backend").select_option("gloo")
        page.get_by_label("When a rank fails").select_option("on_failure")
        page.get_by_label("Environment").fill("NOTE='two words'")
        page.get_by_text("Restarts, nodes and saving").click()
        page.get_by_label("Between SIGTERM and SIGKILL").fill("1.5s")
        page.get_by_label("Before a restart by policy, run").fill("SIGUSR1")
        button(tab, "Preview the ranks").click()
        planned = page.locator(".planned-ranks tbody tr")
        expect(planned).to_have_count(3)
        assert [cells(row)[:4] for row in planned.all()] == [
            ["n1-0", "0", "0", "0"],
            ["n1-1", "1", "1", "0"],
            ["n2-0", "2", "0", "1"],
        ]
        checked(tab)
        button(tab, "Create the group").click()
        expect(page.locator("h1")).to_contain_text("stopped")

        start(tab)
        for rank in range(3):
            expect(row_of(tab, rank)).to_contain_text("running")
        page.get_by_label("Log of rank 2").click()
        log = page.get_by_role("log")
        expect(log).to_contain_text('"RANK": "2"')
        expect(log).to_contain_text('"NOTE": "two words"')
        checked(tab)

        pid = next(pid for pid, (_, _, rank) in living("gpt").items() if rank == "2")
        os.kill(pid, signal.SIGKILL)
        expect(page.locator(".facts-list")).to_contain_text("was killed by SIGKILL")
        expect(page.locator(".facts-list div", has_text="Generation")).to_contain_text("2")
        until(lambda: sorted(living("gpt").values()) == [("gpt", 2, str(rank)) for rank in range(3)], what=living)
        # The log goes on while it is seen.
        expect(log).to_contain_text('"TORCHELASTIC_RESTART_COUNT": "1"')

        button(tab, "Stop").click()
        button(tab, "Stop gpt").click()
        expect(page.locator("h1")).to_contain_text("stopped")
        until(lambda: not living("gpt"), what=living)

        page.get_by_role("link", name="Change").click()
        expect(page.get_by_label("Environment")).to_have_value("NOTE='two words'")
        page.get_by_text("Restarts, nodes and saving").click()
        for label, value in (("Between SIGTERM", "1.5s"), ("Before a restart", "SIGUSR1"), ("Restarts by policy", "3")):
            expect(page.get_by_label(label)).to_have_value(value)
        page.get_by_label("Nodes that are enough").fill("1")
        page.get_by_role("combobox", name="Master", exact=True).select_option("n2")
        button(tab, "Preview the ranks").click()
        expect(planned.first).to_contain_text("n2-0")
        button(tab, "Save the change").click()
        expect(planned).to_have_count(0)
        start(tab)
        for rank, worker in enumerate(("n2-0", "n1-0", "n1-1")):
            expect(row_of(tab, rank)).to_contain_text(worker)
            expect(row_of(tab, rank)).to_contain_text("running")

        button(tab, "Delete").click()
        button(tab, "Delete gpt").click()
        expect(page.locator("main")).to_contain_text("There is no group")
        until(lambda: not living("gpt"), what=living)
        # The browser logs each answer that a rank has no log yet, as while it starts again.
        assert all("404" in complaint for complaint in tab.complaints), tab.complaints
        tab.complaints.clear()


def cells(row: Locator) -> list[str]:
    return row.locator("th, td").all_inner_texts()


def checked(tab: Tab) -> None:
    """Fails if axe-core finds something on the screen, or it is wider than its window; on a phone, too, and dark."""
    expect(tab.page.locator("main .loading")).to_have_count(0)
    for size, theme in (("phone", "dark"), ("laptop", "light")):
        width, height = SIZES[size]
        tab.page.set_viewport_size({"width": width, "height": height})
        tab.page.emulate_media(color_scheme=theme)  # type: ignore[arg-type]
        expect(tab.page.locator("html")).to_have_attribute("data-theme", theme)
        tab.picture(f"groups-{tab.page.title().partition(' ')[0]}-{size}-{theme}")
        assert tab.violations() == []
        assert not tab.overflows()


@pytest.mark.timeout(240)
def test_names_and_commands_are_shown_as_text(
    make_daemon: Callable[..., Daemon], user: User, launchers: Launchers, browser: Browser
) -> None:
    daemon = make_daemon("n1", GROUPS).start()
    serving(launchers, daemon, 1)
    evil = "<img src=x onerror=alert(1)>\x1b[31m\u202e"
    user.ctl(
        daemon, "group", "create", "g", "--workers", "n1-0", "--master", "n1-0", "--", "sh", "-c", f"echo '{evil}'"
    )
    user.ctl(daemon, "group", "start", "g", "--force")
    shown = "<img src=x onerror=alert(1)>\\x1b[31m\\u202e"
    with page_of(daemon, browser) as tab:
        page = tab.page
        tab.go("/groups/g?rank=0")
        expect(page.locator(".facts-list code")).to_contain_text(shown)
        expect(page.get_by_role("log")).to_contain_text(shown)
        tab.go("/groups")
        page.get_by_role("link", name="New group").click()
        page.get_by_label("Name", exact=True).fill("<b>g</b>")
        page.get_by_label("n1-0").check()
        page.get_by_label("Command (as in a shell").fill(evil)
        button(tab, "Preview the ranks").click()
        expect(page.locator(".trouble")).to_contain_text("group <b>g</b>: this is not a valid name")
        assert page.locator("main img, main b b").count() == 0
        # The browser logs that the server refused.
        assert len(tab.complaints) == 1
        tab.complaints.clear()


@contextmanager
def team_page(target: str, listening: str) -> Iterator[str]:
    """Serves a team; yields the origin of its page."""
    words = (BIN / "probingctl", "-t", target, "web", "--listen", listening)
    server = start_process(*words, stdout=subprocess.PIPE, text=True, env={"PYTHONUNBUFFERED": "1"})
    try:
        assert server.stdout is not None
        assert server.stdout.readline().startswith("serving http://")
        yield f"http://{listening}"
    finally:
        end_process(server)


def test_without_groups_the_node_says_so(make_daemon: Callable[..., Daemon], user: User) -> None:
    daemon = make_daemon("n1").start()
    with served("-t", daemon.target, "web", "--port", "0") as (page, key):
        page.enter(key)
        answers = [page.ask("/api/groups"), page.ask("/api/group/start", {"name": "gpt"})]
        assert [answer.status for answer in answers] == [403, 403]
        assert {answer.json["error"] for answer in answers} == {"groups of workers are not enabled on node n1"}
        assert page.ask("/api/group/start", {"name": "gpt"}, headers={"X-Probing": ""}).status == 403
        assert page.ask("/api/group/start", {"name": "gpt"}, headers={"Origin": "http://evil.example"}).status == 403


@pytest.mark.timeout(240)
def test_a_page_of_a_team_shows_groups_and_changes_none(
    make_daemon: Callable[..., Daemon], base: Path, user: User, launchers: Launchers, browser: Browser
) -> None:
    port, tokens = free_port(), tokens_in(base, {"launch": LAUNCH})
    daemon = make_daemon("n1", GROUPS, "--listen", f"127.0.0.1:{port}", "--token-file", str(tokens)).start()
    serving(launchers, daemon, 1)
    user.ctl(daemon, "group", "create", "g", "--workers", "n1-0", "--master", "n1-0", "--", "true")
    listening = f"127.0.0.1:{free_port()}"
    with team_page(f"127.0.0.1:{port}", listening) as origin, opened(browser, origin) as tab:
        tab.go("/groups/g")
        tab.page.get_by_label("Token").fill(LAUNCH)
        button(tab, "Sign in").click()
        expect(tab.page.locator(".group-ranks tbody tr")).to_contain_text("n1-0")
        expect(tab.page.locator(".no-key")).to_contain_text("probingctl group start g")
        expect(button(tab, "Start")).to_have_count(0)
        for action, command in {"start": "start g", "preview": "create g --dry-run ...", "change": "set g ..."}.items():
            status, body = tab.page.evaluate(_POST, [f"/api/group/{action}", {"name": "g"}])
            assert (status, body["code"]) == (403, "PrivilegeError")
            assert body["hint"] == f"run `probingctl group {command}` as the owner"
    assert user.status(daemon, "g")["generation"] == 0
