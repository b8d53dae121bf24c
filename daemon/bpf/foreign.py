"""Stops the layouts (pinned maps and links) of other versions of the daemon. Their records are read by the description
that each layout contains.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from probing.api.errors import FormatError
from probing.daemon.bpf import pins, syscalls
from probing.daemon.bpf.btf import dtype_from_json
from probing.daemon.bpf.maps import Map
from probing.daemon.bpf.ring import Ring

__all__ = ("Foreign", "stop_foreign")


@dataclass(slots=True)
class Foreign:
    """A stopped layout of another version. Read ``rings`` to their end, read ``maps``, then call ``remove``."""

    name: str
    path: Path
    rings: dict[str, Ring]
    maps: dict[str, Map]

    def close(self) -> None:
        for ring in self.rings.values():
            ring.close()
        for bpf_map in self.maps.values():
            bpf_map.close()

    def remove(self) -> None:
        self.close()
        pins.remove_layout(self.path)


def stop_foreign(folder: Path, own: Path) -> list[Foreign]:
    """Detaches the programs of all other versions, whose pins are in ``folder``; ``own`` is this version's folder.

    Returns the versions (layouts) whose rings are still to be drained. Raises OSError.

    A layout that cannot be read stays, stopped, until ``probingd cleanup`` removes it.
    """
    stopped = []
    for layout in pins.layouts(folder):
        if layout == own:
            continue
        pins.remove_links(layout)
        if not (layout / pins.META).exists():
            # A layout without a description never ran.
            pins.remove_layout(layout)
            continue
        try:
            stopped.append(_open(layout))
        except FormatError:
            continue
    return stopped


def _open(layout: Path) -> Foreign:
    foreign = Foreign(layout.name, layout, {}, {})
    try:
        meta = pins.read_meta(layout / pins.META)
        for name, record in meta["rings"].items():
            fd = syscalls.object_get(layout / f"map_{name}")
            foreign.rings[name] = Ring.open(name, fd, dtype_from_json(record))
        for name, (key, value) in meta["maps"].items():
            fd = syscalls.object_get(layout / f"map_{name}")
            foreign.maps[name] = Map(name, fd, dtype_from_json(key), dtype_from_json(value))
    except (FileNotFoundError, KeyError, TypeError, ValueError, AttributeError, FormatError) as e:
        foreign.close()
        raise FormatError(f"the pins of layout {layout.name} cannot be read", hint="run `probingd cleanup`") from e
    return foreign
