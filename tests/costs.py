"""Records what each test costs in the junit files of ``.build/test-times``, and prints their sums: ``make test-times``.

A test's record has its CPU time with all processes that ended in it, the time in each fixture and in parts that
``spent`` names, without nested ones, and the number of processes that it started by program.
"""

from __future__ import annotations

import resource
import sys
import threading
import time
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

__all__ = ("begin_test", "count_processes", "main", "properties", "report", "spent")

RECORDS = Path(__file__).parents[1] / ".build/test-times"
DEAREST = 20
# Names of properties in junit files; a part's or a program's name follows the last two.
_CPU = "cpu seconds"
_SPENT = "seconds in "
_STARTED = "started "
# Programs of Python are told apart by a word in their arguments; the first that fits counts.
_PROGRAMS = ("probingctl", "probingd", "torchrun", "cleanup")


class _Blocks(threading.local):
    """The seconds within each open block of ``spent`` that blocks in it have taken. Jobs of a corpus have threads."""

    def __init__(self) -> None:
        self.nested: list[float] = []


_blocks = _Blocks()
_seconds: Counter[str] = Counter()
_started: Counter[str] = Counter()
_cpu_before = 0.0


@contextmanager
def spent(part: str) -> Iterator[None]:
    """Adds the seconds of a block to those of ``part``, without the seconds of blocks within it."""
    begun, nested = time.monotonic(), _blocks.nested
    nested.append(0.0)
    try:
        yield
    finally:
        seconds = time.monotonic() - begun
        _seconds[part] += seconds - nested.pop()
        if nested:
            nested[-1] += seconds


def begin_test() -> None:
    """Forgets what the test before has cost. Its CPU time counts until the next test begins."""
    global _cpu_before
    _seconds.clear()
    _started.clear()
    _cpu_before = _cpu_seconds()


def properties() -> list[tuple[str, object]]:
    """Returns the costs since ``begin_test``, as properties of a junit file."""
    return [
        (_CPU, f"{_cpu_seconds() - _cpu_before:.2f}"),
        *((_SPENT + part, f"{seconds:.2f}") for part, seconds in sorted(_seconds.items()) if seconds >= 0.01),
        *((_STARTED + program, count) for program, count in sorted(_started.items())),
    ]


def count_processes() -> None:
    """Counts, from now on, the programs that this process starts by ``subprocess``."""
    sys.addaudithook(_count)


def _cpu_seconds() -> float:
    usages = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def _count(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "subprocess.Popen":
        program, words = arguments[0], arguments[1]
        _started[_name_of([str(word) for word in ([program] if isinstance(words, (str, bytes)) else words)])] += 1


def _name_of(words: list[str]) -> str:
    """Returns the name under which a command is counted: "torch" for a program of Python that imports it."""
    names = [Path(word).name for word in words]
    for program in _PROGRAMS:
        if program in names:
            return program
    if any(name.endswith(".py") and _imports_torch(word) for name, word in zip(names, words, strict=True)):
        return "torch"
    return next((name for name in names if name.startswith("python") or name == "cc"), names[0])


@cache
def _imports_torch(script: str) -> bool:
    try:
        return "import torch" in Path(script).read_text()
    except OSError:
        return False


def report(records: Iterable[Path]) -> str:
    """Returns the sums of junit files as text: wall and CPU seconds by folder, part, program and test."""
    folders: dict[str, Counter[str]] = {}
    parts: Counter[str] = Counter()
    started: Counter[str] = Counter()
    tests = []
    runs = []
    for record in sorted(records):
        suite = ET.parse(record).getroot().find("testsuite")
        assert suite is not None, f"{record} has no testsuite"
        runs.append(f"{record.stem}: {float(suite.get('time', 0)):.0f} s, {suite.get('tests')} tests")
        for case in suite.iter("testcase"):
            module, name = case.get("classname", ""), case.get("name", "")
            costs = {p.get("name", ""): float(p.get("value", 0)) for p in case.iter("property")}
            wall, cpu = float(case.get("time", 0)), costs.get(_CPU, 0.0)
            folders.setdefault(_folder(module), Counter()).update(tests=1, wall=wall, cpu=cpu)
            parts.update({n.removeprefix(_SPENT): s for n, s in costs.items() if n.startswith(_SPENT)})
            started.update({n.removeprefix(_STARTED): int(c) for n, c in costs.items() if n.startswith(_STARTED)})
            tests.append((wall, cpu, f"{module.removeprefix('tests.')}::{name}"))
    lines = [*runs, "", f"{'folder':38}{'tests':>7}{'wall s':>9}{'CPU s':>9}"]
    for folder, sums in sorted(folders.items(), key=lambda item: -item[1]["wall"]):
        lines.append(f"{folder:38}{sums['tests']:7.0f}{sums['wall']:9.1f}{sums['cpu']:9.1f}")
    lines += ["", f"{'fixture or part':45}{'wall s':>9}"]
    lines += [f"{part:45}{seconds:9.1f}" for part, seconds in parts.most_common(DEAREST)]
    lines += ["", f"{'program started':45}{'times':>9}"]
    lines += [f"{program:45}{count:9}" for program, count in started.most_common(DEAREST)]
    lines += ["", f"{'wall s':>9}{'CPU s':>9}  test"]
    lines += [f"{wall:9.1f}{cpu:9.1f}  {name}" for wall, cpu, name in sorted(tests, reverse=True)[:DEAREST]]
    return "\n".join(lines)


def _folder(module: str) -> str:
    """Returns the folder of a test module's dotted name, at most two below ``tests``."""
    return "/".join(module.removeprefix("tests.").split(".")[:-1][:2])


def main() -> int:
    """Prints the costs of the last run; returns 1 where there is none."""
    records = list(RECORDS.glob("*.xml"))
    if not records:
        print(f"error: {RECORDS} has no record of a run\nhint: make test", file=sys.stderr)
        return 1
    print(report(records))
    return 0


if __name__ == "__main__":
    sys.exit(main())
