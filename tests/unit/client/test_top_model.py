"""The model of the screen of ``top``: joins, rates, lags, the order of jobs, nodes that go away, hostile rows."""

from __future__ import annotations

from typing import Any

import pytest
from client_top_rows import SECOND, Row, fetched, finding, gpu, inflight, progress, rank, update, use

from probing.client.collectives.ranks import sinking
from probing.client.top.fetch import questions, statements
from probing.client.top.figures import brief_age, brief_size, fitted, spark, text_of
from probing.client.top.health import Absent, Fetched, Health, NodeRows
from probing.client.top.history import Lags, Rates, Series
from probing.client.top.model import AWAY_S, Model, View
from probing.client.top.page import main_page
from probing.client.top.state import State, shown


def test_rates_are_those_of_one_life_of_the_counter() -> None:
    rates = Rates(10.0)
    assert rates.add("k", 0, 100) is None
    assert rates.add("k", 2 * SECOND, 120) == 10.0
    assert rates.add("k", 3 * SECOND, 5) is None, "it went back: another life"
    assert rates.add("k", 5 * SECOND, 25) == 10.0
    assert rates.add("k", 5 * SECOND, 25) == 10.0, "the same reading again"
    for second in range(6, 60):
        last = rates.add("k", second * SECOND, 25 + 3 * second)
    assert last == 3.0, "what lies before the window does not count"


def test_series_are_bounded_and_in_order() -> None:
    series = Series()
    for at in range(1000):
        series.add("k", at, float(at))
    series.add("k", 10, -1.0)
    assert len(series.of("k")) == 120
    assert series.of("k")[-1] == 999.0
    series.keep(())
    assert series.of("k") == ()


def test_a_lag_is_the_median_of_different_operations() -> None:
    lags = Lags()
    assert lags.of("k") is None
    for seq, lag in ((1, 10), (1, 10_000), (2, 30), (3, 20)):
        lags.add("k", seq, lag)
    assert lags.of("k") == 20


def test_rates_and_lags_of_ranks() -> None:
    model = Model(10.0)
    ranks = [rank(n) for n in range(4)]
    first = update(model, 1.0, ranks=ranks, progress=[progress(n, 100, 50) for n in range(4)])
    assert {row["collectives_per_s"] for row in first.ranks} == {None}
    late = {3: 40_000_000}
    second = update(model, 2.0, ranks=ranks, progress=[progress(n, 113, 51, late_ns=late.get(n, 0)) for n in range(4)])
    assert [row["collectives_per_s"] for row in second.ranks] == [13.0] * 4
    assert [row["lag_ns"] for row in second.ranks] == [0, 0, 0, 0], "the median of two looks, the lower one"
    third = update(model, 3.0, ranks=ranks, progress=[progress(n, 126, 52, late_ns=late.get(n, 0)) for n in range(4)])
    assert [row["lag_ns"] for row in third.ranks] == [0, 0, 0, 40_000_000]
    assert [job.word for job in third.jobs] == ["OK"]


def test_a_finding_that_another_node_has_closed_is_not_open() -> None:
    model = Model(10.0)
    rows = {"ranks": [rank(n) for n in range(4)], "progress": [progress(n, 5, 50) for n in range(4)]}
    opened = update(model, findings=[finding("open", "2026-11-22T03:12:07Z")], **rows)
    assert opened.jobs[0].lines[0].endswith("rank 1 is late")
    assert [row["blame"] for row in opened.ranks] == ["victim", "culprit", "victim", "victim"]
    both = [finding("closed", "2026-11-22T03:13:07Z"), finding("open", "2026-11-22T03:12:07Z")]
    closed = update(model, findings=both, **rows)
    assert [row["blame"] for row in closed.ranks] == [""] * 4
    assert closed.jobs[0].word == "OK"


def test_jobs_in_trouble_come_first() -> None:
    pids = {"calm": 500, "j": 100, "odd": 900}
    ranks = [{**rank(n, job=job), "pid": first + n} for job, first in pids.items() for n in range(4)]
    found = [finding("open", "t"), finding("open", "t", severity="warning", verdict="slow_rank", job="odd")]
    view = update(Model(10.0), ranks=ranks, inflight=[inflight(n, 35) for n in (0, 2, 3)], findings=found)
    assert [(job.job, job.word) for job in view.jobs] == [("j", "STUCK"), ("odd", "SLOW"), ("calm", "OK")]


def test_a_long_wait_is_shown_before_there_is_a_finding() -> None:
    ranks = [rank(n) for n in range(4)]
    assert update(Model(10.0), ranks=ranks, inflight=[inflight(0, 6)]).jobs[0].word == "WAITS"
    assert update(Model(10.0), ranks=ranks, inflight=[inflight(0, 4)]).jobs[0].word == "OK"


def test_a_plain_job_has_its_cpu_memory_and_gpu() -> None:
    cpu = {
        "node": "a",
        "pid": 100,
        "start_ns": 7,
        "at": 1,
        "cpu_pct": 250.0,
        "rss_kb": 1000,
        "thread_count": 9,
        "delay_pct": 1.5,
    }
    memory = {"node": "a", "pid": 100, "start_ns": 7, "rss_bytes": 77}
    rows = {"ranks": [rank(0, world=1)], "cpu": [cpu], "memory": [memory], "gpu_processes": [use(0), use(0, "H")]}
    gpus = [gpu(2, 80.0), gpu(1, 10.0), gpu(2, 40.0, uuid="H", temperature_c=70.0, gpu_util_pct=None)]
    view = update(Model(10.0), gpus=gpus, **rows)
    (row,) = view.ranks
    assert (row["cpu_pct"], row["rss_bytes"], row["threads"]) == (250.0, 1_024_000, 9)
    assert (row["gpu_pct"], row["gpu_used_bytes"], row["gpu_own_bytes"]) == ((80.0 + 3.0) / 2, 80, 60)
    assert (row["power_w"], row["temperature_c"]) == (600.0, 70.0)
    assert row["gpus"][0]["history"]["gpu_pct"] == (10.0, 80.0)
    assert "no collective ended lately" not in view.jobs[0].lines


def test_without_tables_of_devices_the_columns_are_blank() -> None:
    (row,) = update(Model(10.0), ranks=[rank(0)]).ranks
    assert [row[name] for name in ("cpu_pct", "rss_bytes", "gpu_pct", "power_w", "temperature_c")] == [None] * 5


def test_a_device_that_gives_no_rows_any_more_is_forgotten() -> None:
    model = Model(10.0)
    rows = {"ranks": [rank(0)], "gpu_processes": [use(0)]}
    update(model, gpus=[gpu(1, 80.0), gpu(1, 5.0, uuid="H")], **rows)
    (row,) = update(model, gpus=[gpu(100, 5.0, uuid="H")], **rows).ranks
    assert row["gpu_pct"] is None


def test_ranks_of_a_node_that_goes_away_stay_for_a_while() -> None:
    model = Model(10.0)
    asked: list[Row] = []
    model._silent = lambda rows: asked.extend(rows) or []  # type: ignore[func-returns-value]
    update(model, 1.0, ranks=[rank(n) for n in range(2)], inflight=[inflight(n, 9) for n in range(2)])
    gone = Absent("addr", "a", "refused", 2.0)
    view = model.update(fetched(3.0, gone), {})
    assert [row["away"] for row in view.ranks] == [True, True]
    assert {row["op"] for row in view.ranks} == {None}
    assert (view.absent, view.jobs[0].word, asked) == ((gone,), "AWAY", [])
    assert model.update(fetched(2.1 + AWAY_S, gone), {}).ranks == []


def test_a_pid_that_is_used_again_is_another_rank() -> None:
    model = Model(10.0)
    update(model, 1.0, ranks=[rank(0)], progress=[progress(0, 100, 50)])
    other = {**rank(0), "start_ns": 8}
    (row,) = update(model, 2.0, ranks=[other], progress=[{**progress(0, 110, 51), "start_ns": 8}]).ranks
    assert row["collectives_per_s"] is None
    assert row["history"]["steps_per_s"] == (None,)


@pytest.mark.parametrize("ranks", ["", None, "1-999999999999", "x", "3-1", "-", "1,,2", "0-70000000"])
def test_odd_texts_of_ranks_do_no_harm(ranks: str | None) -> None:
    view = update(Model(10.0), ranks=[rank(0)], findings=[{**finding("open", "t"), "ranks": ranks, "victims": ranks}])
    assert len(view.ranks) == 1


def test_only_tables_that_a_node_has_are_asked() -> None:
    asked = statements(questions("true"), 0, frozenset(), new=True)
    assert not {"cpu", "gpus", "gpu_processes"} & set(asked)
    assert {"ranks", "tables", "findings"} <= set(asked)
    some = statements(questions("true"), 1, {"gpu.utilization"}, new=True)
    assert "gpus" in some
    assert "cpu" not in some
    assert "INTERVAL 120 SECOND" in some["gpus"]
    assert "INTERVAL 15 SECOND" in statements(questions("true"), 2, {"gpu.utilization"}, new=False)["gpus"]
    seldom = [turn for turn in range(1, 21) if "findings" in statements(questions("true"), turn, (), new=False)]
    assert len(seldom) == 4


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (None, ""),
        (0, "0B"),
        (1000, "1000B"),
        (1024, "1K"),
        (61.2 * 2**30, "61.2G"),
        (1023.6 * 2**20, "1.00G"),
    ],
)
def test_sizes_are_brief(value: float | None, shown: str) -> None:
    assert brief_size(value) == shown
    assert len(brief_size(value)) <= 5


def test_ages_are_brief() -> None:
    assert [brief_age(ns) for ns in (None, -5, 812e6, 35 * SECOND, 307 * SECOND)] == [
        "",
        "0ns",
        "812ms",
        "35s",
        "5m07s",
    ]


def test_bars() -> None:
    assert spark([0.0, 50.0, 100.0], 4, 100.0) == " ▁▅█"
    assert spark([None, 5.0, 5.0], 3) == " ▁▁"
    assert spark([float("nan"), 200.0], 2, 100.0) == " █"
    assert spark([1.0], 0) == ""


def test_text_is_cut_by_cells_and_escaped() -> None:
    assert fitted("日本語", 5) == "日本…"
    assert fitted("a\x1b[2J", 8) == "a\\x1b[2J"
    assert fitted("a", 3, right=True) == "  a"
    assert fitted("abc", 0) == ""


def test_a_node_that_answers_at_another_address_is_there_once() -> None:
    model = Model(10.0)
    ranks = [rank(n) for n in range(4)]
    update(model, 1.0, ranks=ranks)
    old = Absent("addr", "a", "refused", 1.5)
    view = model.update(Fetched(2.0, (NodeRows("addr2", "a", {"ranks": ranks}),), (old,)), {})
    assert [row["rank"] for row in view.ranks] == [0, 1, 2, 3]
    assert (view.absent, view.nodes, view.jobs[0].word) == ((), ("a",), "OK")


def test_an_absent_node_is_left_alone_until_it_answers() -> None:
    from probing.api.errors import PeerError
    from probing.federation.execution.answer import Failed, Gathered

    health = Health(lambda addresses, _seconds: Gathered(tuple(addresses)), lambda: None)
    health.stop()
    health.answered("x", "a")
    health.failed([Failed("x", "", PeerError("x: refused", reason="refused"))])
    (absent,) = health.absent
    assert (absent.node, absent.reason) == ("a", "refused")
    assert health.present(("x", "y")) == ("y",)
    health.failed([Failed("x", "", PeerError("x: other"))])
    assert health.absent[0].since == absent.since
    health.answered("x", "a")
    assert health.present(("x", "y")) == ("x", "y")


def gone(number: int, job: str, ts: str, **end: Any) -> Row:
    """An exit of a rank, as the question ``ended`` answers it."""
    row = {"node": "a", "job": job, "run": "r", "rank": number, "role": "trainer", "pid": 500 + number, "start_ns": 7}
    return {**row, "ts": ts, "event": "exit", "exit_code": None, "signal": None, "recent": True, **end}


def test_what_lives_stands_above_what_has_ended() -> None:
    ended = [
        gone(0, "failed-first", "2026-11-22T03:12:07Z", exit_code=1),
        gone(1, "failed-last", "2026-11-22T03:14:07Z", exit_code=1),
        gone(2, "was-well", "2026-11-22T03:13:07Z", exit_code=0),
    ]
    ranks = [rank(0, job="j"), rank(1, job="j"), {**rank(7, job="fine", world=1), "pid": 900}]
    rows = {"ranks": ranks, "inflight": [inflight(0, 35)], "findings": [finding("open", "t")], "ended": ended}
    view = update(Model(10.0), 1.0, **rows)
    assert [(job.job, job.word) for job in view.jobs] == [
        ("j", "STUCK"),
        ("fine", "OK"),
        ("failed-last", "FAILED"),
        ("failed-first", "FAILED"),
        ("was-well", "ENDED"),
    ]
    state = State()
    page = main_page(view, state, 100, 30, "alpha", 1.0)
    # The first rank is one that can be helped.
    assert state.selected == ("a", 101, 7)
    assert "2 jobs, 3 ranks, 3 ended" in text_of(page.lines[0])
    assert state.press("e", "e", view, 10) == ""
    assert [job.job for job in shown(view, state)] == ["j", "fine"]
    page = main_page(view, state, 100, 30, "alpha", 1.0)
    assert "2 jobs, 3 ranks, 3 ended (hidden)" in text_of(page.lines[0])
    assert all("failed" not in text_of(line) for line in page.lines)
    state.press("e", "e", view, 10)
    assert len(shown(view, state)) == 5


def test_the_first_rank_is_selected_until_the_user_selects_one() -> None:
    model, state = Model(10.0), State()
    over = [gone(0, "over", "2026-11-22T03:12:07Z", exit_code=1)]
    main_page(update(model, 1.0, ended=over), state, 80, 24, "alpha", 1.0)
    assert state.selected == ("a", 500, 7)
    # A job that lives comes above.
    view = update(model, 2.0, ranks=[rank(0), rank(1)], ended=over)
    main_page(view, state, 80, 24, "alpha", 2.0)
    assert state.selected == ("a", 100, 7)
    state.press("j", "j", view, 10)
    first = update(model, 3.0, ranks=[{**rank(9), "job": "a-first"}, rank(0), rank(1)], ended=over)
    main_page(first, state, 80, 24, "alpha", 3.0)
    assert state.selected == ("a", 101, 7)


def test_hidden_jobs_are_said_where_nothing_else_is_there() -> None:
    view = update(Model(10.0), 1.0, ended=[gone(0, "over", "2026-11-22T03:12:07Z", exit_code=0)])
    texts = [text_of(line) for line in main_page(view, State(ended=False), 80, 24, "alpha", 1.0).lines]
    assert "  no training process runs; e shows the jobs that ended" in [text.rstrip() for text in texts]


def test_no_training_process_is_said_where_that_was_answered() -> None:
    def body(view: View) -> str:
        return " ".join(text_of(line) for line in main_page(view, State(), 80, 24, "alpha", 1.0).lines)

    lost = Absent("other", "b", "permission denied", 0.0)
    model = Model(10.0)
    unanswered = model.update(fetched(1.0, lost), {})
    assert "what runs on the nodes above is not known" in body(unanswered)
    assert "no training process" not in body(unanswered)
    both = model.update(Fetched(2.0, (NodeRows("addr", "a", {}),), (lost,)), {})
    assert "no training process on the nodes that answer" in body(both)
    assert "no training process on" not in body(update(Model(10.0), 1.0))


@pytest.mark.parametrize(
    ("rate", "age_s", "shown"),
    [
        (41.0, 0.0, 41.0),
        # A row of a step comes some time after its end.
        (41.0, 2.5, 41.0),
        (41.0, 76.0, 0.0),
        (0.1, 25.0, 0.1),
        (0.1, 50.0, 0.02),
        (0.1, 101.0, 0.0),
        (0.0, 5.0, 0.0),
        (None, 5.0, None),
        # The clock was set back.
        (41.0, -3600.0, 41.0),
    ],
)
def test_the_rate_of_steps_sinks_while_none_ends(rate: float | None, age_s: float, shown: float | None) -> None:
    assert sinking(rate, age_s * SECOND) == shown


def test_the_rate_of_a_rank_that_stands_still() -> None:
    step = {
        "node": "a",
        "job": "j",
        "run": "r",
        "pid": 100,
        "step": 383,
        "steps_per_s": 41.0,
        "step_age_ns": 76 * SECOND,
    }
    (row,) = update(Model(10.0), 1.0, ranks=[rank(0)], steps=[step]).ranks
    assert (row["step"], row["steps_per_s"]) == (383, 0.0)


def test_an_open_finding_grows_older_between_two_questions() -> None:
    model = Model(10.0)
    sentence = "rank 1 (node a, pid 101) holds up 2 ranks for 11 s: it sleeps"
    open_ = finding("open", "2026-11-22T03:12:18.000000000Z")
    row = {**open_, "sentence": sentence, "since": "2026-11-22T03:12:07.000000000Z", "row_age_ns": 4 * SECOND}
    first = update(model, 1.0, ranks=[rank(1)], findings=[row])
    assert "for 15 s: it sleeps" in first.jobs[0].lines[0]
    # They are asked for seldom.
    later = update(model, 31.0, ranks=[rank(1)])
    assert "for 45 s: it sleeps" in later.jobs[0].lines[0]
