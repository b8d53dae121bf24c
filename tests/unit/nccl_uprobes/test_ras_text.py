"""Reports in text, worded as client_support.cc of NCCL 2.24.3 and 2.28.3 words them."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from probing.api.errors import CorruptTarget
from probing.daemon.arrow import batch_of
from probing.daemon.nccl_uprobes.ras import text_report as ras_text
from probing.daemon.nccl_uprobes.ras.text_report import text_report

HEAD = """NCCL version 2.28.3+cuda12.9 compiled with CUDA 12.9
CUDA runtime version 12090, driver version 13000

Job summary
===========

  Nodes  Processes         GPUs  Processes     GPUs
(total)   per node  per process    (total)  (total)
      2          2            1          4        4

Communicators... (0.25s)
=============

Group     Comms     Nodes     Ranks     Ranks     Ranks    Status  Errors
    #  in group  per comm  per node  per comm  in group
    0         1         2         2         4         4   RUNNING  INCOMPLETE,MISMATCH
    1         2         1       1-2         3         6     ABORT  ERROR

"""
NEW = (
    HEAD
    + """Errors
======

INCOMPLETE
  Missing communicator data from 1 job process
  Process 902 on node 10.0.0.2 managing GPU 1

DEAD
  1 job process is considered dead (unreachable via the RAS network)
  Process 902 on node 10.0.0.2 managing GPU 1

#0-0 (00000000feedbeef) INCOMPLETE
  Missing communicator data from 1 rank
  Rank 3 -- GPU 1 managed by process 902 on node 10.0.0.2

#1-1 (0123456789abcdef) ERROR
  Initialization error on 1 rank
  Rank 0 reported System error -- GPU 0 managed by process 11 on node 10.0.0.1
  Asynchronous errors on 2 ranks
  2 ranks reported Remote process error
  Rank 1 -- GPU 1 (NVML 5) managed by process 12 on node 10.0.0.1
  Rank 2 -- [process information not found]

Warnings
========

TIMEOUT
  Encountered 3 communication timeouts while gathering communicator data

#0-0 (00000000feedbeef) MISMATCH
  Communicator ranks have different status
  2 ranks have status RUNNING
  Rank 0 has status ABORT -- GPU 0 managed by process 21 on node 10.0.0.1
  Rank 2 has status NOCOMM -- GPU 0 managed by process 23 on node 10.0.0.2
  Communicator ranks have different Broadcast operation counts
  3 ranks have launched up to operation 17
  Rank 1 has not launched any operations -- GPU 1 managed by process 22 on node 10.0.0.1

  Communicator ranks have different AllReduce operation counts
  2 ranks have launched up to operation 500
  2 ranks have launched up to operation 499
  Rank 0 -- GPU 0 managed by process 21 on node 10.0.0.1
  Rank 1 -- GPU 1 managed by process 22 on node 10.0.0.1

"""
)
OLD = (
    HEAD.replace("2.28.3", "2.24.3")
    + """Errors
======

#0-0 (00000000feedbeef) INCOMPLETE
  Missing communicator data from 2 ranks
  The missing ranks: 1,3

Warnings
========

#0-0 (00000000feedbeef) MISMATCH
  Communicator ranks have different status
  Rank 1 has status UNKNOWN
  Rank 2 has status INIT -- GPU 2 managed by process 9 on node fe80::1
  Communicator ranks have different collective operation counts
  Rank 0 has launched up to operation 9 -- GPU 0 managed by process 8 on node fe80::1

"""
)


def test_the_ranks_that_are_named_are_rows() -> None:
    found = text_report(NEW.encode())
    assert found["skipped"] == 0
    rows = {(row["comm"], row["comm_rank"]): row for row in found["rows"]}
    assert len(rows) == len(found["rows"]) == 7
    common = {"nccl_version": "2.28.3+cuda12.9", "collection_ns": 250_000_000, "timeouts": 3}
    world, small = {**common, "comm": "00000000feedbeef", "size": 4}, {**common, "comm": "0123456789abcdef", "size": 3}
    assert [row["missing"] for row in found["rows"]] == [True, True, False, False, False, False, False]
    assert rows["00000000feedbeef", 3] == {
        **world,
        "comm_rank": 3,
        "missing": True,
        "unresponsive": True,
        "considered_dead": True,
        "cuda_device": 1,
        "nvml_device": 1,
        "rank_pid": 902,
        "host": "10.0.0.2",
    }
    assert rows["00000000feedbeef", 2] == {
        **world,
        "comm_rank": 2,
        "missing": True,
        "unresponsive": False,
        "cuda_device": 0,
        "nvml_device": 0,
        "rank_pid": 23,
        "host": "10.0.0.2",
    }
    assert rows["00000000feedbeef", 0] == {
        **world,
        "comm_rank": 0,
        "missing": False,
        "abort_flag": True,
        "all_reduce": 499,
        "cuda_device": 0,
        "nvml_device": 0,
        "rank_pid": 21,
        "host": "10.0.0.1",
    }
    assert rows["00000000feedbeef", 1] == {
        **world,
        "comm_rank": 1,
        "missing": False,
        "broadcast": 0,
        "all_reduce": 499,
        "cuda_device": 1,
        "nvml_device": 1,
        "rank_pid": 22,
        "host": "10.0.0.1",
    }
    assert rows["0123456789abcdef", 0]["init_state"] == "System error"
    assert rows["0123456789abcdef", 1] == {
        **small,
        "comm_rank": 1,
        "missing": False,
        "async_error": "Remote process error",
        "cuda_device": 1,
        "nvml_device": 5,
        "rank_pid": 12,
        "host": "10.0.0.1",
    }
    assert rows["0123456789abcdef", 2] == {
        **small,
        "comm_rank": 2,
        "missing": False,
        "async_error": "Remote process error",
    }


def test_the_oldest_wording() -> None:
    found = text_report(OLD.encode())
    assert found["skipped"] == 0
    rows = {row["comm_rank"]: row for row in found["rows"]}
    assert sorted(rows) == [0, 1, 2, 3]
    assert {rank for rank, row in rows.items() if row["missing"]} == {1, 3}
    assert "unresponsive" not in rows[3]
    assert rows[2]["init_state"] == "INIT"
    assert rows[2]["host"] == "fe80::1"
    # That version has one count for all kinds of operations, which no column has.
    assert not {"all_reduce", "broadcast"} & set(rows[0])


def test_a_healthy_job_has_no_rows() -> None:
    assert text_report((HEAD + "Errors\n======\n\nWarnings\n========\n\n").encode()) == {"rows": [], "skipped": 0}


def test_lines_that_are_not_understood_are_counted() -> None:
    strange = [
        "#0-0 (00000000feedbeef) ERROR",
        "  Rank 1 went for a walk",
        "  Rank 2 has wings -- GPU 0 managed by process 1 on node x",
    ]
    found = text_report((HEAD + "\n".join(strange)).encode())
    assert found["skipped"] == 2
    assert [row["comm_rank"] for row in found["rows"]] == [2]


@pytest.mark.parametrize("text", ["", "hello\n", "#0-0 (00000000feedbeef) ERROR\n"])
def test_other_content_is_an_error(text: str) -> None:
    with pytest.raises(CorruptTarget):
        text_report(text.encode())


def test_rows_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ras_text, "MAX_ROWS", 2)
    found = text_report((HEAD + "#0-0 (00000000feedbeef) INCOMPLETE\n  The missing ranks: 1,2,3,4\n").encode())
    assert [row["comm_rank"] for row in found["rows"]] == [1, 2]
    assert found["skipped"] == 2


@given(st.lists(st.sampled_from([*NEW.splitlines(), *OLD.splitlines(), "  Rank 1 -- ", "  The missing rank: ,,"])))
def test_lines_in_any_order_give_rows_that_fit_the_table(lines: list[str]) -> None:
    found = text_report("\n".join([*HEAD.splitlines(), *lines]).encode())
    batch_of("comm.ras", json.loads(json.dumps(found))["rows"])


@given(st.integers(0, len(NEW)), st.binary(max_size=30))
def test_a_report_with_a_spoilt_place_gives_rows_that_fit_the_table(at: int, junk: bytes) -> None:
    data = NEW.encode()
    batch_of("comm.ras", text_report(HEAD.encode() + data[:at] + junk + data[at + len(junk) :])["rows"])
