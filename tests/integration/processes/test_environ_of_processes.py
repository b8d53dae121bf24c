"""The environment of real processes: of every libc and CPython, set late, hidden by a title, huge, and changing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from processes_helpers import start_ns_of, started
from python_stack_helpers import each_interpreter

from probing.daemon.processes.memory import ProcessMemory
from probing.daemon.processes.target import Target, identity, list_processes

PROGRAMS = Path(__file__).parents[1] / "processes_programs"
SET_LATE = "import os, time; os.environ['RANK'] = '5'; print('ready', flush=True); time.sleep(600)"
ENVIRON = {"RANK": "0", "WORLD_SIZE": "7", "SECRET": "x"}


def seen(pid: int) -> tuple[dict[str, str], dict[str, str] | None]:
    """The variables of a process at exec, and now."""
    with Target(pid) as target:
        facts = identity(target)
    return facts["environ"], facts["variables"]


@each_interpreter
def test_a_variable_that_a_python_sets_is_seen(python: str) -> None:
    with started([python, "-c", SET_LATE], until="ready", env=ENVIRON) as process:
        assert seen(process.pid) == ({"RANK": "0", "WORLD_SIZE": "7"}, {"RANK": "5", "WORLD_SIZE": "7"})


@pytest.mark.parametrize("compiler", ["gcc -pie", "gcc -no-pie", "musl-gcc -pie -fPIE", "musl-gcc -no-pie"])
def test_the_environ_of_each_libc_is_read_behind_a_title(tmp_path: Path, compiler: str) -> None:
    program = tmp_path / "environ"
    subprocess.run([*compiler.split(), "-O1", "-Wall", "-o", program, PROGRAMS / "environ.c"], check=True)
    with started([str(program), "5"], until="ready", env=ENVIRON) as process:
        assert seen(process.pid) == ({}, {"RANK": "5", "WORLD_SIZE": "7"})


def test_of_a_static_program_only_its_start_is_known(tmp_path: Path) -> None:
    # Nothing in memory names its variables. It cannot load a library of collectives either.
    program = tmp_path / "environ"
    subprocess.run(["gcc", "-static", "-o", program, PROGRAMS / "environ.c"], check=True)
    with started([str(program)], until="ready", env=ENVIRON) as process:
        assert seen(process.pid) == ({}, None)


def test_a_title_hides_nothing() -> None:
    code = "import setproctitle as s, time; s.setproctitle('trainer' * 20); print('ready', flush=True); time.sleep(600)"
    with started([sys.executable, "-c", code], until="ready", env=ENVIRON) as process:
        with Target(process.pid) as target:
            facts = identity(target)
        assert facts["cmdline"][0].startswith("trainertrainer")
        assert facts["environ"] == {}
        assert facts["variables"] == {"RANK": "0", "WORLD_SIZE": "7"}


def test_an_environment_of_two_megabytes_is_read_within_its_bounds() -> None:
    filler = {f"FILLER{n}": "x" * 100_000 for n in range(20)}
    with started([sys.executable, "-c", SET_LATE], until="ready", env={**filler, **ENVIRON}) as process:
        assert seen(process.pid)[1] == {"RANK": "5", "WORLD_SIZE": "7"}


def test_an_environment_that_changes_all_the_time_is_never_another_one() -> None:
    # A value has one digit again and again: any other text would have been read from freed memory. While variables are
    # removed, one of those behind them can be missed.
    code = """
import os
print("ready", flush=True)
while True:
    for n in range(23):
        os.environ[f"FILLER{n}"] = "RANK=77" * n
    os.environ["RANK"] = "555"
    os.environ["RANK"] = "666"
    for n in range(23):
        del os.environ[f"FILLER{n}"]
"""
    values: set[str] = set()
    with started([sys.executable, "-c", code], until="ready", env=ENVIRON) as process:
        for _ in range(230):
            now = seen(process.pid)[1]
            values |= {now["RANK"]} if now and "RANK" in now else set()
    assert values <= {"0", "555", "666"}
    assert values


def test_a_python_behind_the_dynamic_loader_is_one() -> None:
    with started([_loader(), sys.executable, "-c", SET_LATE], until="ready", env=ENVIRON) as process:
        with Target(process.pid) as target:
            facts = identity(target)
        assert "python" not in Path(facts["exe"]).name
        assert facts["libraries"] == ["python"]
        assert facts["variables"]["RANK"] == "5"


def test_a_process_whose_main_thread_has_ended_is_read_by_another_one() -> None:
    with started([sys.executable, str(PROGRAMS / "main_thread_ends.py")], until="ended", env=ENVIRON) as process:
        ((pid, start_ns, _, state, _, exe),) = list_processes([process.pid])
        assert (pid, start_ns) == (process.pid, start_ns_of(process.pid))
        assert state in "RS"
        assert exe == str(Path(f"/proc/{process.pid}/task/{_others(process.pid)[0]}/exe").readlink())
        with Target(process.pid, start_ns) as target:
            facts = identity(target)
            target.check()
        assert facts["variables"]["RANK"] == "5"
        assert facts["libraries"] == ["python"]
        begin = int(Path(f"/proc/{_others(process.pid)[0]}/maps").read_text().partition("-")[0], 16)
        assert ProcessMemory(process.pid).read_many([(begin, 4)]) == [b"\x7fELF"]


def _others(pid: int) -> list[str]:
    return sorted(path.name for path in Path(f"/proc/{pid}/task").iterdir() if path.name != str(pid))


def _loader() -> str:
    text = subprocess.run(["readelf", "-l", sys.executable], check=True, capture_output=True, text=True).stdout
    return text.partition("interpreter: ")[2].partition("]")[0]
