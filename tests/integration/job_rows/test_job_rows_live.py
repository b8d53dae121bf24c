"""Rows that a process of each CPython writes, read through a real reader, also after the process has ended."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from python_stack_helpers import child, each_interpreter

from probing.api.errors import ProcessGone
from probing.daemon.job_rows.memory import MEMORY_LINK, RowMemory
from probing.daemon.processes.reader_pool import ReaderPool

SDK = Path(__file__).resolve().parents[3] / "sdk"
# The modules as text: an interpreter in a root of its own sees no file of ours.
SOURCES = {f"probing{part}": (SDK / f"{part[1:] or '__init__'}.py").read_text() for part in ("", ".rows", ".spans")}
PROGRAM = f"""
import sys, threading, types
for name, text in {SOURCES!r}.items():
    sys.modules[name] = module = types.ModuleType(name)
    module.__path__ = []
    exec(compile(text, name, "exec"), module.__dict__)
import probing
table = probing.ExternalTable("losses", ["step", "where"])
threads = [threading.Thread(target=lambda: [table.append([n, "a"]) for n in range(101)]) for _ in range(7)]
for thread in threads: thread.start()
for thread in threads: thread.join()
with probing.span("forward"): pass
probing.step(5)
print("ready", flush=True)
sys.stdin.read()
table.append([1000, None])
"""


@each_interpreter
def test_rows_of_a_process(python: str, readers: ReaderPool) -> None:
    with child(python, "-c", PROGRAM) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        asked = {"pid": process.pid, "link": MEMORY_LINK}
        answer = readers.call("memory_files", **asked, known=[])
        fds = [answer.take_fd() for _ in answer.header["inodes"]]
        memories = {memory.table: memory for memory in map(RowMemory, fds)}
        assert set(memories) == {"losses", "trace_event", "training_metrics"}
        rows = memories["losses"].take(1 << 62, 10_000).rows
        assert sorted(rows[":step"].tolist()) == sorted(list(range(101)) * 7)
        assert memories["trace_event"].take(1 << 62, 10).rows[":name"].tolist() == [b"forward", b"forward"]
        assert memories["training_metrics"].take(1 << 62, 10).rows[":step"].tolist() == [5]
        assert readers.call("memory_files", **asked, known=answer.header["inodes"]).header == {
            "inodes": [],
            "closed": [],
        }
        process.communicate()
        assert process.returncode == 0
    # The memory outlives the process.
    assert memories["losses"].take(1 << 62, 10).rows[":step"].tolist() == [1000]
    with pytest.raises(ProcessGone):
        readers.call("memory_files", **asked, known=[])
    for fd in fds:
        os.close(fd)


def test_a_file_of_that_name_is_not_opened(readers: ReaderPool, tmp_path: Path) -> None:
    named = tmp_path / "memfd:probing-rows"
    os.mkfifo(named)
    fd = os.open(named, os.O_RDWR)
    answer = readers.call("memory_files", pid=os.getpid(), link=str(named), known=[])
    assert answer.header == {"inodes": [], "closed": []}
    os.close(fd)
