"""A symptom: one thing that is wrong with a part of a node."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from probing.diagnosis.facts import NodeFacts

__all__ = ("FindSymptoms", "Symptom")


@dataclass(frozen=True, slots=True)
class Symptom:
    """A symptom of the hardware. ``kind``: ``gpu_fault``, ``gpu_throttled``, ``network_fault``, ``packet_loss``,
    ``storage_fault`` or ``host_fault``. ``part``: the name of the part, such as "GPU 3".

    ``ranks``: the ranks that use the part; empty: any process of the node may use it. ``fails``: True if the part does
    not work, False if it works worse. ``why``: a clause that follows "rank 1 (node b, pid 4711)", such as "its GPU 3 is
    lost"; ``text``: the same without the rank, such as "GPU 3 is lost". ``since_ns`` and ``last_ns``: the first and the
    last event, on the clock of the node; None: the symptom lasts. ``nvlink_of``: the number of the GPU to which the
    NVLink belongs.
    """

    kind: str
    node: str
    part: str
    ranks: tuple[int, ...]
    fails: bool
    why: str
    text: str
    since_ns: int | None = None
    evidence: tuple[str, ...] = ()
    next_steps: tuple[str, ...] = ()
    last_ns: int | None = None
    nvlink_of: int | None = None


FindSymptoms = Callable[[NodeFacts], Iterator[Symptom]]
"""Yields the symptoms of one kind of part of a node."""
