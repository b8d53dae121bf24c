"""What real processes do: stacks and conditions by real readers, as facts, and the words made of them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hostile import silent_fuse
from processes_helpers import descendants, listening, start_ns_of, started
from python_stack_helpers import PROGRAMS
from waiting import until

from probing.daemon.diagnose.gather.conditions import conditions_of
from probing.daemon.diagnose.gather.stacks import threads_of_processes
from probing.daemon.processes.conditions.answers import ConditionAnswers
from probing.daemon.processes.parsers import ParserPool
from probing.daemon.processes.reader_pool import ReaderPool
from probing.daemon.python_stack.answers import StackAnswers
from probing.daemon.python_stack.native.requests import NativeStacks
from probing.daemon.python_stack.stacks.requests import PythonStacks
from probing.daemon.python_stack.values.requests import Values
from probing.daemon.source import Identity
from probing.diagnosis.activity.activity import Activity, activity_of
from probing.diagnosis.facts import Facts, Helper, Rank

TIMEOUT_S = 20.0
RUNS = ("computing", "throttled")
Look = Callable[..., Activity]


class _Nobody:
    def live(self) -> list[Identity]:
        return []


@pytest.fixture(scope="module")
def look(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Look]:
    """Returns what a process does, read twice. ``workers``: pids of its data-loader workers."""
    where = tmp_path_factory.mktemp("l")
    with (
        listening(where / "reader.sock", "probing.daemon.confined.reader") as reader,
        listening(where / "parser.sock", "probing.daemon.confined.parser") as parser,
    ):
        readers, parsers = ReaderPool(reader.path), ParserPool(parser.path)
        python = PythonStacks(readers, parsers)
        native = NativeStacks(readers, parsers, python.prepare)
        stacks = StackAnswers("n", _Nobody(), python, native, Values(readers, python.prepare))
        conditions = ConditionAnswers(readers, stacks.chosen)

        def looked(pid: int, *workers: int) -> Activity:
            return activity_of(*_facts(stacks, conditions, pid, workers))

        yield looked
        stacks.close()
        python.close()
        readers.close()
        parsers.close()


def _facts(
    stacks: StackAnswers, conditions: ConditionAnswers, pid: int, workers: tuple[int, ...]
) -> tuple[Rank, Facts]:
    pids = [pid, *workers]
    first = conditions.conditions(pids, "", TIMEOUT_S), stacks.stacks(pids, "", TIMEOUT_S)[0]
    deeper = stacks.stacks(pids, "", TIMEOUT_S, native=True, with_locals=True)[0]
    second = conditions.conditions(pids, "", TIMEOUT_S), stacks.stacks(pids, "", TIMEOUT_S)[0]
    waits = {(p["pid"], p["start_ns"]): p["thread_waits"] for p in second[0]["processes"]}
    threads = {key[0]: t for key, t in threads_of_processes(first[1], second[1], deeper, waits, {}).items()}
    found = {key[0]: condition for key, condition in conditions_of(first[0], second[0]).items()}
    helpers = [
        Helper(one, start_ns_of(one), "data_loader", found[one].state, None, threads.get(one, ()), found[one])
        for one in workers
    ]
    rank = Rank(
        0, "n", pid, start_ns_of(pid), threads=threads.get(pid, ()), condition=found[pid], helpers=tuple(helpers)
    )
    return rank, Facts("j", "r", 1, 10.0, time.time_ns(), (), (rank,))


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    ends = os.pipe()
    yield ends
    for end in ends:
        os.close(end)


@pytest.fixture
def script(tmp_path: Path) -> Callable[[str], list[str]]:
    """Returns the command of a program ``train.py`` with this text."""

    def written(text: str) -> list[str]:
        file = tmp_path / "train.py"
        file.write_text(text)
        return [sys.executable, "-u", str(file)]

    return written


def _shows(look: Look, pid: int, kind: str, *workers: int) -> Activity:
    """Returns the activity, once it is of ``kind`` and stands, if it does not run."""
    last: list[Activity] = []

    def shown() -> Activity | None:
        last[:] = [look(pid, *workers)]
        return last[0] if last[0].kind == kind and (kind in RUNS or last[0].progressing is False) else None

    return until(shown, what=lambda: f"{kind}: {last}")


# Each program prints "go" and then stands still in wait(), line 5 of train.py.
STANDS = {
    "lock": (
        "import threading; lock = threading.Lock(); lock.acquire()",
        "lock.acquire()",
        "it waits for a lock in wait, train.py:5",
    ),
    "queue": ("import queue", "queue.Queue().get()", "it waits in a queue in wait, train.py:5"),
    "event": ("import threading", "threading.Event().wait()", "it waits for a lock in wait, train.py:5"),
    "process lock": (
        "import multiprocessing as m; lock = m.Lock(); lock.acquire()",
        "lock.acquire()",
        "it waits for a lock in wait, train.py:5",
    ),
    "join": (
        "import threading, time; t, u = (threading.Thread(target=time.sleep, args=(1009,)) for _ in 'tu');"
        " t.start(); u.start()",
        "t.join()",
        "it waits for another thread to end in wait, train.py:5",
    ),
    "sleep": ("import time", "time.sleep(1009)", "it sleeps in wait, train.py:5"),
    "input": ("", "input()", "it waits for input on its standard input in wait, train.py:5"),
    "breakpoint": ("", "breakpoint()", "it waits at a breakpoint of the debugger in wait, train.py:5"),
}
KINDS = {"sleep": "sleeping", "input": "stdin", "breakpoint": "stdin"}


@pytest.mark.parametrize("name", STANDS)
def test_a_program_that_stands_still_is_described(
    name: str, look: Look, script: Callable[[str], list[str]], pipe: tuple[int, int]
) -> None:
    before, call, why = STANDS[name]
    text = f"{before}\n\nprint('go')\ndef wait():\n    {call}\nwait()\n"
    with started(script(text), until="go", stdin=pipe[0]) as process:
        found = _shows(look, process.pid, KINDS.get(name, "lock"))
    # Whether it is a lock or a condition shows in C functions, whose names a stripped Python lacks.
    assert found.why.replace("a lock or condition", "a lock") == why


def test_the_holder_of_an_rlock_is_named(look: Look, script: Callable[[str], list[str]]) -> None:
    text = """import threading, time
lock, held = threading.RLock(), threading.Event()
def hold():
    with lock:
        held.set()
        time.sleep(1009)
threading.Thread(target=hold, name="saver", daemon=True).start()
held.wait()
print("go")
def wait():
    with lock:
        pass
wait()
"""
    with started(script(text), until="go") as process:
        found = _shows(look, process.pid, "lock")
    assert found.why == "it waits for a lock in wait, train.py:11"
    assert any("saver" in line and "hold, train.py:6" in line for line in found.evidence)


def test_the_gil_held_in_c_is_recognised(look: Look) -> None:
    with started([sys.executable, str(PROGRAMS / "gil_in_c.py")], until="ready") as process:
        found = _shows(look, process.pid, "gil_held")
    assert found.why.startswith("it holds the GIL in hold, gil_in_c.py:17 and waits in C (")
    assert found.progressing is False


def test_a_fifo_and_a_full_pipe_are_named(
    look: Look, script: Callable[[str], list[str]], tmp_path: Path, pipe: tuple[int, int]
) -> None:
    fifo = tmp_path / "go"
    os.mkfifo(fifo)
    with started(script(f"print('go')\ndef wait():\n    open({str(fifo)!r})\nwait()"), until="go") as process:
        found = _shows(look, process.pid, "pipe")
    assert found.why == f"it waits until another process opens the FIFO {fifo} in wait, train.py:3"
    full = script(f"import os\nprint('go')\ndef wait():\n    os.write({pipe[1]}, bytes(1 << 20))\nwait()")
    with started(full, until="go", pass_fds=pipe[1:]) as process:
        found = _shows(look, process.pid, "pipe")
    assert found.why.startswith("it waits until another process reads from (pipe:[")


def test_a_stopped_process_differs_from_a_traced_one(look: Look, script: Callable[[str], list[str]]) -> None:
    with started(script("print('go')\ndef wait():\n    while True: pass\nwait()"), until="go") as process:
        assert _shows(look, process.pid, "computing").why == "it runs in wait, train.py:3"
        os.kill(process.pid, signal.SIGSTOP)
        found = _shows(look, process.pid, "stopped")
        assert found.why == "it is stopped by a signal in wait, train.py:3"
        assert found.progressing is False
        os.kill(process.pid, signal.SIGCONT)
        tracer = f"""import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
assert libc.ptrace(16, {process.pid}, 0, 0) == 0
os.waitpid({process.pid}, 0x40000000)
print('holds')
import time; time.sleep(1009)"""
        with started([sys.executable, "-u", "-c", tracer], until="holds") as debugger:
            found = _shows(look, process.pid, "traced")
            assert f"(pid {debugger.pid})" in found.why


@contextmanager
def _in_group(pid: int, controller: str, files: dict[str, str]) -> Iterator[Path]:
    """Moves a process into a new cgroup, of the first version or the second, and out again at the end."""
    root = Path("/sys/fs/cgroup")
    root = root / controller if (root / controller).is_dir() else root
    group = root / f"condition-{pid}"
    try:
        group.mkdir()
        for name, text in files.items():
            if (group / name).exists():
                (group / name).write_text(text)
        (group / "cgroup.procs").write_text(str(pid))
    except OSError as e:
        pytest.skip(f"no cgroups here: {e}")
    try:
        yield group
    finally:
        (root / "cgroup.procs").write_text(str(pid))
        until(lambda: not (group / "cgroup.procs").read_text())
        group.rmdir()


BUSY = "print('go')\ndef wait():\n    while True: pass\nwait()"


def test_the_quota_of_a_cgroup_is_named(look: Look, script: Callable[[str], list[str]]) -> None:
    quota = {"cpu.cfs_quota_us": "20000", "cpu.max": "20000 100000"}
    with started(script(BUSY), until="go") as process, _in_group(process.pid, "cpu", quota) as group:
        found = _shows(look, process.pid, "throttled")
    assert found.why.startswith("it is throttled in wait, train.py:3: its cgroup ")
    assert found.why.endswith(f"/{group.name} allows 0.2 CPUs")


def test_a_frozen_cgroup_is_named(look: Look, script: Callable[[str], list[str]]) -> None:
    with started(script(BUSY), until="go") as process, _in_group(process.pid, "freezer", {}) as group:
        first = group / "freezer.state"
        freezer, on, off = (first, "FROZEN", "THAWED") if first.exists() else (group / "cgroup.freeze", "1", "0")
        freezer.write_text(on)
        found = _shows(look, process.pid, "stopped")
        freezer.write_text(off)
    assert found.why.startswith("it is frozen by its cgroup ")
    assert found.why.endswith(f"/{group.name}")
    assert found.progressing is False


@contextmanager
def _silent(tmp_path: Path) -> Iterator[Path]:
    """A file whose reads never end."""
    where = tmp_path / "silent"
    where.mkdir()
    server = subprocess.Popen(
        [sys.executable, Path(silent_fuse.__file__), where], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert server.stdout is not None
    if server.stdout.readline() != "ready\n":
        pytest.skip(f"no FUSE here: {server.communicate()[1].splitlines()[-1]}")
    yield where / "file"
    # Its end ends every read that waits for it.
    server.kill()
    server.communicate()
    subprocess.run(["umount", "-l", where], check=False, capture_output=True)


def test_a_file_system_that_does_not_answer_is_named(
    look: Look, script: Callable[[str], list[str]], tmp_path: Path, pipe: tuple[int, int]
) -> None:
    text = """import os, sys
print("go")
sys.stdin.readline()
def wait():
    os.read(os.open(sys.argv[1], 0), 1)
wait()
"""
    command = [*script(text), str(tmp_path / "silent" / "file")]
    # The server ends first: until then its reader cannot be killed.
    with started(command, until="go", stdin=pipe[0]) as process, _silent(tmp_path) as silent:
        os.write(pipe[1], b"\n")
        found = _shows(look, process.pid, "disk_io")
    assert found.why == f"it reads {silent} (fuse.silent {silent.parent}) in wait, train.py:5"


def test_a_checkpoint_on_a_slow_file_system_is_recognised(
    look: Look, script: Callable[[str], list[str]], tmp_path: Path, pipe: tuple[int, int]
) -> None:
    text = """import sys
import torch
print("go")
sys.stdin.readline()
def resume():
    torch.load(sys.argv[1])
resume()
"""
    command = [*script(text), str(tmp_path / "silent" / "file")]
    with started(command, until="go", stdin=pipe[0]) as process, _silent(tmp_path) as silent:
        os.write(pipe[1], b"\n")
        found = _shows(look, process.pid, "checkpoint")
    assert found.why.startswith("it reads a checkpoint in resume, train.py:6: it ")
    assert found.why.endswith(f"{silent} (fuse.silent {silent.parent})")


def test_the_worker_of_a_data_loader_is_named(look: Look, script: Callable[[str], list[str]]) -> None:
    text = """import time
import torch
class Shards(torch.utils.data.Dataset):
    def __len__(self):
        return 4
    def __getitem__(self, n):
        return fetch_shard(n)
def fetch_shard(n):
    time.sleep(1009)
def train():
    for batch in torch.utils.data.DataLoader(Shards(), num_workers=1):
        pass
if __name__ == "__main__":
    print("go")
    train()
"""
    with started(script(text), until="go") as process:
        (worker,) = until(lambda: descendants(process.pid))
        found = _shows(look, process.pid, "data_loader_worker", worker)
        assert found.why == "its data loader waits in fetch_shard, train.py:9"
        os.kill(worker, signal.SIGSTOP)
        found = until(lambda: "stopped" in (a := look(process.pid, worker)).why and a)
        assert found.why == f"its data-loader worker (pid {worker}) is stopped by a signal in fetch_shard, train.py:9"
