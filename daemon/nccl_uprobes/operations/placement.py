"""Places the probes of gloo or NCCL on a library file."""

from __future__ import annotations

import zlib
from collections.abc import Iterable

from probing.api.errors import ProbingError
from probing.daemon.bpf.interfaces import Link, Session
from probing.daemon.elf.symbols import SymbolFinder
from probing.daemon.nccl_uprobes.layouts.gloo import gloo_layout_index
from probing.daemon.nccl_uprobes.operations.symbols import GLOO, Library, Placement

__all__ = ("place_probes",)

# The cookie holds the slot, then a tag of the file or the index of its layout, then the operation of the probe.
_SLOT_BITS, _OPERATION_SHIFT = 16, 48


def place_probes(
    session: Session, symbols: SymbolFinder, library: Library, fd: int, identity: tuple[int, int]
) -> list[Link]:
    """Places the probes on the library open at ``fd``, all or none. Returns the links, in the order of their making.

    Raises UnsupportedTarget, AttachError, PrivilegeError.
    """
    found = symbols(fd, [*library.patterns, *library.marks])
    tag = _tag(library, [symbol.name for symbol in found], identity)
    links: list[Link] = []
    try:
        for (program, on_return), placements in _by_program(library.placements(found)).items():
            offsets = [placement.offset for placement in placements]
            cookies = [_cookie(placement, tag) for placement in placements]
            links.append(session.attach_uprobe(program, fd, offsets, cookies, library.name, on_return=on_return))
    except ProbingError:
        for link in links:
            session.detach(link)
        raise
    return links


def _tag(library: Library, marks: Iterable[str], identity: tuple[int, int]) -> int:
    """Returns the tag of the cookies: for gloo the index of the layout, for NCCL a hash of the file's identity."""
    if library is GLOO:
        return gloo_layout_index(marks)
    return zlib.crc32(repr(identity).encode())


def _cookie(placement: Placement, tag: int) -> int:
    return placement.operation << _OPERATION_SHIFT | tag << _SLOT_BITS | placement.slot


def _by_program(placements: Iterable[Placement]) -> dict[tuple[str, bool], list[Placement]]:
    grouped: dict[tuple[str, bool], list[Placement]] = {}
    for placement in placements:
        grouped.setdefault((placement.program, placement.on_return), []).append(placement)
    return grouped
