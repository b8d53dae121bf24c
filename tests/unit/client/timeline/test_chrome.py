"""A timeline in Chrome's Trace Event Format, held to what its document says of each kind of event."""

from __future__ import annotations

import io
import json
from collections import defaultdict
from operator import itemgetter
from typing import Any

import pytest
from timeline_scene import (
    BEGIN,
    MS,
    SECOND,
    Tables,
    communication,
    counters,
    finding,
    loss,
    operation,
    sample,
    stack,
    step,
    timeline_of,
)

from probing.client.timeline.chrome import write_chrome

# Of https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU: what an event must have, by phase.
_ALWAYS = {"ph", "pid", "tid", "name"}
_NEEDED = {
    "X": {"ts", "dur", "cat"},
    "B": {"ts", "cat"},
    "i": {"ts", "s", "cat"},
    "C": {"ts", "args"},
    "b": {"ts", "id", "cat"},
    "e": {"ts", "id", "cat"},
    "s": {"ts", "id", "cat"},
    "t": {"ts", "id", "cat"},
    "f": {"ts", "id", "cat", "bp"},
    "M": {"args"},
}
_METADATA = {
    "process_name": "name",
    "process_labels": "labels",
    "process_sort_index": "sort_index",
    "thread_name": "name",
    "thread_sort_index": "sort_index",
}
Json = dict[str, Any]


def written(tables: Tables, **more: Any) -> Json:
    sink = io.BytesIO()
    write_chrome(timeline_of(tables, **more), sink)
    found: Json = json.loads(sink.getvalue(), parse_constant=pytest.fail)
    return found


@pytest.fixture(scope="module")
def tables() -> Tables:
    return Tables(
        {
            "comm.ops": [
                *communication(),
                operation(0, 31, 20 * SECOND, t_done_lo=BEGIN + 20 * SECOND + MS, timing_source="watchdog"),
                operation(0, 32, 21 * SECOND, t_done_lo=None, t_done_hi=None, state=None),
            ],
            "train.steps": [step(rank, n, n * SECOND, (n + 1) * SECOND) for rank in range(5) for n in range(13)],
            "python.samples": [sample(rank, 77, n * 300 * MS) for rank in (1, 4) for n in range(17)],
            "python.stacks": [stack(77, ("inner", "/a.py", 3), ("outer", "/b.py", 9))],
            "diagnosis.findings": [finding(3 * SECOND, None)],
            "probing.losses": [loss(SECOND, 2 * SECOND)],
            **counters(),
        }
    )


@pytest.fixture(scope="module")
def trace(tables: Tables) -> Json:
    return written(tables)


def at(event: Json, trace: Json) -> int:
    return round(event["ts"] * 1000) + int(trace["baseTimeNanoseconds"])


def test_each_event_has_what_its_phase_needs(trace: Json) -> None:
    for event in trace["traceEvents"]:
        assert event.keys() >= _ALWAYS | _NEEDED[event["ph"]], event
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        if event["ph"] == "M":
            assert event["args"].keys() == {_METADATA[event["name"]]}
        else:
            assert event["ts"] >= 0
        if event["ph"] == "X":
            assert event["dur"] >= 0
        if event["ph"] == "i":
            assert event["s"] in ("g", "p", "t")
        if event["ph"] == "C":
            assert all(isinstance(value, (int, float)) for value in event["args"].values())
        if "sf" in event:
            assert str(event["sf"]) in trace["stackFrames"]
    for frame in trace["stackFrames"].values():
        assert frame.keys() >= {"name", "category"}
        assert frame.get("parent", next(iter(trace["stackFrames"]))) in trace["stackFrames"]
    assert {event["ph"] for event in trace["traceEvents"]} == _NEEDED.keys() - {"B"}


def test_slices_of_a_thread_nest(trace: Json) -> None:
    threads: dict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)
    for event in trace["traceEvents"]:
        if event["ph"] == "X":
            threads[event["pid"], event["tid"]].append((event["ts"], round(event["ts"] + event["dur"], 3)))
    for spans in threads.values():
        around: list[float] = []
        for begin, end in sorted(spans, key=lambda span: (span[0], -span[1])):
            while around and around[-1] <= begin:
                around.pop()
            assert not around or end <= around[-1]
            around.append(end)


def test_operations_are_those_of_the_table(trace: Json, tables: Tables) -> None:
    wanted = tables.db.sql(
        "SELECT rank, op, epoch_ns(t_call), epoch_ns(t_done_hi) - epoch_ns(t_call), seq, bytes FROM comm.ops"
    ).fetchall()
    names = {e["pid"]: e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "process_name"}
    shown = [
        (
            int(names[event["pid"]].split()[1]),
            event["name"],
            at(event, trace),
            round(event["dur"] * 1000) if "dur" in event else None,
            event["args"]["seq"],
            event["args"]["bytes"],
        )
        for event in trace["traceEvents"]
        if event.get("cat") == "operation" and event["ph"] in "Xi"
    ]
    assert sorted(shown, key=str) == sorted(wanted, key=str)
    assert len(shown) == 5 * 23 + 2 * 11 + 2


def test_flows_begin_once_and_end_with_the_last_rank(trace: Json, tables: Tables) -> None:
    flows = defaultdict(list)
    for event in trace["traceEvents"]:
        if event["ph"] in "stf":
            flows[event["id"]].append((event["ts"], event["ph"]))
    ((wanted,),) = tables.db.sql("SELECT count(*) FROM (SELECT DISTINCT comm, seq FROM comm.ops)").fetchall()
    assert len(flows) == wanted == 23 + 11 + 2
    phases: dict[str, int] = defaultdict(int)
    for events in flows.values():
        phases["".join(phase for _, phase in sorted(events, key=itemgetter(0)))] += 1
    # Of two operations the other ranks have no rows.
    assert phases == {"stttf": 23, "sf": 11, "s": 2}


def test_counters_and_samples(trace: Json, tables: Tables) -> None:
    found = [(e["name"], at(e, trace), *e["args"].items()) for e in trace["traceEvents"] if e["ph"] == "C"]
    wanted = tables.db.sql("""
        SELECT 'GPU 0 power_w', epoch_ns(ts), power_w FROM gpu.utilization WHERE power_w IS NOT NULL
    """).fetchall()
    assert [(name, time, value) for name, time, (unit, value) in found if unit == "W"] == wanted
    assert len(found) == 6 + 7 + 3
    samples = [event for event in trace["traceEvents"] if event.get("cat") == "sample"]
    assert len(samples) == 2 * 17
    assert trace["stackFrames"][str(samples[0]["sf"])]["name"] == "inner (/a.py:3)"


def test_operations_in_flight_begin_and_do_not_end() -> None:
    kept = ("node", "ts", "job", "run", "pid", "start_ns", "rank", "comm", "comm_name", "seq", "op", "backend")
    flying = {key: operation(0, 5, -900 * SECOND)[key] for key in kept} | {"state": "started", "age_ns": 7}
    trace = written(Tables({"comm.inflight": [flying]}), present=True)
    (event,) = [event for event in trace["traceEvents"] if event["ph"] == "B"]
    assert at(event, trace) == BEGIN - 900 * SECOND
