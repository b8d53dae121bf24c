"""C stacks of blocked programs, which equal what the programs were made to do; read without a trace."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from native_helpers import NativeParsers, NativeReaders, blocked_in, built, native, switches, tids
from waiting import until

from probing.api.errors import UnsupportedTarget
from probing.daemon.ipc import Message

READ, FUTEX = "0", "202"
FLAGS = {
    "omitted": ("-O2", "-fomit-frame-pointer"),
    "kept": ("-O2", "-fno-omit-frame-pointer"),
    "unoptimised": ("-O0", "-fno-omit-frame-pointer"),
    "no-pie": ("-O2", "-no-pie"),
    "stripped": ("-O2", "-s", "-rdynamic"),
}
INNER = ["waits_here", "has_alloca", "has_large_frame"]


@contextmanager
def running(*command: str | Path) -> Iterator[subprocess.Popen[bytes]]:
    """A program that has said that it is about to block in read()."""
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout
            assert process.stdout.read(6) == b"ready\n"
            yield process
        finally:
            process.kill()


def own(thread: dict[str, list[dict[str, str]]], program: Path) -> list[str]:
    return [f["func"] for f in thread["frames"] if f["file"] == str(program)]


@pytest.mark.parametrize("flags", FLAGS.values(), ids=FLAGS)
def test_frames_of_every_kind(tmp_path: Path, flags: tuple[str, ...]) -> None:
    program = built(tmp_path, "blocked.c", *flags)
    with running(program, "5") as process:
        blocked_in(process.pid, process.pid, READ)
        thread = native(process.pid)[process.pid]
    frames = thread["frames"]
    assert own(thread, program)[:-1] == [*INNER, *["recurses"] * 6, "through_pointer", "main"]
    assert own(thread, program)[-1] == "_start"
    assert frames[0]["func"] in ("read", "__read", "__GI___libc_read")
    assert all(f["frame_type"] == "Native" and f["lineno"] is None for f in frames)
    # Where the frame pointer was not known, the frame of has_alloca is the likely one, and the stack says so.
    assert thread["native_missing"] in ("", "the position of a frame was guessed")
    assert thread["native_missing"] == "" or "-fno-omit-frame-pointer" not in flags


def test_a_stack_without_doubt(tmp_path: Path) -> None:
    program = built(tmp_path, "blocked.c", "-O2", "-fomit-frame-pointer")
    with running(program, "plain") as process:
        blocked_in(process.pid, process.pid, READ)
        thread = native(process.pid)[process.pid]
    assert own(thread, program) == ["waits_here", "main", "_start"]
    assert thread["native_missing"] == ""


@pytest.mark.parametrize("flags", [FLAGS["omitted"], FLAGS["kept"]], ids=["omitted", "kept"])
def test_through_a_signal_handler(tmp_path: Path, flags: tuple[str, ...]) -> None:
    program = built(tmp_path, "blocked.c", *flags)
    with running(program, "signal") as process:
        blocked_in(process.pid, process.pid, READ)
        thread = native(process.pid)[process.pid]
    assert own(thread, program) == [*INNER, *["recurses"] * 4, "on_signal", "raises_signal", "main", "_start"]
    names = [f["func"] for f in thread["frames"]]
    assert names[names.index("on_signal") + 1] in ("<signal handler called>", "__restore_rt")
    assert names[names.index("raises_signal") - 1] in ("raise", "gsignal", "__GI_raise")


def test_threads(tmp_path: Path) -> None:
    program = built(tmp_path, "blocked.c", *FLAGS["kept"])
    with running(program, "thread") as process:
        (tid,) = set(tids(process.pid)) - {process.pid}
        blocked_in(process.pid, tid, READ)
        threads = native(process.pid)
    assert own(threads[tid], program) == [*INNER, *["recurses"] * 3, "in_thread"]
    assert own(threads[process.pid], program) == ["main", "_start"]
    assert {t["native_missing"] for t in threads.values()} == {""}


def test_many_threads_with_large_stacks(tmp_path: Path) -> None:
    program = built(tmp_path, "blocked.c", *FLAGS["kept"])
    with running(program, "threads") as process:
        blocked_in(process.pid, process.pid, FUTEX)
        others = set(tids(process.pid)) - {process.pid}
        assert len(others) == 300
        for tid in others:
            blocked_in(process.pid, tid, READ)
        threads = native(process.pid)
    # Not all of each stack is copied, and what is beyond is missing.
    for tid in others:
        assert own(threads[tid], program) == ["waits_here", "has_alloca"]
        assert threads[tid]["native_missing"] == "the copy of the stack ends"
    assert own(threads[process.pid], program) == ["main", "_start"]


def test_deep_recursion_is_cut(tmp_path: Path) -> None:
    program = built(tmp_path, "blocked.c", *FLAGS["kept"])
    with running(program, "400") as process:
        blocked_in(process.pid, process.pid, READ)
        thread = native(process.pid)[process.pid]
    assert len(thread["frames"]) == 256
    assert own(thread, program) == [*INNER, *["recurses"] * 252]
    assert "256" in thread["native_missing"]


@pytest.mark.parametrize("flags", [("-O2",), ("-O1", "-fno-omit-frame-pointer")], ids=["plain", "kept"])
def test_names_of_cpp(tmp_path: Path, flags: tuple[str, ...]) -> None:
    program = built(tmp_path, "blocked.cpp", *flags)
    with running(program) as process:
        blocked_in(process.pid, process.pid, READ)
        thread = native(process.pid)[process.pid]
    wait, *outer = own(thread, program)
    assert wait.startswith("void outer::(anonymous namespace)::Hidden::wait<double>(std::vector<double")
    assert any("{lambda()#1}" in name for name in outer[:3])
    assert outer[-6] == "outer::calls(std::function<void ()> const&)"
    assert outer[-5:-3] == ["outer::Derived::operator()(int)", "outer::runs(outer::Base&)"]
    assert outer[-3:] == ["block_in_cpp", "main", "_start"]
    assert thread["native_missing"] == ""


def test_the_program_notices_nothing(tmp_path: Path) -> None:
    program = built(tmp_path, "blocked.c", *FLAGS["kept"])
    with running(program, "thread") as process:
        for tid in tids(process.pid):
            blocked_in(process.pid, tid, READ if tid != process.pid else FUTEX)
        before = switches(process.pid)
        parsers = NativeParsers()
        for _ in range(100):
            assert {t["native_missing"] for t in native(process.pid, parsers).values()} == {""}
        assert switches(process.pid) == before
        assert all("TracerPid:\t0" in words for words in before.values())
        assert parsers.files <= 3


def test_a_stopped_program_is_read(tmp_path: Path) -> None:
    program = built(tmp_path, "blocked.c", *FLAGS["kept"])
    with running(program, "plain") as process:
        blocked_in(process.pid, process.pid, READ)
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
        thread = native(process.pid)[process.pid]
    assert own(thread, program) == ["waits_here", "main", "_start"]


def cpu_ns(pid: int) -> int:
    return int(Path(f"/proc/{pid}/schedstat").read_text().split()[0])


def test_a_program_that_runs_says_so() -> None:
    with subprocess.Popen(["sh", "-c", "while :; do :; done"]) as process:
        try:
            # Until its loop it waits for pages of the shell.
            until(lambda: cpu_ns(process.pid) > 100_000_000, what="100 ms of CPU time")
            thread = native(process.pid)[process.pid]
        finally:
            process.kill()
    assert thread["frames"] == []
    assert "it runs" in thread["native_missing"]


class Refusing(NativeReaders):
    """No file can be opened whose name has ``part``."""

    def __init__(self, part: str) -> None:
        self.part = part

    def call(self, op: str, *, pid: int, start_ns: int, timeout: float, **args: Any) -> Message:
        if op == "open":
            maps = Path(f"/proc/{pid}/maps").read_text().splitlines()
            if any(line.startswith(f"{args['start']:x}-") and self.part in line for line in maps):
                raise UnsupportedTarget("it was replaced")
        return super().call(op, pid=pid, start_ns=start_ns, timeout=timeout, **args)


def test_a_file_that_cannot_be_opened(tmp_path: Path) -> None:
    program = built(tmp_path, "blocked.c", *FLAGS["omitted"])
    with running(program, "plain") as process:
        blocked_in(process.pid, process.pid, READ)
        thread = native(process.pid, readers=Refusing(str(program)))[process.pid]
    assert [f["file"] for f in thread["frames"]][1:] == [str(program)]
    assert thread["frames"][1]["func"].startswith("built+0x")
    assert thread["native_missing"] == "built has no call frame information"


def test_a_program_that_was_deleted_is_read_all_the_same(tmp_path: Path) -> None:
    program = built(tmp_path, "blocked.c", *FLAGS["kept"])
    with running(program, "plain") as process:
        blocked_in(process.pid, process.pid, READ)
        program.unlink()
        thread = native(process.pid)[process.pid]
    # Root may open such a file, through map_files.
    assert own(thread, program) == ["waits_here", "main", "_start"]
    assert thread["native_missing"] == ""
