"""The columns of the page, read as docs say: from the header to the last value."""

from __future__ import annotations

import io
import json
import math
import struct
from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa
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

from probing.api.errors import PeerError
from probing.client.timeline.columns import MAGIC, write_columns
from probing.federation.execution.answer import Failed, Gathered
from probing.federation.execution.clocks import Offset

_TYPES = {"f64": "<f8", "f32": "<f4", "i32": "<i4", "u32": "<u4", "u16": "<u2", "u8": "u1"}


def written(tables: Tables, most: int = 1000, **more: Any) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """Returns the header, and the columns by section and name."""
    sink = io.BytesIO()
    write_columns(timeline_of(tables, **more), sink, most)
    data = sink.getvalue()
    assert data[:8] == MAGIC
    (length,) = struct.unpack_from("<I", data, 8)
    header = json.loads(data[12 : 12 + length], parse_constant=lambda name: 1 / 0)
    begin = -(-(12 + length) // 8) * 8
    assert set(data[12 + length : begin]) <= {0}
    sections: dict[str, dict[str, Any]] = {}
    end = begin
    for name, section in header["sections"].items():
        sections[name] = {}
        for column in section["columns"]:
            assert column["offset"] % 8 == 0
            kind = np.dtype(_TYPES[column["type"]])
            place = begin + column["offset"]
            sections[name][column["name"]] = np.frombuffer(data, kind, section["rows"], place)
            end = max(end, place + kind.itemsize * section["rows"])
    assert end <= len(data) < end + 8
    return header, sections


def test_operations() -> None:
    ops = [
        *communication(),
        operation(0, None, 20 * SECOND, op="send", bytes=None, t_done_lo=None, t_done_hi=None, state=None),
        operation(2, 2**62 + 1, 21 * SECOND, state="failed", error="connection reset"),
    ]
    header, sections = written(Tables({"comm.ops": ops, "train.steps": [step(0, 7, 0, SECOND)]}))
    shown, names = sections["ops"], header["dictionaries"]
    assert [column["name"] for column in header["sections"]["ops"]["columns"]] == [
        *("rank", "comm", "op", "seq", "call", "start", "done_lo", "done_hi"),
        *("bytes", "state", "evidence", "error", "step"),
    ]
    wanted = sorted(ops, key=lambda row: row["ts"])
    ranks = [names["ranks"][place] for place in shown["rank"]]
    assert {(one["rank"], one["node"], one["pid"], one["run"]) for one in ranks} == {
        (row["rank"], row["node"], row["pid"], row["run"]) for row in wanted
    }
    found = [
        (rank["rank"], names["comms"][comm], names["ops"][op], round(call * 1000), names["states"][state])
        for rank, comm, op, call, state in zip(
            ranks, shown["comm"], shown["op"], shown["call"], shown["state"], strict=True
        )
    ]
    assert sorted(found) == sorted(
        (row["rank"], row["comm_name"], row["op"], row["ts"] - BEGIN, row["state"] or "") for row in wanted
    )
    assert list(shown["call"]) == sorted(shown["call"])
    assert names["comm_sizes"] == [5, 2]
    p2p = found.index((0, "default_pg", "send", 20 * SECOND, ""))
    assert [math.isnan(shown[name][p2p]) for name in ("seq", "bytes", "done_hi")] == [True] * 3
    # Nobody saw its end: all that is sure is that it was called before.
    assert shown["done_lo"][p2p] == shown["call"][p2p]
    failed = len(found) - 1
    assert names["errors"][shown["error"][failed]] == "connection reset"
    assert shown["seq"][failed] == 2.0**62
    assert sorted(set(shown["step"])) == [-1, 7]


def test_samples_counters_steps_findings_losses_and_clocks() -> None:
    tables = Tables(
        {
            "comm.ops": communication(),
            "train.steps": [step(rank, n, n * SECOND, (n + 1) * SECOND) for rank in range(5) for n in range(13)],
            "python.samples": [sample(rank, 77 + rank, n * 300 * MS) for rank in (1, 4) for n in range(17)],
            "python.stacks": [stack(78, ("inner", "/a.py", 3), ("outer", "/b.py", 9))],
            "diagnosis.findings": [finding(SECOND, None), finding(2 * SECOND, 3 * SECOND, ranks="1,3")],
            "probing.losses": [loss(SECOND, 2 * SECOND), loss(SECOND, 2 * SECOND, pid=1003, count=None)],
            **counters(),
        },
        {"alpha": Offset(0, 1000)},
    )
    header, sections = written(tables)
    names = header["dictionaries"]
    samples = sections["samples"]
    assert len(samples["start"]) == 2 * 17
    assert {names["ranks"][place]["rank"] for place in samples["rank"]} == {1, 4}
    assert {names["frames"][place] for place in samples["frame"]} == {"inner (/a.py:3)", "(the stack is not stored)"}
    stacks = {tuple(names["frames"][place] for place in names["stacks"][number]) for number in samples["stack"]}
    assert ("outer (/b.py:9)", "inner (/a.py:3)") in stacks
    assert set(samples["count"]) == {11}
    assert set(samples["duration"]) == {110_000}
    assert len(sections["counters"]["value"]) == 6 + 7 + 3
    assert {one["unit"] for one in names["counters"]} == {"%", "W", "Gb/s"}
    steps = sections["steps"]
    assert len(steps["step"]) == 5 * 13
    assert set(steps["end"] - steps["start"]) == {1e6}
    assert all(math.isnan(value) for value in steps["wait"])
    assert [str(value) for value in sections["findings"]["end"]] == ["nan", "3000000.0"]
    assert names["findings"][1]["ranks"] == [1, 3]
    assert [(one["node"], one["rank"], one["from_us"], one["rows"]) for one in header["losses"]] == [
        ("beta", None, 1e6, 19),
        ("beta", 3, 1e6, None),
    ]
    clocks = {one["node"]: (one["offset_ns"], one["bound_ns"]) for one in header["clocks"]}
    assert clocks["beta"] == (None, None)
    assert clocks["alpha"][0] == 0
    assert header["left_out"] == {}


def test_operations_in_flight_have_neither_end() -> None:
    row = operation(0, 5, 7 * MS)
    flying = {name: row[name] for name in ("node", "ts", "job", "run", "pid", "start_ns", "rank", "comm", "seq", "op")}
    _, sections = written(Tables({"comm.inflight": [{**flying, "state": "started"}]}), present=True)
    assert [math.isnan(sections["ops"][name][0]) for name in ("done_lo", "done_hi")] == [True, True]


def test_rows_beyond_the_most_are_counted() -> None:
    tables = Tables({"comm.ops": [operation(0, n, n * MS) for n in range(1009)]})
    header, sections = written(tables, most=503)
    assert len(sections["ops"]["seq"]) == 503
    assert list(sections["ops"]["seq"]) == list(range(503))
    assert header["left_out"] == {"ops": 1009 - 503}
    assert header["notes"] == [
        "only the first 503 operations are shown, 506 are left out: choose a shorter range, or a trace for Perfetto"
    ]


class HalfSilent(Tables):
    """Beta does not answer the first questions."""

    def query_all(self, statements: Mapping[str, str]) -> dict[str, pa.Table]:
        gathered: Gathered[int] = Gathered(("alpha", "beta"))
        gathered.failed.append(Failed("10.0.0.2:7077", "beta", PeerError("no answer for 3.0s")))
        self.outcomes.append(gathered)
        return super().query_all(statements)


def test_nodes_that_did_not_answer_are_named() -> None:
    header, _ = written(HalfSilent({"comm.ops": communication()}))
    assert header["failures"] == [{"node": "beta", "error": "no answer for 3.0s"}]
    header, _ = written(Tables({"comm.ops": communication()}))
    assert header["failures"] == []


def test_a_range_without_rows_has_empty_sections() -> None:
    header, sections = written(Tables({}))
    assert {name: section["rows"] for name, section in header["sections"].items()} == dict.fromkeys(sections, 0)
    assert header["from_ns"] == str(BEGIN)
    assert header["dictionaries"]["ranks"] == []
