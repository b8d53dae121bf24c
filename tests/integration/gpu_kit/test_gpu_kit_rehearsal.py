"""The check on a GPU without one: parts with the doubles, without a daemon, and without anything."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from gpu_kit.__main__ import main
from gpu_kit.machine import examine, needs
from gpu_kit.part import Outcome, State, read_checks
from gpu_kit.parts import PARTS, gpus
from gpu_kit.rehearsal import rehearse
from gpu_kit.runner import Budget, run_parts
from gpu_kit.scene import Libraries, Machine, Scene
from gpu_kit.smi import read_double
from long import long

NO_BPF = "the daemon does not run: the kernel has no BTF"
EVERYTHING = ("daemon", "gpu", "nvml", "nccl", "torch", "cupy", "jax")


@pytest.fixture(scope="module")
def rehearsed(tmp_path_factory: pytest.TempPathFactory) -> Machine:
    return rehearse(Machine(sys.executable, Libraries()), tmp_path_factory.mktemp("doubles"))


@pytest.fixture
def scene(rehearsed: Machine, tmp_path: Path) -> Iterator[Scene]:
    """Where no daemon can run."""
    rehearsed.missing["daemon"] = NO_BPF
    made = Scene(tmp_path, rehearsed, bin=str(Path(sys.executable).parent))
    made.save()
    yield made
    del rehearsed.missing["daemon"]


def run(scene: Scene, *names: str) -> dict[str, Outcome]:
    chosen = [part for part in PARTS if not names or part.name in names]
    outcomes = run_parts(chosen, scene, Budget(600), lambda *_: None)
    return {outcome.name: outcome for outcome in outcomes}


def test_without_bpf_the_parts_run_that_need_none(scene: Scene) -> None:
    found = run(scene, "nvml_values", "stacks", "layout", "direct_two", "torch_one")
    assert {name: outcome.state for name, outcome in found.items()} == {
        "nvml_values": State.PASSED,
        "stacks": State.PASSED,
        "layout": State.PASSED,
        "direct_two": State.SKIPPED,
        "torch_one": State.SKIPPED,
    }, found
    assert found["direct_two"].why == NO_BPF
    assert "a rehearsal uses no GPU" in found["torch_one"].why
    skipped = {
        name: [c.why for c in found[name].checks if c.state is State.SKIPPED] for name in ("stacks", "nvml_values")
    }
    assert skipped == {"stacks": [NO_BPF], "nvml_values": [NO_BPF]}


def test_a_wrong_value_of_the_driver_fails(scene: Scene) -> None:
    # GIVEN a truth that differs from what the driver answers
    values = Path(scene.machine.libraries.nvml).parent / "nvml.values"
    before = values.read_text()
    library = values.with_name("libnvidia-ml.so.1")
    other = scene.folder / "driver"
    other.mkdir()
    (other / library.name).write_bytes(library.read_bytes())
    (other / values.name).write_text(before.replace("gpu3.power_mw ", "gpu3.power_mw 9"))
    scene.machine = Machine(
        sys.executable,
        Libraries(nvml=str(library)),
        missing=scene.machine.missing,
        rehearsal=True,
    )
    part_scene = scene.of_part("nvml_values")
    direct = gpus._read_directly(part_scene)
    truth = read_double(other / values.name)
    gpus._compare(part_scene, "read here", truth, truth, direct)
    failed = [check for check in read_checks(part_scene.place / "checks.jsonl") if check.state is State.FAILED]
    assert [check.name for check in failed] == ["read here: power_w"]
    assert failed[0].got.startswith("GPU 3: ")


def test_without_a_gpu_and_doubles_everything_is_skipped(tmp_path: Path) -> None:
    missing = dict.fromkeys(EVERYTHING, "no GPU is here")
    made = Scene(tmp_path, Machine(sys.executable, Libraries(), missing=missing))
    found = run(made, *(part.name for part in PARTS if part.needs))
    assert {outcome.state for outcome in found.values()} == {State.SKIPPED}
    assert {outcome.why for outcome in found.values()} == {"no GPU is here"}
    assert [part.name for part in PARTS if not part.needs] == ["check"]


@pytest.mark.parametrize(
    ("script", "why"),
    [("exit 3", "did not tell what it has"), ("exec sleep 1000", "TimeoutExpired"), ("echo {", "JSONDecodeError")],
)
def test_an_interpreter_that_does_not_answer(tmp_path: Path, script: str, why: str) -> None:
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\n{script}\n")
    python.chmod(0o755)
    machine = examine(str(python), seconds=1)
    assert why in machine.missing["torch"]
    assert machine.missing["gpu"]


def test_what_each_lack_costs() -> None:
    libraries = Libraries("/nccl", "/cudart")
    everything = needs({"gpu_name": "NVIDIA H100", "cupy": "14.2", "jax": "0.11"}, libraries)
    assert set(everything.values()) == {""}
    no_torch = needs({"no_torch": "torch: No module named 'torch'", "cupy": "14.2"}, Libraries())
    assert no_torch["torch"] == "torch: No module named 'torch'"
    assert (no_torch["gpu"], no_torch["cupy"], no_torch["jax"]) == ("", "", "jax is not installed")
    assert no_torch["nccl"] == "no libnccl or no libcudart was found"
    assert set(needs({"no_gpu": "nvidia-smi: no"}, libraries).values()) == {"nvidia-smi: no"}


def report(folder: Path) -> dict[str, str]:
    return {part["name"]: part["state"] for part in json.loads((folder / "report.json").read_text())["parts"]}


@pytest.fixture
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets everything take as long as tests may, which may run beside others."""
    monkeypatch.setenv("GPU_KIT_PATIENCE", "4")


# A daemon of its own: the kit starts and stops it.
@long
@pytest.mark.timeout(400)
@pytest.mark.usefixtures("patience")
def test_a_rehearsal_of_some_parts(tmp_path: Path) -> None:
    names = "direct_one,cupy"
    # An interpreter without torch is there sooner.
    code = main(["--out", str(tmp_path), "--rehearse", "--parts", names, "--python", "/usr/bin/python3"])
    text = (tmp_path / "report.md").read_text() + (tmp_path / "logs.txt").read_text()[-4000:]
    assert report(tmp_path) == {
        "daemon": "passed",
        "direct_one": "passed",
        "cupy": "skipped",
    }, text
    assert code == 0
    assert "rehearsal with doubles" in (tmp_path / "report.md").read_text()


@pytest.mark.long
@pytest.mark.timeout(1500)
@pytest.mark.usefixtures("patience")
def test_the_whole_rehearsal(tmp_path: Path) -> None:
    code = main(["--out", str(tmp_path), "--rehearse"])
    text = (tmp_path / "report.md").read_text() + (tmp_path / "logs.txt").read_text()[-4000:]
    skipped = {"torch_one", "torch_two", "cuda_torch", "cupy", "jax"}
    wanted = {part.name: "skipped" if part.name in skipped else "passed" for part in PARTS}
    assert report(tmp_path) == {"daemon": "passed", **wanted}, text
    assert code == 0
