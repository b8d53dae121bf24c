"""The kernel's view of real processes, read by a real reader."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from processes_helpers import start_ns_of, started
from waiting import until

from probing.daemon.processes.reader_pool import ReaderPool


def _condition(readers: ReaderPool, pid: int) -> dict[str, Any]:
    answer = readers.call("condition", pid=pid, start_ns=start_ns_of(pid), timeout=10.0, timeout_ms=5000)
    found: dict[str, Any] = json.loads(answer.payload)
    return found


def _in(readers: ReaderPool, pid: int, syscalls: tuple[str, ...]) -> dict[str, Any]:
    return until(
        lambda: (c := _condition(readers, pid))["syscall"] in syscalls and c, what=lambda: _condition(readers, pid)
    )


def _python(code: str) -> list[str]:
    return [sys.executable, "-u", "-c", f"print('go'); {code}"]


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    """The ends of a pipe: to read from, to write to."""
    ends = os.pipe()
    yield ends
    for end in ends:
        os.close(end)


def test_a_read_names_the_pipe_that_it_waits_for(readers: ReaderPool, pipe: tuple[int, int]) -> None:
    with started(_python("import os; os.read(0, 1)"), until="go", stdin=pipe[0]) as process:
        found = _in(readers, process.pid, ("read",))
    assert found["target"].startswith("pipe:[")
    assert found["target_kind"] == "pipe"
    assert found["target_fd"] == 0
    assert found["state"] == "S"
    assert found["threads"] == 1
    assert found["tracer_pid"] is None


def test_the_open_of_a_fifo_names_its_path_and_file_system(readers: ReaderPool, tmp_path: Path) -> None:
    fifo = tmp_path / "go\x1b[31mred"
    os.mkfifo(fifo)
    with started([*_python("import sys; open(sys.argv[1])"), str(fifo)], until="go") as process:
        found = _in(readers, process.pid, ("openat",))
    assert found["target"] == str(tmp_path) + "/go\\x1b[31mred"
    assert found["target_kind"] == "fifo"
    assert found["file_system"].split()[1].startswith("/")


def test_a_wait_for_a_child_names_it(readers: ReaderPool) -> None:
    with started(_python("import subprocess; subprocess.run(['sleep', '1009'])"), until="go") as process:
        # The child runs for a moment before it sleeps.
        found = until(
            lambda: "state S" in ((c := _condition(readers, process.pid))["target"] or "") and c["children"] and c
        )
    (child,) = found["children"]
    assert child[0] == "sleep"
    assert found["target"] == f"sleep (pid {child[1]}, state S)"


def test_poll_and_sockets_are_resolved(readers: ReaderPool, pipe: tuple[int, int]) -> None:
    code = "import socket; s = socket.create_server(('127.0.0.1', 0)); print(s.getsockname()[1]); s.accept()"
    with started([sys.executable, "-u", "-c", code], until="\n") as process:
        found = _in(readers, process.pid, ("accept4", "accept"))
        port = int(process.line)  # type: ignore[attr-defined]
    assert found["target"].endswith(f" tcp 127.0.0.1:{port}")
    assert found["target_kind"] == "listener"
    code = "import select, sys; p = select.poll(); p.register(0, select.POLLIN); p.poll()"
    with started(_python(code), until="go", stdin=pipe[0]) as process:
        found = _in(readers, process.pid, ("poll",))
    assert found["target_fd"] == 0
    assert found["target_kind"] == "pipe"


@pytest.mark.parametrize("wait", ["poll", "select", "epoll"])
def test_of_several_files_the_socket_that_listens_is_shown(readers: ReaderPool, wait: str) -> None:
    code = f"""
import os, select, socket
s = socket.create_server(("127.0.0.1", 0))
r = os.pipe()[0]
wait = select.{wait}
if wait is not select.select:
    waiter = wait()
    waiter.register(r), waiter.register(s)
print(s.getsockname()[1])
wait([r, s], [], []) if wait is select.select else waiter.poll()
"""
    calls = {"poll": ("poll", "ppoll"), "select": ("select", "pselect6"), "epoll": ("epoll_wait", "epoll_pwait")}
    with started([sys.executable, "-u", "-c", code], until="\n") as process:
        found = _in(readers, process.pid, calls[wait])
        port = int(process.line)  # type: ignore[attr-defined]
    assert found["target"].endswith(f" tcp 127.0.0.1:{port}")
    assert found["target_kind"] == "listener"


def test_the_holder_of_a_file_lock_is_named(readers: ReaderPool, tmp_path: Path) -> None:
    file = tmp_path / "cache.lock"
    code = "import fcntl, sys, signal; f = open(sys.argv[1], 'w'); {}; print('go', flush=True); signal.pause()"
    takes, waits = (
        code.format("fcntl.flock(f, fcntl.LOCK_EX)"),
        code.format("print('go'); fcntl.flock(f, fcntl.LOCK_EX)"),
    )
    with (
        started([sys.executable, "-u", "-c", takes, str(file)], until="go") as holder,
        started([sys.executable, "-u", "-c", waits, str(file)], until="go") as process,
    ):
        found = _in(readers, process.pid, ("flock",))
    assert found["target"].startswith(f"{file}, held by python")
    assert f"(pid {holder.pid}, state S)" in found["target"]
    assert found["lock_holder"] == holder.pid


def test_each_thread_has_its_own_wait(readers: ReaderPool, pipe: tuple[int, int]) -> None:
    code = "import os, threading, time; threading.Thread(target=os.read, args=(0, 1)).start(); time.sleep(1009)"
    with started(_python(code), until="go", stdin=pipe[0]) as process:

        def both() -> Any:
            waits = _condition(readers, process.pid)["thread_waits"]
            return len(waits) == 2 and all(wait.get("syscall") for wait in waits) and waits

        main, other = until(both)
    assert main["tid"] == process.pid
    assert main["syscall"] in ("clock_nanosleep", "select", "pselect6")
    assert other["syscall"] == "read"
    assert other["target_kind"] == "pipe"


def test_a_stopped_process_shows_its_letter_and_how_long_it_did_not_run(readers: ReaderPool) -> None:
    with started(_python("\nwhile True: pass"), until="go") as process:
        os.kill(process.pid, signal.SIGSTOP)
        first = until(lambda: (c := _condition(readers, process.pid))["state"] == "T" and c)
        if first["asleep_ns"] is None:
            pytest.skip("this kernel does not show when a thread last ran")
        second = until(lambda: (c := _condition(readers, process.pid))["asleep_ns"] > first["asleep_ns"] + 10**8 and c)
    assert second["cpu_ns"] == first["cpu_ns"]
    assert second["switches"] == first["switches"]
    # Both clocks passed the same time: they are read in one request.
    passed, slept = second["mono_ns"] - first["mono_ns"], second["asleep_ns"] - first["asleep_ns"]
    assert abs(passed - slept) < 10**8


def test_counters_grow_with_what_the_process_does(readers: ReaderPool, tmp_path: Path, pipe: tuple[int, int]) -> None:
    code = "f = open(sys.argv[1], 'wb', buffering=0)\nfor _ in range(307): f.write(bytes(10007))\nsys.stdin.read()"
    go = [*_python(f"import sys; sys.stdin.readline()\n{code}"), str(tmp_path / "out")]
    with started(go, until="go", stdin=pipe[0]) as process:
        first = _in(readers, process.pid, ("read",))
        os.write(pipe[1], b"go\n")
        second = until(
            lambda: (c := _condition(readers, process.pid))["write_bytes"] >= first["write_bytes"] + 307 * 10007 and c
        )
    assert second["write_bytes"] == first["write_bytes"] + 307 * 10007
    assert second["cpu_ns"] > first["cpu_ns"]
    assert second["switches"] > first["switches"]
    assert second["shm_size_bytes"] is None or second["shm_size_bytes"] >= second["shm_used_bytes"] >= 0


def test_all_processes_of_the_machine_have_a_load(readers: ReaderPool) -> None:
    with started(_python("\nwhile True: pass"), until="go") as process:

        def load() -> Any:
            loads = json.loads(readers.call("loads", timeout=10.0, timeout_ms=5000).payload)
            return next((load for load in loads if load[0] == process.pid), None)

        pid, start_ns, name, cpu, cpu_ns = until(load)
    assert (pid, cpu_ns % 10_000_000) == (process.pid, 0)
    assert cpu_ns > 0
    assert name.startswith("python")
    assert isinstance(cpu, int)
    assert start_ns > 0
