"""What readers tell the sampler, of every interpreter that is there: threads, and code objects with their lines."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from fakes import Parsers
from python_stack_helpers import child, each_interpreter, program
from sampler_support import ServedReaders, offset_of, readers, walked

from probing.api.errors import CorruptTarget, ProcessGone, UsageError
from probing.daemon.processes.memory import ProcessMemory
from probing.daemon.python_stack.sampling.codes import MAX_WANTED, LineTable, SampledCode, unpack_codes
from probing.daemon.python_stack.sampling.line_index import line_index
from probing.daemon.python_stack.sampling.thread_states import scan_threads
from probing.daemon.python_stack.stacks.requests import PythonStacks
from probing.daemon.python_stack.walk.locate import RuntimeInfo
from probing.daemon.python_stack.walk.threads import read_start_ns

Until = Callable[..., Any]
THREADS = 160
# A line table of more than 4096 bytes, and a call behind it.
LONG = "import sys\ndef long():\n" + "    x = 1\n" * 4000 + "    sys.stdin.readline()\nprint('ready')\nlong()\n"
# Waits in a function that is forgotten then, so that the next one gets its addresses; each begins in another line.
AGAIN = """
import gc, sys
for n in range(1000):
    source = "\\n" * n + f"def f{n}():\\n    print('in', flush=True); sys.stdin.readline()"
    names = {"sys": sys}
    exec(compile(source, f"<file {n}>", "exec"), names)
    names.pop(f"f{n}")()
    del names
    gc.collect()
"""


@pytest.fixture
def reader() -> Iterator[ServedReaders]:
    with readers() as found:
        yield found


@pytest.fixture
def stacks(reader: ServedReaders) -> Iterator[PythonStacks]:
    found = PythonStacks(reader, Parsers())
    yield found
    found.close()


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def sleeps(pid: int) -> bool:
    """Whether it waits in a system call, so that nothing in it moves."""
    with open(f"/proc/{pid}/syscall") as file:
        return not file.read().startswith("running")


def threads(reader: ServedReaders, pid: int, runtime: RuntimeInfo) -> dict[str, Any]:
    return reader.call(
        "threads", pid=pid, start_ns=read_start_ns(pid), timeout=10, runtime=runtime.to_dict(), timeout_ms=10_000
    ).header


def codes(
    reader: ServedReaders,
    pid: int,
    runtime: RuntimeInfo,
    addresses: list[int],
    check: int | None = None,
    lines: LineTable = "locations",
) -> dict[tuple[int, int], SampledCode]:
    return unpack_codes(
        reader.call(
            "codes",
            pid=pid,
            start_ns=read_start_ns(pid),
            timeout=10,
            runtime=runtime.to_dict(),
            wanted=[(address, check) for address in addresses],
            timeout_ms=10_000,
        ),
        lines,
        line_index,
    )


@each_interpreter
def test_every_thread_comes_with_its_state(
    python: str, reader: ServedReaders, stacks: PythonStacks, until: Until
) -> None:
    with program(python, "many_threads.py", str(THREADS)) as process:
        assert line(process) == "ready"
        pid, start_ns = process.pid, read_start_ns(process.pid)
        runtime, layout = stacks.prepare(pid, start_ns, 60), stacks.layout(pid, start_ns, 60)
        until(lambda: all(sleeps(int(tid)) for tid in os.listdir(f"/proc/{pid}/task")))  # noqa: PTH208
        for _ in range(2):  # the second scan has hints of the first
            found = threads(reader, pid, runtime)
            assert found["complete"]
            tids = [tid for tid, _, _, _ in found["threads"]]
            assert tids[0] == pid
            assert set(tids) == {int(tid) for tid in os.listdir(f"/proc/{pid}/task")}  # noqa: PTH208
            states = {state: thread_id for _, state, thread_id, _ in found["threads"] if state}
            assert states == {t.address: t.thread_id for t in walked(pid, runtime, layout)}
            assert len(states) == THREADS
        assert found["gil"]


@each_interpreter
def test_code_comes_with_its_lines(python: str, reader: ServedReaders, stacks: PythonStacks, until: Until) -> None:
    with child(python, "-u", "-c", LONG) as process:
        assert line(process) == "ready"
        pid, start_ns = process.pid, read_start_ns(process.pid)
        runtime, layout = stacks.prepare(pid, start_ns, 60), stacks.layout(pid, start_ns, 60)
        until(lambda: sleeps(pid))
        frames = [f for thread in walked(pid, runtime, layout) for f in thread.frames]
        read = codes(reader, pid, runtime, [f.code for f in frames], lines=layout.lines)
        found = {address: code for (address, _), code in read.items()}
        told = [
            (found[f.code].func, found[f.code].line(offset_of(layout, f.code, f.instr)))
            for f in frames
            if found[f.code].file == "<string>"
        ]
        assert told == [("long", 4003), ("<module>", 4005)]
        index = next(code.index for code in found.values() if code.func == "long")
        assert index is not None
        assert len(index.lines) > 4_000


@each_interpreter
def test_code_at_an_address_that_is_used_again_is_noticed(
    python: str, reader: ServedReaders, stacks: PythonStacks, until: Until
) -> None:
    seen: dict[int, set[tuple[int, str]]] = {}
    with child(python, "-c", AGAIN) as process:
        assert line(process) == "in"
        pid, start_ns = process.pid, read_start_ns(process.pid)
        runtime, layout = stacks.prepare(pid, start_ns, 60), stacks.layout(pid, start_ns, 60)
        for n in range(40):
            until(lambda: sleeps(pid))
            address = walked(pid, runtime, layout)[0].frames[0].code
            ((key, code),) = codes(reader, pid, runtime, [address]).items()
            assert (key[0], code.func, code.file) == (address, f"f{n}", f"<file {n}>")
            # Other code than the wanted one is not read.
            assert list(codes(reader, pid, runtime, [address], key[1])) == [key]
            assert codes(reader, pid, runtime, [address], key[1] ^ 1) == {}
            seen.setdefault(address, set()).add((key[1], code.func))
            assert process.stdin is not None
            process.stdin.write("\n")
            process.stdin.flush()
            assert line(process) == "in"
    again = [found for found in seen.values() if len(found) > 1]
    assert again, "no address was used twice"
    for found in again:
        assert len({check for check, _ in found}) == len(found)


def test_requests_that_make_no_sense(reader: ServedReaders, stacks: PythonStacks) -> None:
    with program(sys.executable, "many_threads.py", "1") as process:
        assert line(process) == "ready"
        pid, start_ns = process.pid, read_start_ns(process.pid)
        runtime = stacks.prepare(pid, start_ns, 60)
        assert codes(reader, pid, runtime, [0, 1, -1, 2**64, 2**70, 4096, pid]) == {}
        with pytest.raises(UsageError):
            codes(reader, pid, runtime, [1] * (MAX_WANTED + 1))
        other = RuntimeInfo.from_dict({**runtime.to_dict(), "hexversion": 7})
        with pytest.raises(CorruptTarget):
            threads(reader, pid, other)
    with pytest.raises(ProcessGone):
        reader.call("threads", pid=pid, start_ns=start_ns, timeout=5, runtime=runtime.to_dict())


@each_interpreter
def test_another_scan_of_many_threads_takes_few_reads(python: str, stacks: PythonStacks) -> None:
    with program(python, "many_threads.py", str(THREADS)) as process:
        assert line(process) == "ready"
        pid, start_ns = process.pid, read_start_ns(process.pid)
        runtime = stacks.prepare(pid, start_ns, 60)
        first, memory = scan_threads(pid, start_ns, runtime, time.monotonic() + 60), ProcessMemory(pid)
        assert scan_threads(pid, start_ns, runtime, time.monotonic() + 60, memory) == first
        assert memory.calls < 8
