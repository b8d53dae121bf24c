"""Writes the tables of ``layouts/nccl.py`` from NCCL's wheels.

``packaging/dev/nccl-wheels.sh all && .venv/bin/python -m probing.daemon.nccl_uprobes.layouts.make_nccl .build/wheels``

Existing entries keep their indexes, which are keys of a map that outlives the daemon.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from probing.api.errors import NotFound, ProbingError
from probing.daemon.nccl_uprobes.layouts import nccl as nccl_layouts
from probing.daemon.nccl_uprobes.layouts.from_dwarf import nccl_layout
from probing.daemon.nccl_uprobes.layouts.nccl import ABSENT, NCCL_LAYOUTS, UNGUARDED_LAYOUTS, NcclLayout

__all__ = ("layout_of", "main", "merged", "tables")

_PREFIX = "nvidia-nccl-cu12-"
_GUARDED, _UNGUARDED = "NCCL_LAYOUTS", "UNGUARDED_LAYOUTS"
_TABLES = re.compile(r"^(\w+): tuple\[NcclLayout, \.\.\.\] = \(.*?\)$", re.MULTILINE | re.DOTALL)
_WIDTH = 112


def layout_of(wheel: Path) -> NcclLayout:
    """Returns the layout of the wheel unpacked at ``wheel``, a folder named by ``nccl-wheels.sh``."""
    fd = os.open(wheel / "lib" / "libnccl.so.2", os.O_RDONLY)
    try:
        found = nccl_layout(fd)
    finally:
        os.close(fd)
    return NcclLayout.of(found["comm"], (wheel.name.removeprefix(_PREFIX),), (found["build_id"] or "",))


def merged(known: Sequence[NcclLayout], found: Iterable[NcclLayout]) -> tuple[NcclLayout, ...]:
    """Returns ``known`` with the layouts of ``found`` added. A layout adds its versions to the entry with equal
    offsets, or becomes a new entry.
    """
    entries = list(known)
    for layout in found:
        same = [index for index, entry in enumerate(entries) if entry.offsets == layout.offsets]
        if not same:
            entries.append(layout)
        elif not set(layout.versions) <= set(entries[same[0]].versions):
            entry = entries[same[0]]
            entries[same[0]] = entry._replace(
                versions=entry.versions + layout.versions, build_ids=entry.build_ids + layout.build_ids
            )
    return tuple(entries)


def tables(text: str, guarded: Sequence[NcclLayout], unguarded: Sequence[NcclLayout]) -> str:
    """Returns the source ``text`` of layouts/nccl.py with these tables in it."""
    new = {_GUARDED: guarded, _UNGUARDED: unguarded}

    def table(match: re.Match[str]) -> str:
        entries = "".join(_entry(layout) for layout in new[match[1]])
        opening = "(\n" if entries else "("
        return f"{match[1]}: tuple[NcclLayout, ...] = {opening}{entries})"

    return _TABLES.sub(table, text)


def _entry(layout: NcclLayout) -> str:
    lines = ["    NcclLayout("]
    for name, value in layout._asdict().items():
        if isinstance(value, tuple):
            quoted = ", ".join(f'"{text}"' for text in value) + ("," if len(value) == 1 else "")
            if len(quoted) <= _WIDTH - len(name):
                lines.append(f"        {name}=({quoted}),")
            else:
                lines += [f"        {name}=(", *(f'            "{text}",' for text in value), "        ),"]
        elif value != ABSENT:
            lines.append(f"        {name}={value if name == 'seq_count' else f'0x{value:X}'},")
        elif name == "end_magic":
            lines.append(f"        {name}=ABSENT,")
    return "\n".join([*lines, "    ),\n"])


def _numbers(wheel: Path) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", wheel.name.removeprefix(_PREFIX))]


def main() -> int:
    try:
        wheels = sorted(Path(sys.argv[1]).glob(f"{_PREFIX}*"), key=_numbers)
        if not wheels:
            raise NotFound(f"no wheel of NCCL in {sys.argv[1]}", hint="run `packaging/dev/nccl-wheels.sh all`")
        layouts = [layout_of(wheel) for wheel in wheels]
    except ProbingError as e:
        print(f"error: {e.message}\nhint: {e.hint}", file=sys.stderr)
        return e.exit_code
    guarded = merged(NCCL_LAYOUTS, (layout for layout in layouts if layout.end_magic != ABSENT))
    unguarded = merged(UNGUARDED_LAYOUTS, (layout for layout in layouts if layout.end_magic == ABSENT))
    path = Path(nccl_layouts.__file__)
    path.write_text(tables(path.read_text(), guarded, unguarded))
    print(f"{len(layouts)} wheels, {len(guarded)} layouts with magic words, {len(unguarded)} without")
    return 0


if __name__ == "__main__":
    sys.exit(main())
