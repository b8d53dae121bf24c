"""Makes operations, progress, communicators and lost operations of the ranks of a run from rows of several tables."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from probing.daemon.diagnose.gather.processes import JobProcess, Key
from probing.daemon.diagnose.gather.tables import Row, Rows
from probing.diagnosis.facts import Communicator, Member, Missing, Operation, Progress

__all__ = ("Losses", "Operations", "communicators_of", "operations_of")

_TEXT = 200
_MAX_OPEN = 64
# How far the times of one operation in two tables may differ, ns: the wall clock may be set between two readings.
_SAME_NS = 50_000_000
# Calls that threads make at the same time may be seen out of order. Their numbers then differ by at most this value.
_REORDERED = 8


class Operations:
    """The operations of one process: ``open``, ``done`` and ``progress`` as in ``facts.Rank``."""

    def __init__(self, open_: Sequence[Operation], done: Sequence[Operation], progress: Iterable[Row]) -> None:
        done = sorted(done, key=_called)
        ended = {_identity(one): _called(one) for one in done}
        # An operation may have ended after the rows of comm.inflight were read.
        still = [one for one in open_ if abs(ended.get(_identity(one), 0) - _called(one)) > _SAME_NS]
        self.open = tuple(sorted(still, key=_called)[-_MAX_OPEN:])
        # The rows count operations that ended; operations in flight were called later.
        counted = {row["comm"]: row for row in progress}
        made = _made_again(sorted([*done, *self.open], key=_called), counted)
        self.done = tuple(one for one in done if _called(one) >= made.get(one.comm, 0))
        self.progress = tuple(_progress(self.open, self.done, counted, made))

    @property
    def advanced_ns(self) -> int | None:
        """The time at which an operation was last called or ended, UTC ns; None: no operation was seen."""
        times = [t for one in self.progress for t in (one.last_call_ns, one.last_done_ns) if t is not None]
        return max(times, default=None)


def operations_of(inflight: Iterable[Row], done: Iterable[Row], progress: Iterable[Row]) -> dict[Key, Operations]:
    """Returns the operations of each process. ``inflight``: rows of comm.inflight, ``progress`` of comm.progress."""
    opened: dict[Key, list[Operation]] = defaultdict(list)
    closed: dict[Key, list[Operation]] = defaultdict(list)
    counted: dict[Key, list[Row]] = defaultdict(list)
    for row in inflight:
        opened[Key.of(row)].append(_operation(row, row["ts"], None))
    for row in done:
        closed[Key.of(row)].append(_operation(row, row["called_ns"], row["done_ns"]))
    for row in progress:
        if row["comm"] is not None:
            counted[Key.of(row)].append(row)
    keys = dict.fromkeys([*opened, *closed, *counted])
    return {key: Operations(opened[key], closed[key], counted[key]) for key in keys}


def communicators_of(ranks: Mapping[Key, int], rows: Iterable[Row], seen: Iterable[Row]) -> tuple[Communicator, ...]:
    """Returns the communicators of the processes in ``ranks``. ``rows``: rows of comm.communicators; ``seen``: rows of
    operations and of progress, which also name communicators."""
    found: dict[str, list[Row]] = defaultdict(list)
    known = set()
    for row in rows:
        if Key.of(row) in ranks:
            found[row["comm"]].append(row)
            known.add((Key.of(row), row["comm"]))
    for row in seen:
        key = Key.of(row)
        if key in ranks and row["comm"] is not None and (key, row["comm"]) not in known:
            found[row["comm"]].append(_as_communicator(row))
            if row["comm_rank"] is not None:
                known.add((key, row["comm"]))
    return tuple(_communicator(comm, found[comm], ranks) for comm in sorted(found))


def _as_communicator(row: Row) -> Row:
    unknown = dict.fromkeys(("role", "async_error", "aborted", "state"))
    return {**row, **unknown, "name": row["comm_name"], "size": row["comm_size"]}


def _communicator(comm: str, rows: Sequence[Row], ranks: Mapping[Key, int]) -> Communicator:
    def first(name: str) -> str | None:
        return next((row[name] for row in rows if row[name] is not None), None)

    members = {row["comm_rank"]: ranks[Key.of(row)] for row in rows if row["comm_rank"] is not None}
    error = first("async_error")
    states = [row["state"] for row in rows if row["state"] is not None]
    return Communicator(
        comm,
        first("name"),
        first("backend"),
        max((row["size"] for row in rows if row["size"] is not None), default=None),
        tuple(Member(*member) for member in sorted(members.items())),
        role=first("role"),
        async_error=error[:_TEXT] if error else None,
        aborted=max((row["aborted"] for row in rows if row["aborted"] is not None), default=None),
        state=next((state for state in states if state != "active"), states[0] if states else None),
    )


def _operation(row: Row, called_ns: int, done_ns: int | None) -> Operation:
    error = row.get("error")
    return Operation(
        row["comm"] or "",
        row["seq"],
        row["op"],
        called_ns,
        done_ns,
        row["state"],
        row["dtype"],
        row["count"],
        row["bytes"],
        row["redop"],
        row["root"],
        row["peer"],
        row["tid"],
        row["async_op"],
        error[:_TEXT] if error else None,
        launched=False if row["state"] == "called" and row.get("group_id") is not None else None,
    )


def _identity(one: Operation) -> tuple[str, int | None, str | None, int | None, int | None]:
    return one.comm, one.seq, one.op, one.peer, one.tid


def _called(one: Operation) -> int:
    return one.t_call_ns or 0


def _made_again(operations: Iterable[Operation], counted: Mapping[str, Row]) -> dict[str, int]:
    """Returns, for each process group that was destroyed and made again, when the first operation of the new group was
    called, UTC ns. The new group has the name of the old group, so only its numbers, which start again, show it.
    ``operations``: sorted by time of call."""
    made: dict[str, int] = {}
    seen: dict[str, dict[int, int]] = defaultdict(dict)
    highest: dict[str, int] = {}
    for one in operations:
        if one.seq is None or not one.comm:
            continue
        called, before = _called(one), seen[one.comm]
        row = counted.get(one.comm)
        last = highest.get(one.comm, -1)
        if row is not None and row["seq"] is not None and (row["last_call"] or called) < called:
            last = max(last, row["seq"])
        if one.seq + _REORDERED < last or called - before.get(one.seq, called) > _SAME_NS:
            made[one.comm] = called
            before.clear()
            highest[one.comm] = -1
        before[one.seq] = called
        highest[one.comm] = max(highest.get(one.comm, -1), one.seq)
    return made


def _progress(
    opened: Sequence[Operation], done: Sequence[Operation], counted: Mapping[str, Row], made: Mapping[str, int]
) -> Iterable[Progress]:
    by_comm: dict[str, list[Operation]] = defaultdict(list)
    for one in (*done, *opened):
        by_comm[one.comm].append(one)
    for comm in sorted({*counted, *by_comm}):
        row, own = counted.get(comm), sorted(by_comm[comm], key=_called)
        calls = row["calls"] + sum(one.comm == comm for one in opened) if row else len(own)
        last_call, op = (row["last_call"], row["op"]) if row else (None, None)
        if own and (last_call is None or _called(own[-1]) > last_call):
            last_call, op = own[-1].t_call_ns, own[-1].op
        newest = row["seq"] if row and (row["last_call"] or 0) >= made.get(comm, 0) else None
        yield Progress(
            comm,
            _highest([one.seq for one in own] + [newest]),
            op,
            calls,
            last_call,
            _highest([one.t_done_ns for one in own] + [row["last_done"] if row else None]),
        )


def _highest(values: Iterable[int | None]) -> int | None:
    return max((value for value in values if value is not None), default=None)


_ATTACH = "attach"
_MAX_TEXTS = 8


class Losses:
    """Reads the rows of the statement ``losses``; each is about one pid or about all processes."""

    def __init__(self, rows: Rows) -> None:
        self._attached: dict[int, list[Row]] = {}
        self._lost: list[Row] = []
        for row in rows.get("losses", ()):
            if row["stage"] != _ATTACH:
                self._lost.append(row)
            elif row["pid"] is not None:
                self._attached.setdefault(row["pid"], []).append(row)

    def seen_from(self, one: JobProcess, attached_ns: int | None) -> int | None:
        """Returns when the recording of a process's operations began, UTC ns; None: at its start. ``attached_ns``: the
        column of comm.progress."""
        # Rows older than this process are left out: they are about an earlier process with the same pid.
        own = (row["until_ns"] for row in self._attached.get(one.key.pid, ()))
        times = [at for at in own if at >= (one.started_ns or 0)]
        return max([*times, *([attached_ns] if attached_ns is not None else [])], default=None)

    def lost(self, one: JobProcess) -> int:
        """Returns the number of operations of a process that were lost lately. A loss without a count counts as 1."""
        return sum(row["count"] or 1 for row in self._lost if _concerns(row, one))

    def missing(self, processes: Iterable[JobProcess]) -> list[Missing]:
        """Returns the newest eight losses of ``processes`` as missing facts."""
        known = list(processes)
        found = []
        for row in self._lost:
            if any(_concerns(row, one) for one in known):
                count = "some" if row["count"] is None else row["count"]
                whose = "" if row["pid"] is None else f" of pid {row['pid']}"
                found.append(Missing("operations", f"{count} operations{whose} were lost: {row['reason']}"))
        return found[:_MAX_TEXTS]


def _concerns(row: Row, one: JobProcess) -> bool:
    return row["pid"] in (None, one.key.pid) and row["until_ns"] >= (one.started_ns or 0)
