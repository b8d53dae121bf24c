"""Look at a state directory without touching it: ``probingd verify``."""

from __future__ import annotations

from pathlib import Path

from probing.api.errors import FormatError, StoreError
from probing.daemon.store.files import SystemFiles
from probing.daemon.store.manifest import load_manifest
from probing.daemon.store.segments import check_segment
from probing.daemon.store.wal import TORN, WAL_DIR, part_number, part_path, scan_part

__all__ = ("verify_directory",)


def verify_directory(path: str | Path) -> list[str]:
    """What is wrong with the state directory ``path``, one line each; empty when all of it can be read.

    A daemon that runs meanwhile may drop or seal what is being looked at: stop it first. Raises StoreError when there
    is no state directory, FormatError for a newer format.
    """
    root = Path(path)
    files = SystemFiles()
    if not root.is_dir():
        raise StoreError(f"there is no state directory {root}", hint="name the one that the daemon uses: --state-dir")
    try:
        manifest = load_manifest(files, root)
    except OSError as e:
        raise StoreError(f"the manifest of {root} cannot be read: {e.strerror or e}") from e
    problems = [f"manifest: {manifest.bad_lines} damaged lines"] if manifest.bad_lines else []
    checked = {s.path: check_segment(files, root, s) for s in manifest.segments.values()}
    for number in sorted(filter(None, map(part_number, files.listdir(root / WAL_DIR)))):
        if number > manifest.sealed_to:
            checked[f"{WAL_DIR}/{number:012d}.wal"] = _check_part(files, root, number)
    return [*problems, *(f"{name}: {problem}" for name, problem in checked.items() if problem)]


def _check_part(files: SystemFiles, root: Path, number: int) -> str:
    try:
        problem = scan_part(files, part_path(root, number)).problem
    except (FormatError, OSError) as e:
        return str(e)
    return "" if problem == TORN else problem
