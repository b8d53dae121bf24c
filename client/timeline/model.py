"""The data of a timeline: processes, communicators, threads and counters, and their rows as columns of numbers.

All times are UTC ns by the client's clock. Unknown numbers are ``coding.UNKNOWN``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from probing.client.timeline.coding import Ints, Reals

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = (
    "SPANNING",
    "Clock",
    "Columns",
    "Comm",
    "Counter",
    "Counters",
    "Finding",
    "Loss",
    "Operations",
    "Process",
    "Samples",
    "Steps",
    "Thread",
)

SPANNING = 2**62
"""The end of an operation that has not ended: later than all times."""


class Clock(NamedTuple):
    """The clock of ``node`` is ``offset_ns`` ahead of ours, give or take ``error_ns``; None: not measured."""

    node: str
    offset_ns: int | None
    error_ns: int | None


class Process(NamedTuple):
    """A process of the job; ``rank`` is None if no row names the rank."""

    node: str
    run: str
    pid: int
    start_ns: int
    rank: int | None


class Comm(NamedTuple):
    """A communicator of a run; ``size`` is 0 if it is not known."""

    run: str
    comm: str
    name: str
    backend: str
    size: int


class Thread(NamedTuple):
    """A thread of ``process`` (an index); ``name`` is its name in the kernel. ``trains``: it issues the collectives."""

    process: int
    tid: int
    name: str
    trains: bool


class Counter(NamedTuple):
    """A figure of a device of a node over time."""

    node: str
    device: str
    name: str
    unit: str


class Loss(NamedTuple):
    """Rows of ``table`` that may be missing from ``begin`` to ``end``. ``missing`` is their number; None if unknown.

    ``pid`` None: rows of all processes of the node.
    """

    node: str
    pid: int | None
    begin: int
    end: int
    table: str
    reason: str
    missing: int | None


class Finding(NamedTuple):
    """A finding that held in the range, from ``begin`` to ``end``; ``end`` None: it is open."""

    run: str
    begin: int
    end: int | None
    verdict: str
    severity: str
    sentence: str
    ranks: tuple[int, ...]
    confidence: float


@dataclass(slots=True)
class Columns:
    """Columns of equal length."""

    def __len__(self) -> int:
        return len(getattr(self, fields(self)[0].name))

    def taken(self, rows: Ints) -> Self:
        """Returns the rows that ``rows`` selects, by indices or by a flag for each row."""
        return type(self)(*(getattr(self, field.name)[rows] for field in fields(self)))

    @classmethod
    def joined(cls, parts: Sequence[Self]) -> Self:
        """Returns the rows of all ``parts``."""
        if not parts:
            return cls(*(np.zeros(0, np.int64) for _ in fields(cls)))
        return cls(*(np.concatenate([getattr(part, field.name) for part in parts]) for field in fields(cls)))


@dataclass(slots=True)
class Operations(Columns):
    """Operations, sorted by call.

    ``process``, ``comm``, ``op``, ``state``, ``timing`` and ``error`` are indices into the timeline's dictionaries.
    ``done_hi`` is SPANNING for an operation in flight. ``last_call`` and ``last`` (an index of a process): when and by
    which process the operation was called last; UNKNOWN unless the rows of all ranks were read.
    """

    process: Ints
    comm: Ints
    op: Ints
    seq: Ints
    size: Ints
    call: Ints
    start: Ints
    done_lo: Ints
    done_hi: Ints
    state: Ints
    timing: Ints
    error: Ints
    step: Ints
    last_call: Ints
    last: Ints


@dataclass(slots=True)
class Steps(Columns):
    """Training steps, sorted by process and begin."""

    process: Ints
    step: Ints
    begin: Ints
    end: Ints
    comm_ns: Ints
    wait_ns: Ints


@dataclass(slots=True)
class Samples(Columns):
    """Rows of python.samples: ``thread`` is an index, ``stack`` a stack_id, ``on_cpu`` 0 or 1, ``duration`` in ns."""

    thread: Ints
    time: Ints
    duration: Ints
    count: Ints
    on_cpu: Ints
    stack: Ints


@dataclass(slots=True)
class Counters(Columns):
    """Values of counters: the index of a Counter, a time and a finite value."""

    counter: Ints
    time: Ints
    value: Reals
