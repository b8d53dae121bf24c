"""Recovers a state directory at the start, whatever is found in it.

Only a newer format makes a start fail. Bad files are set aside in ``corrupt/``, and their rows are losses.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path

from probing.api.errors import FormatError
from probing.daemon.clock import Clock
from probing.daemon.store.files import Files
from probing.daemon.store.log.parts import part_path
from probing.daemon.store.manifest import MANIFEST, Edit, Manifest, load_manifest
from probing.daemon.store.recovery.directory import Directory, Recovered, part_numbers, segment_paths
from probing.daemon.store.recovery.log_parts import scan_log, take_parts
from probing.daemon.store.recovery.repair import drop_bad_segments, rebuild
from probing.daemon.store.recovery.set_aside import SetAside
from probing.daemon.store.segments.reader import describe_segment

__all__ = ("recover",)

_MAX_FOREIGN = 100


def recover(files: Files, root: Path, node: str, clock: Clock, aside: SetAside) -> Recovered:
    """Brings manifest, segments and log into agreement, and writes the manifest anew.

    Raises NewerFormat, or OSError when the directory itself cannot be read.
    """
    directory = Directory(files, root, node, clock, aside)
    state = load_manifest(files, root)
    found = Recovered(Manifest(files, root, node, clock.boot_id, state))
    numbers = part_numbers(directory, found.foreign)
    on_disk = list(segment_paths(directory, found.foreign))
    damaged = state.bad_lines > 0 or state.cut_short or (not state.found and bool(numbers or on_disk))
    scanned = scan_log(directory, [n for n in numbers if n > state.sealed_to], found)
    if damaged:
        rebuild(directory, found, set(on_disk), {s.part.number for s in scanned})
    drop_bad_segments(directory, found, set(on_disk))
    _clear(directory, root / f"{MANIFEST}.tmp")
    try:
        found.manifest.commit(Edit())
    except OSError as e:
        found.degraded = f"the manifest cannot be written: {e.strerror or e}"
    if not found.degraded or not damaged:
        _sweep(directory, found, numbers, on_disk)
    take_parts(found, damaged, [s for s in scanned if s.part.number > state.sealed_to])
    found.next_part = max([state.sealed_to, *numbers]) + 1
    del found.foreign[_MAX_FOREIGN:]
    return found


def _clear(directory: Directory, path: Path) -> None:
    # A folder cannot be unlinked, and would keep the name occupied for ever.
    with contextlib.suppress(OSError):
        try:
            directory.files.unlink(path)
        except OSError:
            directory.aside.move(path)


def _sweep(directory: Directory, found: Recovered, numbers: Sequence[int], on_disk: Sequence[str]) -> None:
    """Removes log parts that are sealed and segments that the manifest does not name."""
    state = found.manifest.state
    with contextlib.suppress(OSError):
        for number in sorted(numbers):
            if number <= state.sealed_to:
                directory.files.unlink(part_path(directory.root, number))
        for path in on_disk:
            if path not in state.segments:
                _remove_orphan(directory, path)


def _remove_orphan(directory: Directory, path: str) -> None:
    try:
        describe_segment(directory.files, directory.root, path)
    except FileNotFoundError:
        return
    except (FormatError, OSError):
        directory.aside.move(directory.root / path)
        return
    directory.files.unlink(directory.root / path)
