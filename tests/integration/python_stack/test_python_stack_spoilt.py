"""What real processes hold, recorded and then spoilt; and files that are replaced while they are used."""

from __future__ import annotations

import random
import shutil
import struct
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from python_stack_helpers import (
    INTERPRETERS,
    PROGRAMS,
    SID,
    child,
    dump,
    each_interpreter,
    program,
    runtime_in_memory,
    runtime_of,
)

from probing.api.errors import CorruptTarget, ProbingError
from probing.daemon.processes.memory import FakeMemory, ProcessMemory, Range
from probing.daemon.python_stack.walk.capture import Known, capture
from probing.daemon.python_stack.walk.layouts import DEBUG_OFFSETS_SIZE, layout_of

ROUNDS = 150
_PAGE = 4096


class Recorder(ProcessMemory):
    """Keeps the pages of all that is read."""

    def __init__(self, pid: int) -> None:
        super().__init__(pid)
        self.pages: dict[int, bytearray] = {}

    def read_many(self, ranges: Sequence[Range]) -> list[bytes | None]:
        wanted = {p for a, size in ranges if size > 0 for p in range(a & -_PAGE, a + size, _PAGE)} - self.pages.keys()
        pages = sorted(wanted)
        for page, data in zip(pages, super().read_many([(p, _PAGE) for p in pages]), strict=True):
            if data is not None:
                self.pages[page] = bytearray(data)
        return super().read_many(ranges)


class Recorded(FakeMemory):
    """The pages of a recording, some words of them spoilt."""

    def __init__(self, pages: dict[int, bytearray]) -> None:
        super().__init__({}, max_calls=10_000)
        self._pages = pages

    def _read(self, address: int, size: int) -> bytes | None:
        pages = [self._pages.get(p) for p in range(address & -_PAGE, address + size, _PAGE)]
        if None in pages:
            return None
        self.bytes_read += size
        start = address % _PAGE
        return b"".join(bytes(p) for p in pages if p is not None)[start : start + size]


def _waits(thread: dict[str, Any]) -> bool:
    names = [frame["func"] for frame in thread["frames"][:2]]
    return bool(thread["complete"]) and len(names) == 2 and all(name.endswith("wait") for name in names)


def _sleeps(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "S"


@each_interpreter
def test_a_recording_that_is_spoilt(python: str, until: Callable[..., object]) -> None:
    """Pointers to elsewhere, rings, lengths beyond all measure: typed errors, bounded work, and it comes to an end."""
    with program(python, "many_threads.py", "5") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        runtime = runtime_of(process.pid)
        until(lambda: all(_waits(t) for t in dump(process.pid, runtime)["threads"]) and _sleeps(process.pid))
        recorder = Recorder(process.pid)
        head = recorder.read_many([(runtime.runtime, DEBUG_OFFSETS_SIZE)])[0]
        layout = layout_of(runtime.version, head or b"")
        whole = capture(recorder, runtime.runtime, layout, time.monotonic() + 60, Known())
    pages = recorder.pages
    assert len(whole.threads) == 5
    # Untouched it gives the same again.
    again = capture(Recorded(pages), runtime.runtime, layout, time.monotonic() + 60, Known())
    assert [len(t.frames) for t, _ in again.threads] == [len(t.frames) for t, _ in whole.threads]

    used = [t.address for t, _ in whole.threads]
    used += [a for t, _ in whole.threads for f in t.frames for a in (f.address, f.code)]
    seed = random.Random(runtime.version[1])
    failed = marked = 0
    for _ in range(ROUNDS):
        spoilt = {page: bytearray(data) for page, data in pages.items()}
        for _ in range(seed.randint(1, 12)):
            at = (seed.choice(used) & -8) + 8 * seed.randrange(24)
            value = seed.choice([seed.choice(used), seed.getrandbits(64), seed.getrandbits(8), 1 << 40, at])
            if at & -_PAGE in spoilt:
                struct.pack_into("<Q", spoilt[at & -_PAGE], at % _PAGE, value)
        memory = Recorded(spoilt)
        try:
            found = capture(memory, runtime.runtime, layout, time.monotonic() + 60, Known())
        except ProbingError:
            failed += 1
        else:
            marked += not found.complete or not all(t.complete for t, _ in found.threads)
            for thread, codes in found.threads:
                for frame in thread.frames:
                    if code := codes.get(frame.code):
                        code.line(layout, frame)
        assert memory.calls < 2_000
        assert memory.bytes_read < 64 << 20
    assert failed + marked > ROUNDS // 10


def copy_to(folder: Path, python: str) -> tuple[list[Path], list[str]]:
    """Copies of the program and its library, and what runs them."""
    real = Path(python).resolve()
    files = [folder / real.name]
    shutil.copy(real, files[0])
    prefix = real.parents[1]
    libraries = [] if prefix == Path("/usr") else list((prefix / "lib").glob("libpython3.?*.so.*"))
    for library in libraries:
        files.append(folder / library.name)
        shutil.copy(library, files[-1])
    return files, ["env", f"PYTHONHOME={prefix}", f"LD_LIBRARY_PATH={folder}", str(files[0])]


@pytest.mark.parametrize("how", ["replaced", "deleted"])
@pytest.mark.parametrize("python", [p for p in INTERPRETERS if Path(p).resolve().parent != SID])
def test_an_interpreter_that_is_upgraded_under_a_process(python: str, how: str, tmp_path: Path) -> None:
    files, command = copy_to(tmp_path, python)
    with child(*command, "-S", "-u", str(PROGRAMS / "many_threads.py"), "3") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        before = runtime_of(process.pid)
        for file in files:
            if how == "replaced":
                # As a package manager does: another file of the same name.
                other = file.with_suffix(".new")
                shutil.copy("/bin/true", other)
                other.replace(file)
            else:
                file.unlink()
        assert str(Path(f"/proc/{process.pid}/exe").readlink()).endswith(" (deleted)")
        assert runtime_in_memory(process.pid).runtime == before.runtime
        assert runtime_of(process.pid).runtime == before.runtime
        threads = dump(process.pid, before, cold=True)["threads"]
        assert [[f["func"] for f in t["frames"]].count("deep") for t in threads] == [0, 11, 11]


def test_memory_that_is_not_what_it_was() -> None:
    """Another CPython at the place of the one that was known: never its stacks read by the other's layout."""
    with program(INTERPRETERS[0], "many_threads.py", "2") as process:
        assert process.stdout is not None
        process.stdout.readline()
        known = runtime_of(process.pid)
    with program(INTERPRETERS[-1], "many_threads.py", "2") as process:
        assert process.stdout is not None
        process.stdout.readline()
        with pytest.raises(CorruptTarget):
            dump(process.pid, known)


def test_files_that_are_no_programs_are_no_error_of_ours(tmp_path: Path) -> None:
    broken = tmp_path / "python3.12"
    broken.write_bytes(b"\x7fELF\x02\x01" + bytes(9000))
    code = f"import mmap,sys\nf=open({str(broken)!r},'rb')\nm=mmap.mmap(f.fileno(),0,access=1)\n"
    code += "print('ready',flush=True)\nsys.stdin.read()"
    with child(str(Path(INTERPRETERS[0])), "-c", code) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        assert str(broken) in Path(f"/proc/{process.pid}/maps").read_text()
        assert runtime_in_memory(process.pid).version == runtime_of(process.pid).version
