"""The interface of a source, and the types that sources share.

A source watches one thing and hands Arrow batches to a ``Sink`` by table name. It knows nothing of files, SQL or RPC.
``daemon/collector/source_set.py`` lists the sources; the collector builds each from a ``daemon.context.Context``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol

import numpy.typing as npt
import pyarrow as pa

from probing.daemon.clock import ClockPair
from probing.daemon.config import Config
from probing.daemon.source_state import SourceState, Totals

__all__ = (
    "Assemble",
    "Identity",
    "Loss",
    "ProbeSlot",
    "ProbedLibrary",
    "ProcessKey",
    "Processes",
    "Refused",
    "RingConsumer",
    "Sink",
    "Source",
)

Records = npt.NDArray[Any]
Assemble = Callable[[Records, ClockPair], Mapping[str, pa.RecordBatch]]
"""(records of a ring, the clocks when they were read) -> physical batches by table."""


class ProcessKey(NamedTuple):
    """Names a process until the next boot: pids are used again, but not with the same start time.

    ``start_ns`` is CLOCK_BOOTTIME ns.
    """

    pid: int
    start_ns: int


class Identity(NamedTuple):
    """The job, run, role and rank of a process, as in every table. Ranks are None unless ``role`` is trainer.

    ``train_tid``: the thread that issues its collectives; None: the main thread, or none is known. ``owner``: the uid
    of the user whose job it is.
    """

    pid: int
    start_ns: int
    job: str
    run: str
    role: str
    rank: int | None = None
    local_rank: int | None = None
    world_size: int | None = None
    node_rank: int | None = None
    train_tid: int | None = None
    owner: int = 0

    @property
    def trains(self) -> int:
        """The thread that trains."""
        return self.train_tid or self.pid

    @property
    def key(self) -> ProcessKey:
        return ProcessKey(self.pid, self.start_ns)


class Processes(Protocol):
    """The identities of processes. Safe to call from any thread."""

    def identity(self, pid: int, start_ns: int) -> Identity | None:
        """Returns None for a process that was never seen or is not identified. Never waits.

        A process keeps its identity after its exit.
        """


@dataclass(frozen=True, slots=True)
class Loss:
    """Rows that are missing from ``table``, certainly or possibly; each becomes a row of ``probing.losses``.

    ``ts_from_ns`` and ``ts_to_ns`` are UTC ns; ``count`` is None when it is unknown; ``pid`` None means all processes.
    """

    source: str
    table: str
    stage: str
    reason: str
    ts_from_ns: int
    ts_to_ns: int
    count: int | None = None
    pid: int | None = None


class Sink(Protocol):
    """Accepts the rows of sources. Safe to call from any thread; the next drain writes the rows to the log."""

    def put(self, table: str, batch: pa.RecordBatch, read: Mapping[str, int] = ...) -> None:
        """``batch`` has the physical schema of ``table`` (``probing.api.tables``). ``read``: how far the memories that
        it comes from have been read, which is written to the log with it."""

    def forget(self, read: Iterable[str]) -> None:
        """Drops names of ``read`` whose memories are gone."""

    def lost(self, loss: Loss) -> None: ...


class ProbeSlot(NamedTuple):
    """A probe, and which rows are missing when its hits are refused: rows of ``table`` by ``source``.

    ``why``: the reason of a refusal that is not the budget of hits.
    """

    name: str
    source: str
    table: str
    why: str = ""


class ProbedLibrary(Protocol):
    """A library that gets probes in every process that maps it. Its file names begin with one of ``files``."""

    @property
    def name(self) -> str: ...

    @property
    def table(self) -> str:
        """The table whose rows are missing where the library could not be probed in time."""

    @property
    def files(self) -> tuple[bytes, ...]: ...

    @property
    def awaited(self) -> bool:
        """Whether the start of the daemon waits for its probes in running processes."""

    def interesting(self, path: bytes) -> bool:
        """Whether a mapped file can be this library, by its path."""

    def attach(self, fd: int, path: bytes) -> int:
        """Place the probes on the file open at ``fd``, which stays the caller's. Returns how many are new.

        Raises AttachError, PrivilegeError, UnsupportedTarget.
        """

    def forget(self, identity: tuple[int, int]) -> None:
        """The session has ended the probes on a file (device, inode)."""


@dataclass(frozen=True, slots=True)
class RingConsumer:
    """Turns the records of a ring into rows. ``table`` is the one whose rows a full ring costs.

    ``identified``: rows name job and rank for good, so records wait a moment for the identity of their process.
    ``ready`` returns the position up to which the ring may be drained. ``full_share``: the ring is drained at once when
    it is filled to one part in so many; ``rest_s``: how long records may wait in the ring, s. None: as the drain does.
    ``open_map`` is the map of records that are not finished; ``abandoned`` makes finished ones of them when the layout
    is replaced.
    """

    assemble: Assemble
    table: str
    identified: bool = False
    ready: Callable[[], int] | None = None
    full_share: int | None = None
    rest_s: float | None = None
    open_map: str = ""
    abandoned: Callable[[Records], Records] = lambda records: records[:0]


class Source:
    """One watched thing. A source overrides what it has.

    The collector builds all sources and calls ``start``, then ``started`` when it has looked at all running processes.
    At the end it calls ``finish``, drains the rings once more, and calls ``stop``. The thread of discovery calls the
    ``process_`` methods, the draining thread ``assemble`` of the rings: neither may wait. A thread of tickers calls
    ``tick``; any thread calls the rest.
    """

    name: str = ""
    table: str = ""
    """The table whose rows ``states`` counts."""
    objects: ClassVar[tuple[str, ...]] = ()
    """BPF objects without which the collector does not start."""
    late_objects: ClassVar[tuple[str, ...]] = ()
    """Those objects, of both kinds, whose programs load when one is first used, or shortly after the start."""
    optional_objects: ClassVar[tuple[str, ...]] = ()
    """BPF objects that the kernel may refuse (``session.refused``)."""

    @classmethod
    def ring_sizes(cls, config: Config) -> Mapping[str, int]:  # noqa: ARG003
        """Sizes of rings that are configured, bytes. Raises ConfigError."""
        return {}

    @property
    def rings(self) -> Mapping[str, RingConsumer]:
        """The consumers of the rings of this source, in the order in which one cycle drains them."""
        return {}

    @property
    def libraries(self) -> Sequence[ProbedLibrary]:
        return ()

    @property
    def probe_slots(self) -> Mapping[int, ProbeSlot]:
        """The probes by their slots, which ``bpf.probe_slots.SLOTS`` gives out."""
        return {}

    @property
    def live_tables(self) -> Mapping[str, Callable[[ClockPair], pa.RecordBatch]]:
        """Tables that are not stored: their rows are made for each query."""
        return {}

    @property
    def observed_tables(self) -> Mapping[str, Callable[[pa.RecordBatch, ClockPair], None]]:
        """Batches of other sources that this one reads, by table. Called in the thread that made the batch."""
        return {}

    @property
    def restored_tables(self) -> Mapping[str, tuple[Sequence[str], Callable[[pa.Table], None]]]:
        """Columns of tables whose stored rows of this boot, and some older ones, the source gets before it ticks."""
        return {}

    @property
    def tick_s(self) -> Callable[[], float] | None:
        """The interval of ``tick``, s, where it needs a thread of its own; None: 1 s, in a thread with others."""
        return None

    def start(self) -> None:
        """Raises ProbingError: the collector does not start."""

    def finish(self) -> None:
        """Put the last rows that come from no ring: the last drain follows."""

    def stop(self) -> None:
        """Release everything; also after ``start`` failed or was not called."""

    def tick(self) -> None: ...

    def settings_changed(self) -> bool:
        """Apply changed settings. Returns whether the libraries have to be attached anew."""
        return False

    def pause(self, paused: bool) -> None:
        """Stop or resume probes that the session's switch in the kernel does not reach."""

    def ends_missed(self, before_ns: int, pid: int | None = None) -> object:
        """Operations begun before ``before_ns`` (CLOCK_MONOTONIC), of one process or all, may have ended unseen."""

    def started(self, alive: Callable[[int, int], bool]) -> None:
        """The last call of a start: drop the state of processes that ended unseen, those that are not
        ``alive(pid, start_ns)``."""

    def process_identified(self, process: Identity) -> None:
        """A process is new, or has another identity than before."""

    def process_replaced(self, pid: int, start_ns: int) -> None:
        """A process called exec and runs another program now."""

    def process_exited(self, process: Identity) -> None: ...

    def rows_lost(self, loss: Loss) -> None:
        """A source reported a loss. Called in the thread that did."""

    def states(self, totals: Totals) -> list[SourceState]:
        return [totals.of(self.name, self.table)]


class Refused(Source):
    """Takes the place of a source that the kernel refused, and reports why."""

    def __init__(self, name: str, reason: str) -> None:
        self.name = name
        self._reason = reason

    def states(self, totals: Totals) -> list[SourceState]:  # noqa: ARG002
        return [SourceState(self.name, "degraded", self._reason)]
