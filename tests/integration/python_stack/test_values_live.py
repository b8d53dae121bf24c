"""Values of processes that do not hold still, are stopped, or hold tensors; and the source that asks for them."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from fakes import Parsers
from long import examples
from python_stack_helpers import ReadersOfValues, child, each_interpreter, program, runtime_of

from probing.api.errors import ProcessGone, UsageError
from probing.daemon.clock import SystemClock
from probing.daemon.python_stack.stacks.dump import dump_stacks
from probing.daemon.python_stack.stacks.requests import PythonStacks
from probing.daemon.python_stack.values.heap import CHANGED
from probing.daemon.python_stack.values.read import ATTEMPTS, handlers, read_values
from probing.daemon.python_stack.values.requests import Values
from probing.daemon.python_stack.values.watch import VariableWatch
from probing.daemon.python_stack.walk.capture import Capture, capture
from probing.daemon.python_stack.walk.threads import read_start_ns
from probing.daemon.source import Identity, Loss

Until = Callable[..., object]


def agrees(row: dict[str, Any]) -> bool:
    text = row["value"]
    if row["name"] == "pair":
        found = re.fullmatch(r"\((\d+), (\d+)\)", text)
        return found is not None and int(found[2]) - int(found[1]) == 10**12
    if row["name"] == "state":
        return re.fullmatch(r"\{'a': (\d+), 'b': \[\1, '\1'\]\}", text) is not None
    if row["name"] == "text":
        return re.fullmatch(r"'(\d+)\1{7}'", text) is not None
    return str(text).isdigit()


@contextmanager
def stopped(python: str, until: Until) -> Iterator[subprocess.Popen[str]]:
    """Runs values_busy.py until both of its threads are at work, and stops it."""
    with program(python, "values_busy.py") as process:
        assert process.stdout is not None
        assert process.stdout.readline().strip() == "ready"
        os.kill(process.pid, signal.SIGSTOP)
        until(lambda: "T (stopped)" in Path(f"/proc/{process.pid}/status").read_text())
        yield process


@each_interpreter
def test_values_that_change_are_whole_or_said_to_have_changed(python: str) -> None:
    rounds, read = examples(60), 0
    with program(python, "values_busy.py") as process:
        assert process.stdout is not None
        assert process.stdout.readline().strip() == "ready"
        runtime, start_ns = runtime_of(process.pid), read_start_ns(process.pid)
        for _ in range(rounds):
            deadline = time.monotonic() + 60
            answer = read_values(process.pid, start_ns, runtime, ["step", "pair", "state", "text", "box.a"], deadline)
            for row in answer["values"]:
                assert row["value"] is None or agrees(row), row
                assert row["value"] or row["reason"] == CHANGED or "there is no variable" in row["reason"], row
                read += row["value"] is not None
        for _ in range(10):
            dumped = dump_stacks(process.pid, start_ns, runtime, time.monotonic() + 60, with_locals=True)
            found = [v for t in dumped["threads"] for f in t["frames"] if f["func"] == "work" for v in f["locals"]]
            assert all(agrees(v) for v in found if v["value"] and v["name"] in ("pair", "state", "text", "step"))
    assert read > rounds


@each_interpreter
def test_each_thread_answers_for_itself(python: str, until: Until) -> None:
    with stopped(python, until) as process:
        runtime, start_ns = runtime_of(process.pid), read_start_ns(process.pid)
        other = max(int(entry.name) for entry in Path(f"/proc/{process.pid}/task").iterdir())
        request = {"pid": process.pid, "start_ns": start_ns, "runtime": runtime.to_dict(), "timeout_ms": 60_000}
        one = handlers()["vars"]({**request, "names": ["who"], "threads": [other]})["values"]
        answers = [
            read_values(process.pid, start_ns, runtime, ["who", "step", "Box"], time.monotonic() + 60)["values"]
            for _ in range(3)
        ]
    assert [(v["tid"], v["value"]) for v in one] == [(other, "'other'")]
    assert answers[0] == answers[1] == answers[2]
    rows = [(v["name"], v["value"]) for v in answers[0]]
    # A global is read once, and all threads see the same.
    assert rows[:2] == [("who", "'main'"), ("who", "'other'")]
    assert [name for name, _ in rows] == ["who", "who", "step", "step", "Box"]
    assert answers[0][0]["tid"] == process.pid != answers[0][1]["tid"]


def test_a_stack_that_is_not_whole_hides_no_variable(monkeypatch: pytest.MonkeyPatch, until: Until) -> None:
    looks, incomplete = 0, 0

    def cut(*arguments: Any) -> Capture:
        nonlocal looks
        captured, looks = capture(*arguments), looks + 1
        if looks > incomplete:
            return captured
        threads = [(replace(thread, frames=[], complete=False), codes) for thread, codes in captured.threads]
        return replace(captured, threads=threads)

    monkeypatch.setattr("probing.daemon.python_stack.values.read.capture", cut)
    with stopped(sys.executable, until) as process:
        runtime, start_ns = runtime_of(process.pid), read_start_ns(process.pid)

        def answer(name: str) -> list[tuple[str | None, str]]:
            values = read_values(process.pid, start_ns, runtime, [name], time.monotonic() + 60)["values"]
            return [(value["value"], value["reason"]) for value in values]

        # WHEN the first of the looks lacks frames, the next has them
        incomplete = 1
        assert answer("who") == [("'main'", ""), ("'other'", "")]
        # AND when all lack some, nobody says that there is no such variable
        incomplete = looks + ATTEMPTS
        assert answer("who") == [(None, CHANGED)]
        assert answer("nobody") == [(None, "there is no variable 'nobody' in any frame")]


def test_tensors() -> None:
    with program(sys.executable, "values_torch.py") as process:
        assert process.stdout is not None
        told = json.loads(process.stdout.readline())
        pid = process.pid
        names = [*told, "strange", "numbers", "model.fc.weight", "model.count", "model.seq.0.bias"]
        names.append("module:torch.int64")
        values = read_values(pid, read_start_ns(pid), runtime_of(pid), names, time.monotonic() + 60)["values"]
    found = {v["name"]: v for v in values}
    for name, (shape, dtype, device, number) in told.items():
        row = found[name]
        if name == "meta_scalar":
            assert (row["value"], row["reason"]) == (None, "on the device meta: its value cannot be read from outside")
            continue
        assert row["number"] == number, row
        what = f"shape={shape}" if number is None else "0.693" if name == "loss" else number
        assert row["value"] == f"tensor({what}, dtype={dtype}, device={device})"
    assert found["strange"]["reason"] == "a scalar of complex64 is not read"
    assert found["numbers"]["value"] == (
        "{'loss': tensor(0.693, dtype=float32, device=cpu), 'list': [tensor(1099511627776, dtype=int64, device=cpu), "
        "tensor(True, dtype=bool, device=cpu)]}"
    )
    assert found["model.fc.weight"]["value"] == "tensor(shape=[2, 3], dtype=float32, device=cpu)"
    assert found["model.fc.weight"]["type"] == "Parameter"
    assert found["model.count"]["number"] == 3
    assert found["model.seq.0.bias"]["number"] is not None
    assert found["module:torch.int64"]["value"] == "torch.int64"


def test_the_source_answers_for_several_processes_and_tells_failures() -> None:
    stacks = PythonStacks(ReadersOfValues(), Parsers())
    values = Values(ReadersOfValues(), stacks.prepare)
    with child("/bin/sleep", "1000") as other, program(sys.executable, "values_busy.py") as process:
        assert process.stdout is not None
        assert process.stdout.readline().strip() == "ready"
        keys = [(p.pid, read_start_ns(p.pid)) for p in (process, other)]
        found, failures = values.values([*keys, (process.pid, 10_000_000)], ["who"], 60)
        assert {(v["pid"], v["start_ns"], v["value"]) for v in found} == {(*keys[0], "'main'"), (*keys[0], "'other'")}
        assert [(f.pid, f.error.kind) for f in failures] == [(other.pid, "NotPython"), (process.pid, "ProcessGone")]
        late = values.values(keys, ["who"], 0.0)[1]
        assert {f.error.kind for f in late} == {"TargetTimeout"}
    values.close()
    stacks.close()


class Kept:
    """A sink; ``rows`` by table."""

    def __init__(self) -> None:
        self.rows: dict[str, list[dict[str, Any]]] = {"python.variables": [], "python.training_metrics": []}

    def put(self, table: str, batch: pa.RecordBatch) -> None:
        self.rows[table] += batch.drop_columns(["ts"]).to_pylist()

    def lost(self, loss: Loss) -> None:
        raise AssertionError(loss)


@each_interpreter
def test_watched_steps_and_losses_become_rows(python: str, until: Until) -> None:
    sink = Kept()
    with program(python, "values_train.py") as process:
        assert process.stdout is not None
        assert process.stdout.readline().strip() == "ready"
        stacks = PythonStacks(ReadersOfValues(), Parsers())
        values = Values(ReadersOfValues(), stacks.prepare)
        who = Identity(process.pid, read_start_ns(process.pid), "job", "run", "trainer", 3, 3, 8, 0)
        names = ("trainer.state.step", "trainer.loss", "trainer.epoch")
        known = SimpleNamespace(live=lambda: [who])
        watch = VariableWatch(values, sink, lambda _: names, known, SystemClock(), "n1", interval_s=lambda: 0.01)
        watch.start()
        metrics = sink.rows["python.training_metrics"]
        until(lambda: len(metrics) >= 5)
        watch.stop()
        assert watch.reason == ""
        values.close()
        stacks.close()
    assert {(m["rank"], m["pid"], m["job"]) for m in metrics} == {(3, process.pid, "job")}
    steps = [m["step"] for m in metrics]
    assert steps == sorted(set(steps))
    # The loss is set right after the step, so it may still be that of the step before.
    assert all(m["loss"] in (1 / m["step"], 1 / max(1, m["step"] - 1)) for m in metrics if m["loss"] is not None)
    told = [v for v in sink.rows["python.variables"] if v["name"] == "trainer.epoch"]
    assert [(v["type"], v["value"], v["func"]) for v in told] == [("str", "'first'", "train")]


def test_requests_that_make_no_sense() -> None:
    with program(sys.executable, "values_busy.py") as process:
        assert process.stdout is not None
        assert process.stdout.readline().strip() == "ready"
        runtime = runtime_of(process.pid)
        request: dict[str, Any] = {"pid": process.pid, "start_ns": 0, "runtime": runtime.to_dict()}
        ask = handlers()["vars"]
        for wrong in ({"names": []}, {"names": ["a b"]}, {"names": ["x"] * 65 + [f"y{i}" for i in range(65)]}):
            with pytest.raises(UsageError):
                ask({**request, **wrong})
        with pytest.raises(UsageError):
            ask({**request, "names": ["x"], "pid": "1"})
        with pytest.raises(UsageError):
            ask({**request, "names": ["x"], "threads": "all"})
        with pytest.raises(ProcessGone):
            ask({**request, "names": ["x"], "start_ns": 10_000_000})
