"""Witnesses of a diagnosis: reports and dumps as NCCL and torch write them, through the statements of the gatherer."""

from __future__ import annotations

import json
from typing import Any

from query_helpers import T0, Machine, answer

from probing.daemon.diagnose.gather.witnesses import ERRORS_SQL, FLIGHT_SQL, RAS_SQL, add_witnesses
from probing.daemon.nccl_uprobes.flight_recorder.dump import dump_rows
from probing.daemon.nccl_uprobes.ras.json_report import json_report
from probing.diagnosis.facts import Communicator, Member, Operation, Rank, Witness

S = 1_000_000_000
COMM = "feedbeef12345678"
COUNTS = ("Broadcast", "Reduce", "AllGather", "ReduceScatter", "AllReduce")
WORLD = Communicator(COMM, "default_pg", "nccl", 3, tuple(Member(n, n) for n in range(3)))
RANKS = [Rank(n, "n0", 100 + n, 10 * (n + 1)) for n in range(2)]


def said_by_ras(launched: list[int], missing: list[int]) -> bytes:
    status = {"init_state": 0, "finalize_called": False, "destroy_flag": False, "abort_flag": False}
    ranks = [
        {"rank": n, "host": "10.0.0.1", "pid": 100 + n, "cuda_dev": n, "nvml_dev": n}
        | {"status": {**status, "async_error": 6 if n else 0}, "collective_counts": dict.fromkeys(COUNTS, count)}
        for n, count in enumerate(launched)
    ]
    gone = [
        {"rank": n, "host": "10.0.0.2", "pid": 7, "cuda_dev": 0, "nvml_dev": 0}
        | {"status": {"unresponsive": True, "considered_dead": True}}
        for n in missing
    ]
    comm = {"hash": f"0x{COMM}", "secondary_hash": "1:2", "size": 3, "ranks": ranks, "missing_ranks": gone}
    other = {"hash": "0xab", "secondary_hash": "1:2", "size": 2, "ranks": ranks[1:], "missing_ranks": []}
    report = {"nccl_version": "2.28.9", "communicators": [comm, other], "ras": {"collection_time_sec": 0.1}}
    return json.dumps(report).encode()


def ras_rows(ts: int, *report: list[int]) -> list[dict[str, Any]]:
    who = {"node": "n0", "ts": ts, "job": "j", "run": "r", "pid": 100, "start_ns": 10}
    return [{**who, **row} for row in json_report(said_by_ras(*report))["rows"]]


def flight_rows(ts: int, pid: int, snapshot: int, last: int) -> list[dict[str, Any]]:
    entries = [
        {"record_id": n, "process_group": ("0", "default_pg"), "collective_seq_id": n, "p2p_seq_id": 0, "is_p2p": False}
        | {"profiling_name": "nccl:_all_gather_base", "input_sizes": [[7, 11], [13]], "input_dtypes": ["Float"] * 2}
        | {"state": "completed" if n < last else "started", "time_created_ns": T0 + n, "timeout_ms": 1000 * n}
        for n in range(1, last + 1)
    ]
    who = {"node": "n0", "ts": ts, "job": "j", "run": "r", "pid": pid, "start_ns": 10 * (pid - 99), "rank": pid - 100}
    rows = dump_rows({"version": "2.10", "entries": entries})["rows"]
    return [{**who, "snapshot_id": snapshot, **row} for row in rows]


def asked(machine: Machine, sql: str) -> list[dict[str, Any]]:
    return answer(machine.engine, sql.format(job="'j'"))[0].to_pylist()


def test_the_newest_report_and_dump_of_each_rank_are_witnesses(machine: Machine) -> None:
    # GIVEN two reports, the newer one with a rank fewer, and two dumps of rank 1
    machine.files.segment("comm.ras", [*ras_rows(T0, [5, 5, 5], []), *ras_rows(T0 + S, [17, 13], [2])])
    machine.files.segment(
        "python.torch_nccl_flight_record",
        [*flight_rows(T0, 101, 1, 3), *flight_rows(T0 + S, 101, 2, 23), *flight_rows(T0, 100, 3, 2)],
    )
    ras, flight = asked(machine, RAS_SQL), asked(machine, FLIGHT_SQL)
    # WHEN they become facts
    ranks, communicators, missing = add_witnesses(RANKS, [WORLD], ras, flight)
    # THEN each rank has what was seen last
    first, dump = ranks[0].witnesses
    assert first == Witness(
        "ras",
        COMM,
        T0 + S,
        aborted=False,
        state="Success",
        launched=tuple((op, 17) for op in ("broadcast", "reduce", "all_gather", "reduce_scatter", "all_reduce")),
    )
    assert [o.seq for o in dump.operations] == [1, 2]
    assert dump.time_out_ns == 2 * S
    by = {(w.source, w.comm): w for w in ranks[1].witnesses}
    assert by["ras", COMM].launched[0] == ("broadcast", 13)
    assert by["ras", COMM].async_error == "Remote process error"
    assert [o.seq for o in by["flight_recorder", COMM].operations] == list(range(16, 24))
    assert by["flight_recorder", COMM].operations[-1] == Operation(
        COMM, 23, "all_gather", T0 + 23, None, "started", "float", 7 * 11 + 13, source="flight_recorder"
    )
    # AND a communicator that only RAS knows is there, with the rank that has that pid
    assert communicators == [
        WORLD,
        Communicator("00000000000000ab", None, "nccl", 2, (Member(1, 1),), witness="ras"),
    ]
    assert [(m.rank, m.text) for m in missing] == [
        (2, "NCCL's RAS considers it dead: rank 2 (host 10.0.0.2, pid 7)"),
    ]


def test_errors_of_communicators_are_witnesses_with_their_first_time(machine: Machine) -> None:
    row = {"node": "n0", "job": "j", "run": "r", "pid": 101, "start_ns": 20, "comm": COMM, "state": "active"}
    error = {"async_error": "ncclRemoteError"}
    machine.files.segment(
        "comm.communicators",
        [
            *({**row, "ts": T0}, {**row, "ts": T0 + 3, **error}, {**row, "ts": T0 + 5, **error}),
            *({**row, "ts": T0 + 7, **error, "state": "aborted", "aborted": True}, {**row, "ts": T0, "pid": 100}),
        ],
    )
    ranks, _, missing = add_witnesses(RANKS, [WORLD], [], [], asked(machine, ERRORS_SQL))
    assert [rank.witnesses for rank in ranks] == [
        (),
        (Witness("probe", COMM, T0 + 3, async_error="ncclRemoteError", aborted=True, state="aborted"),),
    ]
    assert missing == []


def test_rows_of_another_run_are_no_witnesses(machine: Machine) -> None:
    machine.files.segment("comm.ras", ras_rows(T0, [5, 5], []))
    machine.files.segment("python.torch_nccl_flight_record", flight_rows(T0, 101, 1, 3))
    others = [Rank(0, "n0", 900, 1), Rank(1, "n0", 901, 1)]
    ranks, communicators, missing = add_witnesses(others, [], asked(machine, RAS_SQL), asked(machine, FLIGHT_SQL))
    assert [rank.witnesses for rank in ranks] == [(), ()]
    assert (communicators, missing) == ([], [])
