"""What is read from outside equals what the interpreter says of itself, on every interpreter there is."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from python_stack_helpers import INTERPRETERS, cleaned, dump, each_interpreter, frames_of, program, runtime_of


def test_which_interpreters(capsys: pytest.CaptureFixture[str]) -> None:
    missing = [python for python in INTERPRETERS if not os.access(python, os.X_OK)]
    assert missing == []
    code = "import platform; print(platform.python_version())"
    versions = [subprocess.check_output([python, "-c", code], text=True).strip() for python in INTERPRETERS]
    with capsys.disabled():
        print("\nPython stacks are tested on:")
        for version, python in zip(versions, INTERPRETERS, strict=True):
            print(f"  {version:10} {python}")
    newest = {version.rpartition(".")[0] for version in versions} & {"3.14", "3.15"}
    if "PROBINGD_TEST_PYTHONS" in os.environ:
        return
    # As root they are there to be made; anywhere else it is said that they are not tested.
    assert "3.14" in newest or "CI" not in os.environ, "run packaging/dev/sid-python.sh"
    if "3.14" not in newest:
        with capsys.disabled():
            print("  3.14 and 3.15 are NOT tested: packaging/dev/sid-python.sh makes them, and they take root")


def utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def reported(process: subprocess.Popen[str]) -> dict[int, list[list[Any]]]:
    """[func, file, lineno] of each frame by tid, as the program says once all its threads are parked."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write("report\n")
    process.stdin.flush()
    return {int(tid): frames for tid, frames in json.loads(process.stdout.readline()).items()}


@each_interpreter
def test_all_threads_in_all_shapes(python: str, until: Callable[..., object]) -> None:
    with program(python, "shapes.py") as process:
        said = {tid: cleaned(frames) for tid, frames in reported(process).items()}
        assert len(said) == 44

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


@each_interpreter
def test_py_spy_sees_the_same(python: str) -> None:
    """py-spy 0.4.3 reads 3.8 to 3.15. A frame whose file name is no UTF-8 is left out by it, and so by us here."""
    with program(python, "shapes.py") as process:
        said = reported(process)
        surrogates = [frame for frames in said.values() for frame in frames if not utf8(frame[1])]
        assert len(surrogates) == 1
        ((_, unspoken, _),) = cleaned(surrogates)
        ours = {t["tid"]: frames_of(t) for t in dump(process.pid, runtime_of(process.pid))["threads"]}
        command = [Path(sys.executable).with_name("py-spy"), "dump", "--json", "--pid", str(process.pid)]
        theirs = {
            thread["os_thread_id"]: cleaned([[f["name"], f["filename"], f["line"]] for f in thread["frames"]])
            for thread in json.loads(subprocess.check_output(command, text=True))
        }
        assert theirs.keys() >= said.keys()
        for tid in said:
            assert [f for f in ours[tid] if f[1] != unspoken] == theirs[tid]
