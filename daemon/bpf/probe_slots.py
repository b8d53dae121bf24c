"""Probe slots: the numbers under which the programs count the hits of a probe and keep its budget.

A slot travels in the low 16 bits of a probe's cookie and indexes the maps of guard.bpf.h. Those maps and the links are
pinned, so they outlive the daemon: a module reserves the same numbers each time, and changes them only together with
the layout of the maps.
"""

from __future__ import annotations

from collections.abc import Mapping

from probing.api.errors import InternalError

__all__ = ("PROBE_SLOTS", "SLOTS", "SlotRegistry")

# The same number as in guard.bpf.h.
PROBE_SLOTS = 256


class SlotRegistry:
    """Gives out slots by name; each slot has one owner."""

    def __init__(self, limit: int = PROBE_SLOTS) -> None:
        self._limit = limit
        self._blocks: dict[str, range] = {}

    def reserve(self, name: str, first: int, count: int = 1) -> range:
        """Reserves the ``count`` slots from ``first`` on for ``name``, and returns them.

        Raises InternalError if a slot has an owner or lies beyond the limit, or if ``name`` already has slots.
        """
        block = range(first, first + count)
        if not 0 <= first <= first + count <= self._limit:
            raise InternalError(f"the probe slots {_text(block)} of {name} are not all below {self._limit}")
        for owner, taken in self._blocks.items():
            if owner == name or max(block.start, taken.start) < min(block.stop, taken.stop):
                raise InternalError(f"{name} wants the probe slots {_text(block)}, {owner} has {_text(taken)}")
        self._blocks[name] = block
        return block

    @property
    def blocks(self) -> Mapping[str, range]:
        """Returns the slots of each owner."""
        return dict(self._blocks)


def _text(block: range) -> str:
    return f"{block.start} to {block.stop - 1}"


SLOTS = SlotRegistry()
"""The registry of all modules that place probes or name slots in C."""
