"""Copies packages that are too large for the kit from this interpreter: ``python brought.py FOLDER NAME...``.

Copies, because the daemon's confined processes may read no files but those of their own interpreter.
"""

from __future__ import annotations

import importlib.metadata
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

__all__ = ("bring", "main")


def bring(name: str, folder: Path) -> None:
    """Copies what a package installed, without its tests, into ``folder``. Raises PackageNotFoundError."""
    found = importlib.metadata.distribution(name)
    tops = {file.parts[0] for file in found.files or ()} - {".."}
    for top in sorted(tops):
        source = Path(str(found.locate_file(top)))
        if source.is_dir():
            ignored = shutil.ignore_patterns("tests", "include", "__pycache__")
            shutil.copytree(source, folder / top, ignore=ignored, dirs_exist_ok=True)
        else:
            shutil.copy2(source, folder / top)


def main(argv: Sequence[str]) -> int:
    """Returns 1 where a package is missing."""
    folder, *names = argv
    try:
        for name in names:
            bring(name, Path(folder))
    except importlib.metadata.PackageNotFoundError as e:
        print(f"error: {sys.executable} has no {e.name}, which probingd needs", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
