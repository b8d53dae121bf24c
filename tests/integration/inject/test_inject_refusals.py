"""Processes into which no code is put, each with its reason; and processes of other users and in sandboxes."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from inject_helpers import asked, beats, busy, evaluated, regions
from native_helpers import built
from python_stack_helpers import PROGRAMS, child
from waiting import until

from probing.api.errors import PrivilegeError, ProbingError, TargetError, TargetTimeout, UnsupportedTarget
from probing.daemon.confined.seccomp import refuse_calls
from probing.daemon.inject.evaluation import Evaluation, evaluate

BUSY = str(PROGRAMS / "inject_busy.py")
_libc = ctypes.CDLL(None, use_errno=True)


def _ready(process: subprocess.Popen[str]) -> int:
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process.pid


@pytest.mark.parametrize(
    ("options", "environment", "words"),
    [
        (("-I",), {}, "isolated mode"),
        (("-uBI",), {}, "isolated mode"),
        (("-Xdisable-remote-debug",), {}, "-X disable-remote-debug"),
        (("-X", "disable-remote-debug"), {}, "-X disable-remote-debug"),
        ((), {"PYTHON_DISABLE_REMOTE_DEBUG": "1"}, "PYTHON_DISABLE_REMOTE_DEBUG"),
    ],
)
def test_who_forbade_it_at_the_start_is_left_alone(
    options: tuple[str, ...], environment: dict[str, str], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with child(sys.executable, *options, BUSY) as process:
        pid = _ready(process)
        with pytest.raises(PrivilegeError, match=words):
            evaluated(pid, "1")
        beats(process)


@pytest.mark.parametrize("options", [("-c", "print('ready', flush=True)\nwhile True: pass", "-I"), ("-W", "error::I")])
def test_options_of_the_program_are_not_the_interpreters(options: tuple[str, ...]) -> None:
    command = [sys.executable, *options] if options[0] == "-c" else [sys.executable, "-Wignore", BUSY, "-I"]
    with child(*command) as process:
        assert evaluated(_ready(process), "1")["value"] == "1"


def test_a_traced_process_is_left_to_its_tracer() -> None:
    with busy(sys.executable) as process:
        tracer = os.fork()
        if not tracer:
            _libc.ptrace(0x4206, process.pid, None, None)
            signal.pause()
        try:
            until(lambda: "TracerPid:\t0\n" not in Path(f"/proc/{process.pid}/status").read_text())
            with pytest.raises(TargetError, match=f"traced by process {tracer}"):
                evaluated(process.pid, "1")
        finally:
            os.kill(tracer, signal.SIGKILL)
            os.waitpid(tracer, 0)
        beats(process)


def test_a_stopped_process_stays_stopped() -> None:
    with busy(sys.executable) as process:
        os.kill(process.pid, signal.SIGSTOP)
        until(lambda: Path(f"/proc/{process.pid}/stat").read_text().split()[2] == "T")
        with pytest.raises(TargetError, match="is stopped"):
            evaluated(process.pid, "1")
        assert Path(f"/proc/{process.pid}/stat").read_text().split()[2] == "T"
        os.kill(process.pid, signal.SIGCONT)
        beats(process)


def test_a_process_of_another_user_than_was_allowed() -> None:
    with busy(sys.executable) as process:
        with pytest.raises(PrivilegeError, match="has changed its user"):
            evaluate(asked(process.pid, "1", uid=65534))
        beats(process)


_IN_HANDLER = """
import ctypes, os, signal
kind = ctypes.CFUNCTYPE(None, ctypes.c_int)
def handler(_):
    print("ready", flush=True)
    while True:
        sum(range(100))
keep = kind(handler)
ctypes.CDLL(None).signal(signal.SIGUSR1, keep)
os.kill(os.getpid(), signal.SIGUSR1)
"""


def test_a_signal_handler_in_c_is_not_interrupted() -> None:
    with child(sys.executable, "-c", _IN_HANDLER) as process:
        pid = _ready(process)
        with pytest.raises(TargetTimeout, match="in a signal handler"):
            evaluated(pid, "1", 1.0)
        assert regions(pid) == []
        assert process.poll() is None


_IN_VFORK = """
import ctypes, sys
print("ready", flush=True)
ctypes.CDLL(sys.argv[1]).hold()
print("back", flush=True)
"""


def test_a_parent_in_vfork_is_not_touched(tmp_path: Path) -> None:
    library = built(tmp_path, "inject_vfork.c", "-shared", "-fPIC")
    with child(sys.executable, "-c", _IN_VFORK, str(library)) as process:
        pid = _ready(process)
        until(lambda: Path(f"/proc/{pid}/stat").read_text().split()[2] == "D")
        with pytest.raises(TargetTimeout, match="uninterruptible wait, as in vfork"):
            evaluated(pid, "1", 0.5)
        [inner] = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        os.kill(int(inner), signal.SIGKILL)
        assert process.stdout is not None
        assert process.stdout.readline() == "back\n"


@contextmanager
def _started(before: Callable[[], object], *command: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, preexec_fn=before, cwd="/"
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def _filtered() -> None:
    _libc.prctl(38, 1, 0, 0, 0)
    refuse_calls(("execve", "fork", "vfork", "clone", "clone3"))


def test_a_sandbox_is_entered_only_where_no_call_is_needed() -> None:
    program = "import sys; print('ready', flush=True)\nwhile True: sum(range(100))"
    with _started(_filtered, sys.executable, "-c", program) as process:
        pid = _ready(process)
        with pytest.raises(UnsupportedTarget, match="seccomp sandbox and has not loaded ctypes"):
            evaluated(pid, "1")
        assert process.poll() is None
    with _started(_filtered, sys.executable, "-c", f"import ctypes; {program}") as process:
        found = evaluated(_ready(process), "__import__('socket').socket()")
        assert found["error"]["type"] == "PermissionError"
        assert evaluated(process.pid, "6 * 7")["value"] == "42"


def test_a_process_that_cannot_write_to_itself_needs_ctypes() -> None:
    """After a change of user /proc/self/mem is root's."""
    program = "import os; os.setuid(65534); print('ready', flush=True)\nwhile True: sum(range(100))"
    with child("/usr/bin/python3", "-c", program) as process:
        with pytest.raises(UnsupportedTarget, match="cannot open /proc/self/mem"):
            evaluated(_ready(process), "1")
        assert process.poll() is None
    with child("/usr/bin/python3", "-c", f"import ctypes; {program}") as process:
        assert evaluated(_ready(process), "6 * 7")["value"] == "42"


def _as_nobody() -> None:
    os.setgroups(())
    os.setgid(65534)
    os.setuid(65534)


def test_a_process_of_an_ordinary_user() -> None:
    with _started(_as_nobody, "/usr/bin/python3", "-c", "print('ready', flush=True)\nwhile True: sum(range(100))") as p:
        found = evaluated(_ready(p), "__import__('os').getuid()")
        assert found["value"] == "65534"


def test_a_container_with_namespaces_of_its_own_and_a_root_that_nobody_writes() -> None:
    program = 'print("ready", flush=True)\nwhile True: sum(range(9))'
    inner = f"mount -o remount,bind,ro / && exec /usr/bin/python3 -c '{program}'"
    flags = ["--user", "--map-root-user", "--mount", "--pid", "--fork", "--mount-proc", "--net", "--ipc"]
    with _started(_as_nobody, "unshare", *flags, "/bin/sh", "-c", inner) as process:
        _ready(process)
        [pid] = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        try:
            found = evaluated(int(pid), "__import__('os').getpid(), __import__('os').getuid()")
            assert found["value"] == "(1, 0)"
            assert regions(int(pid)) == []
        finally:
            os.kill(int(pid), signal.SIGKILL)


def test_a_function_that_is_not_there_is_refused_before_anything_is_done() -> None:
    with busy(sys.executable) as process:
        good = asked(process.pid, "1")
        changed = {**good.functions, "run_string": int(ctypes.addressof(ctypes.c_int()))}
        with pytest.raises(ProbingError):
            evaluate(Evaluation.from_dict({**good._asdict(), "functions": changed}))
        assert regions(process.pid) == []
        beats(process)


def test_the_end_of_the_process_while_it_is_asked() -> None:
    with busy(sys.executable) as process:
        request = asked(process.pid, "1")
        process.kill()
        process.wait()
        with pytest.raises(TargetError, match="exited"):
            evaluate(request)
