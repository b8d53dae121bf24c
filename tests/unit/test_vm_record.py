"""The record of the tree that passed in guests: when it is written, and what differs from it."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
KERNELS = ("5.10", "7.2")
FILES = {
    "daemon/bpf/one.bpf.c": "int one;",
    "daemon/supervisor/run.py": "run = 1",
    "packaging/package.sh": "#!/bin/sh",
    "vm-tests/guest.py": "guest = 1",
    "daemon/store/log.py": "log = 1",
    ".gitignore": ".build\n*.o\n",
}


def _module() -> ModuleType:
    """vm-tests is no package, and on the path of its own tests only."""
    spec = importlib.util.spec_from_file_location("vm_tests_passed", ROOT / "vm-tests/passed.py")
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    sys.modules["vm_tests_passed"] = made
    spec.loader.exec_module(made)
    return made


passed = _module()
ALL = list(passed.FOLDERS)


def git(root: Path, *words: str) -> None:
    who = ("-c", "user.name=nobody", "-c", "user.email=nobody@localhost")
    subprocess.run(("git", *who, *words), cwd=root, check=True, capture_output=True)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A checkout whose package is about to be built."""
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", "-A")
    git(tmp_path, "commit", "-q", "-m", "all")
    passed.begin(tmp_path)
    return tmp_path


def keep(root: Path, *kernels: str) -> str:
    """Returns what the last of ``kernels``, which pass one after another, says."""
    said = ""
    for series in kernels:
        said = passed.keep(root, series, f"{series}.0-amd64", KERNELS)
    return said


def record(root: Path) -> dict[str, object] | None:
    path = root / passed.RECORD
    return json.loads(path.read_text()) if path.exists() else None


def test_without_a_record_all_differs(root: Path) -> None:
    assert passed.differing(root) == ALL


def test_all_kernels_make_a_record(root: Path) -> None:
    assert "not recorded yet: 7.2 " in keep(root, "5.10")
    assert record(root) is None
    assert keep(root, "7.2").startswith("recorded")
    made = record(root)
    assert made is not None
    assert made["kernels"] == {"5.10": "5.10.0-amd64", "7.2": "7.2.0-amd64"}
    assert list(made["folders"]) == ALL
    assert len(made["commit"]) == 40
    assert passed.differing(root) == []
    # The record is no part of what it records.
    git(root, "add", "-A")
    git(root, "commit", "-q", "-m", "record")
    assert passed.differing(root) == []


@pytest.mark.parametrize(
    ("name", "folders"),
    [
        ("daemon/bpf/one.bpf.c", ["daemon/bpf"]),
        ("daemon/supervisor/new/file.py", ["daemon/supervisor"]),
        ("packaging/package.sh", ["packaging"]),
        ("vm-tests/guest.py", ["vm-tests"]),
        ("daemon/store/log.py", []),
        # A folder of a similar name, and what git ignores.
        ("daemon/bpf2/one.bpf.c", []),
        ("daemon/bpf/one.o", []),
    ],
)
def test_a_changed_file_differs(root: Path, name: str, folders: list[str]) -> None:
    keep(root, *KERNELS)
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).write_text("something else")
    assert passed.differing(root) == folders


def test_a_removed_a_renamed_and_an_executable_file_differ(root: Path) -> None:
    keep(root, *KERNELS)
    (root / "packaging/package.sh").chmod(0o755)
    assert passed.differing(root) == ["packaging"]
    (root / "daemon/bpf/one.bpf.c").rename(root / "daemon/bpf/two.bpf.c")
    (root / "vm-tests/guest.py").unlink()
    assert passed.differing(root) == ["daemon/bpf", "packaging", "vm-tests"]


def test_a_link_is_hashed_by_its_target(root: Path) -> None:
    (root / "packaging/link").symlink_to("nowhere")
    passed.begin(root)
    keep(root, *KERNELS)
    assert passed.differing(root) == []
    (root / "packaging/link").unlink()
    (root / "packaging/link").symlink_to("elsewhere")
    assert passed.differing(root) == ["packaging"]


def test_kernels_of_two_runs_count_only_for_one_tree(root: Path) -> None:
    keep(root, "5.10")
    # Not in one of the folders, but in the package.
    (root / "daemon/store/log.py").write_text("log = 2")
    passed.begin(root)
    assert "5.10 did not pass with this tree" in keep(root, "7.2")
    assert record(root) is None
    assert keep(root, "5.10").startswith("recorded")
    made = record(root)
    assert made is not None
    assert made["commit"].endswith("-dirty")


def test_a_change_during_the_run_is_not_recorded(root: Path) -> None:
    keep(root, "5.10")
    (root / "vm-tests/guest.py").write_text("guest = 2")
    assert keep(root, "7.2") == "not recorded: vm-tests changed while the tests ran"
    assert record(root) is None


def test_a_failure_takes_the_note_back(root: Path) -> None:
    keep(root, "5.10")
    passed.take_back(root, "5.10")
    passed.take_back(root, "7.2")
    assert "not recorded yet: 5.10 " in keep(root, "7.2")


def test_without_hashes_from_before_the_package_nothing_is_recorded(root: Path) -> None:
    (root / ".build/vm-tests/begun.json").unlink()
    assert keep(root, *KERNELS).startswith("not recorded: ")


def test_the_command_says_what_differs(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(passed, "ROOT", root)
    assert passed.main("unchanged") == 1
    assert f"differ from the tree that passed the whole matrix: {', '.join(ALL)}" in capsys.readouterr().out
    assert passed.main("begin") == 0
    keep(root, *KERNELS)
    assert passed.main("unchanged") == 0
    assert "no guest is booted" in capsys.readouterr().out
    (root / "daemon/bpf/one.bpf.c").write_text("int two;")
    assert passed.main("unchanged") == 1
    assert capsys.readouterr().out.endswith("matrix: daemon/bpf\n")
    assert passed.main("anything") == 2


def test_the_folders_are_there() -> None:
    """A folder that moved would never differ."""
    assert all((ROOT / folder).is_dir() for folder in passed.FOLDERS)
