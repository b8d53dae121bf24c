"""The runner of the check on a GPU: what comes of parts that end in every way, and of those that do not end."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import parts_of_tests
import pytest
from gpu_kit.part import Outcome, Part, State
from gpu_kit.report import exit_code, write
from gpu_kit.runner import Budget, run_part, run_parts
from gpu_kit.scene import Libraries, Machine, Scene
from waiting import until

PARTS = {part.name: part for part in parts_of_tests.PARTS}


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Scene:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    machine = Machine(sys.executable, Libraries(), missing={"gpu": "nvidia-smi: No such file or directory"})
    made = Scene(tmp_path, machine, parts="parts_of_tests")
    made.save()
    return made


def states(outcome: Outcome) -> list[State]:
    return [check.state for check in outcome.checks]


def test_a_part_that_passes(scene: Scene) -> None:
    outcome = run_part(PARTS["good"], scene, 30)
    assert (outcome.state, outcome.why) == (State.PASSED, "")
    assert states(outcome) == [State.PASSED, State.MEASURED]


@pytest.mark.parametrize(
    ("name", "why", "checks"),
    [
        ("wrong", "1 of 2 checks failed", [State.PASSED, State.FAILED]),
        ("crashes", "ValueError: seven is no even number", [State.PASSED]),
        ("checks_nothing", "it checked nothing", []),
    ],
)
def test_a_part_that_fails(scene: Scene, name: str, why: str, checks: list[State]) -> None:
    outcome = run_part(PARTS[name], scene, 30)
    assert (outcome.state, outcome.why) == (State.FAILED, why)
    assert states(outcome) == checks


def test_a_part_that_is_killed(scene: Scene) -> None:
    outcome = run_part(PARTS["dies"], scene, 30)
    assert outcome.state is State.FAILED
    assert "signal 9" in outcome.why


@pytest.mark.parametrize("name", ["finds_nothing", "skips_all_checks"])
def test_a_part_that_finds_no_gpu_is_skipped(scene: Scene, name: str) -> None:
    outcome = run_part(PARTS[name], scene, 30)
    assert (outcome.state, outcome.why) == (State.SKIPPED, "no GPU is here")


def test_a_part_that_hangs_is_killed_with_its_child_and_the_next_one_runs(scene: Scene) -> None:
    # GIVEN a part that has made a check and started a child
    hanging = Part("hangs", "it hangs", 3.5, PARTS["hangs"].run)
    told: list[tuple[list[str], list[str]]] = []
    # WHEN it is run before another
    outcomes = run_parts(
        [hanging, PARTS["good"]],
        scene,
        Budget(60),
        lambda done, waiting: told.append(([outcome.name for outcome in done], waiting)),
    )
    # THEN its deadline ends it alone, and what it had checked is kept
    assert [(o.name, o.state) for o in outcomes] == [("hangs", State.TIMED_OUT), ("good", State.PASSED)]
    assert states(outcomes[0]) == [State.PASSED]
    assert outcomes[0].why == "its deadline of 4 s passed"
    assert told == [(["hangs"], ["good"]), (["hangs", "good"], [])]
    has_ended(scene, "hangs")


def test_a_child_that_a_part_leaves_is_killed(scene: Scene) -> None:
    assert run_part(PARTS["leaves_a_child"], scene, 30).state is State.PASSED
    has_ended(scene, "leaves_a_child")


def has_ended(scene: Scene, name: str) -> None:
    pid = int((scene.folder / name / "child").read_text())
    until(lambda: not _runs(pid), what=f"the end of process {pid}")


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_a_part_whose_need_is_missing_is_skipped_without_a_process(scene: Scene) -> None:
    (outcome,) = run_parts([PARTS["needs_a_gpu"]], scene, Budget(60), lambda *_: None)
    assert (outcome.state, outcome.why) == (State.SKIPPED, "nvidia-smi: No such file or directory")
    assert not (scene.folder / "needs_a_gpu").exists()


def test_no_part_begins_when_the_time_is_over(scene: Scene) -> None:
    (outcome,) = run_parts([PARTS["good"]], scene, Budget(1), lambda *_: None)
    assert (outcome.state, outcome.why) == (State.SKIPPED, "the time for all parts was over")


def test_the_report_of_a_run_that_was_cut_has_the_parts_so_far(scene: Scene, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()

    def note(done: list[Outcome], waiting: list[str]) -> None:
        write(out, {"kernel": "6.18", "gpu_name": "NVIDIA H100"}, done, waiting)
        if len(done) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_parts([PARTS["good"], PARTS["wrong"], PARTS["finds_nothing"]], scene, Budget(60), note)
    report = json.loads((out / "report.json").read_text())
    assert [(part["name"], part["state"]) for part in report["parts"]] == [("good", "passed"), ("wrong", "failed")]
    assert report["not_run"] == ["finds_nothing"]
    assert report["summary"] == {
        "passed": 1,
        "failed": 1,
        "checks_passed": 2,
        "checks_measured": 1,
        "checks_failed": 1,
    }
    assert sorted(path.name for path in out.iterdir()) == ["report.json", "report.md"]


def test_the_table_and_the_exit_code(scene: Scene, tmp_path: Path) -> None:
    names = ("good", "wrong", "finds_nothing")
    outcomes = [run_part(PARTS[name], scene, 30) for name in names]
    write(tmp_path, {"gpu_name": "NVIDIA H100", "kernel": "6.18", "python": "3.12.3", "torch": "2.11"}, outcomes)
    lines = (tmp_path / "report.md").read_text().splitlines()
    assert lines[0] == "Machine: NVIDIA H100, Linux 6.18, CPython 3.12.3, torch 2.11."
    assert [line.split(" | ")[:2] for line in lines[4:7]] == [
        ["| it good", "passed"],
        ["| it wrong", "failed"],
        ["| it finds_nothing", "skipped"],
    ]
    assert lines[6].endswith("| no GPU is here |")
    assert lines[-1] == "* it wrong, product: expected 5, got 4"
    assert [exit_code([outcome]) for outcome in outcomes] == [0, 1, 0]
    assert exit_code([outcomes[0], Outcome("x", "x", State.TIMED_OUT, 1.0)]) == 1
