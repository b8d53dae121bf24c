"""The watch of variables against values that are made up: what becomes a row, and when."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any

import pytest
from fakes import Processes, Sink

from probing.api.errors import TargetTimeout
from probing.daemon.clock import FakeClock
from probing.daemon.python_stack.values.heap import CHANGED
from probing.daemon.python_stack.values.watch import VariableWatch
from probing.daemon.source import Identity


def trainer(pid: int, rank: int) -> Identity:
    return Identity(pid, pid * 10, "job", "run", "trainer", rank, rank, 2, 0)


class Made:
    """Values by (pid, name); ``stuck`` processes wait for an event, ``failing`` ones raise."""

    def __init__(self) -> None:
        self.values: dict[tuple[int, str], list[dict[str, Any]]] = {}
        self.stuck: dict[int, threading.Event] = {}
        self.failing: set[int] = set()
        self.asked: list[tuple[int, tuple[str, ...]]] = []

    def set(self, pid: int, name: str, value: str | None, number: float | None = None, reason: str = "") -> None:
        row = {"tid": pid, "func": "train", "name": name, "type": "x", "value": value, "number": number}
        self.values[pid, name] = [{**row, "reason": reason}]

    def of_process(self, pid: int, start_ns: int, names: Sequence[str], deadline: float) -> list[dict[str, Any]]:
        self.asked.append((pid, tuple(names)))
        if pid in self.stuck:
            assert self.stuck[pid].wait(60)
        if pid in self.failing:
            raise TargetTimeout(f"process {pid} does not answer")
        return [{"pid": pid, "start_ns": start_ns, **row} for name in names for row in self.values.get((pid, name), [])]


class Bench:
    def __init__(self) -> None:
        self.values, self.clock = Made(), FakeClock(real_ns=5_000)
        self.sink = Sink("python.variables", "python.training_metrics", may_lose=False)
        self.known = Processes(trainer(7, 0))
        self.names: dict[int, tuple[str, ...]] = {7: ("trainer.step", "loss")}
        self.watch = VariableWatch(
            self.values,
            self.sink,
            lambda who: self.names.get(who.pid, ()),
            self.known,
            self.clock,
            "n1",
            interval_s=lambda: 0.01,
        )

    def look(self) -> list[Future[None]]:
        begun = self.watch.look()
        for future in begun:
            future.result(60)
        return begun

    @property
    def variables(self) -> list[dict[str, Any]]:
        return self.sink.of("python.variables")

    @property
    def metrics(self) -> list[dict[str, Any]]:
        return self.sink.of("python.training_metrics")


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    made.watch.stop()


def test_rows_when_a_value_changes_and_for_each_step(bench: Bench) -> None:
    bench.values.set(7, "trainer.step", "1", 1.0)
    bench.values.set(7, "loss", "tensor(nan, ...)", float("nan"))
    bench.look()
    bench.look()
    assert [(r["name"], r["value"], r["step"], r["rank"], r["ts"]) for r in bench.variables] == [
        ("trainer.step", "1", 1, 0, 5_000),
        ("loss", "tensor(nan, ...)", 1, 0, 5_000),
    ]
    assert [(r["step"], repr(r["loss"]), r["node"], r["job"]) for r in bench.metrics] == [(1, "nan", "n1", "job")]
    bench.values.set(7, "trainer.step", "2", 2.0)
    bench.values.set(7, "loss", "0.5", 0.5)
    bench.look()
    assert [r["name"] for r in bench.variables[2:]] == ["trainer.step", "loss"]
    assert [(r["step"], r["loss"]) for r in bench.metrics[1:]] == [(2, 0.5)]


def test_a_value_that_changed_while_it_was_read_is_no_news(bench: Bench) -> None:
    bench.values.set(7, "trainer.step", "1", 1.0)
    bench.values.set(7, "loss", None, None, CHANGED)
    bench.look()
    assert [r["name"] for r in bench.variables] == ["trainer.step"]
    assert [(r["step"], r["loss"]) for r in bench.metrics] == [(1, None)]
    bench.values.set(7, "loss", None, None, "there is no variable")
    bench.look()
    told = [(r["name"], r["value"], r["reason"]) for r in bench.variables[1:]]
    assert told == [("loss", None, "there is no variable")]


def test_the_first_thread_with_a_value_answers(bench: Bench) -> None:
    bench.names[7] = ("loss",)
    bench.values.set(7, "loss", None, None, "nothing")
    main = bench.values.values[7, "loss"]
    bench.values.set(7, "loss", "0.5", 0.5)
    bench.values.values[7, "loss"] = main + bench.values.values[7, "loss"]
    bench.look()
    assert [r["value"] for r in bench.variables] == ["0.5"]
    assert bench.metrics == []


@pytest.mark.parametrize(
    ("text", "number"), [("1.5", 1.5), ("inf", float("inf")), ("nan", float("nan")), ("'a'", None)]
)
def test_steps_that_are_none(bench: Bench, text: str, number: float | None) -> None:
    bench.values.set(7, "trainer.step", text, number)
    bench.look()
    assert bench.metrics == []
    assert [r["step"] for r in bench.variables] == [None]


def test_only_trainers_with_names_are_read(bench: Bench) -> None:
    bench.known.who += [Identity(8, 80, "job", "run", "dataloader"), trainer(9, 1)]
    bench.names[8] = ("x",)
    bench.look()
    assert {pid for pid, _ in bench.values.asked} == {7}
    bench.known.who.clear()
    assert bench.look() == []


def test_a_stuck_process_does_not_delay_the_others(bench: Bench) -> None:
    bench.known.who.append(trainer(9, 1))
    bench.names[9] = ("step",)
    bench.values.set(9, "step", "3", 3.0)
    held = bench.values.stuck[7] = threading.Event()
    stuck, other = bench.watch.look()
    other.result(60)
    assert [(r["rank"], r["step"]) for r in bench.metrics] == [(1, 3)]
    # It is not asked again while it is being read.
    again = bench.watch.look()
    assert len(again) == 1
    again[0].result(60)
    held.set()
    stuck.result(60)
    assert [pid for pid, _ in bench.values.asked].count(7) == 1


def test_failures_have_a_reason_until_they_end(bench: Bench) -> None:
    bench.values.failing.add(7)
    bench.look()
    assert bench.watch.reason == "process 7 does not answer"
    bench.values.failing.clear()
    bench.look()
    assert bench.watch.reason == ""


def test_it_reads_by_itself_and_at_once_when_asked(bench: Bench, until: Callable[..., object]) -> None:
    bench.names.clear()
    bench.watch.start()
    bench.values.set(7, "step", "1", 1.0)
    bench.names[7] = ("step",)
    bench.watch.settings_changed()
    until(lambda: bench.metrics)
    bench.watch.stop()
    assert [(r["step"], r["value"]) for r in bench.variables][:1] == [(1, "1")]


def test_an_error_of_the_source_itself_is_shown(bench: Bench) -> None:
    # GIVEN an answer that cannot become a row
    bench.values.set(7, "loss", "0.5", "half")  # type: ignore[arg-type]
    bench.look()
    # THEN the state of the source says that there are no values
    assert bench.watch.reason == "the visit of a process failed: ArrowInvalid"
    # AND a later answer makes it right
    bench.values.set(7, "loss", "0.5", 0.5)
    bench.look()
    assert bench.watch.reason == ""
    assert [row["value"] for row in bench.variables] == ["0.5"]
