"""C and Python frames of one thread as one stack: every interpreter, a real hung collective, and beside pystack."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from native_helpers import blocked_in, built, merged, pystack, stacks_of, switches
from python_stack_helpers import child, each_interpreter

READ = "0"
# f and the lambda run twice each, every time in a C loop of their own; below them the C++ library waits.
NESTED = """
import ctypes, sys
library = ctypes.CDLL(sys.argv[1])
def waits():
    library.block_in_cpp()
def f(depth):
    if depth == 0:
        return waits()
    return sorted([1], key=lambda _: f(depth - 1))
f(2)
"""
PYTHON = ["waits", "f", "<lambda>", "f", "<lambda>", "f", "<module>"]
HANGS = """
import sys, threading
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
def train_step():
    if dist.get_rank() == 0:
        dist.all_reduce(torch.ones(10))
    else:
        sys.stdin.read()
print("ready", flush=True)
train_step()
"""
# Each thread is in a or in b at any time, in Python and in C.
MOVES = """
import ctypes, sys, threading
library = ctypes.CDLL(sys.argv[1])
def a(): library.a_outer(20000)
def b(): b_too()
def b_too(): library.b_outer(20000)
def moves():
    while True:
        a()
        b()
for _ in range(3):
    threading.Thread(target=moves, daemon=True).start()
print("ready", flush=True)
sys.stdin.read()
"""
LIKELY = "the position of a frame was guessed"
A, B = ["a_inner", "a_outer"], ["b_inner", "b_middle", "b_outer"]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built(tmp_path_factory.mktemp("native"), "blocked.cpp", "-O2", "-shared", "-fPIC")


@contextmanager
def nested(python: str, library: Path) -> Iterator[int]:
    # An interpreter may be in a root of its own, from which only this way leads out.
    with child(python, "-c", NESTED, f"/proc/{os.getpid()}/root{library}") as process:
        assert process.stdout
        assert process.stdout.readline() == "ready\n"
        blocked_in(process.pid, process.pid, READ)
        yield process.pid


def short(frames: list[dict[str, Any]], kind: str) -> list[str]:
    return [f["func"].rpartition(".")[2] if kind == "Python" else f["func"] for f in frames if f["frame_type"] == kind]


@each_interpreter
def test_merged_stacks(python: str, library: Path) -> None:
    with nested(python, library) as pid:
        before = switches(pid)
        thread = merged(pid)[pid]
        assert switches(pid) == before
    frames = thread["frames"]
    assert thread["native_missing"] == ""
    assert thread["complete"]
    assert short(frames, "Python") == PYTHON
    names = [f["func"].rpartition(".")[2] for f in frames]
    assert names.index("block_in_cpp") < names.index("waits")
    assert not any(f["func"].startswith("_PyEval_EvalFrameDefault") for f in frames)
    # list.sort, in C, lies between each lambda and the f that called it: they are runs of their own.
    kinds = [f["frame_type"] for f in frames]
    runs = re.sub(r"(.)\1+", r"\1", "".join(kind[0] for kind in kinds))
    entries = sum(f["entry"] for f in frames if f["frame_type"] == "Python")
    assert runs == "NPNPNPN" if entries == 3 else runs.count("P") >= 3
    assert frames[-1]["func"] == "_start"


def test_threads_that_move_are_right_or_said_to_be_missing(tmp_path: Path) -> None:
    library = built(tmp_path, "moving.c", "-O2", "-shared", "-fPIC")
    right = 0
    with child(sys.executable, "-c", MOVES, str(library)) as process, stacks_of(process.pid) as read:
        assert process.stdout
        assert process.stdout.readline() == "ready\n"
        for _ in range(600):
            for tid, thread in read().items():
                own = [f["func"] for f in thread["frames"] if f["file"] == str(library)]
                frames = short(thread["frames"], "Python")
                # libffi's frame lies where only a register says; it is found, and said to be so.
                if tid == process.pid or thread["native_missing"] not in ("", LIKELY):
                    continue
                # A thread can be about to enter C, or be on its way back, and waits for the interpreter lock there.
                assert own in (A, B, [])
                assert own != A or frames[:2] == ["a", "moves"]
                assert own != B or frames[:3] == ["b_too", "b", "moves"]
                right += bool(own)
            if right >= 300:
                break
    assert right >= 300


def test_beside_pystack(library: Path) -> None:
    with nested(sys.executable, library) as pid:
        ours = merged(pid)[pid]["frames"]
        theirs = pystack(pid)
    listed = re.findall(r'\((\w+)\) File "[^\n]*", line \d+, in ([^\n]*?)(?: \((/[^\n]*)\))?\n', theirs)[::-1]
    assert [name for kind, name, _ in listed if kind == "Python"] == short(ours, "Python")
    told = [(name, Path(file).name) for kind, name, file in listed if kind == "C" and "(inlined)" not in name]
    python = Path(sys.executable).resolve().name
    # pystack leaves some of the interpreter's own frames out, and names what only separate symbols name.
    outside = [f for f in ours if f["frame_type"] == "Native" and not f["file"].endswith(python)]
    assert [Path(f["file"]).name for f in outside] == [file for _, file in told if file != python]
    named = [(f["func"], name) for f, (name, _) in zip(outside, [t for t in told if t[1] != python], strict=True)]
    of_library = [(mine, name) for mine, name in named if "block_in_cpp" in mine or "outer::" in mine]
    assert len(of_library) >= 6
    assert [mine for mine, _ in of_library] == [name for _, name in of_library]


@pytest.fixture(scope="module")
def ranks() -> Iterator[list[int]]:
    """Two gloo ranks: 0 waits in all_reduce for 1, which does not come."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        master = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1]), "WORLD_SIZE": "2"}
    environ = {**os.environ, **master, "OMP_NUM_THREADS": "1"}
    started = [
        subprocess.Popen(
            [sys.executable, "-c", HANGS],
            env={**environ, "RANK": str(rank)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        for process in started:
            assert process.stdout
            assert process.stdout.readline() == "ready\n"
        yield [process.pid for process in started]
    finally:
        for process in started:
            process.kill()
            process.communicate()


def test_a_hung_all_reduce_is_seen_in_c(ranks: list[int]) -> None:
    blocked_in(ranks[0], ranks[0], "202")
    hung = waiting(ranks[0])
    assert all(t["native_missing"] == "" for t in hung.values())
    main = hung.pop(ranks[0])
    assert short(main["frames"], "Python")[-2:] == ["train_step", "<module>"]
    assert "all_reduce" in short(main["frames"], "Python")
    names = [f["func"] for f in main["frames"]]
    assert next(i for i, n in enumerate(names) if n.startswith("c10d::Work::wait(")) < names.index("all_reduce")
    every = [f["func"] for t in hung.values() for f in t["frames"]]
    assert any("c10d::AsyncAllreduceWork::allreduce(" in name for name in every)
    assert any(name.startswith("gloo::(anonymous namespace)::allreduce(") for name in every)


def test_the_other_rank_is_elsewhere(ranks: list[int]) -> None:
    blocked_in(ranks[1], ranks[1], READ)
    other = waiting(ranks[1])
    assert not any("llreduce(" in f["func"] for t in other.values() for f in t["frames"])
    assert short(other[ranks[1]]["frames"], "Python")[-2:] == ["train_step", "<module>"]


def waiting(pid: int) -> dict[int, dict[str, Any]]:
    """The threads of a rank once all of them are blocked; some wake up now and then to look whether to go on."""
    for _ in range(100):
        threads = merged(pid)
        if not any(t["native_missing"] for t in threads.values()):
            return threads
    with suppress(ProcessLookupError):
        pytest.fail(f"threads of {pid} are never seen: {[t['native_missing'] for t in threads.values()]}")
    return {}
