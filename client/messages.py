"""Turns answers of nodes into dicts of JSON's types, in the forms that docs/json.md describes."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypedDict

from probing.api.text import utc

if TYPE_CHECKING:
    from probing.api.proto.probing.v1 import node_pb2 as pb

__all__ = (
    "Change",
    "Evaluated",
    "Failure",
    "Frame",
    "Raised",
    "Setting",
    "Thread",
    "Value",
    "Variable",
    "evaluated_of",
    "failure_of",
    "raised_text",
    "setting_of",
    "thread_of",
    "value_of",
)


class Variable(TypedDict):
    """A variable. ``value`` is text; ``number`` is set for a number, ``reason`` if there is no value."""

    name: str
    type: str
    value: str | None
    number: float | None
    reason: str | None


class _Frame(TypedDict):
    func: str
    file: str
    lineno: int | None
    frame_type: str


class Frame(_Frame, total=False):
    """A frame of a stack. ``frame_type`` is Python or Native. ``locals`` exists only if local variables were
    asked for.
    """

    locals: list[Variable]


class _NativeMissing(TypedDict, total=False):
    native_missing: str | None


class Thread(_NativeMissing):
    """A thread. ``frames`` are ordered from the innermost. ``trains``: whether it issues the collectives.

    ``native_missing``: why native frames are missing; only if they were asked for.
    """

    node: str
    job: str
    run: str
    rank: int | None
    pid: int
    tid: int
    thread: str
    trains: bool
    state: str
    gil: bool | None
    complete: bool
    frames: list[Frame]


class Value(Variable):
    """A variable of a frame of ``func`` in thread ``tid``."""

    node: str
    job: str
    run: str
    rank: int | None
    pid: int
    tid: int
    func: str


class Setting(TypedDict):
    """A setting. If ``job`` or ``pid`` is set, the setting holds only for this job or process. ``until``: the time when
    the setting ends, ISO 8601.

    ``deletes_from``: the time when a new limit begins to delete, ISO 8601; None: no deletion is planned. The other
    ``deletes_`` fields count the segments, rows and bytes that the limit would delete now.
    """

    node: str
    key: str
    value: str
    default: str
    job: str | None
    pid: int | None
    until: str | None
    persisted: bool
    doc: str
    deletes_segments: int | None
    deletes_rows: int | None
    deletes_bytes: int | None
    deletes_from: str | None


class Change(TypedDict, total=False):
    """A change of a setting. ``job``, ``pid`` or ``node`` limits the change to one job, process or node. The change
    ends after ``seconds``; 0: it has no end.

    ``reset`` undoes a change; ``yes`` confirms a change that deletes rows.
    """

    job: str
    pid: int
    seconds: float
    persist: bool
    reset: bool
    yes: bool
    node: str


class Failure(TypedDict):
    """A process that could not be read. ``kind`` names a class of probing.api.errors."""

    node: str
    pid: int
    rank: int | None
    job: str
    kind: str
    reason: str
    hint: str


class Raised(TypedDict):
    """An exception that code raised. Each of ``frames`` is [file, line, function], outermost first."""

    type: str
    message: str
    frames: list[list[str | int]]


def raised_text(raised: Raised) -> str:
    """Returns an exception as ``TYPE: MESSAGE``. The text comes from the target process and is not escaped."""
    return ": ".join(filter(None, (raised["type"], raised["message"])))


class Evaluated(TypedDict):
    """The result of code in a process. ``value``: the repr of an expression's value; None for statements and for the
    value None.

    ``output``: the text that the main thread printed; ``dropped``: characters of output that are left out. ``stops``:
    how often the main thread was stopped for the code.
    """

    node: str
    job: str
    run: str
    rank: int | None
    pid: int
    value: str | None
    type: str | None
    output: str
    dropped: int
    seconds: float
    raised: Raised | None
    stops: int
    longest_stop_us: int


def evaluated_of(node: str, e: pb.Evaluated) -> Evaluated:
    raised: Raised | None = None
    if e.HasField("raised"):
        frames: list[list[str | int]] = [[frame.file, frame.line, frame.function] for frame in e.raised.frames]
        raised = {"type": e.raised.type, "message": e.raised.message, "frames": frames}
    return {
        "node": node,
        "job": e.job,
        "run": e.run,
        "rank": e.rank if e.HasField("rank") else None,
        "pid": e.pid,
        "value": e.value if e.HasField("value") else None,
        "type": e.type or None,
        "output": e.output,
        "dropped": e.dropped,
        "seconds": e.seconds,
        "raised": raised,
        "stops": e.stops,
        "longest_stop_us": e.longest_stop_us,
    }


def thread_of(node: str, t: pb.Thread, *, native: bool = False, local_variables: bool = False) -> Thread:
    """Returns a thread as a dict. ``native`` adds native_missing, ``local_variables`` adds locals to each frame."""
    missing: _NativeMissing = {"native_missing": t.native_missing or None} if native else {}
    return {
        "node": node,
        "job": t.job,
        "run": t.run,
        "rank": t.rank if t.HasField("rank") else None,
        "pid": t.pid,
        "tid": t.tid,
        "thread": t.thread,
        # Older nodes do not say which thread trains.
        "trains": t.trains if t.HasField("trains") else t.tid == t.pid,
        "state": t.state,
        "gil": t.gil if t.HasField("gil") else None,
        "complete": t.complete,
        **missing,
        "frames": [_frame(f, local_variables) for f in t.frames],
    }


def _frame(f: pb.Frame, local_variables: bool) -> Frame:
    lineno = f.lineno if f.HasField("lineno") else None
    found: Frame = {"func": f.func, "file": f.file, "lineno": lineno, "frame_type": f.frame_type}
    if local_variables:
        found["locals"] = [_variable(v) for v in f.locals]
    return found


def _variable(v: pb.Variable) -> Variable:
    return {
        "name": v.name,
        "type": v.type,
        "value": v.value if v.HasField("value") else None,
        "number": v.number if v.HasField("number") else None,
        "reason": v.reason or None,
    }


def value_of(node: str, v: pb.Value) -> Value:
    rank = v.rank if v.HasField("rank") else None
    return {
        "node": node,
        "job": v.job,
        "run": v.run,
        "rank": rank,
        "pid": v.pid,
        "tid": v.tid,
        "func": v.func,
        **_variable(v.variable),
    }


def setting_of(node: str, s: pb.Setting) -> Setting:
    return {
        "node": node,
        "key": s.key,
        "value": s.value,
        "default": s.default,
        "job": s.job or None,
        "pid": s.pid or None,
        "until": utc(s.until_ns) if s.until_ns else None,
        "persisted": s.persisted,
        "doc": s.doc,
        "deletes_segments": s.deletes.segments if s.HasField("deletes") else None,
        "deletes_rows": s.deletes.rows if s.HasField("deletes") else None,
        "deletes_bytes": s.deletes.bytes if s.HasField("deletes") else None,
        "deletes_from": utc(s.deletes.begins_ns) if s.HasField("deletes") else None,
    }


def failure_of(node: str, f: pb.TargetFailure) -> Failure:
    rank = f.rank if f.HasField("rank") else None
    return {
        "node": node,
        "pid": f.pid,
        "rank": rank,
        "job": f.job,
        "kind": f.error.kind,
        "reason": f.error.message,
        "hint": f.error.hint,
    }
