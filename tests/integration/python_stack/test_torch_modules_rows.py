"""Rows of ``python.torch_modules`` from a process that stands in one module, through the loop of a reader."""

from __future__ import annotations

import sys
from typing import Any

import pytest
from fakes import Parsers, Processes, Sink
from python_stack_helpers import child
from sampler_support import readers
from test_torch_modules import FAKE, LAYERS

from probing.api.errors import UsageError
from probing.daemon.clock import FakeClock
from probing.daemon.python_stack.stacks.requests import PythonStacks
from probing.daemon.python_stack.torch_modules.source import TorchModules
from probing.daemon.python_stack.walk.threads import read_start_ns
from probing.daemon.source import Identity

SAMPLES = 7
SECOND_NS = 1_000_000_000


@pytest.fixture(scope="module")
def rows() -> list[dict[str, Any]]:
    """The rows of 7 samples, a second apart."""
    clock, sink = FakeClock(mono_ns=SECOND_NS, real_ns=1_000 * SECOND_NS), Sink("python.torch_modules", may_lose=False)
    with child(sys.executable, "-u", "-c", FAKE + LAYERS) as process, readers() as served:
        assert process.stdout is not None
        assert process.stdout.readline() == "stopped\n"
        who = Identity(process.pid, read_start_ns(process.pid), "job", "run", "trainer", 3)
        stacks = PythonStacks(served, Parsers())
        source = TorchModules(served, stacks, sink, lambda _: True, Processes(who), clock, "n1")
        for _ in range(SAMPLES):
            (reading,) = source.look()
            reading.result(60)
            clock.advance(SECOND_NS)
        source.finish()
        source.stop()
        stacks.close()
    return sink.rows


def test_each_sample_is_counted_once(rows: list[dict[str, Any]]) -> None:
    keys = ("model", "module", "class", "stage", "samples", "samples_below")
    assert {tuple(row[key] for key in keys) for row in rows} == {
        ("Net", "Net", "Parallel", "forward", 0, SAMPLES),
        ("Net", "Net", "Compiled", "forward", 0, SAMPLES),
        ("Net", "Net", "Net", "forward", 0, SAMPLES),
        ("Net", "body", "Body", "forward", 0, SAMPLES),
        ("Net", "body.layers.0", "Module", "forward", 0, SAMPLES),
        ("Net", "body.layers.0.mlp", "Leaf", "forward", SAMPLES, SAMPLES),
    }


def test_samples_stand_for_the_time_of_the_window(rows: list[dict[str, Any]]) -> None:
    # The end of the window, t_end, is computed from its begin and window_ns.
    assert {(row["ts"], row["window_ns"], row["interval_ns"]) for row in rows} == {
        (1_000 * SECOND_NS, SAMPLES * SECOND_NS, SECOND_NS)
    }
    assert {(row["node"], row["job"], row["run"], row["rank"]) for row in rows} == {("n1", "job", "run", 3)}


def test_a_request_without_a_thread_is_refused() -> None:
    with (
        child(sys.executable, "-u", "-c", FAKE + LAYERS) as process,
        readers() as served,
        pytest.raises(UsageError, match="needs the tid"),
    ):
        served.call("modules", pid=process.pid, start_ns=0, timeout=5)
