"""What each test costs: seconds of parts without the parts within, programs by name, and the sums of junit files."""

from __future__ import annotations

import subprocess
from pathlib import Path
from types import SimpleNamespace

import costs
import pytest

JUNIT = """<?xml version="1.0"?>
<testsuites><testsuite name="pytest" tests="{tests}" time="{time}">{cases}</testsuite></testsuites>
"""
CASE = '<testcase classname="{module}" name="{name}" time="{wall}"><properties>{costs}</properties></testcase>'


def case(module: str, name: str, wall: float, **values: object) -> str:
    shown = "".join(f'<property name="{key.replace("_", " ")}" value="{value}" />' for key, value in values.items())
    return CASE.format(module=module, name=name, wall=wall, costs=shown)


def junit(path: Path, *cases: str, time: float) -> Path:
    path.write_text(JUNIT.format(tests=len(cases), time=time, cases="".join(cases)))
    return path


def rows(report: str, title: str) -> list[list[str]]:
    """The words of each line below the one that begins with ``title``."""
    block = next(block for block in report.split("\n\n") if block.lstrip().startswith(title))
    return [line.split() for line in block.splitlines()[1:]]


def test_the_seconds_of_a_part_are_without_those_of_parts_within(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(costs, "time", SimpleNamespace(monotonic=lambda: now[0]))
    with costs.spent("all"):
        now[0] += 1
        with costs.spent("inner"):
            now[0] += 2
            with costs.spent("innermost"):
                now[0] += 4
        now[0] += 8
        with pytest.raises(ValueError, match="of the part"):
            _fail_in("inner", now)
    found = dict(costs.properties())
    assert [found[f"seconds in {part}"] for part in ("all", "inner", "innermost")] == ["9.00", "18.00", "4.00"]
    assert float(str(found["cpu seconds"])) >= 0


def _fail_in(part: str, now: list[float]) -> None:
    with costs.spent(part):
        now[0] += 16
        raise ValueError("of the part")


def test_programs_that_a_test_starts_are_counted() -> None:
    before = dict(costs.properties())
    subprocess.run(["true"], check=True)
    subprocess.run("true", check=True, shell=True)
    after = dict(costs.properties())
    assert "started true" not in before
    assert after["started true"] == 1
    costs.begin_test()
    assert [name for name, _ in costs.properties()] == ["cpu seconds"]


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (["/usr/bin/python3.11", "-m", "torch.distributed.run", "job.py"], "python3.11"),
        (["/x/.venv/bin/python", "/x/.venv/bin/probingctl", "ps"], "probingctl"),
        (["sudo", "/usr/bin/probingd", "run"], "probingd"),
        (["torchrun", "--nproc-per-node=2", "job.py"], "torchrun"),
        (["python", "nowhere.py"], "python"),
        (["/usr/bin/cc", "-o", "x", "x.c"], "cc"),
        (["gdb", "--batch", "python"], "python"),
    ],
)
def test_a_program_of_python_is_known_by_what_it_runs(words: list[str], name: str) -> None:
    assert costs._name_of(words) == name


def test_a_program_that_imports_torch_is_counted_as_that(tmp_path: Path) -> None:
    for name, text in (("job.py", "import os\nimport torch\n"), ("plain.py", "import os\n")):
        (tmp_path / name).write_text(text)
    assert costs._name_of(["python3", str(tmp_path / "job.py"), "--steps", "5"]) == "torch"
    assert costs._name_of(["python3", str(tmp_path / "plain.py")]) == "python3"


def test_the_sums_of_all_files_are_printed(tmp_path: Path) -> None:
    apart = junit(
        tmp_path / "apart.xml",
        case("tests.e2e.test_a", "test_one[x y]", 7, cpu_seconds=3, seconds_in_fixture_daemon=2, started_torch=2),
        case("tests.e2e.test_a", "test_two", 1, cpu_seconds=0.5, seconds_in_fixture_daemon=0.5),
        time=8.4,
    )
    unit = junit(
        tmp_path / "unit.xml",
        case("tests.unit.store.test_b", "test_three", 0.25, cpu_seconds=0.2, started_torch=1, started_cc=1),
        case("tests.unit.test_c", "test_four", 0.5),
        time=1,
    )
    report = costs.report([unit, apart])
    assert report.splitlines()[:2] == ["apart: 8 s, 2 tests", "unit: 1 s, 2 tests"]
    assert rows(report, "folder") == [
        ["e2e", "2", "8.0", "3.5"],
        ["unit", "1", "0.5", "0.0"],
        ["unit/store", "1", "0.2", "0.2"],
    ]
    assert rows(report, "fixture or part") == [["fixture", "daemon", "2.5"]]
    assert rows(report, "program started") == [["torch", "3"], ["cc", "1"]]
    assert [words[2] for words in rows(report, "wall s")][:2] == ["e2e.test_a::test_one[x", "e2e.test_a::test_two"]


def test_only_the_dearest_tests_are_printed(tmp_path: Path) -> None:
    cases = [case("tests.unit.test_a", f"test_{n}", n) for n in range(50)]
    found = rows(costs.report([junit(tmp_path / "unit.xml", *cases, time=1)]), "wall s")
    assert [words[0] for words in found] == [f"{n}.0" for n in range(49, 49 - costs.DEAREST, -1)]


def test_without_a_run_there_is_a_hint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(costs, "RECORDS", tmp_path)
    assert costs.main() == 1
    assert "hint: make test" in capsys.readouterr().err
    junit(tmp_path / "unit.xml", case("tests.unit.test_a", "test_one", 1), time=1)
    assert costs.main() == 0
    assert "unit.test_a::test_one" in capsys.readouterr().out
