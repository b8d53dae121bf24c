"""Reports in JSON, as client_support.cc of NCCL prints them, also those of the versions that print them wrong."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from probing.api.errors import CorruptTarget, ProbingError, UsageError
from probing.api.tables import table_named
from probing.api.typed import typed_json
from probing.daemon.arrow import batch_of
from probing.daemon.ipc import Message
from probing.daemon.nccl_uprobes.ras import json_report as ras_report
from probing.daemon.nccl_uprobes.ras.json_report import handlers, json_report
from probing.daemon.nccl_uprobes.ras.report import Report

TABLE = "comm.ras"
_JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=10,
)


# The answer of a real 2.28.9: one rank alive, two unreachable.
RECORDED = """{
  "nccl_version": "2.28.9",
  "cuda_runtime_version": 12090,
  "cuda_driver_version": 0,
  "timestamp": "2026-11-21 15:19:33",
  "communicators_count": 1,
  "communicators": [
    {
      "hash": "0xfeedbeef12345678",
      "secondary_hash": "0xfeedbeef12345a60:0xfeedbeef12345e48",
      "size": 3,
      "ranks_count": 1,
      "missing_ranks_count": 2,
      "ranks": [
        {
          "rank": 0,
          "host": "127.0.0.1",
          "pid": 4281,
          "cuda_dev": 0,
          "nvml_dev": 0,
          "status": {
            "init_state": 0,
            "async_error": 6,
            "finalize_called": false,
            "destroy_flag": false,
            "abort_flag": false
          },
          "collective_counts": {
            "Broadcast": 1,
            "Reduce": 2,
            "AllGather": 3,
            "ReduceScatter": 4,
            "AllReduce": 500
          }
        }
      ],
      "missing_ranks": [
        {
          "rank": 1,
          "host": "127.0.0.1",
          "pid": 5001,
          "cuda_dev": 1,
          "nvml_dev": 1
          "status": {
            "unresponsive": true,
            "considered_dead": false
          }
        },
        {
          "rank": 2,
          "host": "127.0.0.1",
          "pid": 5002,
          "cuda_dev": 2,
          "nvml_dev": 2
          "status": {
            "unresponsive": true,
            "considered_dead": false
          }
        }
      ]
    }
  ],
  "ras": {
    "collection_time_sec": 0.000,
    "timeouts_count": 0
  }
}
"""


def rank_text(rank: int, *, counts: int = 100, error: int = 0) -> str:
    """As jsonWriteRankData prints it."""
    operations = ["Broadcast", "Reduce", "AllGather", "ReduceScatter", "AllReduce"]
    lines = ",\n".join(f'            "{name}": {counts + i}' for i, name in enumerate(operations))
    return (
        f'        {{\n          "rank": {rank},\n          "host": "10.0.0.{rank}",\n          "pid": {4000 + rank},\n'
        f'          "cuda_dev": {rank},\n          "nvml_dev": {rank + 1},\n          "status": {{\n'
        f'            "init_state": 0,\n            "async_error": {error},\n            "finalize_called": false,\n'
        '            "destroy_flag": false,\n            "abort_flag": true\n          },\n'
        f'          "collective_counts": {{\n{lines}\n          }}\n        }}'
    )


def missing_text(rank: int, comma: str, pid: int = 77, host: str = "10.0.0.9") -> str:
    """As jsonWriteMissingRank prints it; without the comma in 2.28.7 and 2.28.9."""
    return (
        f'        {{\n          "rank": {rank},\n          "host": "{host}",\n          "pid": {pid},\n'
        f'          "cuda_dev": 3,\n          "nvml_dev": 3{comma}\n          "status": {{\n'
        '            "unresponsive": true,\n            "considered_dead": false\n          }\n        }'
    )


def report(ranks: list[str], missing: list[str], comm: str = "0xfeed0000beef") -> bytes:
    inner, lost = ",\n".join(ranks), ",\n".join(missing)
    return (
        '{\n  "nccl_version": "2.28.9+cuda13.0",\n  "cuda_runtime_version": 13000,\n  "cuda_driver_version": 13000,\n'
        '  "timestamp": "2026-11-21 10:00:00",\n  "communicators_count": 1,\n  "communicators": [\n    {\n'
        f'      "hash": "{comm}",\n      "secondary_hash": "0x12:0x34",\n'
        f'      "size": {len(ranks) + len(missing)},\n      "ranks_count": {len(ranks)},\n'
        f'      "missing_ranks_count": {len(missing)},\n      "ranks": [\n{inner}\n      ],\n'
        f'      "missing_ranks": [\n{lost}\n      ]\n    }}\n  ],\n'
        '  "ras": {\n    "collection_time_sec": 0.125,\n    "timeouts_count": 2\n  }\n}\n'
    ).encode()


@pytest.mark.parametrize("comma", [",", ""], ids=["2.29", "2.28.9"])
def test_every_rank_is_a_row_missing_ones_first(comma: str) -> None:
    found = json_report(report([rank_text(0), rank_text(1, error=6)], [missing_text(2, comma), missing_text(3, comma)]))
    assert found["skipped"] == 0
    assert [row["comm_rank"] for row in found["rows"]] == [2, 3, 0, 1]
    common = {
        "nccl_version": "2.28.9+cuda13.0",
        "collection_ns": 125_000_000,
        "timeouts": 2,
        "size": 4,
        "comm": "0000feed0000beef",
        "secondary_hash": "0x12:0x34",
    }
    assert found["rows"][0] == {
        **common,
        "comm_rank": 2,
        "host": "10.0.0.9",
        "rank_pid": 77,
        "cuda_device": 3,
        "nvml_device": 3,
        "missing": True,
        "unresponsive": True,
        "considered_dead": False,
    }
    assert found["rows"][3] == {
        **common,
        "comm_rank": 1,
        "host": "10.0.0.1",
        "rank_pid": 4001,
        "cuda_device": 1,
        "nvml_device": 2,
        "missing": False,
        "init_state": "Success",
        "async_error": "Remote process error",
        "finalize_called": False,
        "destroy_flag": False,
        "abort_flag": True,
        "broadcast": 100,
        "reduce": 101,
        "all_gather": 102,
        "reduce_scatter": 103,
        "all_reduce": 104,
    }
    assert set(found["rows"][3]) | set(found["rows"][0]) <= set(table_named(TABLE).physical.names)


def test_a_recorded_report_of_a_version_that_prints_no_json() -> None:
    with pytest.raises(json.JSONDecodeError):
        json.loads(RECORDED)
    found = json_report(RECORDED.encode())
    assert found["skipped"] == 0
    lost, _, here = found["rows"]
    assert {row["comm"] for row in found["rows"]} == {"feedbeef12345678"}
    assert (lost["comm_rank"], lost["rank_pid"]) == (1, 5001)
    assert (lost["unresponsive"], lost["considered_dead"]) == (True, False)
    assert (here["comm_rank"], here["all_reduce"], here["async_error"]) == (0, 500, "Remote process error")


def test_an_operation_in_progress_is_no_error() -> None:
    (row,) = json_report(report([rank_text(0, error=7)], []))["rows"]
    assert row["async_error"] is None


def test_a_process_that_ras_does_not_know_has_no_number() -> None:
    (row,) = json_report(report([], [missing_text(0, "", pid=-1, host="unknown")]))["rows"]
    assert row["rank_pid"] is row["host"] is None


def test_a_document_that_is_right_is_not_repaired() -> None:
    # Text within a value that looks like the fault stays as it is.
    text = '"nvml_dev": 3\n  "status":'
    right = report([rank_text(0)], [missing_text(1, ",")]).replace(b'"10.0.0.9"', json.dumps(text).encode())
    assert json_report(right)["rows"][0]["host"] == text.replace("\n", "\\n")


@pytest.mark.parametrize(
    "spoilt",
    [b"", b"{", b"[]", b"null", b'{"communicators": 3}', b"[" * 100_000, b'{"a": 1' + b"0" * 5000 + b"}", b"\xff\xfe"],
)
def test_other_content_is_an_error(spoilt: bytes) -> None:
    with pytest.raises(CorruptTarget):
        json_report(spoilt)


def test_a_report_that_is_cut_is_an_error() -> None:
    whole = report([rank_text(0)], [missing_text(1, "")])
    for end in range(0, len(whole) - 3, 7):
        with pytest.raises(CorruptTarget):
            json_report(whole[:end])


@pytest.mark.parametrize("comm", ["", "feed", "0x", "0x" + "f" * 17, "0xzz"])
def test_a_communicator_without_a_hash_is_skipped(comm: str) -> None:
    assert json_report(report([rank_text(0)], [], comm)) == {"rows": [], "skipped": 1}


def test_missing_ranks_are_kept_when_there_are_too_many_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ras_report, "MAX_ROWS", 3)
    found = json_report(report([rank_text(i) for i in range(5)], [missing_text(9, "")]))
    assert [row["comm_rank"] for row in found["rows"]] == [9, 0, 1]
    assert found["skipped"] == 3


@given(_JUNK, st.sampled_from(["hash", "size", "ranks", "missing_ranks"]), _JUNK)
def test_any_json_gives_rows_that_fit_the_table(junk: Any, name: str, other: Any) -> None:
    rank = {"rank": junk, "host": junk, "pid": junk, "status": junk, "collective_counts": other, "nvml_dev": other}
    communicator = {"hash": "0x1", "ranks": [rank, junk], "missing_ranks": [rank], name: other}
    for document in (junk, {"communicators": [communicator, junk], "ras": junk, "nccl_version": junk}):
        try:
            found = json_report(json.dumps(document).encode())
        except ProbingError:
            continue
        batch_of(TABLE, typed_json(Report, json.dumps(found).encode())["rows"])


@given(st.binary(max_size=400))
def test_any_bytes_give_rows_or_a_typed_error(data: bytes) -> None:
    for form in ("json", "text"):
        try:
            handlers()["ras_report"](Message({"form": form}, data))
        except ProbingError as e:
            failed = e
        else:
            continue
        assert isinstance(failed, CorruptTarget)


def test_a_parser_answers_both_forms() -> None:
    answer = handlers()["ras_report"]
    assert len(json.loads(answer(Message({"form": "json"}, report([rank_text(0)], []))))["rows"]) == 1
    assert json.loads(answer(Message({"form": "text"}, b"NCCL version 2.24.3\n"))) == {"rows": [], "skipped": 0}
    with pytest.raises(UsageError):
        answer(Message({"form": "xml"}, b""))
