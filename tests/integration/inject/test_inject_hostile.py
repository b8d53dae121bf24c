"""Processes that answer with lies, and clients that ask at the same time."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from elftools.elf.elffile import ELFFile
from inject_helpers import asked, beats, busy, evaluated
from python_stack_helpers import INTERPRETERS, PROGRAMS, child, each_interpreter

from probing.api.errors import ProbingError, TargetTimeout
from probing.daemon.inject.evaluation import evaluate

# RDI and RSI are the arguments of Py_AddPendingCall: PyRun_SimpleString and the text, 1 MiB behind the answer. In a
# second call RSI is the mark, which does not begin a page.
# The state of the answer is 4 bytes at its begin (2: done), followed by its length.
_RETURNS = bytes.fromhex("31c0c3")  # xor eax, eax; ret
_ONLY_TEXT = bytes.fromhex("f7c6ff0f0000740331c0c3")  # test esi, 0xfff; jz behind; xor eax, eax; ret
_SPINS = bytes.fromhex("ebfe")  # jmp to itself
_DONE = bytes.fromhex("c7860000f0ff02000000")  # mov dword [rsi - 0x100000], 2
_HUGE = bytes.fromhex("c7860400f0ffffffffff")  # mov dword [rsi - 0x0ffffc], 0xffffffff
_SMALL = bytes.fromhex("c7860400f0ff07000000")  # mov dword [rsi - 0x0ffffc], 7
_GARBAGE = bytes.fromhex("c7864000f0ffffffff7f")  # mov dword [rsi - 0x0fffc0], 0x7fffffff
# An interpreter, and its libpython in a file of its own.
_PYTHON = next(
    (path for path in map(Path, INTERPRETERS) if list(path.parents[1].glob("lib/libpython3.*.so.1.0"))), None
)
_SHARED = list(_PYTHON.parents[1].glob("lib/libpython3.*.so.1.0")) if _PYTHON else []


@contextmanager
def _with_fake(tmp_path: Path, code: bytes) -> Iterator[subprocess.Popen[str]]:
    """A program under an interpreter whose Py_AddPendingCall is ``code``."""
    fake = tmp_path / _SHARED[0].name
    shutil.copyfile(_SHARED[0], fake)
    with fake.open("r+b") as file:
        elf = ELFFile(file)
        [symbol] = elf.get_section_by_name(".dynsym").get_symbol_by_name("Py_AddPendingCall")
        [offset] = elf.address_offsets(symbol["st_value"])
        file.seek(offset)
        file.write(code)
    command = ("env", f"LD_PRELOAD={fake}", str(_PYTHON), "-u", str(PROGRAMS / "inject_busy.py"))
    with child(*command) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield process


@pytest.mark.skipif(not _SHARED, reason="no interpreter has a shared libpython")
@pytest.mark.parametrize(
    ("code", "error", "words"),
    [
        (_RETURNS, TargetTimeout, "was withdrawn"),
        (_ONLY_TEXT + _DONE + _SMALL + _GARBAGE + _RETURNS, ProbingError, "malformed"),
    ],
    ids=["adds nothing", "a text of 2 GiB"],
)
def test_an_interpreter_that_lies(tmp_path: Path, code: bytes, error: type[ProbingError], words: str) -> None:
    with _with_fake(tmp_path, code) as process:
        with pytest.raises(error, match=words):
            evaluated(process.pid, "1", 0.7)
        beats(process)


@pytest.mark.skipif(not _SHARED, reason="no interpreter has a shared libpython")
def test_an_answer_of_4_gib_has_only_the_size_of_its_place(tmp_path: Path) -> None:
    with _with_fake(tmp_path, _ONLY_TEXT + _DONE + _HUGE + _RETURNS) as process:
        answer = evaluated(process.pid, "1", 0.7)
        assert sorted(answer) == ["longest_stop_us", "stops"]
        beats(process)


@pytest.mark.skipif(not _SHARED, reason="no interpreter has a shared libpython")
def test_an_interpreter_that_never_returns(tmp_path: Path) -> None:
    """The program has harmed itself; the injector gives up in time, and leaves it stopped by nobody."""
    with _with_fake(tmp_path, _SPINS) as process:
        with pytest.raises(TargetTimeout):
            evaluated(process.pid, "1", 0.7)
        status = Path(f"/proc/{process.pid}/status").read_text()
        assert "TracerPid:\t0\n" in status
        assert "State:\tR" in status


@each_interpreter
def test_no_code_is_put_beside_code_that_still_runs(python: str) -> None:
    """It would keep CPython 3.11 from ever getting on with the first."""
    with busy(python, "threads") as process:
        request = asked(process.pid, "", 1.0)
        with pytest.raises(TargetTimeout, match="the code still runs"):
            evaluate(request._replace(code="__import__('time').sleep(5)"))
        with pytest.raises(TargetTimeout, match="code of an earlier request still runs"):
            evaluate(request._replace(code="6 * 7"))
        beats(process)
        assert evaluated(process.pid, "6 * 7")["value"] == "42"
