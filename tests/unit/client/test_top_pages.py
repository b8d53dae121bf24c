"""The pages of the screen of ``top`` and its keys: lines fit, the selection stays, nothing drives the terminal."""

from __future__ import annotations

from typing import Any

import pytest
from client_top_rows import fetched, finding, gpu, inflight, progress, rank, update, use
from rich.cells import cell_len

from probing.client.messages import Thread
from probing.client.top.figures import Line, text_of
from probing.client.top.health import Absent
from probing.client.top.model import Model, View, key_of
from probing.client.top.page import Page, main_page
from probing.client.top.rank_page import RankFacts, rank_page
from probing.client.top.screen import Changed, TopApp, help_page, style_of
from probing.client.top.state import SORTS, State, shown

SIZES = [(80, 24), (200, 60), (40, 10), (20, 4), (1, 1), (500, 3)]
EVIL = "[red]日本\x1b]0;x\x07\u202e\x9b\ud800[/]"


def view_of(count: int = 4, **more: Any) -> View:
    rows = {
        "ranks": [{**rank(n, world=count), **more} for n in range(count)],
        "progress": [progress(n, 100, 50) for n in range(count)],
        "inflight": [inflight(n, 35) for n in range(count) if n != 1],
        "findings": [{**finding("open", "t"), **more}],
        "gpus": [gpu(1, 80.0)],
        "gpu_processes": [use(n) for n in range(count)],
    }
    return update(Model(10.0), 1.0, **rows)


def page_of(view: View, state: State, width: int = 80, height: int = 24) -> Page:
    return main_page(view, state, width, height, "alpha", 1.5)


def fits(lines: tuple[Line, ...] | list[Line], width: int, height: int) -> None:
    assert len(lines) <= height
    for line in lines:
        assert cell_len(text_of(line)) <= width, text_of(line)
        assert all(style_of(span.style) for span in line if span.style)


@pytest.mark.parametrize(("width", "height"), SIZES)
@pytest.mark.parametrize("more", [{}, {"node": EVIL, "command": EVIL, "sentence": EVIL, "job": EVIL, "run": EVIL}])
def test_every_line_fits_and_is_harmless(width: int, height: int, more: dict[str, str]) -> None:
    view = view_of(**more)
    pages = [list(page_of(view, State(filter=text), width, height).lines) for text in ("", "nobody", EVIL)]
    thread: Thread = {
        "node": "a",
        "job": "j",
        "run": "r",
        "rank": 0,
        "pid": 100,
        "tid": 100,
        "thread": EVIL,
        "state": EVIL,
        "gil": None,
        "complete": False,
        "frames": [
            {
                "func": EVIL,
                "file": EVIL,
                "lineno": 1,
                "frame_type": "Python",
                "locals": [{"name": EVIL, "type": EVIL, "value": EVIL, "number": None, "reason": None}],
            }
        ],
    }
    operation = {
        "ts": "2026-11-22T03:12:07Z",
        "comm": EVIL,
        "comm_name": EVIL,
        "comm_size": 4,
        "op": EVIL,
        "seq": 5,
        "bytes": 1,
        "duration_ns": 1,
        "busbw_gbps": 1.0,
        "state": EVIL,
        "error": EVIL,
    }
    watched = {"name": EVIL, "value": EVIL, "ts": "2026-11-22T03:12:07Z"}
    key = key_of(view.ranks[0])
    facts = RankFacts(key, (thread, thread), (operation,), (watched,), EVIL, EVIL)
    for given in (facts, RankFacts(key, reason=EVIL), None):
        pages += [rank_page(row, given, 10_000, width, height)[0] for row in (view.ranks[0], None)]
    pages.append(help_page(3, width, height)[0])
    for lines in pages:
        fits(lines, width, height)
        assert not set("".join(map(text_of, lines))) & {"\x1b", "\x07", "\u202e", "\x9b", "\ud800", "\n"}


def test_the_columns_of_a_screen_of_80_cells() -> None:
    titles = text_of(page_of(view_of(), State()).lines[1]).split()
    assert {"RANK", "IN", "FLIGHT", "AGE", "UTIL", "GMEM", "PYTHON"} <= set(titles)
    assert not {"NODE", "CPU", "RSS", "STEP/S"} & set(titles), "one node, and no values of the others"


def test_the_selection_stays_with_its_process() -> None:
    view, state = view_of(), State()
    page = page_of(view, state)
    assert [row["rank"] for row in page.rows] == [1, 0, 2, 3], "the culprit first"
    assert text_of(page.lines[page.cursor or 0]).startswith("!     1")
    state.press("j", "j", view, 5)
    assert state.selected == ("a", 100, 7)
    state.press("s", "s", view, 5)
    page = page_of(view, state)
    assert [row["rank"] for row in page.rows] == [0, 1, 2, 3]
    assert state.position == 0
    gone = view_of(1, rank=9, pid=900)
    assert page_of(gone, state).cursor is not None
    assert state.selected == ("a", 900, 7)
    assert page_of(View(at=1.0), state).cursor is None
    assert state.press("enter", None, View(), 5) == ""


def test_the_selected_rank_is_always_seen() -> None:
    view, state = view_of(300), State()
    for key in ("end", "up", "pageup", "home", "pagedown", "pagedown", "down", "k", "end"):
        page_of(view, state)
        state.press(key, key if len(key) == 1 else None, view, 9)
        page = page_of(view, state)
        assert page.cursor is not None
        assert str(page.rows[state.position]["rank"]) in text_of(page.lines[page.cursor]).split()[:2]


@pytest.mark.parametrize("sort", range(len(SORTS)))
def test_each_order_has_all_ranks(sort: int) -> None:
    view = view_of(20)
    for reverse in (False, True):
        (job,) = shown(view, State(sort=sort, reverse=reverse))
        assert {row["rank"] for row in job.ranks} == set(range(20))
    both = [shown(view, State(sort=1, reverse=reverse))[0].ranks for reverse in (False, True)]
    assert both[0] == both[1][::-1]


def test_a_filter_is_typed_kept_and_left() -> None:
    view, state = view_of(12), State()
    state.press("slash", "/", view, 5)
    for character in "rank1x":
        state.press(character, character, view, 5)
    state.press("backspace", "\x7f", view, 5)
    assert (state.filter, state.editing) == ("rank1", True)
    assert "filter: rank1_" in text_of(page_of(view, state).lines[-1])
    assert {row["rank"] for row in shown(view, state)[0].ranks} == {1, 10, 11}
    assert state.press("q", "q", view, 5) == "", "a letter while it is typed"
    assert shown(view, state) == ()
    state.press("ctrl+u", None, view, 5)
    assert state.filter == ""
    state.press("a", "a", view, 5)
    state.press("enter", "\r", view, 5)
    assert (state.filter, state.editing) == ("a", False)
    state.press("escape", None, view, 5)
    assert state.filter == ""
    state.press("slash", "/", view, 5)
    assert state.press("ctrl+c", None, view, 5) == "quit"


def test_keys_of_the_other_pages() -> None:
    view, state = view_of(), State()
    page_of(view, state)
    assert state.press("enter", "\r", view, 5) == "open"
    assert (state.page, state.press("p", "p", view, 5), state.paused) == ("rank", "pause", True)
    assert state.press("end", None, view, 5) == ""
    _, state.scroll = rank_page(view.ranks[0], None, state.scroll, 80, 24)
    assert state.scroll == 0
    assert state.press("question_mark", "?", view, 5) == "close"
    assert state.page == "help"
    state.press("down", None, view, 5)
    assert help_page(state.scroll, 80, 10)[1] == 1
    assert (state.press("escape", None, view, 5), state.page) == ("", "main")
    assert [state.press(key, None, view, 5) for key in ("q", "ctrl+c", "ctrl+q")] == ["quit"] * 3


def test_a_node_without_an_answer_is_not_said_to_run_nothing() -> None:
    gone = Absent("addr", "a", "permission denied", 0.0)
    lines = "\n".join(text_of(line) for line in page_of(Model(10.0).update(fetched(1.0, gone), {}), State()).lines)
    assert "permission denied" in lines
    assert "what runs on the nodes above is not known" in lines
    assert "no training process" not in lines
    assert "no training process" in "\n".join(text_of(line) for line in page_of(update(Model(10.0)), State()).lines)


def test_a_wide_screen_has_room_for_the_operation() -> None:
    view = view_of()
    for row in view.ranks:
        row.update(op="reduce_scatter_tensor", seq=912_345, age_ns=10**9)
    for width, text in ((200, "reduce_scatter_tensor #912345 "), (80, "reduce_scatte")):
        lines = [text_of(line) for line in page_of(view, State(), width, 40).lines]
        assert any(text in line for line in lines), width
        assert all(cell_len(line) <= width for line in lines)


def test_no_line_of_the_help_is_cut_at_80_columns() -> None:
    lines, _ = help_page(0, 80, 60)
    assert not any("…" in text_of(line) or "~" in text_of(line) for line in lines)
    assert any("hide the jobs that have ended" in text_of(line) for line in lines)


def test_what_is_new_is_drawn_when_it_comes() -> None:
    # Textual finds the method by the name of the message: without it a screen is a second late.
    assert getattr(TopApp, Changed.handler_name, None) is TopApp.on_changed
