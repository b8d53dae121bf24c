"""Finds files of a state directory that nothing names, and files with wrong rights."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from probing.daemon.store.log.parts import WAL_DIR, part_number
from probing.daemon.store.manifest import MANIFEST, LoadedManifest
from probing.daemon.store.recovery.directory import NODE_KEY, OWN_NAMES
from probing.daemon.store.recovery.set_aside import CORRUPT_DIR
from probing.daemon.store.segments.paths import is_date_dir, segment_parts
from probing.daemon.store.verify.findings import Problem

__all__ = ("stray_files",)


def stray_files(root: Path, manifest: LoadedManifest, running: bool) -> Iterator[Problem]:
    """Yields files that nothing names, that others may write to, or that the daemon cannot use.

    ``running``: a daemon uses the directory, so files that it has for a moment are no problem.
    """
    owner = root.lstat().st_uid
    for path in _walk(root):
        try:
            state = path.lstat()
        except FileNotFoundError:
            continue
        name = path.relative_to(root).as_posix()
        if reason := _wrong_rights(state, 0 if name == NODE_KEY and state.st_uid == 0 else owner):
            yield Problem(name, reason, "goes on, but the daemon may not be able to use or remove it")
            continue
        kind = None if stat.S_ISDIR(state.st_mode) else _leftover(name, manifest)
        if kind is not None and not (running and kind.transient):
            yield Problem(name, kind.what, kind.then, wrong=False)


def _walk(root: Path) -> Iterator[Path]:
    yield root
    for folder, names, files in os.walk(root):
        names.sort()
        yield from (Path(folder, name) for name in (*names, *sorted(files)))


def _wrong_rights(state: os.stat_result, owner: int) -> str:
    mode = stat.S_IMODE(state.st_mode)
    if not (stat.S_ISREG(state.st_mode) or stat.S_ISDIR(state.st_mode)):
        return "it is neither a file nor a directory"
    if state.st_uid != owner:
        return f"it belongs to uid {state.st_uid}, the state directory to {owner}"
    if mode & 0o022:
        return f"others may write to it (mode {mode:04o})"
    wanted = 0o700 if stat.S_ISDIR(state.st_mode) else 0o600
    return "" if mode & wanted == wanted else f"its owner may not use it (mode {mode:04o})"


@dataclass(frozen=True, slots=True)
class _Kind:
    """A kind of file that nothing names. ``transient``: a running daemon has such files for a moment."""

    what: str
    then: str
    transient: bool = True


_UNFINISHED = _Kind("it was not finished", "removes it")
_SEALED = _Kind("its rows are in segments", "removes it")
_UNNAMED = _Kind("the manifest does not name it", "removes it, as its rows are elsewhere")
_FOREIGN = _Kind("it is no file of probingd", "leaves it alone", transient=False)


def _leftover(name: str, manifest: LoadedManifest) -> _Kind | None:
    parts = name.split("/")
    if parts[0] == CORRUPT_DIR or (len(parts) == 1 and name in OWN_NAMES):
        return _UNFINISHED if name == f"{MANIFEST}.tmp" else None
    if parts[0] == WAL_DIR and len(parts) == 2 and (number := part_number(parts[1])) is not None:
        return _SEALED if number <= manifest.sealed_to else None
    if len(parts) == 3 and "." in parts[0] and is_date_dir(parts[1]):
        if segment_parts(parts[2]):
            return None if name in manifest.segments else _UNNAMED
        if segment_parts(parts[2].removesuffix(".tmp")):
            return _UNFINISHED
    return _FOREIGN
