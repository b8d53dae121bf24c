"""Interpreters whose files tell less and less: stripped, without section headers, without the symbol of the runtime.

What still runs is what a loader needs. In each kind of build the same stacks must come out.
"""

from __future__ import annotations

import os
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from python_stack_helpers import (
    INTERPRETERS,
    PROGRAMS,
    SID,
    child,
    dump,
    each_interpreter,
    read_mappings,
    runtime_in_memory,
    runtime_of,
)

from probing.api.errors import NotPython
from probing.daemon.processes.loaded_file import Loaded
from probing.daemon.processes.memory import ProcessMemory

WORKERS = "4"
Damage = Callable[[Path], None]


class Build(NamedTuple):
    """``launch`` runs the program at ``file``, or the one that uses the library at ``file``."""

    kind: tuple[str, str]
    file: Path
    launch: list[str]


def strip(file: Path) -> None:
    subprocess.run(["strip", "--strip-all", file], check=True)


def drop_sections(file: Path) -> None:
    with file.open("r+b") as f:
        # e_shoff; then e_shnum and e_shstrndx (System V gABI, figure 4-3).
        f.seek(40)
        f.write(bytes(8))
        f.seek(60)
        f.write(bytes(4))


def hide_symbols(file: Path) -> None:
    """Other names of the same hash, so that the loader's table still holds: in it a byte counts 33 times the next."""
    data = file.read_bytes()
    for name in (b"\0_PyRuntime\0", b"\0Py_Version\0"):
        other = bytes([*name[:4], name[4] + 1, name[5] - 33, *name[6:]])
        assert name in data or name == b"\0Py_Version\0"
        data = data.replace(name, other)
    file.write_bytes(data)
    drop_sections(file)


DAMAGES: dict[str, Damage] = {"stripped": strip, "no sections": drop_sections, "no symbols": hide_symbols}


@pytest.fixture
def folder() -> Iterator[Path]:
    # Where a chroot sees it too.
    root = SID.parent / "sid" / "tmp" if SID.exists() and os.geteuid() == 0 else None
    with tempfile.TemporaryDirectory(dir=root, prefix="stripped-") as made:
        Path(made).chmod(0o755)
        yield Path(made)


def copy_of(python: str, folder: Path) -> Build:
    real = Path(python).resolve()
    if real.parent == SID:
        file = folder / real.name
        sid = SID.parent / "sid"
        shutil.copy(sid / "usr" / "bin" / real.name, file)
        return Build(_kind(file), file, ["chroot", str(sid), f"/{file.relative_to(sid)}"])
    file = folder / real.name
    shutil.copy(real, file)
    prefix = real.parents[1]
    libraries = list((prefix / "lib").glob("libpython3.?*.so.*"))
    if prefix == Path("/usr") or not libraries:
        return Build(_kind(file), file, ["env", f"PYTHONHOME={prefix}", str(file)])
    library = folder / libraries[0].name
    shutil.copy(libraries[0], library)
    launch = ["env", f"PYTHONHOME={prefix}", f"LD_LIBRARY_PATH={folder}", str(file)]
    return Build(("shared", _kind(file)[1]), library, launch)


def static_pie(folder: Path) -> Build:
    """Debian's own library of position-independent objects, linked into a program that exports nothing."""
    (library,) = Path("/usr/lib").glob("python3.*/config-3.*/libpython3.*-pic.a")
    name = library.name.removeprefix("lib").removesuffix("-pic.a")
    file = folder / name
    source = "int Py_BytesMain(int, char **);\nint main(int n, char **a) { return Py_BytesMain(n, a); }\n"
    (folder / "main.c").write_text(source)
    libraries = ["-Wl,--start-group", str(library), "-lexpat", "-lz", "-lm", "-ldl", "-lutil", "-Wl,--end-group"]
    subprocess.run(["gcc", "-pie", "-s", "-o", file, folder / "main.c", *libraries], check=True)
    return Build(_kind(file), file, ["env", "PYTHONHOME=/usr", str(file)])


def _kind(file: Path) -> tuple[str, str]:
    (kind,) = struct.unpack_from("<H", file.read_bytes()[:64], 16)
    return "static", {2: "fixed", 3: "pie"}[kind]


def check(build: Build, damage: Damage | None) -> None:
    if damage is not None:
        damage(build.file)
    # In a chroot the tests are not seen, so the program comes along.
    shutil.copy(PROGRAMS / "many_threads.py", build.file.parent)
    program = build.file.parent / "many_threads.py"
    seen = str(program)
    if build.launch[0] == "chroot":
        seen = "/" + str(program.relative_to(build.launch[1]))
    with child(*build.launch, "-S", "-u", seen, WORKERS) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        pid = process.pid
        assert str(build.file.name) in Path(f"/proc/{pid}/maps").read_text()
        runtime = runtime_in_memory(pid)
        if damage is strip:
            assert runtime_of(pid).runtime == runtime.runtime
        threads = dump(pid, runtime)["threads"]
        assert len(threads) == int(WORKERS)
        for thread in threads[1:]:
            functions = [f["func"] for f in thread["frames"]]
            assert functions.count("deep") == 11
            assert thread["complete"]
            assert {f["file"] for f in thread["frames"] if f["func"] == "deep"} == {seen}
            assert {f["lineno"] for f in thread["frames"] if f["func"] == "deep"} == {11, 14}
        if damage is hide_symbols:
            assert _exported(pid, build) == {}
            assert runtime.version_at == 0


def _exported(pid: int, build: Build) -> dict[str, int]:
    (mapping,) = [m for m in read_mappings(pid) if m.path.endswith(build.file.name.encode()) and not m.offset]
    read = ProcessMemory(pid).read_many
    return Loaded.at(read, mapping.start).symbols(read, ["_PyRuntime", "Py_Version"])


@pytest.mark.parametrize("damage", DAMAGES)
@each_interpreter
def test_files_that_tell_less(python: str, damage: str, folder: Path) -> None:
    check(copy_of(python, folder), DAMAGES[damage])


@pytest.mark.parametrize("damage", [None, "no sections"])
def test_a_static_build_that_exports_nothing(damage: str | None, folder: Path) -> None:
    build = static_pie(folder)
    assert build.kind == ("static", "pie")
    check(build, DAMAGES[damage] if damage else None)


def test_which_kinds(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kinds = {copy_of(python, folder).kind for python in INTERPRETERS}
    kinds.add(static_pie(folder).kind)
    with capsys.disabled():
        print(f"\nkinds of CPython builds: {', '.join(sorted(' '.join(kind) for kind in kinds))}")
    assert kinds >= {("shared", "pie"), ("static", "fixed"), ("static", "pie")}


def test_a_program_that_is_none_has_nothing_to_find() -> None:
    with child("sleep", "9999") as process, pytest.raises(NotPython):
        runtime_in_memory(process.pid)
