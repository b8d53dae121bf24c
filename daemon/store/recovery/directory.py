"""The state directory that recovery works on, and the result of recovery."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from probing.daemon.clock import Clock
from probing.daemon.source import Loss
from probing.daemon.store.files import Files
from probing.daemon.store.format import Positions
from probing.daemon.store.log.parts import WAL_DIR, Part, part_number
from probing.daemon.store.manifest import MANIFEST, Manifest
from probing.daemon.store.recovery.set_aside import CORRUPT_DIR, SetAside
from probing.daemon.store.segments.files import is_date_dir, segment_parts

__all__ = ("NODE_KEY", "OWN_NAMES", "Directory", "Recovered", "part_numbers", "segment_paths")

# Other files of the collector in the same directory, NAME.json; a file has the name NAME.new while it is written.
_OTHERS = ("changes", "flight_dumps", "limits", "nccl_layouts", "user_tables")
NODE_KEY = "node.key"
"""The file with the key of the node; it belongs to root (``supervisor.node_key``)."""
OWN_NAMES = {"lock", "imports.jsonl", NODE_KEY, MANIFEST, f"{MANIFEST}.tmp", WAL_DIR, CORRUPT_DIR} | {
    f"{name}.{end}" for name in _OTHERS for end in ("json", "new")
}


class Directory(NamedTuple):
    """The state directory ``root`` of ``node``."""

    files: Files
    root: Path
    node: str
    clock: Clock
    aside: SetAside


@dataclass(slots=True)
class Recovered:
    """The result of recovery. ``parts``: log parts that are not sealed yet, oldest first. ``torn``: the number of log
    parts that were cut short while they were written. The unfinished records were never acknowledged, so they are not
    losses. ``foreign``: files that do not belong to the store, which are left alone. ``degraded``: why the manifest
    cannot be written, or empty."""

    manifest: Manifest
    parts: list[Part] = field(default_factory=list)
    positions: Positions = field(default_factory=dict)
    next_sequence: int = 1
    next_part: int = 1
    losses: list[Loss] = field(default_factory=list)
    torn: int = 0
    foreign: list[str] = field(default_factory=list)
    degraded: str = ""


def part_numbers(directory: Directory, foreign: list[str]) -> list[int]:
    """Returns the numbers of all log parts; adds other files to ``foreign``."""
    numbers = []
    for name in directory.files.listdir(directory.root / WAL_DIR):
        number = part_number(name)
        if number is None:
            foreign.append(f"{WAL_DIR}/{name}")
        else:
            numbers.append(number)
    return numbers


def segment_paths(directory: Directory, foreign: list[str]) -> Iterator[str]:
    """Yields the paths of all segments, and removes unfinished segments; adds other files to ``foreign``."""
    files, root = directory.files, directory.root
    for table in files.listdir(root):
        if table in OWN_NAMES:
            continue
        dates = files.listdir(root / table)
        if "." not in table or not dates:
            foreign.append(table)
            continue
        for date in dates:
            for name in files.listdir(root / table / date) if is_date_dir(date) else ():
                path = f"{table}/{date}/{name}"
                if segment_parts(name):
                    yield path
                elif segment_parts(name.removesuffix(".tmp")):
                    with suppress(OSError):
                        files.unlink(root / path)
                else:
                    foreign.append(path)
            if not is_date_dir(date):
                foreign.append(f"{table}/{date}")
