"""The interface of a source, and the types that sources share.

A source watches one thing and hands Arrow batches to a ``Sink`` by table name. It uses no files of the store, no SQL
and no RPC. ``daemon/collector/source_set.py`` lists the sources. The collector builds each source from a
``daemon.context.Context``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol

import numpy.typing as npt
import pyarrow as pa

from probing.api.tables.schema import Row
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
    """Identifies a process until the next boot: a pid can be reused, but not with the same start time.

    ``start_ns`` is CLOCK_BOOTTIME ns.
    """

    pid: int
    start_ns: int


class Identity(NamedTuple):
    """The job, run, role and rank of a process, as in every table. Ranks are None unless ``role`` is trainer.

    ``train_tid``: the thread that issues its collectives; None: the main thread, or unknown. ``owner``: the uid of the
    user who owns the job.
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
        """Returns the tid of the thread that trains."""
        return self.train_tid or self.pid

    @property
    def key(self) -> ProcessKey:
        return ProcessKey(self.pid, self.start_ns)

    def row(self, node: str, ts_ns: int) -> Row:
        """Returns the columns of a row about the process at ``ts_ns``, UTC: node, time, job, run, process and rank."""
        return {
            "node": node,
            "ts": ts_ns,
            "job": self.job,
            "run": self.run,
            "pid": self.pid,
            "start_ns": self.start_ns,
            "rank": self.rank,
        }


class Processes(Protocol):
    """The identities of processes. Safe to call from any thread."""

    def identity(self, pid: int, start_ns: int) -> Identity | None:
        """Returns the identity of a process; None if the process was never seen or is not identified yet. Never waits.

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
        """Adds ``batch``, in the physical schema of ``table`` (``probing.api.tables``). ``read``: if the rows come from
        memory files, name of the file -> the position up to which it was read; the log stores this with the batch."""

    def forget(self, read: Iterable[str]) -> None:
        """Drops the positions of memory files that no longer exist; ``read`` has the names of these files."""

    def lost(self, loss: Loss) -> None: ...


class ProbeSlot(NamedTuple):
    """A probe. When its hits are refused, rows of ``table`` by ``source`` are missing.

    ``why``: why hits are refused; empty: the probe was hit too often.
    """

    name: str
    source: str
    table: str
    why: str = ""


class ProbedLibrary(Protocol):
    """A library that gets probes in every process that maps it. ``files``: prefixes of its file names."""

    @property
    def name(self) -> str: ...

    @property
    def table(self) -> str:
        """The table whose rows are missing if the library could not be probed in time."""

    @property
    def files(self) -> tuple[bytes, ...]: ...

    @property
    def awaited(self) -> bool:
        """Whether the daemon, when it starts, waits until the library's probes are attached to running processes."""

    def interesting(self, path: bytes) -> bool:
        """Returns whether a mapped file can be this library, by its path."""

    def attach(self, fd: int, path: bytes) -> int:
        """Attaches the probes to the file with descriptor ``fd``, which the caller keeps. Returns the number of new
        probes.

        Raises AttachError, PrivilegeError, UnsupportedTarget.
        """

    def forget(self, identity: tuple[int, int]) -> None:
        """Drops the state of a file (device, inode) whose probes the session has detached."""


@dataclass(frozen=True, slots=True)
class RingConsumer:
    """Turns the records of a ring into rows. ``table``: the table whose rows are missing when the ring is full.

    ``identified``: rows contain job and rank, so records wait a moment until their process is identified. ``ready``
    returns the position up to which the ring may be drained. ``full_share``: the ring is drained at once when
    1/``full_share`` of it is filled; ``rest_s``: how long records may wait in the ring, s; None: the drain's defaults.
    ``open_map``: the map of unfinished records; ``abandoned`` turns them into finished records when the daemon takes
    over from another version.
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
    """Watches one thing. A source overrides the methods that it needs.

    The collector builds all sources and calls ``start``, and ``started`` after the first scan of all processes. At the
    end it calls ``finish``, drains the rings once more, and calls ``stop``. The discovery thread calls the ``process_``
    methods. The draining thread calls ``assemble`` of each ring consumer. None of these may block. A ticker calls
    ``tick``. Any thread may call the other methods.
    """

    name: str = ""
    table: str = ""
    """The table whose rows ``states`` counts."""
    objects: ClassVar[tuple[str, ...]] = ()
    """BPF objects without which the collector does not start."""
    late_objects: ClassVar[tuple[str, ...]] = ()
    """Names from ``objects`` and ``optional_objects`` whose programs load on first use, or shortly after the start."""
    optional_objects: ClassVar[tuple[str, ...]] = ()
    """BPF objects that the kernel may refuse (``session.refused``)."""

    @classmethod
    def ring_sizes(cls, config: Config) -> Mapping[str, int]:  # noqa: ARG003
        """Returns the configured sizes of rings, in bytes. Raises ConfigError."""
        return {}

    @property
    def rings(self) -> Mapping[str, RingConsumer]:
        """Returns the consumers of this source's rings, in the order in which a cycle drains them."""
        return {}

    @property
    def libraries(self) -> Sequence[ProbedLibrary]:
        return ()

    @property
    def probe_slots(self) -> Mapping[int, ProbeSlot]:
        """Returns the probes by slot; ``bpf.probe_slots.SLOTS`` gives out the slots."""
        return {}

    @property
    def live_tables(self) -> Mapping[str, Callable[[ClockPair], pa.RecordBatch]]:
        """Returns the tables that are not stored, each with a function that makes its rows for a query."""
        return {}

    @property
    def observed_tables(self) -> Mapping[str, Callable[[pa.RecordBatch, ClockPair], None]]:
        """Returns table -> the function that reads the batches which other sources make for this table. It is called in
        the thread that made the batch.
        """
        return {}

    @property
    def restored_tables(self) -> Mapping[str, tuple[Sequence[str], Callable[[pa.Table], None]]]:
        """Returns, by table, the columns to read from stored rows at the start, and a function that is called with
        these columns before the first ``tick``.

        Some of the rows may be from before this boot.
        """
        return {}

    @property
    def tick_s(self) -> Callable[[], float] | None:
        """The interval of ``tick``, s, if it needs its own thread; None: 1 s, in a thread shared with other sources."""
        return None

    def start(self) -> None:
        """Starts the source. Raises ProbingError if the collector must not start."""

    def finish(self) -> None:
        """Puts the last rows that do not come from a ring into the sink; the last drain follows."""

    def stop(self) -> None:
        """Releases all resources; also called if ``start`` failed or was not called."""

    def tick(self) -> None: ...

    def settings_changed(self) -> bool:
        """Applies changed settings. Returns whether probes must be attached to the libraries again."""
        return False

    def pause(self, paused: bool) -> None:
        """Pauses or resumes the probes that do not follow the session's switch in the kernel."""

    def ends_missed(self, before_ns: int, pid: int | None = None) -> object:
        """Called when operations that began before ``before_ns`` (CLOCK_MONOTONIC) may have ended unseen, in process
        ``pid`` (None: in any process).
        """

    def started(self, alive: Callable[[int, int], bool]) -> None:
        """Called once the collector has started. Drops the state of processes that ended unseen: ``alive(pid,
        start_ns)`` is False for them."""

    def process_identified(self, process: Identity) -> None:
        """Called when a process is new, or its identity changed."""

    def process_replaced(self, pid: int, start_ns: int) -> None:
        """Called when a process called exec and runs another program now."""

    def program_ended(self, pid: int, start_ns: int, mono_ns: int) -> None:
        """Called with ``process_replaced``: everything that the process had begun before its exec at ``mono_ns``
        (CLOCK_MONOTONIC) has ended. The call may come late, when the new program has already begun something.
        """

    def process_exited(self, process: Identity) -> None: ...

    def rows_lost(self, loss: Loss) -> None:
        """Called when a source reported a loss, in the thread that reported it."""

    def states(self, totals: Totals) -> list[SourceState]:
        return [totals.of(self.name, self.table)]


class Refused(Source):
    """Takes the place of a source that the kernel refused, and reports why."""

    def __init__(self, name: str, reason: str) -> None:
        self.name = name
        self._reason = reason

    def states(self, totals: Totals) -> list[SourceState]:  # noqa: ARG002
        return [SourceState(self.name, "degraded", self._reason)]
