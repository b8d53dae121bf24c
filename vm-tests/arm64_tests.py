"""The wheel for arm64 on a kernel of arm64: its programs load, and see exactly what processes did there.

``make vm-test-arm64`` runs them; they are no part of the tests of the other guests. PROBINGD_VM_ARM64_TESTS names other
tests to run in the guest, with spaces between.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from arm64 import PYTHON, Arm64Guest, payload_image, root_image
from kernels import ROOT, kernel

# Limits for a guest of the usual speed, s.
TESTS_S, DEADLINE_S, TEST_S = 1800.0, 600.0, 1200.0
# A probe's arguments by both ways to attach it, starts and ends of processes, samples of Python, and NCCL's calls.
TESTS = (
    "tests/kernel/test_bpf_session.py::test_counts_and_arguments_are_exact",
    "tests/kernel/test_bpf_lifecycle.py",
    "tests/kernel/test_python_sampler.py::test_samples_are_what_a_walk_sees",
    "tests/kernel/test_python_sampler.py::test_holder_of_the_gil_is_recorded",
    "tests/kernel/test_nccl_operations.py",
)


@pytest.fixture(scope="module")
def payload(tmp_path_factory: pytest.TempPathFactory) -> Path:
    (wheel,) = (ROOT / ".build/wheels").glob("probingd-*_aarch64.whl")
    return payload_image(tmp_path_factory.mktemp("arm64"), wheel)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    kernels = metafunc.config.getoption("kernels").replace(",", " ").split()
    metafunc.parametrize("machine", kernels, indirect=True, scope="module")


@pytest.fixture(scope="module")
def machine(
    request: pytest.FixtureRequest, cache: Path, payload: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Arm64Guest]:
    folder = tmp_path_factory.mktemp("machine")
    made = Arm64Guest(folder, kernel(request.param, cache, "arm64"), root_image(cache), payload)
    try:
        print(f"\nLinux {made.kernel.release} answers after {made.boot():.0f} s")
        yield made
    finally:
        made.close()


def test_every_program_loads(machine: Arm64Guest) -> None:
    checked = machine.run("/payload/venv/bin/probingd check")
    assert "own: the host has no libbpf.so.1" in checked
    counts = machine.run(f"{PYTHON} -I -m probing.daemon.bpf.verifier_statistics")
    # For `make verifier-record`.
    kept = ROOT / f".build/vm-tests/verifier-{machine.kernel.series}-arm64.json"
    kept.parent.mkdir(parents=True, exist_ok=True)
    kept.write_text(counts)
    objects = json.loads(counts)["objects"]
    assert set(objects) == {path.name.removesuffix(".bpf.c") for path in (ROOT / "daemon/bpf").glob("*.bpf.c")}
    assert all(instructions > 0 for programs in objects.values() for instructions, _ in programs.values())


def test_programs_see_what_processes_do(machine: Arm64Guest) -> None:
    deadline = f"PROBINGD_TEST_DEADLINE_S={DEADLINE_S * machine.slowness:.0f}"
    settings = f"PROBINGD_TEST_PYTHONS=/usr/bin/python3 {deadline} HYPOTHESIS_STORAGE_DIRECTORY=/tmp"
    options = f"-v -p no:cacheprovider -o timeout={TEST_S * machine.slowness:.0f} --tb=short"
    tests = os.environ.get("PROBINGD_VM_ARM64_TESTS") or " ".join(TESTS)
    print(machine.run(f"cd /payload && {settings} {PYTHON} -m pytest {options} {tests}", seconds=TESTS_S))
