"""Reads a range of time of a job from all nodes: operations, steps, samples, counters, findings and gaps.

Operations, samples and counters are read in slices of bounded size, so that the memory does not grow with their number.
Times are UTC ns by our clock: the offset of each node's clock is subtracted.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from probing.api.errors import UsageError
from probing.api.numpy_import import allow_numpy
from probing.api.text import age, sql_text
from probing.client.diagnosis.findings import newest_sql, ns_of
from probing.client.diagnosis.findings import numbers as ranks_in
from probing.client.jobs import job_named
from probing.client.profile.model import Frame
from probing.client.profile.samples import read_stacks
from probing.client.render.rows import Row, rows_of
from probing.client.timeline import sections
from probing.client.timeline.coding import UNKNOWN, Ints, mixed, shown
from probing.client.timeline.decoding import Dictionaries
from probing.client.timeline.matching import awaited, steps_at
from probing.client.timeline.model import Clock, Columns, Counters, Finding, Loss, Operations, Samples, Steps
from probing.client.timeline.selection import CLOSE_NS, Section, Selection, slices
from probing.client.times import bound

if TYPE_CHECKING:
    import pyarrow as pa

    from probing.client.cluster import Cluster

__all__ = ("Timeline", "timeline")

T = TypeVar("T", bound=Columns)
ROWS_A_SLICE = 200_000
_MOST_STEPS = 1_000_000
_MOST_LOSSES = 10_000
_MOST_FINDINGS = 1_000
_MOST_RANKS = 100_000
_MOST_STACKS = 50_000
_ANY_ERROR_NS = 2**60
_UNSIGNED = 2**64 - 1
_NO_STACK = Frame("(the stack is not stored)")
_LEFT_OUT = Frame(f"(one of more than {_MOST_STACKS:,} stacks)")
# Findings are read from this long before the start of the range, because a finding that is still open may have been
# stored long before the range.
_LOOK_BACK_NS = 7 * 86_400 * 10**9
_FINDING = ("verdict", "severity", "state", "confidence", "sentence", "ranks", "since", "opened", "closed", "found_by")
_LOSSES = """
SELECT node, table_name, left(reason, 256) AS why, pid, ts_from, ts_to, "count" AS missing FROM probing.losses
WHERE ts >= make_timestamp_ns({begin}) AND ts_from < make_timestamp_ns({end}) ORDER BY ts LIMIT {most}
"""
_NODES = "SELECT DISTINCT node FROM {table} WHERE {where}"


def timeline(cluster: Cluster, job: str, since: str = "5m", until: str | None = None) -> Timeline:
    """Returns the timeline of ``job``, a name as for --job, from ``since`` to ``until`` (None: now).

    Both are lengths of time before now, or instants: see ``probing.client.times.bound``. Raises the errors of
    ``job_named``, UsageError for an empty range, and the nodes' error if no node answers. A program that hides numpy
    must call ``allow_numpy`` before it imports pyarrow.
    """
    allow_numpy()
    now = time.time_ns()
    begin = bound(since, now).ns(now)
    end = now if until is None else bound(until, now).ns(now)
    if end <= begin:
        hint = "give lengths of time before now, or instants: --since 10m --until 5m"
        raise UsageError(f"--until {until or 'now'} is not after --since {since}", hint=hint)
    name = job_named(cluster, job)
    # Each reply gives an estimate of its node's clock offset. The connections are open by now, so the round trip is
    # short and the estimate more exact.
    cluster.query_each("SELECT 1 AS one")
    return Timeline(cluster, name, begin, end, present=until is None)


class Timeline:
    """The timeline of ``job`` in the range [``begin``, ``end``), UTC ns by our clock.

    ``operations``, ``samples`` and ``counters`` read rows while they are iterated over. Columns of these rows refer by
    index to ``names``, the processes, communicators and texts that were read so far. ``losses_of_job`` yields the
    losses (ranges with missing rows) that are known so far. ``rows`` is the number of rows that were read, of about
    ``expected``; ``counts``: the rows by section. ``notes`` say what is left out.
    """

    def __init__(self, cluster: Cluster, job: str, begin: int, end: int, *, present: bool) -> None:
        """``present``: the range reaches to now, so that operations in flight belong to it."""
        self.job, self.begin, self.end = job, begin, end
        self.rows, self.expected = 0, 0
        self.counts = dict.fromkeys(("operations", "steps", "samples", "counter_values"), 0)
        self.notes: list[str] = []
        self.losses: list[Loss] = []
        self.findings: list[Finding] = []
        self._cluster = cluster
        self._asked = len(cluster.outcomes)
        # The gaps of nodes that did not answer, by node and table.
        self._gaps: dict[tuple[str, str], Loss] = {}
        self._stacks: dict[int, tuple[Frame, ...]] = {}
        self.clocks = _clocks(cluster)
        ahead = {clock.node: clock.offset_ns for clock in self.clocks if clock.offset_ns}
        self.names = Dictionaries({shown(node): ns for node, ns in ahead.items()})
        self._selection = Selection(job, begin, end, ahead)
        self._inflight = self._first(present)

    def _first(self, present: bool) -> Operations:
        """Reads findings, losses and the job's nodes; returns the operations in flight."""
        chosen, of_job = self._selection, f"job = {sql_text(self.job)}"
        widest = max((abs(ns) for ns in chosen.ahead.values()), default=0)
        early = max(0, self.begin - widest)
        tables = {section.table: section for section in (sections.OPS, sections.STEPS, sections.SAMPLES)}
        statements = {
            table: _NODES.format(table=table, where=chosen.where(section, self.begin, self.end))
            for table, section in tables.items()
        }
        statements["findings"] = newest_sql(
            f"{of_job} AND ts >= make_timestamp_ns({max(0, early - _LOOK_BACK_NS)})", _FINDING
        )
        statements["losses"] = _LOSSES.format(begin=early, end=self.end + widest, most=_MOST_LOSSES)
        now = {"ranks": sections.RANKS, "inflight": sections.IN_FLIGHT} if present else {}
        statements |= {name: section.select(of_job) for name, section in now.items()}
        answers = self._cluster.query_all(statements)
        self._note("", (), self.begin, self.end)
        if present:
            # This adds ranks that have no row in the range, such as a rank that joins no operation.
            for batch in answers["ranks"].combine_chunks().to_batches():
                self.names.processes_in(batch)
        inflight = [self.names.operations(b) for b in answers["inflight"].to_batches()] if present else []
        nodes = {str(node) for table in (*tables, *now) for node in answers[table].column("node").to_pylist()}
        self._selection = chosen._replace(nodes=frozenset(nodes))
        held = [finding for row in rows_of(answers["findings"]) if (finding := self._finding(row)) is not None]
        self.findings += sorted(held, key=lambda finding: finding.begin)[-_MOST_FINDINGS:]
        if len(held) > _MOST_FINDINGS:
            self.notes.append(f"only the last {_MOST_FINDINGS:,} findings are shown")
        self._losses_of(rows_of(answers["losses"]))
        return Operations.joined(inflight)

    @property
    def base(self) -> int:
        """A time before all times of the timeline, UTC ns by our clock."""
        return min(self.begin - CLOSE_NS, int(self._inflight.call.min(initial=self.begin)))

    @cached_property
    def steps(self) -> Steps:
        """The training steps, sorted by process and begin; at most a million."""
        parts: list[Steps] = []
        for part in self._parts(sections.STEPS, self.names.steps):
            parts.append(part)
            if sum(map(len, parts)) > _MOST_STEPS:
                self.notes.append(f"only the first {_MOST_STEPS:,} steps are shown")
                break
        steps = Steps.joined(parts)
        steps = steps.taken(np.lexsort((steps.begin, steps.process))[:_MOST_STEPS])
        self.counts["steps"] = len(steps)
        return steps

    def operations(self) -> Iterator[Operations]:
        """Yields the operations in the order of their calls; operations in flight come last."""
        # The steps are read first, because each operation gets the number of its step.
        steps = self.steps
        for part in awaited(self._all_operations(), self.names.sizes):
            part.step = steps_at(steps, part.process, part.call)
            self.counts["operations"] += len(part)
            yield part

    def _all_operations(self) -> Iterator[Operations]:
        open_keys, ended = _keys(self._inflight), np.zeros(len(self._inflight), bool)
        for part in self._parts(sections.OPS, self.names.operations):
            if len(open_keys):
                ended |= np.isin(open_keys, _keys(part))
            yield part.taken(np.argsort(part.call, kind="stable"))
        inflight = self._inflight.taken(np.flatnonzero(~ended))
        if len(inflight):
            yield inflight.taken(np.argsort(inflight.call, kind="stable"))

    def samples(self) -> Iterator[Samples]:
        """Yields rows of python.samples, each part in the order of time."""
        for part in self._parts(sections.SAMPLES, self.names.samples):
            self.counts["samples"] += len(part)
            yield part.taken(np.argsort(part.time, kind="stable"))

    def counters(self) -> Iterator[Counters]:
        """Yields the values of GPUs and of interfaces, each part in the order of time."""
        of_job = sections.NET._replace(condition=sections.NET.condition.format(job=sql_text(self.job)))
        for section, figures in ((sections.GPU, sections.GPU_FIGURES), (of_job, sections.NET_FIGURES)):
            for part in self._parts(section, partial(self.names.counter_values, figures=figures)):
                self.counts["counter_values"] += len(part)
                yield part.taken(np.argsort(part.time, kind="stable"))

    def stacks(self, ids: Sequence[int]) -> dict[int, tuple[Frame, ...]]:
        """Returns the frames of each stack, outermost first, at least one frame."""
        missing = [stack for stack in ids if stack not in self._stacks][: _MOST_STACKS - len(self._stacks)]
        stored = read_stacks(self._cluster, (stack & _UNSIGNED for stack in missing))
        for stack in missing:
            frames = stored.get(stack & _UNSIGNED, (_NO_STACK,))
            self._stacks[stack] = tuple(Frame(shown(f.func) or "?", shown(f.file), f.lineno) for f in frames)
        return {stack: self._stacks.get(stack, (_LEFT_OUT,)) for stack in ids}

    def unread(self) -> int:
        """Returns about how many rows have still to be read."""
        return max(0, self.expected - self.rows)

    def errors(self) -> tuple[Ints, Ints]:
        """Returns two columns with a value for each process: by how many ns the clock of its node may be wrong, and the
        number of the node.

        The error of a clock that was not compared is unlimited.
        """
        processes = self.names.processes.values
        bounds = {shown(clock.node): clock.error_ns for clock in self.clocks if clock.error_ns is not None}
        numbers = {node: number for number, node in enumerate(dict.fromkeys(process.node for process in processes))}
        errors = np.array([bounds.get(process.node, _ANY_ERROR_NS) for process in processes], np.int64)
        return errors, np.array([numbers[process.node] for process in processes], np.int64)

    @property
    def unanswered(self) -> list[Loss]:
        """The gaps of nodes that have failed to answer so far."""
        return list(self._gaps.values())

    def losses_of_job(self) -> Iterator[tuple[Loss, int | None]]:
        """Yields the losses of the job's nodes and processes, each with its process (None: the whole node)."""
        processes = {(who.node, who.pid): index for index, who in enumerate(self.names.processes.values)}
        for loss in (*self.losses, *self.unanswered):
            if loss.pid is None:
                yield loss, None
            elif (process := processes.get((loss.node, loss.pid))) is not None:
                yield loss, process

    def clock_text(self, node: str) -> str:
        """Returns the offset of the clock of ``node`` and its bound, in words."""
        for clock in self.clocks:
            if shown(clock.node) == node and clock.offset_ns is not None:
                return _clock_text(clock)
        return "its clock was not compared with ours"

    def _parts(self, section: Section, decode: Callable[[pa.RecordBatch], T]) -> Iterator[T]:
        pieces = slices(self._cluster, self._selection, section, ROWS_A_SLICE)
        self.expected += sum(piece.rows for piece in pieces)
        self._note(section.table, (), self.begin, self.end)
        for low, high, _ in pieces:
            decoded: list[T] = []
            with self._cluster.stream(self._selection.select(section, low, high)) as rows:
                for batch in rows:
                    self.rows += batch.num_rows
                    decoded.append(decode(batch))
            self._note(section.table, rows.warnings, low, high)
            if decoded:
                yield type(decoded[0]).joined(decoded)

    def _note(self, table: str, warnings: Sequence[str], low: int, high: int) -> None:
        """Notes the warnings of nodes about ``table``, and a gap for each node that did not answer."""
        self.notes += [note for note in map(shown, warnings) if note not in self.notes]
        failures = [failed for outcome in self._cluster.outcomes[self._asked :] for failed in outcome.failed]
        self._asked = len(self._cluster.outcomes)
        names = {a.address: a.node for outcome in self._cluster.outcomes for a in outcome.answered}
        for failed in failures:
            node = failed.node or names.get(failed.address, failed.address)
            gap = Loss(shown(node), None, low, high, table, shown(failed.reason), None)
            before = self._gaps.get((gap.node, table))
            if before is None or before.reason != gap.reason:
                self._gaps[gap.node, table] = gap
            else:
                whole = before._replace(begin=min(before.begin, low), end=max(before.end, high))
                self._gaps[gap.node, table] = whole

    def _finding(self, row: Row) -> Finding | None:
        """Returns the finding of a row; None if it did not hold in the range."""
        ahead = self._selection.ahead.get(row["found_by"], 0)
        begin, end = (None if at is None else at - ahead for at in _span_of(row))
        if begin is None or begin >= self.end or (end is not None and end < self.begin):
            return None
        return Finding(
            shown(row["run"]),
            max(begin, self.begin),
            end,
            shown(row["verdict"], 64),
            shown(row["severity"], 16),
            shown(row["sentence"], 1000),
            tuple(ranks_in(row["ranks"])[:_MOST_RANKS]),
            float(row["confidence"] or 0.0),
        )

    def _losses_of(self, rows: Sequence[Row]) -> None:
        if len(rows) == _MOST_LOSSES:
            self.notes.append(f"only the first {_MOST_LOSSES:,} gaps are shown")
        for row in rows:
            begin, end = ns_of(row["ts_from"]), ns_of(row["ts_to"])
            if begin is None or end is None or row["node"] not in self._selection.nodes:
                continue
            ahead = self._selection.ahead.get(row["node"], 0)
            begin, end = max(begin - ahead, self.begin), min(end - ahead, self.end)
            if begin <= end:
                node, table, why = shown(row["node"]), shown(row["table_name"], 64), shown(row["why"])
                self.losses.append(Loss(node, row["pid"], begin, end, table, why, row["missing"]))


def _span_of(row: Row) -> tuple[int | None, int | None]:
    """Returns begin (None: unknown) and end (None: open) of a finding, by the clock of the node that found it."""
    return ns_of(row["since"]) or ns_of(row["opened"]), ns_of(row["closed"]) if row["state"] == "closed" else None


def _clock_text(clock: Clock) -> str:
    ahead, error = clock.offset_ns or 0, clock.error_ns or 0
    side = "ahead of" if ahead >= 0 else "behind"
    return f"its clock is {age(abs(ahead))} {side} ours, give or take {age(error)}; its times are corrected for this"


def _keys(operations: Operations) -> Ints:
    return mixed(
        operations.process,
        operations.comm,
        operations.op,
        np.where(operations.seq != UNKNOWN, operations.seq, operations.call // 1_000_000),
    )


def _clocks(cluster: Cluster) -> tuple[Clock, ...]:
    """Returns the clocks of the nodes that have answered."""
    names = dict.fromkeys(answered.node for outcome in cluster.outcomes for answered in outcome.answered)
    now_ns = time.monotonic_ns()
    offsets = {name: cluster.clocks.of(name, now_ns) for name in names}
    return tuple(
        Clock(name, *((clock.offset_ns, clock.error_ns) if clock is not None else (None, None)))
        for name, clock in offsets.items()
    )
