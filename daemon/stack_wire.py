"""The wire format of Python stacks, variables and conditions: reader -> collector -> service.

A reader packs the threads of one process as JSON that contains each name of a function or file once (``pack``), because
the threads of a trainer have many equal frames. The collector writes an index and appends the JSON of all processes
without decoding it (``join_stacks``). The service decodes each process once (``split_stacks``, ``threads_of``).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypedDict

from probing.api.errors import InternalError
from probing.daemon.ipc import Header

__all__ = (
    "CUT",
    "MAX_BYTES",
    "VARIABLE_BYTES",
    "ConditionsRead",
    "Frame",
    "Load",
    "NamedVariable",
    "ProcessStacks",
    "ReadFailure",
    "Thread",
    "Variable",
    "VariablesRead",
    "join_stacks",
    "json_bytes",
    "pack",
    "split_stacks",
    "threads_of",
    "unpack",
)

CUT = "further variables did not fit"

# A message header holds at most 1 MiB of JSON (daemon/ipc.py). A character takes up to 12 bytes of JSON.
MAX_BYTES = 900_000
_FRAME_BYTES = 48
_THREAD_BYTES = 168
VARIABLE_BYTES = 64
_VARIABLE = ("name", "type", "value", "number", "reason")


class Variable(TypedDict):
    """A variable. ``value``: None when it could not be read; then ``reason`` says why."""

    name: str
    type: str
    value: str | None
    number: float | None
    reason: str


class _NamedVariable(Variable):
    tid: int
    func: str


class NamedVariable(_NamedVariable, total=False):
    """A variable that was requested by name. ``func``: the function or module that holds it.

    ``pid`` and ``start_ns`` are set in lists of variables of several processes.
    """

    pid: int
    start_ns: int


class _Frame(TypedDict):
    func: str
    file: str
    lineno: int | None
    frame_type: str
    ip: int
    entry: bool


class Frame(_Frame, total=False):
    """A frame. ``frame_type``: "Python" or "Native". ``entry``: whether it is the outermost frame of a run of CPython's
    interpreter loop.

    ``lineno``: None when unknown. ``locals`` is set if locals were requested.
    """

    locals: list[Variable]


class _Thread(TypedDict):
    tid: int
    thread: str
    state: str
    gil: bool | None
    complete: bool
    frames: list[Frame]


class Thread(_Thread, total=False):
    """A thread. ``frames``: innermost first. ``gil``: whether the thread holds the GIL, None when unknown. ``complete``
    is False for a stack that changed while it was read, or was cut. ``native_missing``: why native frames are missing.

    ``pid`` and ``start_ns`` are set in lists of threads of several processes.
    """

    native_missing: str
    pid: int
    start_ns: int


class ReadFailure(TypedDict):
    """A process that could not be read. ``error``: the result of ``ProbingError.to_dict``."""

    pid: int
    rank: int | None
    job: str
    error: dict[str, str]


class _JobVariable(NamedVariable):
    job: str
    run: str
    rank: int | None


class VariablesRead(TypedDict):
    """The variables of several processes, and the processes that could not be read."""

    values: list[_JobVariable]
    failures: list[ReadFailure]


class Load(NamedTuple):
    """The load of a process. ``cpu_ns``: its CPU time since its start, ns, counted in ticks of 10 ms. ``cpu``: the CPU
    on which its main thread last ran."""

    pid: int
    start_ns: int
    name: str
    cpu: int | None
    cpu_ns: int


class ConditionsRead(TypedDict):
    """The conditions of ``processes``: job, run, rank and role of each, and the fields of
    ``conditions.condition.read_condition``. ``loads``: the loads of all processes of the node, None when they were not
    read in time."""

    processes: list[Header]
    loads: list[Load] | None
    failures: list[ReadFailure]


class ProcessStacks(NamedTuple):
    """The threads of one process, as JSON for ``threads_of``. ``trains``: the tid of the thread that trains."""

    job: str
    run: str
    rank: int | None
    pid: int
    start_ns: int
    trains: int
    packed: bytes


def join_stacks(processes: Iterable[ProcessStacks], failures: Sequence[ReadFailure]) -> tuple[Header, bytes]:
    """Returns header and payload of the collector's answer. The payload begins with an index; the field ``index`` of
    the header is the length of the index in bytes.

    The index is JSON: ``{"processes": [[job, run, rank, pid, start_ns, trains, bytes], ...], "failures": [...]}``. The
    packed stacks follow in the same order.
    """
    processes = list(processes)
    rows = [[*process[:-1], len(process.packed)] for process in processes]
    index = json.dumps({"processes": rows, "failures": failures}, separators=(",", ":")).encode()
    return {"index": len(index)}, b"".join([index, *(process.packed for process in processes)])


def split_stacks(header: Mapping[str, Any], payload: bytes) -> tuple[list[ProcessStacks], list[ReadFailure]]:
    """Returns the arguments of ``join_stacks``. Raises InternalError if the answer has another form."""
    try:
        at = int(header["index"])
        index = json.loads(payload[:at])
        processes = []
        for *process, size in index["processes"]:
            job, run, rank, pid, start_ns, trains = process
            processes.append(ProcessStacks(job, run, rank, pid, start_ns, trains, payload[at : at + size]))
            at += size
        return processes, list(index["failures"])
    except (KeyError, TypeError, ValueError, RecursionError) as e:
        raise InternalError("the collector's answer contains no stacks") from e


def pack(dump: Mapping[str, Any]) -> Header:
    """Returns ``dump`` with frames as [code, lineno, ip, entry] and codes as [func, file].

    Frames that do not fit into a message are cut, outermost first. The remaining bytes are used for locals, those of
    inner frames first.
    """
    codes: dict[tuple[str, str], int] = {}
    threads = []
    left = MAX_BYTES - _THREAD_BYTES * len(dump["threads"])
    for thread in dump["threads"]:
        frames: list[list[Any]] = []
        for frame in thread["frames"]:
            key = (frame["func"], frame["file"])
            left -= _FRAME_BYTES + (0 if key in codes else json_bytes(*key))
            if left < 0:
                break
            frames.append([codes.setdefault(key, len(codes)), frame["lineno"], frame["ip"], int(frame["entry"])])
        cut = len(frames) < len(thread["frames"])
        threads.append({**thread, "frames": frames, "complete": thread["complete"] and not cut})
    _pack_locals(dump["threads"], threads, left)
    return {**dump, "threads": threads, "codes": [list(key) for key in codes]}


def unpack(packed: Mapping[str, Any]) -> Header:
    """Returns the dump that ``pack`` packed, without the parts that ``pack`` cut. Raises InternalError if
    ``packed`` has another form.
    """
    try:
        codes = packed["codes"]
        threads = [{**t, "frames": [_frame(codes, *f) for f in t["frames"]]} for t in packed["threads"]]
    except (KeyError, IndexError, TypeError, ValueError) as e:
        raise InternalError("a reader's answer contains no stacks") from e
    return {**{k: v for k, v in packed.items() if k != "codes"}, "threads": threads}


def threads_of(text: bytes) -> list[Thread]:
    """Returns the threads of a dump in JSON, packed or not. Raises InternalError if the text is not a dump."""
    try:
        dump = json.loads(text)
        return list((unpack(dump) if "codes" in dump else dump)["threads"])
    except (KeyError, TypeError, ValueError, RecursionError) as e:
        raise InternalError("an answer contains no stacks") from e


def _pack_locals(dumped: list[Thread], threads: list[Header], left: int) -> None:
    # When no bytes are left, the remaining frames get no list of locals.
    deepest = max((len(t["frames"]) for t in threads), default=0)
    for depth in range(deepest):
        for thread, packed in zip(dumped, threads, strict=True):
            if depth >= len(packed["frames"]) or "locals" not in thread["frames"][depth]:
                continue
            kept: list[list[Any]] = []
            packed["frames"][depth].append(kept)
            for row in thread["frames"][depth]["locals"]:
                left -= VARIABLE_BYTES + json_bytes(row["name"], row["type"], row["value"] or "", row["reason"])
                if left < 0:
                    kept.append(["...", "", None, None, CUT])
                    return
                kept.append([row["name"], row["type"], row["value"], row["number"], row["reason"]])


def _frame(
    codes: list[Any], index: int, lineno: int | None, ip: int, entry: int, variables: list[list[Any]] | None = None
) -> Header:
    func, file = codes[index]
    frame = {"func": func, "file": file, "lineno": lineno, "frame_type": "Python", "ip": ip, "entry": bool(entry)}
    if variables is not None:
        frame["locals"] = [dict(zip(_VARIABLE, row, strict=True)) for row in variables]
    return frame


def json_bytes(*texts: str) -> int:
    """Returns an upper bound on the number of bytes that ``texts`` take in a message."""
    return 8 + sum(len(t) if t.isascii() else 12 * len(t) for t in texts)
