"""The process that runs an interpreter for its versions: real interpreters, and programs that are none."""

from __future__ import annotations

import json
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest
from query_helpers import Inetd

from probing.api.errors import ProbingError, TargetError, TargetTimeout, UnsupportedTarget, UsageError
from probing.daemon.service.preflight.gather import Interpreters


@pytest.fixture
def interpreters(open_tmp_path: Path) -> Iterator[Interpreters]:
    path = open_tmp_path / "interpreter.sock"
    listener = Inetd(path, [], ("-m", "probing.daemon.confined.interpreter"))
    yield Interpreters(str(path))
    listener.close()


def program(folder: Path, text: str) -> str:
    path = folder / "program"
    path.write_text(text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR | stat.S_IXGRP | stat.S_IXOTH)
    return str(path)


def test_versions_are_those_of_the_interpreter(interpreters: Interpreters) -> None:
    found = {version.name: version.value for version in interpreters.versions(sys.executable, 30)}
    assert found["python"] == ".".join(map(str, sys.version_info[:3]))
    # torch's own word, without the import that takes seconds
    assert found["torch"].partition("+")[0] == metadata.version("torch").partition("+")[0]
    [bare] = [v for v in interpreters.versions("/usr/bin/python3", 30) if v.name == "python"]
    asked = subprocess.run(["/usr/bin/python3", "-V"], capture_output=True, text=True, check=True)
    assert f"Python {bare.value}" == asked.stdout.strip()


_TRIES = """#!{python} -I
import json, os, socket, subprocess, sys
tried = {{}}
def attempt(name, function):
    try:
        function()
        tried[name] = "done"
    except BaseException as e:
        tried[name] = type(e).__name__
attempt("write", lambda: open({path!r}, "w"))
attempt("socket", lambda: socket.socket())
attempt("fork", os.fork)
attempt("run", lambda: subprocess.run(["/bin/true"], check=True))
attempt("kill", lambda: os.kill(os.getppid(), 0))
attempt("unlink", lambda: os.unlink({path!r}))
print(json.dumps({{"python": json.dumps(tried)}}))
"""


def test_the_program_can_do_nothing(interpreters: Interpreters, open_tmp_path: Path) -> None:
    victim = open_tmp_path / "victim"
    victim.write_text("kept")
    text = _TRIES.format(python=sys.executable, path=str(victim))
    [found] = interpreters.versions(program(open_tmp_path, text), 30)
    # The value is cut at 100 characters, which is enough for the first ones.
    for name in ("write", "socket", "fork", "run"):
        assert f'"{name}": "done"' not in found.value
    assert found.value.startswith('{"write": "PermissionError", "socket": "PermissionError"')
    assert victim.read_text() == "kept"


@pytest.mark.parametrize(
    ("text", "error", "words"),
    [
        ("#!/bin/sh\necho no versions\n", UnsupportedTarget, "did not report its versions (exit status 0)"),
        ("#!/bin/sh\necho '[]'\n", UnsupportedTarget, "did not report its versions"),
        ("#!/bin/sh\necho broken >&2; exit 7\n", UnsupportedTarget, "(exit status 7): broken"),
        ("#!/bin/sh\nkill -9 $$\n", UnsupportedTarget, "did not report its versions"),
        ("#!/no/such/interpreter\n", TargetError, "cannot be started: No such file"),
        ("#!/bin/sh\nwhile :; do echo aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa; done\n", TargetTimeout, "did not answer"),
        ("#!/bin/sh\nread x < /dev/zero\n", TargetTimeout, "did not answer"),
        ("#!/bin/sh\nexec >&- 2>&-; while :; do :; done\n", ProbingError, ""),
    ],
)
def test_what_is_no_interpreter_is_an_error_in_time(
    interpreters: Interpreters, open_tmp_path: Path, text: str, error: type[ProbingError], words: str
) -> None:
    path = program(open_tmp_path, text)
    with pytest.raises(error) as caught:
        interpreters.versions(path, 2 if "while" in text or "zero" in text else 30)
    assert words in caught.value.message


def test_nothing_is_left_running(interpreters: Interpreters, open_tmp_path: Path) -> None:
    blocked = "signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 64))"
    text = f"#!{sys.executable}\nimport signal, time\n{blocked}\ntime.sleep(999)\n"
    path = program(open_tmp_path, text)
    with pytest.raises(TargetTimeout):
        interpreters.versions(path, 2)
    deadline = time.monotonic() + 30
    while path.encode() in b"".join(_commands()):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def _commands() -> Iterator[bytes]:
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            yield path.read_bytes()
        except OSError:
            continue


def test_wrong_paths_are_refused(interpreters: Interpreters, open_tmp_path: Path) -> None:
    for path in ("python3", "", "/x\0y", "/" + "x" * 5000):
        with pytest.raises(UsageError):
            interpreters.versions(path, 1)
    with pytest.raises(TargetError, match="cannot be started: Permission denied"):
        interpreters.versions(str(open_tmp_path), 10)
    with pytest.raises(TargetError, match="cannot be started: No such file"):
        interpreters.versions("/no/such/python", 10)
    assert json.dumps([version.name for version in interpreters.versions("/usr/bin/python3", 30)])
