"""Builders of synthetic facts. Times are given in seconds before NOW: ``op(7, ago=39)`` is open since 39 s."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from types import FrameType
from typing import Any

from probing.diagnosis.facts import (
    Communicator,
    Facts,
    Frame,
    Member,
    NodeFacts,
    Operation,
    Process,
    Progress,
    Rank,
    Thread,
)

NOW = 1_800_000_000 * 10**9
WORLD = "0"
"""The comm of the default process group of gloo."""
TORCH = "/site-packages/torch/"
C10D = TORCH + "distributed/distributed_c10d.py"


def ago(seconds: float) -> int:
    """Returns the time of ``seconds`` before NOW, ns."""
    return NOW - round(seconds * 1e9)


def op(
    seq: int | None,
    name: str | None = "all_reduce",
    *,
    ago: float,
    took: float | None = None,
    comm: str = WORLD,
    **fields: Any,
) -> Operation:
    """Returns an operation called ``ago`` seconds before NOW; open unless it ``took`` a time, s."""
    called = NOW - round(ago * 1e9)
    done = None if took is None else called + round(took * 1e9)
    data = {} if name == "barrier" else {"dtype": "float32", "count": 10, "bytes": 40}
    if name in ("all_reduce", "reduce", "reduce_scatter"):
        data["redop"] = "sum"
    state = "started" if took is None else "done"
    return Operation(comm, seq, name, called, done, **{"state": state, "async_op": False, **data, **fields})


def history(
    last: int, *, ago: float, every: float = 1.0, length: int = 8, names: Sequence[str] = ("all_reduce",), **fields: Any
) -> tuple[Operation, ...]:
    """Returns the done operations ``last - length + 1`` to ``last`` (not below 1), the last one called ``ago`` s before
    NOW. ``names`` repeat: operation seq has ``names[seq % len(names)]``."""
    numbers = range(max(1, last - length + 1), last + 1)
    return tuple(
        op(seq, names[seq % len(names)], ago=ago + (last - seq) * every, took=0.01, **fields) for seq in numbers
    )


def frame(text: str, native: bool = False, **values: str) -> Frame:
    """Returns the frame of ``func file:line`` or ``func``; ``values`` are its locals."""
    func, _, place = text.partition(" ")
    file, _, line = place.rpartition(":")
    return Frame(func, file, int(line) if line else None, native, tuple(values.items()))


def thread(*frames: str | Frame, main: bool = True, **fields: Any) -> Thread:
    """Returns a thread with ``frames``, innermost first."""
    own = tuple(f if isinstance(f, Frame) else frame(f) for f in frames)
    default = {"tid": 100 if main else 101, "name": "python" if main else "worker", "state": "S", "gil": None}
    return Thread(main=main, frames=own, **{**default, **fields})


def in_collective(name: str = "all_reduce", *, group: str | None = None, **fields: Any) -> Thread:
    """Returns a main thread that waits in a call of torch.distributed. ``group``: the text of the keyword arguments,
    {} for a call of the default group; None: they were not read."""
    values = {} if group is None else {"args": "(tensor(shape=[10], dtype=float32, device=cpu),)", "kwargs": group}
    wrapper = frame(f"wrapper {TORCH}distributed/c10d_logger.py:83", **values)
    return thread(f"{name} {C10D}:3252", wrapper, "train train.py:40", "<module> train.py:60", **fields)


def elsewhere(text: str = "load data.py:12", **fields: Any) -> Thread:
    """Returns a main thread outside of collectives, innermost in ``text``."""
    return thread(text, "train train.py:30", "<module> train.py:60", **fields)


def rank(number: int, *ops: Operation, node: str = "a", stack: Thread | None = None, **fields: Any) -> Rank:
    """Returns a rank with ``ops``, open and done ones; its progress is made of them."""
    own: dict[str, Any] = {
        "pid": 4000 + number,
        "start_ns": 10**9 + number,
        "open": tuple(o for o in ops if o.t_done_ns is None),
        "done": tuple(o for o in ops if o.t_done_ns is not None),
        "progress": progress(ops),
        "threads": () if stack is None else (stack,),
    }
    return Rank(number, node, **{**own, **fields})


def progress(ops: Iterable[Operation]) -> tuple[Progress, ...]:
    """Returns the progress that ``ops`` of one rank show, by communicator."""
    by_comm: dict[str, list[Operation]] = {}
    for one in ops:
        by_comm.setdefault(one.comm, []).append(one)
    found = []
    for comm, own in by_comm.items():
        newest = max(own, key=lambda o: o.t_call_ns or 0)
        numbers = [o.seq for o in own if o.seq is not None]
        done = [o.t_done_ns for o in own if o.t_done_ns is not None]
        highest = max(numbers, default=None)
        found.append(Progress(comm, highest, newest.op, len(own), newest.t_call_ns, max(done, default=None)))
    return tuple(found)


def comm(name: str, ranks: Iterable[int], **fields: Any) -> Communicator:
    """Returns a communicator of ``ranks`` in the job, in this order."""
    members = tuple(Member(number, one) for number, one in enumerate(ranks))
    own = {"name": "default_pg" if name == WORLD else name, "backend": "gloo", "size": len(members)}
    return Communicator(name, members=members, **{**own, **fields})


def facts(
    *ranks: Rank,
    comms: Sequence[Communicator] | None = None,
    nodes: Sequence[NodeFacts] | None = None,
    processes: Sequence[Process] = (),
    **fields: Any,
) -> Facts:
    """Returns the facts of ``ranks``: W is 10 s; without ``comms`` all communicators that they use span all of them."""
    world = [r.rank for r in ranks]
    if comms is None:
        used = dict.fromkeys([WORLD, *(o.comm for r in ranks for o in (*r.open, *r.done))])
        comms = [comm(name, world) for name in used]
    if nodes is None:
        nodes = [node(name, [r for r in ranks if r.node == name]) for name in dict.fromkeys(r.node for r in ranks)]
    own = {"job": "job", "run": "run", "world_size": len(world), "stall_s": 10.0, "taken_ns": NOW}
    return Facts(
        nodes=tuple(nodes), ranks=ranks, communicators=tuple(comms), processes=tuple(processes), **{**own, **fields}
    )


def node(name: str, ranks: Iterable[Rank] = (), **fields: Any) -> NodeFacts:
    """Returns a node that watches for an hour and last saw an operation when one of ``ranks`` last had one."""
    ends = [t for r in ranks for o in (*r.open, *r.done) for t in (o.t_call_ns, o.t_done_ns) if t is not None]
    own = {"taken_ns": NOW, "watching_since_ns": ago(3600), "advanced_ns": max(ends, default=None)}
    return NodeFacts(name, **{**own, **fields})


def shifted(one: Rank, seconds: float) -> Rank:
    """Returns ``one`` as a node with a clock that is ``seconds`` ahead sees it: its operations, steps and exit."""
    by = round(seconds * 1e9)

    def moved(o: Operation) -> Operation:
        called, done = (t if t is None else t + by for t in (o.t_call_ns, o.t_done_ns))
        return replace(o, t_call_ns=called, t_done_ns=done)

    return replace(
        one,
        open=tuple(map(moved, one.open)),
        done=tuple(map(moved, one.done)),
        progress=progress([*map(moved, one.open), *map(moved, one.done)]),
        seen_from_ns=None if one.seen_from_ns is None else one.seen_from_ns + by,
        threads=tuple(t if t.since_ns is None else replace(t, since_ns=t.since_ns + by) for t in one.threads),
        steps=tuple(replace(s, t_start_ns=s.t_start_ns + by) for s in one.steps),
        exit=None if one.exit is None else replace(one.exit, ts_ns=one.exit.ts_ns + by),
    )


def instructions(call: Callable[[], object]) -> int:
    """Returns the number of Python's instructions that ``call`` runs: its work, however busy the machine is."""
    count = 0

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal count
        del argument
        frame.f_trace_lines, frame.f_trace_opcodes = False, True
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return count
