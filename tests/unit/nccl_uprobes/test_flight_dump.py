"""Rows of a flight recorder's dump: versions, formats, and hostile dumps."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from probing.api.errors import CorruptTarget, ProbingError, UnsupportedTarget
from probing.api.tables import table_named
from probing.api.typed import typed_json
from probing.daemon.arrow import batch_of
from probing.daemon.ipc import Message
from probing.daemon.nccl_uprobes.flight_recorder import dump as flight_dump
from probing.daemon.nccl_uprobes.flight_recorder.dump import dump_rows, handlers
from probing.daemon.nccl_uprobes.flight_recorder.report import Dump
from probing.diagnosis.flight_recorder.dump import load_dump

TABLE = "python.torch_nccl_flight_record"
FRAMES = [
    {"name": "all_reduce", "filename": "/torch/distributed_c10d.py", "line": 2501},
    {"name": "train", "filename": "/job/train.py", "line": 12},
]
# As torch 2.9 writes it (FlightRecorderDetail.hpp, getCollectiveTrace).
ENTRY: dict[str, Any] = {
    "frames": FRAMES,
    "record_id": 7,
    "pg_id": 1,
    "process_group": ("1", "dp"),
    "collective_seq_id": 4,
    "p2p_seq_id": 0,
    "op_id": 4,
    "profiling_name": "nccl:all_reduce",
    "time_created_ns": 1_795_272_352_262_300_165,
    "duration_ms": 1.5,
    "input_sizes": [[4, 3], [8]],
    "input_dtypes": ["Float", "Int"],
    "output_sizes": [[4, 3], [8]],
    "output_dtypes": ["Float", "Int"],
    "state": "completed",
    "time_discovered_started_ns": 1_795_272_352_262_300_200,
    "time_discovered_completed_ns": 1_795_272_352_262_300_300,
    "retired": True,
    "timeout_ms": 600_000,
    "is_p2p": False,
}
DUMP = {
    "version": "2.9",
    "entries": [ENTRY],
    "pg_config": {
        "0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1, 2, 3]"},
        "1": {"name": "1", "desc": "dp", "ranks": "[0, 2]"},
    },
    "pg_status": {"0": {"last_enqueued_collective": 4, "last_started_collective": -1, "last_completed_collective": 3}},
    "nccl_version": "2.27.5",
    "nccl_comm_state": {"0x1": {"rank": "0"}},
}
_JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20) | st.binary(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=10,
)


def test_a_record_has_every_column() -> None:
    found = dump_rows(pickle.loads(pickle.dumps(DUMP)))
    assert (found["version"], found["world_size"], found["skipped"]) == ("2.9", 4, 0)
    assert found["rows"] == [
        {
            "record_id": 7,
            "pg_id": 1,
            "pg_name": "1",
            "pg_desc": "dp",
            "collective_seq_id": 4,
            "p2p_seq_id": 0,
            "op_id": 4,
            "profiling_name": "nccl:all_reduce",
            "state": "completed",
            "input_sizes": "[[4,3],[8]]",
            "input_dtypes": '["Float","Int"]',
            "output_sizes": "[[4,3],[8]]",
            "output_dtypes": '["Float","Int"]',
            "time_created_ns": 1_795_272_352_262_300_165,
            "time_discovered_started_ns": 1_795_272_352_262_300_200,
            "time_discovered_completed_ns": 1_795_272_352_262_300_300,
            "duration_ns": 1_500_000,
            "timeout_ms": 600_000,
            "retired": True,
            "is_p2p": False,
            "frames": json.dumps(FRAMES, separators=(",", ":")),
            "top_frame": "/torch/distributed_c10d.py:2501 all_reduce",
        }
    ]
    assert set(found["rows"][0]) <= set(table_named(TABLE).physical.names)


def test_an_old_record_counts_microseconds_and_has_one_sequence() -> None:
    old = {
        "id": 3,
        "pg_id": 0,
        "process_group": "x",
        "seq_id": 9,
        "time_created_us": 1_700_000_000_000_000.5,
        "state": "scheduled",
        "time_discovered_started_ns": None,
    }
    (row,) = dump_rows([old])["rows"]
    assert (row["record_id"], row["collective_seq_id"], row["pg_name"]) == (3, 9, None)
    assert row["time_created_ns"] == 1_700_000_000_000_000_500
    assert row["time_discovered_started_ns"] is None
    assert row["frames"] is row["top_frame"] is None


def test_a_zero_time_in_json_is_null() -> None:
    entry = {**ENTRY, "process_group": ["1", "dp"], "time_discovered_completed_ns": 0}
    (row,) = dump_rows(load_dump(json.dumps({**DUMP, "entries": [entry]}).encode()))["rows"]
    assert row["time_discovered_completed_ns"] is None
    assert row["pg_name"] == "1"


@pytest.mark.parametrize("data", [b"", b"\x7fELF", b"hello", b"\n\n"])
def test_another_file_is_refused(data: bytes) -> None:
    with pytest.raises(UnsupportedTarget):
        load_dump(data)


@pytest.mark.parametrize("data", [b'{"entries": [', b"[" * 200_000, b'{"a": ' + b"9" * 5_000 + b"}"])
def test_spoilt_json_is_an_error(data: bytes) -> None:
    with pytest.raises(CorruptTarget):
        load_dump(data)


def test_texts_have_no_control_characters() -> None:
    entry = {**ENTRY, "profiling_name": "nccl:\x1b[2J", "frames": [{"name": "f\n", "filename": "\x00a", "line": 1}]}
    (row,) = dump_rows({"entries": [entry]})["rows"]
    assert row["profiling_name"] == "nccl:\\x1b[2J"
    assert row["top_frame"] == "\\x00a:1 f\\n"


def test_a_list_that_holds_itself_ends() -> None:
    loop: list[Any] = []
    loop.append(loop)
    found = dump_rows({"entries": [{**ENTRY, "frames": loop, "input_sizes": loop, "input_dtypes": loop}, loop]})
    assert found["skipped"] == 1
    assert found["rows"][0]["input_sizes"] == "[[null]]"


def test_long_texts_and_lists_are_cut() -> None:
    wide = {**ENTRY, "input_sizes": [list(range(100))] * 10_000, "frames": [{**FRAMES[0], "name": "n" * 10_000}] * 900}
    found = dump_rows({"entries": [wide]})
    (row,) = found["rows"]
    assert len(row["input_sizes"]) <= flight_dump.MAX_JSON
    assert len(row["frames"]) <= flight_dump.MAX_JSON
    assert len(json.loads(row["frames"])[0]["name"]) == flight_dump.MAX_TEXT


def test_the_newest_of_too_many_records_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flight_dump, "MAX_RECORDS", 10)
    found = dump_rows({"entries": [{**ENTRY, "record_id": i} for i in range(25)]})
    assert [row["record_id"] for row in found["rows"]] == list(range(15, 25))
    assert found["skipped"] == 15
    monkeypatch.setattr(flight_dump, "MAX_ROWS_TEXT", 600)
    found = dump_rows({"entries": [{**ENTRY, "record_id": i} for i in range(5)]})
    assert found["rows"][-1]["record_id"] == 4
    assert 0 < len(found["rows"]) < 5


@settings(deadline=None)
@given(_JUNK, st.dictionaries(st.sampled_from([*ENTRY, "seq_id", "time_created_us"]), _JUNK))
def test_any_content_gives_rows_that_fit_the_table(junk: Any, changes: dict[str, Any]) -> None:
    for dump in (junk, {"entries": [{**ENTRY, **changes}], "pg_config": junk, "version": junk}, {"entries": junk}):
        try:
            found = dump_rows(dump)
        except ProbingError:
            continue
        batch_of(TABLE, typed_json(Dump, json.dumps(found).encode())["rows"])


def test_a_parser_answers_from_a_descriptor(tmp_path: Path) -> None:
    file = tmp_path / "dump"
    file.write_bytes(pickle.dumps(DUMP, 2))
    fd = os.open(file, os.O_RDONLY)
    try:
        answer = json.loads(handlers()["flight_dump"](Message({}, fds=[fd])))
    finally:
        os.close(fd)
    assert answer["rows"][0]["record_id"] == 7


def test_a_parser_refuses_a_file_that_is_too_large(tmp_path: Path) -> None:
    file = tmp_path / "dump"
    file.touch()
    os.truncate(file, flight_dump.MAX_FILE + 1)
    fd = os.open(file, os.O_RDONLY)
    try:
        with pytest.raises(UnsupportedTarget, match="bytes"):
            handlers()["flight_dump"](Message({}, fds=[fd]))
    finally:
        os.close(fd)
