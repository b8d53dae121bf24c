"""The source of torch modules against readers that are made up: which samples become which rows, and which losses."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from fakes import Processes, Readers, Sink

from probing.api.errors import CorruptTarget, NotPython, ProbingError, ProcessGone, TargetTimeout
from probing.daemon.clock import FakeClock
from probing.daemon.ipc import Message
from probing.daemon.python_stack.torch_modules.source import MAX_MODULES, WINDOW_NS, TorchModules
from probing.daemon.source import Identity

SECOND_NS = 1_000_000_000
NET = ("Net", "Net", "Net")
LAYER = ("Net", "layers.3", "Block")
MLP = ("Net", "layers.3.mlp", "Mlp")


def trainer(pid: int, rank: int, train_tid: int | None = None) -> Identity:
    return Identity(pid, pid * 10, "job", "run", "trainer", rank, rank, 2, 0, train_tid)


class Bench:
    """A source that samples all trainers. ``answers``: of the readers, in turn; ``stage`` and modules, or an error."""

    def __init__(self) -> None:
        self.clock = FakeClock(mono_ns=7 * SECOND_NS, real_ns=1_000 * SECOND_NS)
        self.sink = Sink("python.torch_modules")
        self.known = Processes(trainer(7, 0))
        self.off: set[int] = set()
        self.answers: list[tuple[str, list[Any]] | ProbingError] = []
        self.readers = Readers(modules=self._answer)
        runtimes = SimpleNamespace(prepare=lambda *_: SimpleNamespace(to_dict=dict))
        self.source = TorchModules(
            self.readers,
            runtimes,
            self.sink,
            lambda who: who.pid not in self.off,
            self.known,
            self.clock,
            "n1",
            interval_s=lambda: 0.01,
        )

    def _answer(self, _: dict[str, Any]) -> Message | ProbingError:
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        return answer if isinstance(answer, ProbingError) else Message({"stage": answer[0], "modules": answer[1]})

    def look(self, *answers: tuple[str, list[Any]] | ProbingError, after_ns: int = SECOND_NS) -> None:
        """Lets the source sample each process once for each of ``answers``."""
        for answer in answers:
            self.answers = [answer]
            for future in self.source.look():
                future.result(60)
            self.clock.advance(after_ns)

    def rows(self) -> dict[tuple[str | None, str], tuple[int, int]]:
        """Returns the samples, and samples below, by module and stage."""
        rows = self.sink.of("python.torch_modules")
        return {(row["module"], row["stage"]): (row["samples"], row["samples_below"]) for row in rows}


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    made.source.stop()


def test_a_window_has_a_row_for_each_module_and_stage(bench: Bench) -> None:
    bench.look(*[("forward", [NET, LAYER, MLP])] * 3, *[("forward", [NET, LAYER])] * 2)
    bench.look(*[("backward", [])] * 3, ("other", []), ("backward", [LAYER, MLP]))
    assert bench.sink.rows == []
    bench.look(("forward", [NET]))
    assert bench.rows() == {
        ("Net", "forward"): (0, 5),
        ("layers.3", "forward"): (2, 5),
        ("layers.3.mlp", "forward"): (3, 3),
        ("layers.3", "backward"): (0, 1),
        ("layers.3.mlp", "backward"): (1, 1),
        (None, "backward"): (3, 3),
        (None, "other"): (1, 1),
    }
    common = {
        (row["node"], row["job"], row["run"], row["pid"], row["start_ns"], row["rank"]) for row in bench.sink.rows
    }
    assert common == {("n1", "job", "run", 7, 70, 0)}
    times = {(row["ts"], row["window_ns"], row["interval_ns"]) for row in bench.sink.rows}
    assert times == {(1_000 * SECOND_NS, WINDOW_NS, SECOND_NS)}
    assert {(row["model"], row["module"], row["class"]) for row in bench.sink.rows} == {NET, LAYER, MLP, (None,) * 3}
    # The sample after the window is the first of the next window.
    bench.sink.clear()
    bench.source.finish()
    assert bench.rows() == {("Net", "forward"): (1, 1)}
    assert bench.sink.rows[0]["ts"] == 1_010 * SECOND_NS
    assert bench.sink.losses == []


def test_each_sample_counts_a_module_once(bench: Bench) -> None:
    bench.look(("forward", [NET, LAYER, NET]))
    bench.source.finish()
    assert bench.rows() == {("Net", "forward"): (1, 1), ("layers.3", "forward"): (0, 1)}


def test_a_sample_stands_for_more_time_where_samples_are_missing(bench: Bench) -> None:
    bench.look(
        *[("other", [])] * 2, TargetTimeout("it hangs"), CorruptTarget("it changed"), CorruptTarget("it changed")
    )
    assert bench.source.reason == ""
    bench.source.finish()
    (row,) = bench.sink.rows
    assert (row["samples"], row["window_ns"], row["interval_ns"]) == (2, 5 * SECOND_NS, 5 * SECOND_NS // 2)
    (loss,) = bench.sink.losses
    assert (loss.source, loss.table, loss.stage, loss.reason) == (
        *("torch_modules", "python.torch_modules", "read", "it changed"),
    )
    assert (loss.ts_from_ns, loss.ts_to_ns, loss.count, loss.pid) == (1_000 * SECOND_NS, 1_005 * SECOND_NS, 3, 7)


def test_a_process_that_does_not_answer_is_a_reason_until_it_does(bench: Bench) -> None:
    bench.look(TargetTimeout("process 7 hangs"))
    assert bench.source.reason == "process 7 hangs"
    bench.look(("other", []))
    assert bench.source.reason == ""


def test_a_process_without_cpython_is_asked_seldom_and_loses_nothing(bench: Bench) -> None:
    bench.look(NotPython("process 7 runs no CPython"), ("other", []))
    assert bench.readers.count("modules") == 1
    assert bench.source.reason == "process 7 runs no CPython"
    bench.source.finish()
    assert bench.sink.rows == bench.sink.losses == []


def test_a_process_that_ended_loses_nothing(bench: Bench) -> None:
    bench.look(("other", []), ProcessGone("process 7 exited"))
    bench.known.who.clear()
    assert bench.source.look() == []
    assert bench.rows() == {(None, "other"): (1, 1)}
    assert bench.sink.losses == []


def test_only_trainers_that_are_wanted_are_sampled(bench: Bench) -> None:
    bench.known.who += [trainer(8, 1, 88), Identity(9, 90, "job", "run", "data_loader")]
    bench.off.add(7)
    bench.look(("other", []))
    assert [(arguments["pid"], arguments["tid"]) for _, arguments in bench.readers.asked] == [(8, 88)]
    # Its window ends when it is no longer wanted.
    bench.off.add(8)
    assert bench.source.look() == []
    assert [(row["pid"], row["samples"]) for row in bench.sink.rows] == [(8, 1)]


@pytest.mark.parametrize("answer", [("sideways", []), ("forward", [["Net", "Net"]]), ("forward", [[1, 2, 3]])])
def test_an_answer_that_is_none_is_a_loss(bench: Bench, answer: tuple[str, list[Any]]) -> None:
    bench.look(answer)
    assert bench.source.reason.startswith("a reader's answer about modules cannot be used: ")
    bench.source.finish()
    assert [loss.count for loss in bench.sink.losses] == [1]


def test_modules_beyond_the_limit_are_counted_together(bench: Bench) -> None:
    for number in range(MAX_MODULES + 23):
        bench.look(("forward", [NET, ("Net", f"m{number}", "Linear")]), after_ns=1000)
    bench.look(("backward", []), after_ns=1000)
    bench.source.finish()
    rows = bench.rows()
    # The model is one of the modules that ran most.
    assert len(rows) == MAX_MODULES + 2
    assert rows["Net", "forward"] == (0, MAX_MODULES + 23)
    assert rows[None, "forward"] == (24, 24)
    assert rows[None, "backward"] == (1, 1)
    assert sum(samples for samples, _ in rows.values()) == MAX_MODULES + 24
    (loss,) = bench.sink.losses
    assert (loss.stage, loss.count, loss.reason) == ("read", 24, f"more than {MAX_MODULES} modules ran")


def test_it_samples_by_itself_once_a_trainer_is_wanted(bench: Bench, until: Callable[..., object]) -> None:
    bench.answers = [("forward", [NET])]
    (who,) = bench.known.who
    bench.off.add(7)
    bench.source.start()
    bench.off.clear()
    bench.source.process_identified(who)
    until(lambda: bench.readers.count("modules") >= 3)
    bench.off.add(7)
    bench.source.settings_changed()
    until(lambda: bench.sink.rows)
    assert bench.rows()["Net", "forward"][0] >= 3
