"""Rows of communicators: columns of a record, columns kept from earlier records, and roles concluded later."""

from __future__ import annotations

import socket
from typing import Any

import numpy as np
import pytest
from fakes import Processes, rows_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from long import examples
from operation_support import operations_of

from probing.api.tables import table_named
from probing.api.text import escape
from probing.daemon.bpf.build import build
from probing.daemon.bpf.libbpf import Object
from probing.daemon.clock import ClockPair
from probing.daemon.nccl_uprobes.communicators import rows as communicator_rows
from probing.daemon.nccl_uprobes.communicators.rows import Communicators
from probing.daemon.source import Identity

PAIR = ClockPair(mono_ns=1_000_000, boot_ns=1_500_000, real_ns=1_700_000_000_000_000_000)
SEEN, MADE, FINALIZED, DESTROYED, ABORTED, ERROR = range(1, 7)
TABLE = "comm.communicators"


def identify(pid: int, start_ns: int) -> Identity | None:
    return Identity(pid, start_ns, "job", "run", "trainer", rank=pid, world_size=4) if pid < 4 else None


PROCESSES = Processes(identify=identify)


@pytest.fixture(scope="module")
def dtype() -> np.dtype[Any]:
    path = next(path for path in build() if path.name == "nccl.bpf.o")
    with Object("nccl", path.read_bytes()) as found:
        return found.btf.record("communicators")


def record(layout: np.dtype[Any], /, **values: Any) -> np.ndarray[Any, Any]:
    unknown: dict[str, Any] = dict.fromkeys(("rank", "size", "cuda_device", "node", "nodes", "color", "key"), -1)
    unknown |= {"bus_id": 2**64 - 1, "hash": 2**64 - 1, "result": 0, "aborted": 255}
    found = np.zeros(1, layout)
    for name, value in {"t": 400_000, "tgid": 2, "comm": 0x7000, "event": SEEN, **unknown, **values}.items():
        found[name] = np.frombuffer(value, np.uint8) if name == "root_address" else value
    return found


def rows(communicators: Communicators, *records: np.ndarray[Any, Any]) -> list[dict[str, Any]]:
    return rows_of(communicators.rows(np.concatenate(records), PAIR))


def address(family: int, packed: bytes, port: int) -> bytes:
    head = family.to_bytes(2, "little") + port.to_bytes(2, "big")
    return (head + (b"\0" * 4 if family == socket.AF_INET6 else b"") + packed).ljust(28, b"\0")


def made(layout: np.dtype[Any], **values: Any) -> np.ndarray[Any, Any]:
    known = {"hash": 0xAB54A98CEB1F0A, "identity": 1, "rank": 1, "size": 4, "cuda_device": 3, "node": 0, "nodes": 2}
    return record(layout, event=MADE, maker=2, duration_ns=70, start_ns=90, **{**known, **values})


def test_a_communicator_that_was_made(dtype: np.dtype[Any]) -> None:
    known = {"bus_id": 0x17000, "name": b"default_pg", "root_address": address(2, bytes([10, 0, 0, 7]), 29500)}
    (row,) = rows(Communicators("n1", PROCESSES), made(dtype, **known, aborted=0))
    when = PAIR.real_ns - 600_000
    expected = {
        "node": "n1",
        "ts": when,
        "job": "job",
        "run": "run",
        "pid": 2,
        "start_ns": 90,
        "comm": "00ab54a98ceb1f0a",
        "name": "default_pg",
        "backend": "nccl",
        "size": 4,
        "rank": 1,
        "job_rank": 2,
        "cuda_device": 3,
        "node_index": 0,
        "nodes": 2,
        "aborted": False,
        "created": when,
        "state": "active",
        "made_by": "init_rank_config",
        "init_ns": 70,
        "bus_id": "0000:17:00.0",
        "root_address": "10.0.0.7:29500",
        "identity": "struct",
        "parallel_role": "world",
        "parallel_role_why": "has all 4 ranks of the job",
    }
    assert row == {**dict.fromkeys(table_named(TABLE).physical.names), **expected}


def test_what_is_not_known_is_null(dtype: np.dtype[Any]) -> None:
    (row,) = rows(Communicators("n1", PROCESSES), record(dtype, tgid=9, result=255))
    known = {"node", "ts", "pid", "start_ns", "backend", "created", "state", "identity", "parallel_role"}
    assert {name for name, value in row.items() if value is not None} == {*known, "parallel_role_why"}
    assert (row["identity"], row["parallel_role"]) == ("none", "unknown")


def test_each_row_repeats_what_is_known(dtype: np.dtype[Any]) -> None:
    communicators = Communicators("n1", PROCESSES)
    (first,) = rows(communicators, made(dtype))
    later = {"start_ns": 90, "t": 500_000}
    (error,) = rows(communicators, record(dtype, event=ERROR, result=6, **later))
    assert error == {**first, "ts": first["ts"] + 100_000, "async_error": "ncclRemoteError"}
    (well,) = rows(communicators, record(dtype, event=ERROR, result=7, **later))
    assert well == {**first, "ts": first["ts"] + 100_000}
    (aborted,) = rows(communicators, record(dtype, event=ABORTED, **later))
    assert aborted == {**well, "state": "aborted", "aborted": True}
    # Another process, and the same address in a later process with the same pid.
    (other,) = rows(communicators, record(dtype, tgid=3, event=FINALIZED, **later))
    assert (other["state"], other["comm"], other["size"]) == ("finalized", None, None)
    (later_one,) = rows(communicators, record(dtype, start_ns=91))
    assert later_one["comm"] is None


@pytest.mark.parametrize(("event", "state"), [(FINALIZED, "finalized"), (DESTROYED, "destroyed"), (ABORTED, "aborted")])
def test_a_call_that_fails_changes_nothing(dtype: np.dtype[Any], event: int, state: str) -> None:
    communicators = Communicators("n1", PROCESSES)
    found = rows(communicators, made(dtype), *(record(dtype, start_ns=90, event=event, result=r) for r in (4, 7)))
    assert [row["state"] for row in found] == ["active", "active", state]


def test_an_address_that_is_used_again(dtype: np.dtype[Any]) -> None:
    communicators = Communicators("n1", PROCESSES)
    gone = record(dtype, start_ns=90, event=DESTROYED)
    again = made(dtype, hash=5, t=600_000, size=2, rank=0, nodes=-1)
    old, _, new = rows(communicators, made(dtype), gone, again)
    assert (new["comm"], new["state"], new["nodes"]) == (f"{5:016x}", "active", None)
    assert new["created"] == old["created"] + 200_000
    (another,) = rows(communicators, record(dtype, start_ns=90, hash=6, identity=1))
    assert (another["comm"], another["size"], another["made_by"]) == (f"{6:016x}", None, None)


def test_a_communicator_that_could_not_be_made(dtype: np.dtype[Any]) -> None:
    communicators = Communicators("n1", PROCESSES)
    (row,) = rows(communicators, made(dtype, comm=0, result=2))
    assert (row["state"], row["async_error"], row["comm"]) == ("failed", "ncclSystemError", "00ab54a98ceb1f0a")
    (next_one,) = rows(communicators, made(dtype, comm=0, result=42, hash=7))
    assert (next_one["async_error"], next_one["comm"]) == ("ncclResult_t 42", f"{7:016x}")


def test_splits(dtype: np.dtype[Any]) -> None:
    split = {"event": MADE, "maker": 5, "parent": 0xAB, "color": 1, "hash": 0xCD, "identity": 3}
    (row,) = rows(Communicators("n1", PROCESSES), record(dtype, **split))
    assert (row["made_by"], row["parent"], row["color"], row["comm"], row["identity"]) == (
        "split",
        f"{0xAB:016x}",
        1,
        f"{0xCD:016x}",
        "derived",
    )


def test_addresses_of_the_root(dtype: np.dtype[Any]) -> None:
    six = address(10, socket.inet_pton(socket.AF_INET6, "fd00::7"), 80)
    found = rows(Communicators("n1", PROCESSES), *(made(dtype, root_address=a) for a in (six, address(77, b"", 1))))
    assert [row["root_address"] for row in found] == ["[fd00::7]:80", None]


def test_names_have_no_control_characters_and_ended_processes_are_dropped(dtype: np.dtype[Any]) -> None:
    communicators = Communicators("n1", PROCESSES)
    (row,) = rows(communicators, made(dtype, name=b"a\x1b[2J\xff"))
    assert row["name"] == "a\\x1b[2J\\xff"
    communicators.forget({(2, 90)})
    (again,) = rows(communicators, record(dtype, start_ns=90))
    assert again["comm"] is None


def ops(pid: int, comm: str, calls: int, size: int, **values: Any) -> list[dict[str, Any]]:
    given = {"node": "n1", "ts": 5, "job": "job", "run": "run", "pid": pid, "start_ns": 90, "comm": comm}
    return [{**given, "op": "all_reduce", "bytes": size, "comm_size": 2, "backend": "gloo", **values}] * calls


def follow(communicators: Communicators, rows: list[dict[str, Any]], pair: ClockPair) -> list[dict[str, Any]]:
    batch = communicators.follow(operations_of(rows, pair), pair)
    return [] if batch is None else rows_of(batch)


def grid() -> list[dict[str, Any]]:
    """Four ranks: rows of neighbours that reduce often, columns that reduce seldom."""
    made: list[dict[str, Any]] = []
    for pid in range(4):
        row, column = pid // 2, pid % 2
        made += ops(pid, f"row{row}", 160, 100, comm_rank=column)
        made += ops(pid, f"column{column}", 20, 9000, comm_rank=row)
        made += ops(pid, "0", 20, 4, comm_rank=pid, comm_size=4, comm_name="default_pg")
    return made


def test_roles_are_found_from_operations() -> None:
    communicators = Communicators("n1", PROCESSES)
    later = ClockPair(PAIR.mono_ns + 5_000_000_000, 0, PAIR.real_ns)
    found = follow(communicators, grid(), later)
    first = [row for row in found if row["ts"] == 5]
    assert len(first) == 12
    assert {row["parallel_role"] for row in first} == {"unknown"}
    roles = {(row["pid"], row["comm"]): row["parallel_role"] for row in found if row["ts"] != 5}
    assert roles == {
        key: role
        for pid in range(4)
        for key, role in (((pid, f"row{pid // 2}"), "tp"), ((pid, f"column{pid % 2}"), "dp"), ((pid, "0"), "world"))
    }
    (row,) = [row for row in found if row["comm"] == "row0" and row["pid"] == 0 and row["ts"] != 5]
    assert (row["created"], row["job_rank"], row["parallel_role_why"][:20]) == (5, 0, "its ranks are neighb")
    # More of the same operations do not change a role, however much later.
    much_later = ClockPair(2 * later.mono_ns, 0, PAIR.real_ns)
    assert follow(communicators, ops(3, "row1", 9, 4), much_later) == []


def test_a_process_group_that_is_made_again_for_fewer_ranks_has_a_row() -> None:
    # GIVEN a rank in a group of all four
    communicators = Communicators("n1", PROCESSES)
    pair = ClockPair(5_000_000_000, 0, PAIR.real_ns)
    *_, first = follow(communicators, ops(2, "0", 20, 4, comm_size=4, comm_rank=2), pair)
    assert (first["size"], first["rank"], first["parallel_role"]) == (4, 2, "world")
    # WHEN it destroys the group after a fault, and makes one of two with the same name
    later = pair._replace(mono_ns=pair.mono_ns + 9, real_ns=pair.real_ns + 9)
    again, role = follow(communicators, ops(2, "0", 900, 4, comm_size=2, comm_rank=1, op="send", ts=1_000), later)
    # THEN there is a row of the new group, and its role is concluded anew.
    assert (again["size"], again["rank"], again["created"]) == (2, 1, 1_000)
    assert (role["size"], role["rank"], role["created"], role["parallel_role"]) == (2, 1, 1_000, "pp")
    # An operation of the earlier group that ends late changes nothing.
    assert follow(communicators, ops(2, "0", 1, 4, comm_size=4, comm_rank=2, ts=6), later) == []


def test_a_new_role_keeps_the_other_columns(dtype: np.dtype[Any]) -> None:
    communicators = Communicators("n1", PROCESSES)
    (row,) = rows(communicators, made(dtype, size=2))
    assert row["parallel_role"] == "unknown"
    later = ClockPair(5_000_000_000, 0, PAIR.real_ns)
    (found,) = follow(communicators, ops(2, "00ab54a98ceb1f0a", 40, 100, op="send", backend="nccl"), later)
    why = "100 % of 40 operations are send and recv"
    assert found == {**row, "ts": later.real_ns, "parallel_role": "pp", "parallel_role_why": why}
    (gone,) = rows(communicators, record(dtype, start_ns=90, event=DESTROYED))
    assert (gone["parallel_role"], gone["state"], gone["cuda_device"]) == ("pp", "destroyed", 3)


def test_operations_of_a_communicator_that_is_gone_say_nothing_of_the_one_at_its_address(dtype: np.dtype[Any]) -> None:
    # GIVEN a communicator that was made, used and destroyed within a drain, and another one made at its address
    communicators = Communicators("n1", PROCESSES)
    gone, new = made(dtype, hash=7, size=2), made(dtype, hash=8, size=4)
    (*_, newest) = rows(communicators, gone, record(dtype, start_ns=90, event=DESTROYED), new)
    # WHEN the operations of both come
    later = ClockPair(5_000_000_000, 0, PAIR.real_ns)
    calls = [ops(2, f"{number:016x}", 40, 100, op="send", backend="nccl", comm_size=2) for number in (7, 8)]
    found = follow(communicators, [*calls[0], *calls[1]], later)
    # THEN the first one does not come back, with what is known of the other,
    assert [(row["comm"], row["size"], row["state"]) for row in found] in ([], [(newest["comm"], 4, "active")])
    # and no process has it any more.
    assert [communicators.processes_of(f"{number:016x}") for number in (7, 8)] == [[], [(2, 90)]]
    (destroyed,) = rows(communicators, record(dtype, start_ns=90, event=DESTROYED, hash=8, identity=1))
    assert (destroyed["comm"], destroyed["size"], destroyed["made_by"]) == (newest["comm"], 4, newest["made_by"])


def test_a_process_with_very_many_communicators_displaces_only_its_own(
    dtype: np.dtype[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    for limit in ("_MAX_KNOWN", "_MAX_SEEN"):
        monkeypatch.setattr(communicator_rows, limit, 32, raising=False)
    communicators = Communicators("n1", PROCESSES)
    follow(communicators, grid(), PAIR)
    (first,) = rows(communicators, made(dtype, cuda_device=5))
    # WHEN another process uses more communicators than are kept
    for number in range(100):
        follow(communicators, ops(9, f"c{number}", 1, 4), PAIR)
        rows(communicators, record(dtype, tgid=8, start_ns=90, comm=number + 1))
    # THEN those of the others are known as before: they are not reported anew, and keep their columns.
    assert [row for row in follow(communicators, grid(), PAIR) if row["ts"] == 5] == []
    (error,) = rows(communicators, record(dtype, event=ERROR, start_ns=90, result=6))
    assert (error["cuda_device"], error["created"]) == (5, first["created"])
    assert communicators.processes_of("row0") == [(0, 90), (1, 90)]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=examples(50))
@given(data=st.data())
def test_hostile_records_give_valid_rows(dtype: np.dtype[Any], data: st.DataObject) -> None:
    raw = data.draw(st.binary(min_size=3 * dtype.itemsize, max_size=3 * dtype.itemsize))
    records = np.frombuffer(raw, dtype).copy()
    # The kernel writes the times, so they fit.
    for name in ("t", "start_ns", "duration_ns", "tgid"):
        records[name] %= 1 << 30
    found = rows_of(Communicators("n1", PROCESSES).rows(records, PAIR))
    assert len(found) == 3
    assert all(escape(row["name"] or "") == (row["name"] or "") for row in found)
