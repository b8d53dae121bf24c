"""The record of the last tree that passed the whole matrix: ``passed.json``, and which folders differ from it today.

The whole matrix is every test of this folder, those marked ``long`` too, on every kernel of ``kernels.SUITES``. A
kernel that passed leaves a note in .build/vm-tests. Once all kernels have a note of the same tree, passed.json is
written: after one `make vm-test`, or after several of an unchanged checkout, so that a kernel that failed by accident
can run again alone. A change of any file of the checkout makes all notes void, and a test that fails removes the note
of its kernel. A run of some of the tests leaves no note, nor does one during which a folder of FOLDERS changed.

The hashes are of names, modes and contents of the files that git tracks or would add, as they lie in the checkout.
passed.json itself is left out.

``passed.py begin`` keeps the hashes of the tree, before a package is built from it. ``passed.py unchanged`` prints
which of FOLDERS differ from the record; it exits with 0 if none does.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Collection, Iterable
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from hashlib import sha256
from pathlib import Path

__all__ = ("FOLDERS", "RECORD", "Tree", "begin", "differing", "keep", "read_tree", "take_back")

ROOT = Path(__file__).resolve().parents[1]
# The folders that only the guests test, and not `make test`: old kernels, systemd's units and the package.
FOLDERS = ("daemon/bpf", "daemon/supervisor", "packaging", "vm-tests")
RECORD = "vm-tests/passed.json"
_NOTES = ".build/vm-tests"
_BEGUN = f"{_NOTES}/begun.json"


@dataclass(frozen=True, slots=True)
class Tree:
    """Hashes of a checkout: of all its files (``whole``), and of each of FOLDERS.

    ``commit`` ends with -dirty where files differ from it.
    """

    commit: str
    whole: str
    folders: dict[str, str]


def read_tree(root: Path) -> Tree:
    """Returns the hashes of the checkout at ``root``. Raises CalledProcessError where git does not know it."""
    listed = _git(root, "ls-files", "-z", "--cached", "--others", "--exclude-standard").split("\0")
    # A removed file is still tracked.
    files = {name: _content(root, name) for name in sorted(set(listed) - {"", RECORD}) if _exists(root / name)}
    folders = {
        folder: _hash(line for name, line in files.items() if name.startswith(f"{folder}/")) for folder in FOLDERS
    }
    dirty = _git(root, "status", "--porcelain", "--", ".", f":!{RECORD}")
    commit = _git(root, "rev-parse", "HEAD").strip()
    return Tree(f"{commit}-dirty" if dirty else commit, _hash(files.values()), folders)


def differing(root: Path) -> list[str]:
    """Returns the folders of FOLDERS that differ from the record: all of them if there is no record."""
    record = root / RECORD
    passed = json.loads(record.read_text())["folders"] if record.exists() else {}
    found = read_tree(root).folders
    return [folder for folder in FOLDERS if found[folder] != passed.get(folder)]


def begin(root: Path) -> None:
    """Keeps the hashes of the tree, from which a package is built next."""
    (root / _NOTES).mkdir(parents=True, exist_ok=True)
    (root / _BEGUN).write_text(json.dumps(asdict(read_tree(root)), indent=1) + "\n")


def keep(root: Path, series: str, release: str, kernels: Collection[str]) -> str:
    """Notes that a kernel has passed, and writes the record if all ``kernels`` have; returns the outcome as text."""
    begun = root / _BEGUN
    if not begun.exists():
        return "not recorded: `make vm-test` has not kept the hashes of the tree"
    tree = Tree(**json.loads(begun.read_text()))
    now = read_tree(root).folders
    if changed := [folder for folder in FOLDERS if now[folder] != tree.folders[folder]]:
        return f"not recorded: {', '.join(changed)} changed while the tests ran"
    date = datetime.now(timezone.utc).date().isoformat()
    _note(root, series).write_text(json.dumps({"release": release, "date": date, **asdict(tree)}, indent=1) + "\n")
    notes = {kernel: json.loads(_note(root, kernel).read_text()) for kernel in kernels if _note(root, kernel).exists()}
    passed = {kernel: note["release"] for kernel, note in notes.items() if note["whole"] == tree.whole}
    if missing := [kernel for kernel in kernels if kernel not in passed]:
        return f"not recorded yet: {', '.join(missing)} did not pass with this tree"
    record = {"commit": tree.commit, "date": date, "kernels": passed, "folders": tree.folders}
    (root / RECORD).write_text(json.dumps(record, indent=2) + "\n")
    return f"recorded in {RECORD}, which is to be committed: the whole matrix has passed"


def take_back(root: Path, series: str) -> None:
    """Removes the note of a kernel on which a test has failed."""
    _note(root, series).unlink(missing_ok=True)


def main(command: str) -> int:
    """Runs a command of the module's docstring; returns its exit status."""
    if command == "begin":
        begin(ROOT)
        return 0
    if command != "unchanged":
        print("error: passed.py takes begin or unchanged", file=sys.stderr)
        return 2
    if not (ROOT / RECORD).exists():
        print(f"no whole matrix has passed yet: there is no {RECORD}")
    if found := differing(ROOT):
        print(f"differ from the tree that passed the whole matrix: {', '.join(found)}")
        return 1
    record = json.loads((ROOT / RECORD).read_text())
    print(f"nothing differs from {record['commit'][:12]}, which passed the whole matrix on {record['date']}", end="")
    print(": no guest is booted")
    return 0


def _git(root: Path, *words: str) -> str:
    return subprocess.run(("git", *words), cwd=root, capture_output=True, check=True, text=True).stdout


def _exists(path: Path) -> bool:
    return path.is_symlink() or path.is_file()


def _content(root: Path, name: str) -> str:
    """Returns a line with the name, the mode as git has it, and the hash of the content."""
    path = root / name
    if path.is_symlink():
        return f"{name} link {path.readlink()}"
    mode = "program" if path.stat().st_mode & 0o100 else "file"
    return f"{name} {mode} {sha256(path.read_bytes()).hexdigest()}"


def _hash(lines: Iterable[str]) -> str:
    return sha256("".join(f"{line}\n" for line in lines).encode()).hexdigest()


def _note(root: Path, series: str) -> Path:
    return root / _NOTES / f"passed-{series}.json"


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:] or ("",)))
