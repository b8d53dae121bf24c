"""The source of labels: what jobs and administrators say about ranks, as pairs of a key and a value.

The label ``phase`` tells the diagnosis what a rank does: compile, eval and checkpoint have limits of their own.
"""

from __future__ import annotations

import re
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from probing.api.errors import CorruptTarget, NotFound, Overloaded, PrivilegeError, ProbingError, UsageError
from probing.api.tables.schema import Row
from probing.api.text import escape, plural
from probing.api.typed import typed
from probing.daemon.arrow import batch_of
from probing.daemon.arrow_to_numpy import integers
from probing.daemon.clock import Clock
from probing.daemon.context import Context
from probing.daemon.fairness import in_turn
from probing.daemon.ipc import Header
from probing.daemon.processes.liveness import is_alive, real_user
from probing.daemon.processes.reader_pool import PATIENCE_S, ReaderPool
from probing.daemon.source import Identity, Loss, ProcessKey, Sink, Source
from probing.daemon.source_state import SourceState, Totals
from probing.daemon.worker import Worker

__all__ = ("PHASE", "Label", "LabelRequest", "Labels")

PHASE = "phase"
TABLE = "train.labels"
MAX_LABELS = 64
MAX_VALUE = 256
KEY = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}", re.ASCII)
# The processes of one user may change labels in a burst of MAX_CHANGES, and CHANGES_S times a second on average.
MAX_CHANGES, CHANGES_S = 512, 4
INTERVAL_S = 1.0
READ_TIMEOUT_S = 1.0
# The first and the longest pause between two searches for the context of a process, s.
FIRST_LOOK_S, LAST_LOOK_S = 2.0, 60.0
_OPENTELEMETRY, _DATAGRAM, _ANNOTATE = "opentelemetry", "datagram", "annotate"
_RESTORED = ("pid", "start_ns", "key", "value", "source", "uid", "ts")


class Label(NamedTuple):
    """``since_ns``: when the label got its value, UTC ns. ``source``, ``uid``: as in train.labels."""

    value: str
    since_ns: int
    source: str
    uid: int | None = None


@dataclass(frozen=True, slots=True)
class LabelRequest:
    """A request to set labels. A label with an empty value is removed.

    The labels are set on all trainers that match ``pids``, ``job`` and ``rank``; an empty field matches all. A request
    without ``pids`` and ``job`` is about the sender: the trainer ``by_pid``, or, if ``rank`` is given or the sender is
    not a trainer, the trainers of its job. ``by_pid`` and ``by_uid``: the sender of a datagram according to the kernel;
    None for ``probingctl``.
    """

    labels: dict[str, str]
    pids: tuple[int, ...] = ()
    job: str = ""
    rank: int | None = None
    by_pid: int | None = None
    by_uid: int | None = None


@dataclass(slots=True)
class _Process:
    """A trainer. ``address``: the address of its process context, 0 while none is known; ``context``: the attributes
    that were read there. ``look_at_ns``: when the context is read next, CLOCK_MONOTONIC ns."""

    who: Identity
    address: int = 0
    published_ns: int = 0
    look_at_ns: int = 0
    pause_s: float = FIRST_LOOK_S
    context: dict[str, str] = field(default_factory=dict)
    labels: dict[str, Label] = field(default_factory=dict)


class Labels(Source):
    """Keeps the labels of living trainers, and stores each change. Thread-safe.

    ``live`` returns the identities of the watched processes. ``enabled`` returns whether a process may have labels.
    """

    name = "labels"
    table = TABLE

    def __init__(
        self,
        readers: ReaderPool,
        sink: Sink,
        clock: Clock,
        node: str,
        live: Callable[[], list[Identity]],
        enabled: Callable[[Identity], bool] = lambda _: True,
    ) -> None:
        self._readers, self._sink, self._clock, self._node = readers, sink, clock, node
        self._live, self._enabled = live, enabled
        self._lock = threading.Lock()
        self._processes: dict[ProcessKey, _Process] = {}
        self._restored: dict[ProcessKey, dict[str, Label]] = {}
        # The leaky bucket of each owner: its level in changes, and when the level was computed, CLOCK_MONOTONIC ns.
        self._changes: dict[int, tuple[float, int]] = {}
        self._refused, self._why = 0, ""
        self._worker = Worker(self.name, self.turn, lambda: INTERVAL_S, patience_s=READ_TIMEOUT_S)

    @classmethod
    def make(cls, context: Context) -> Labels:
        return cls(
            context.readers,
            context.sink,
            context.clock,
            context.node,
            context.processes.live,
            lambda who: bool(context.settings.value("labels.enabled", who)),
        )

    def start(self) -> None:
        self._worker.start()

    def stop(self) -> None:
        self._worker.stop()

    def process_identified(self, process: Identity) -> None:
        if process.role != "trainer":
            return
        with self._lock:
            entry = self._processes.setdefault(process.key, _Process(process))
            entry.who = process
            entry.labels |= self._restored.pop(process.key, {})

    def process_replaced(self, pid: int, start_ns: int) -> None:
        """Removes the labels that the earlier program set. Labels that an administrator set stay."""
        now = self._clock.pair().real_ns
        with self._lock:
            process = self._processes.get(ProcessKey(pid, start_ns))
            if process is None:
                return
            ended = {key: label for key, label in process.labels.items() if label.source != _ANNOTATE}
            process.labels = {key: label for key, label in process.labels.items() if key not in ended}
            process.context, process.address, process.published_ns = {}, 0, 0
            process.look_at_ns, process.pause_s = 0, FIRST_LOOK_S
            common = {**process.who.row(self._node, now), "value": None}
            rows = [{**common, "key": key, "source": label.source, "uid": label.uid} for key, label in ended.items()]
            if rows:
                self._sink.put(TABLE, batch_of(TABLE, rows))

    def process_exited(self, process: Identity) -> None:
        with self._lock:
            self._processes.pop(process.key, None)

    @property
    def restored_tables(self) -> Mapping[str, tuple[Sequence[str], Callable[[pa.Table], None]]]:
        return {TABLE: (_RESTORED, self._restore)}

    def started(self, alive: Callable[[int, int], bool]) -> None:  # noqa: ARG002
        """Drops the restored labels that no process has taken: all living processes are identified by now, so the
        processes of these labels have ended.
        """
        with self._lock:
            self._restored.clear()

    def states(self, totals: Totals) -> list[SourceState]:
        with self._lock:
            labelled = sum(bool(process.labels) for process in self._processes.values())
            detail = f"{plural(labelled, 'rank')} with labels"
            if self._refused:
                detail += f", {plural(self._refused, 'request')} refused, the last: {self._why}"
        return [totals.of(self.name, TABLE, detail=detail)]

    def phase(self, key: ProcessKey) -> Label | None:
        """Returns the label ``phase`` of a process; None without one."""
        with self._lock:
            process = self._processes.get(key)
            if process is None or (label := process.labels.get(PHASE)) is None or not self._enabled(process.who):
                return None
            return label

    def answer(self, request: Mapping[str, Any]) -> tuple[Header, bytes]:
        """Handles the request ``label`` of the control socket. Returns the header ``ranks``: the number of labelled
        processes.

        Raises UsageError, NotFound, PrivilegeError, Overloaded.
        """
        try:
            asked = typed(LabelRequest, {name: value for name, value in request.items() if name != "op"})
        except ValueError as e:
            raise UsageError(f"the request to set labels is malformed: {e}") from None
        try:
            return {"ranks": self._set_as_asked(asked)}, b""
        except ProbingError as e:
            with self._lock:
                self._refused, self._why = self._refused + 1, e.message
            raise

    def turn(self) -> None:
        """Reads the process contexts of OpenTelemetry that are new or have changed."""
        now = self._clock.pair().mono_ns
        with self._lock:
            due = {key: one for key, one in self._processes.items() if one.look_at_ns <= now and self._enabled(one.who)}
        # All requests share one deadline. The owners take turns, so that processes of one owner that do not answer
        # cannot use up the time of other owners.
        turns = in_turn(due.items(), lambda item: item[1].who.owner)
        asks = {(key.pid, key.start_ns): partial(_asked, one) for key, one in turns}
        answers = self._readers.call_each("process_context", asks, timeout=READ_TIMEOUT_S, patience=PATIENCE_S)
        for key, answer in answers:
            process = due[ProcessKey(*key)]
            found = not isinstance(answer, ProbingError) and bool(answer.header["address"])
            process.pause_s = INTERVAL_S if found else min(2 * max(process.pause_s, FIRST_LOOK_S), LAST_LOOK_S)
            process.look_at_ns = now + round((process.pause_s - INTERVAL_S / 2) * 1e9)
            if isinstance(answer, ProbingError):
                if isinstance(answer, CorruptTarget):
                    self._lost(process.who, answer.message)
                continue
            self._take_context(process, answer.header)

    def _take_context(self, process: _Process, header: Header) -> None:
        if header["attributes"] is not None:
            attributes = {key: value for key, value in header["attributes"].items() if KEY.fullmatch(key)}
            # If a datagram or `annotate` has since set the label of an attribute, that label stays until the attribute
            # changes.
            changes = {key: value for key, value in attributes.items() if process.context.get(key) != value}
            restored = {key for key, label in process.labels.items() if label.source == _OPENTELEMETRY}
            changes |= dict.fromkeys(sorted((process.context.keys() | restored) - attributes.keys()), "")
            try:
                self._set([process], changes, _OPENTELEMETRY)
            except Overloaded:
                # ``process.context`` stays as it is, so the next turn reads the context again.
                return
            except UsageError as e:
                self._lost(process.who, e.message)
            process.context = attributes
        process.address, process.published_ns = header["address"], header["published_ns"]

    def _set_as_asked(self, asked: LabelRequest) -> int:
        if not asked.labels:
            raise UsageError("there is no label to set", hint="give KEY=VALUE")
        for key, value in asked.labels.items():
            if not KEY.fullmatch(key):
                raise UsageError(f"{key[:80]!r} cannot be the key of a label", hint="use a-z, A-Z, 0-9 and _ . -")
            if len(value) > MAX_VALUE:
                raise UsageError(f"the value of {key} has {len(value):,} characters", hint=f"use {MAX_VALUE} at most")
        chosen = self._chosen(asked)
        for who in chosen:
            self._check_owner(asked, who)
        with self._lock:
            processes = [self._processes[who.key] for who in chosen if who.key in self._processes]
        self._set(processes, asked.labels, _ANNOTATE if asked.by_pid is None else _DATAGRAM, asked.by_uid)
        return len(processes)

    def _chosen(self, asked: LabelRequest) -> list[Identity]:
        live = self._live()
        if not asked.pids and not asked.job:
            sender = next((who for who in live if who.pid == asked.by_pid), None)
            if sender is None:
                raise NotFound("the sender is not a process of a job", hint="name a job or the pid of a rank")
            own = sender.role == "trainer" and asked.rank is None
            asked = LabelRequest(asked.labels, (sender.pid,) if own else (), sender.job, asked.rank)
        found = [
            who
            for who in live
            if who.role == "trainer"
            and self._enabled(who)
            and (who.pid in asked.pids if asked.pids else True)
            and asked.job in ("", who.job)
            and asked.rank in (None, who.rank)
        ]
        if not found:
            raise NotFound("no such rank runs on this node", hint="`probingctl ps` lists jobs, ranks and processes")
        return found

    def _check_owner(self, asked: LabelRequest, who: Identity) -> None:
        # A rootless container has many uids, which all belong to its owner. The kernel reports the sender's uid on this
        # host.
        if asked.by_uid in (None, 0, who.owner) or asked.by_uid == real_user(who.pid):
            return
        raise PrivilegeError(
            f"uid {asked.by_uid} has no right to label ranks of job {who.job}, which belongs to uid {who.owner}",
            hint="send the datagram as the user of the job, or use `probingctl annotate`",
        )

    def _set(
        self, processes: Iterable[_Process], changes: Mapping[str, str], source: str, uid: int | None = None
    ) -> None:
        """Sets labels of all ``processes``, and stores the changes.

        Raises Overloaded, and UsageError for too many labels of a process; then no label is set.
        """
        pair = self._clock.pair()
        now = pair.real_ns
        values = {key: escape(value, MAX_VALUE) for key, value in changes.items()}
        rows: list[Row] = []
        with self._lock:
            changed = [(process, _differing(process.labels, values)) for process in processes]
            for process, new in changed:
                if len(process.labels.keys() | {key for key, value in new.items() if value}) > MAX_LABELS:
                    raise UsageError(f"a rank has {MAX_LABELS} labels at most", hint="remove some: KEY=")
            if source != _ANNOTATE:
                self._count_changes(Counter(process.who.owner for process, new in changed for _ in new), pair.mono_ns)
            for process, new in changed:
                for key, value in new.items():
                    if value:
                        process.labels[key] = Label(value, now, source, uid)
                    else:
                        del process.labels[key]
                    changed_to = {"key": key, "value": value or None, "source": source, "uid": uid}
                    rows.append({**process.who.row(self._node, now), **changed_to})
            if rows:
                self._sink.put(TABLE, batch_of(TABLE, rows))

    def _count_changes(self, numbers: Mapping[int, int], now: int) -> None:
        """Counts changes by owner. Raises Overloaded for too many. ``now``: CLOCK_MONOTONIC ns."""
        counts = {}
        for owner, number in numbers.items():
            before, at = self._changes.get(owner, (0.0, now))
            counts[owner] = max(before - (now - at) / 1e9 * CHANGES_S, 0.0) + number, now
            if counts[owner][0] > MAX_CHANGES:
                raise Overloaded(f"the labels of uid {owner} change more than {CHANGES_S} times a second")
        self._changes |= counts

    def _restore(self, rows: pa.Table) -> None:
        """Restores the labels of living processes that an earlier daemon stored.

        ``rows`` has the columns _RESTORED, and is in the order in which the rows were stored. This order counts, not
        ``ts``: the clock may have been set back.
        """
        pids, starts, times = (integers(rows.column(name).combine_chunks()) for name in ("pid", "start_ns", "ts"))
        living = [
            pid for pid, start_ns in set(zip(pids.tolist(), starts.tolist(), strict=True)) if is_alive(pid, start_ns)
        ]
        chosen = np.flatnonzero(np.isin(pids, living))
        kept = rows.take(chosen)
        numbers = (values[chosen].tolist() for values in (times, pids, starts))
        texts = (kept.column(name).to_pylist() for name in ("key", "value", "source", "uid"))
        with self._lock:
            for ts, pid, start_ns, key, value, source, uid in zip(*numbers, *texts, strict=True):
                labels = self._restored.setdefault(ProcessKey(pid, start_ns), {})
                if value:
                    labels[key] = Label(value, ts, source, uid)
                else:
                    labels.pop(key, None)

    def _lost(self, who: Identity, reason: str) -> None:
        now = self._clock.pair().real_ns
        self._sink.lost(Loss(self.name, TABLE, "process context", reason, now, now, None, who.pid))


def _differing(labels: Mapping[str, Label], values: Mapping[str, str]) -> dict[str, str]:
    """Returns the ``values`` that differ from ``labels``. An empty value stands for a missing label."""
    return {key: value for key, value in values.items() if value != (labels[key].value if key in labels else "")}


def _asked(process: _Process) -> Header:
    return {"address": process.address, "published_ns": process.published_ns}
