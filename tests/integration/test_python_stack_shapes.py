"""What is read from outside equals what the interpreter says of itself, on every interpreter there is."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable

import pytest
from python_stack_helpers import INTERPRETERS, cleaned, dump, frames_of, program, runtime_of


def test_which_interpreters(capsys: pytest.CaptureFixture[str]) -> None:
    with capsys.disabled():
        print(f"\nPython stacks are tested on: {', '.join(INTERPRETERS)}")
    assert INTERPRETERS
    assert [python for python in INTERPRETERS if not os.access(python, os.X_OK)] == []


@pytest.mark.parametrize("python", INTERPRETERS)
def test_all_threads_in_all_shapes(python: str, until: Callable[..., object]) -> None:
    with program(python, "shapes.py") as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write("report\n")
        process.stdin.flush()
        said = {int(tid): cleaned(frames) for tid, frames in json.loads(process.stdout.readline()).items()}
        assert len(said) > 20

        runtime = runtime_of(process.pid)
        for attempt in ("cold", "warm"):
            answer = dump(process.pid, runtime, cold=attempt == "cold")
            threads = {t["tid"]: t for t in answer["threads"]}
            assert threads.keys() >= said.keys()
            assert answer["threads"][0]["tid"] == process.pid
            for tid, frames in said.items():
                assert frames_of(threads[tid]) == frames, attempt
                assert threads[tid]["gil"] is False
                assert threads[tid]["complete"]

        until(lambda: {t["state"] for t in dump(process.pid, runtime)["threads"]} == {"sleeping"})

        os.kill(process.pid, signal.SIGSTOP)
        _, status = os.waitpid(process.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status)
        stopped = {t["tid"]: t for t in dump(process.pid, runtime)["threads"]}
        assert {t["state"] for t in stopped.values()} == {"stopped"}
        assert {tid: frames_of(stopped[tid]) for tid in said} == said
