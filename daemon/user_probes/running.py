"""A loaded probe of a user: its attachments, ring and counters, and its events as rows of its table.

The links are never pinned: they end with their descriptors, so no probe of a user outlives the collector.
"""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from probing.api.errors import AttachError, PrivilegeError, ProbingError, TargetError, TargetTimeout
from probing.api.tables import Table
from probing.daemon import columns
from probing.daemon.bpf.attach import attach_multi, attach_perf_by_ioctl, refused
from probing.daemon.bpf.maps import Map
from probing.daemon.bpf.perf_events import ATTR_SIZE, perf_event_open, run_program
from probing.daemon.bpf.ring import Ring
from probing.daemon.clock import ClockPair
from probing.daemon.processes.procfs import Mapping, clean_text
from probing.daemon.source import Identity, Processes, ProcessKey
from probing.daemon.user_probes.c_text import COUNTS, record_dtype
from probing.daemon.user_probes.compiler import Loaded
from probing.daemon.user_probes.spec import Attach, Spec
from probing.daemon.user_probes.targets import Targets

__all__ = (
    "Counts",
    "Running",
    "rows_of",
)

ALL = 0
"""The pid that stands for every process that maps the file."""
_TYPE_TRACEPOINT = 2
_TRACING = (Path("/sys/kernel/tracing"), Path("/sys/kernel/debug/tracing"))

# The first and the longest pause between two readings of the mappings of a process, s. They are read again because a
# process may map the library late.
FIRST_LOOK_S = 1.0
LAST_LOOK_S = 30.0
MAX_EVENTS = 4096
_EVERYWHERE = ProcessKey(ALL, 0)


class Counts(NamedTuple):
    """Counts since the probe was loaded. ``refused``: hits over the budget; ``lost``: events for which the ring was
    full.
    """

    hits: int
    refused: int
    emitted: int
    lost: int


@dataclass(slots=True)
class _Follow:
    missing: set[int]
    due: float = 0.0
    wait: float = FIRST_LOOK_S


class Running:
    """A loaded probe. ``follow``, ``detach`` and ``close`` are for one thread; another thread may call ``drain``."""

    def __init__(self, spec: Spec, table: Table, loaded: Loaded, *, multi: bool = True) -> None:
        """Makes a running probe. ``multi``: the programs were loaded for uprobe_multi links."""
        self.spec, self.table = spec, table
        self._programs, self._multi = loaded.programs, multi
        self._ring = Ring.open(f"user:{spec.name}", loaded.maps["probing_events"], record_dtype(spec))
        self._counts = Map("probing_counts", loaded.maps["probing_counts"], np.dtype("<u4"), COUNTS)
        self._listed = Map("probing_listed", loaded.maps["probing_listed"], np.dtype("<u4"), np.dtype("<u1"))
        self._followed: dict[ProcessKey, _Follow] = {}
        self._events: dict[ProcessKey, list[int]] = {}
        # The attachments to all processes that are still to be made; None before the first try.
        self._everywhere_follow: _Follow | None = None
        # The reason and the process of the last failure of each attachment.
        self._reasons: dict[str, tuple[str, ProcessKey]] = {}

    def close(self) -> None:
        self.detach()
        for program in self._programs:
            os.close(program)
        self._programs = []
        self._ring.close()
        self._counts.close()
        self._listed.close()

    @property
    def reasons(self) -> dict[str, str]:
        """Returns, by attachment, why the probe could not be attached in a process that is still followed."""
        return {place: reason for place, (reason, _) in list(self._reasons.items())}

    @property
    def attached(self) -> str:
        """Returns a text that says where the probe is attached."""
        if self.spec.who == "all":
            return "in all processes" if self._events.get(_EVERYWHERE) else "nowhere"
        if self._events.get(_EVERYWHERE):
            return f"in all processes, for {len(self._followed)}"
        processes = len(self._events.keys() - {_EVERYWHERE})
        return f"in {processes} process{'es' * (processes != 1)}"

    def counts(self) -> Counts:
        of_cpus = self._counts.lookup(0)
        return Counts(*(int(of_cpus[name].sum()) for name in COUNTS.names or ()))

    def drain(self, take: Callable[[npt.NDArray[Any]], None]) -> None:
        """Calls ``take`` with the records of the ring, which are freed when ``take`` returns."""
        while True:
            records, end = self._ring.drain(1 << 20)
            if not len(records):
                return
            take(records)
            self._ring.commit(end)

    def detach(self) -> None:
        """Detaches the probe from all processes; ``follow`` attaches it again."""
        self.forget([*self._events, *self._followed])
        self._everywhere_follow = None

    def forget(self, keys: Iterable[ProcessKey]) -> None:
        """Detaches the probe from processes, and treats them as new."""
        for key in keys:
            self._end(key)
            self._reasons = {place: reason for place, reason in self._reasons.items() if reason[1] != key}
            if self._followed.pop(key, None) is not None:
                self._listed.delete(key.pid)

    def follow(
        self, live: Collection[Identity], files: Callable[[Identity], Sequence[Mapping]], targets: Targets
    ) -> None:
        """Attaches the probe to all processes of ``live``, and drops processes that have ended."""
        if self.spec.who == "all" or any(place.tracepoint for place in self.spec.attach):
            self._everywhere(targets)
        keys = {who.key for who in live}
        self.forget(self._followed.keys() - keys)
        if self.spec.who == "all":
            return
        for who in live:
            self._look(who, files, targets)

    def _everywhere(self, targets: Targets) -> None:
        """Attaches tracepoints, and functions that are probed in all processes. An attachment that fails is tried again
        later.
        """
        now, follow = time.monotonic(), self._everywhere_follow
        if follow is None:
            everywhere = self.spec.who == "all"
            follow = _Follow({i for i, place in enumerate(self.spec.attach) if everywhere or place.tracepoint})
            self._everywhere_follow = follow
        if not follow.missing or now < follow.due:
            return
        follow.due, follow.wait = now + follow.wait, min(2 * follow.wait, LAST_LOOK_S)
        for index in sorted(follow.missing, key=lambda i: not self.spec.attach[i].on_return):
            place, program = self.spec.attach[index], self._programs[index]
            try:
                event = self._attached_everywhere(place, program, targets)
            except ProbingError as e:
                self._reasons[place.where] = e.message, _EVERYWHERE
                continue
            self._events.setdefault(_EVERYWHERE, []).append(event)
            self._reasons.pop(place.where, None)
            follow.missing.discard(index)

    def _attached_everywhere(self, place: Attach, program: int, targets: Targets) -> int:
        if place.tracepoint:
            return _attach_tracepoint(program, place.tracepoint)
        fd, offset = targets.host_offset(place)
        try:
            return _attach_function(program, fd, offset, ALL, place, multi=self._multi)
        finally:
            os.close(fd)

    def _look(self, who: Identity, files: Callable[[Identity], Sequence[Mapping]], targets: Targets) -> None:
        key, now = who.key, time.monotonic()
        follow = self._followed.get(key)
        if follow is None:
            follow = _Follow({i for i, place in enumerate(self.spec.attach) if not place.tracepoint})
            self._followed[key] = follow
            self._listed.update(who.pid, 1)
        if not follow.missing or now < follow.due:
            return
        follow.due, follow.wait = now + follow.wait, min(2 * follow.wait, LAST_LOOK_S)
        try:
            mapped = files(who)
            self._reasons.pop("processes", None)
            # Probes on returns are attached first, so that a call whose beginning is seen also shows its end.
            for index in sorted(follow.missing, key=lambda i: not self.spec.attach[i].on_return):
                if self._place(who, index, targets.matching(mapped, self.spec.attach[index].library), targets):
                    follow.missing.discard(index)
        except ProbingError as e:
            # The error of a process that has ended, or that can never be read, says nothing about the probe.
            if isinstance(e, TargetTimeout) or not isinstance(e, TargetError):
                self._reasons["processes"] = e.message, key

    def _place(self, who: Identity, index: int, mappings: Sequence[Mapping], targets: Targets) -> bool:
        place, key = self.spec.attach[index], who.key
        placed = False
        for mapping in mappings:
            try:
                if sum(map(len, self._events.values())) >= MAX_EVENTS:
                    raise AttachError(f"the probe is already attached in {MAX_EVENTS} places")
                with targets.opened(who, mapping) as fd:
                    offset = targets.offset(fd, place)
                    event = _attach_function(self._programs[index], fd, offset, who.pid, place, multi=self._multi)
            except (TargetError, AttachError, PrivilegeError) as e:
                self._reasons[place.where] = e.message, key
                continue
            self._events.setdefault(key, []).append(event)
            self._reasons.pop(place.where, None)
            placed = True
        return placed

    def _end(self, key: ProcessKey) -> None:
        for event in self._events.pop(key, []):
            os.close(event)


def _attach_function(program: int, fd: int, offset: int, pid: int, place: Attach, *, multi: bool) -> int:
    """Returns the descriptor of a link, or of a perf event if ``multi`` is False. ``offset`` is in the file with
    descriptor ``fd``.

    With ``pid``, all threads of this process are probed, and no other process hits a breakpoint
    (kernel/trace/bpf_trace.c, uprobe_multi_link_filter; trace_uprobe.c, uprobe_perf_filter). Raises AttachError,
    PrivilegeError.
    """
    try:
        if multi:
            return attach_multi(program, fd, [offset], [0], place.on_return, pid)
        return attach_perf_by_ioctl(program, fd, offset, place.on_return, pid)
    except OSError as e:
        raise refused(e, place.where) from e


def _attach_tracepoint(program: int, name: str) -> int:
    """Returns the descriptor of a perf event for all processes. ``name`` is category:name.

    Raises AttachError, PrivilegeError.
    """
    category, _, point = name.partition(":")
    for root in _TRACING:
        try:
            identity = int((root / "events" / category / point / "id").read_text())
        except (OSError, ValueError):
            continue
        attributes = struct.pack("<IIQQQQQIIQQ", _TYPE_TRACEPOINT, ATTR_SIZE, identity, 1, 0, 0, 0, 0, 0, 0, 0)
        try:
            return run_program(perf_event_open(attributes, 0), program)
        except OSError as e:
            raise refused(e, name) from e
    hint = "mount tracefs at /sys/kernel/tracing; its file available_events lists all tracepoints"
    raise AttachError(f"there is no tracepoint {name}", hint=hint)


def rows_of(
    spec: Spec, table: Table, records: npt.NDArray[Any], pair: ClockPair, node: str, processes: Processes
) -> pa.RecordBatch:
    """Returns events (``c_text.record_dtype``) as a batch of ``table``, which may have more columns than the probe.

    The identity of each process is looked up once; an unknown process has no job, run and rank.
    """
    pids, starts = records["probing_tgid"], records["probing_start_ns"]
    who, which = columns.identities(processes, pids, starts)
    made = columns.identity_columns(node, who, which, pids, starts)
    made["ts"] = columns.times(records["probing_time_ns"].astype(np.int64) + pair.mono_to_utc_ns)
    made["tid"] = columns.numbers(records["probing_tid"].astype(np.int32))
    for column in spec.fields:
        values = records[column.name]
        made[column.name] = _clean_texts(values) if column.type == "text" else columns.numbers(values)
    made |= {field.name: pa.nulls(len(records), field.type) for field in table.physical if field.name not in made}
    return columns.batch(table.physical, made)


def _clean_texts(values: npt.NDArray[Any]) -> pa.Array[Any]:
    distinct, which = np.unique(values, return_inverse=True)
    return columns.texts([clean_text(bytes(text).split(b"\0", 1)[0]) or None for text in distinct], which)
