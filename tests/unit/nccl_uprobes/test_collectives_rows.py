"""Rows of operations from records: known values, and hostile records generated at random."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from fakes import Processes, rows_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from long import examples

from probing.api.tables import table_named
from probing.daemon.bpf.build import FOLDER, build
from probing.daemon.bpf.libbpf import Object
from probing.daemon.clock import ClockPair
from probing.daemon.nccl_uprobes.communicators.rows import Communicators
from probing.daemon.nccl_uprobes.operations.rows import finished_rows, inflight_rows
from probing.daemon.nccl_uprobes.records import names
from probing.daemon.nccl_uprobes.records.operations import OperationDecoder
from probing.daemon.source import Identity

PAIR = ClockPair(mono_ns=1_000_000, boot_ns=1_500_000, real_ns=1_700_000_000_000_000_000)


def identify(pid: int, start_ns: int) -> Identity | None:
    """Knows even pids."""
    return None if pid % 2 else whoever(pid, start_ns)


def whoever(pid: int, start_ns: int) -> Identity:
    return Identity(pid, start_ns, f"job{pid}", "run", "trainer", rank=pid // 2, world_size=4)


@pytest.fixture(scope="module")
def dtype() -> np.dtype[Any]:
    path = next(path for path in build() if path.name == "gloo.bpf.o")
    with Object("gloo", path.read_bytes()) as found:
        return found.btf.record("collectives")


def record(layout: np.dtype[Any], /, **values: Any) -> np.ndarray[Any, Any]:
    unknown = {"comm_rank": -1, "comm_size": -1, "root": -1, "peer": -1, "cuda_device": -1}
    unknown |= {"dtype": 255, "redop": 255, "async_op": 255, "seq": 2**64 - 1, "count": 2**64 - 1}
    found = np.zeros(1, layout)
    for name, value in {"tgid": 2, "backend": 1, "state": 3, "timing": 1, **unknown, **values}.items():
        found[name] = value
    return found


class Maker:
    """Decodes and makes rows as the source does."""

    def __init__(self, processes: Processes | None = None) -> None:
        processes = processes or Processes(identify=identify)
        self._decoder = OperationDecoder(processes)
        self.communicators = Communicators("n1", processes)

    def finished(self, records: np.ndarray[Any, Any]) -> pa.RecordBatch:
        return finished_rows("n1", records, self._decoder.decode(records), PAIR)

    def inflight(self, records: np.ndarray[Any, Any]) -> pa.RecordBatch:
        return inflight_rows("n1", records, self._decoder.decode(records), PAIR)

    def followed(self, records: np.ndarray[Any, Any]) -> pa.RecordBatch | None:
        return self.communicators.follow(self._decoder.decode(records), PAIR)


def rows(*records: np.ndarray[Any, Any]) -> list[dict[str, Any]]:
    return rows_of(Maker().finished(np.concatenate(records)))


def test_a_finished_all_reduce(dtype: np.dtype[Any]) -> None:
    times = {"t_call": 400_000, "t_start": 400_010, "t_done_lo": 400_050, "t_done_hi": 400_050}
    group = {"comm": 0x7000, "comm_rank": 1, "comm_size": 4, "name": b"0", "name_form": 1, "desc": b"default_pg"}
    values = {"op": 1, "dtype": 6, "count": 10, "redop": 0, "seq": 7, "async_op": 1, "tid": 3, "start_ns": 90}
    (row,) = rows(record(dtype, **times, **group, **values))
    expected = {
        "node": "n1",
        "ts": PAIR.real_ns - 600_000,
        "job": "job2",
        "run": "run",
        "pid": 2,
        "start_ns": 90,
        "tid": 3,
        "rank": 1,
        "comm": "0",
        "comm_name": "default_pg",
        "comm_rank": 1,
        "comm_size": 4,
        "backend": "gloo",
        "seq": 7,
        "op": "all_reduce",
        "dtype": "float32",
        "count": 10,
        "bytes": 40,
        "redop": "sum",
        "async_op": True,
        "timing_source": "exact",
        "state": "done",
        "start_ns_after": 10,
        "done_hi_ns": 50,
    }
    assert row == {**dict.fromkeys(table_named("comm.ops").physical.names), **expected}


def test_what_is_not_known_is_null(dtype: np.dtype[Any]) -> None:
    (row,) = rows(record(dtype, op=200, tgid=3, state=6, timing=3))
    known = {name for name, value in row.items() if value is not None}
    assert known == {"node", "ts", "pid", "start_ns", "tid", "backend", "timing_source"}


def test_an_abandoned_operation_has_no_end(dtype: np.dtype[Any]) -> None:
    (row,) = rows(record(dtype, op=15, count=0, state=5, t_call=5, t_start=6))
    assert (row["state"], row["timing_source"], row["done_hi_ns"]) == ("abandoned", None, None)
    assert (row["op"], row["bytes"], row["dtype"], row["start_ns_after"]) == ("barrier", 0, None, 1)


def test_names_and_errors_have_no_control_characters(dtype: np.dtype[Any]) -> None:
    long = b"x" * 40 + (0x1122334455667788).to_bytes(8, "little")
    zero_ended = (0x0055).to_bytes(8, "little")
    found = rows(
        record(dtype, name=b"a\x1b[2Jb\xff", name_form=1),
        record(dtype, name=long, name_form=2, comm=1),
        record(dtype, name=zero_ended, name_form=3, backend=2),
        record(dtype, name=b"junk", comm=2),
        record(dtype, name=b"0", name_form=1, desc=b"undefined", comm=3),
        record(dtype, state=4, error=b"Connection\nclosed"),
        # A text that fills its field was cut by the kernel.
        record(dtype, state=4, error=b"Connection closed by peer [127.0.0.1]:26763. This is ty"),
        record(dtype, state=4, error=b"x" * 55),
    )
    texts = ["a\\x1b[2Jb\\xff", "x" * 40 + "~1122334455667788", "0000000000000055", None, "0", None, None, None]
    assert [row["comm"] for row in found] == [text and text.replace("\ufffd", found[0]["comm"][-1]) for text in texts]
    assert found[4]["comm_name"] is None
    errors = ["Connection\\nclosed", "Connection closed by peer [127.0.0.1]:26763.", "x" * 55 + "…"]
    assert [row["error"] for row in found] == [None] * 5 + errors


def test_blocks_of_nccl_count_once_for_each_rank(dtype: np.dtype[Any]) -> None:
    nccl = {"backend": 2, "dtype": 7, "count": 10, "comm_rank": 1, "comm_size": 4}
    found = rows(
        record(dtype, **nccl, op=3),
        record(dtype, **{**nccl, "comm_size": -1}, op=3),
        record(dtype, **nccl, op=4),
        record(dtype, **nccl, op=9, root=1),
        record(dtype, **nccl, op=9, root=0),
    )
    assert [row["bytes"] for row in found] == [160, None, 40, 160, 0]


def test_a_failed_operation_of_nccl_has_its_result_as_error(dtype: np.dtype[Any]) -> None:
    nccl = {"backend": 2, "state": 4}
    found = rows(
        record(dtype, **nccl, result=4),
        record(dtype, **nccl, result=200),
        record(dtype, **nccl, error=b"the communicator was aborted"),
        record(dtype, **nccl),
        record(dtype, backend=2, result=4),
        record(dtype, state=4, result=4),
    )
    errors = ["ncclInvalidArgument", "ncclResult 200", "the communicator was aborted", None, None, None]
    assert [row["error"] for row in found] == errors


def test_operations_of_nccl_report_no_communicators(dtype: np.dtype[Any]) -> None:
    one = record(dtype, backend=2, name=b"\x55", name_form=3, comm_rank=0, comm_size=4)
    maker = Maker()
    assert rows_of(maker.finished(one))[0]["comm"] == "0000000000000055"
    assert maker.followed(one) is None


def test_a_communicator_is_one_row(dtype: np.dtype[Any]) -> None:
    maker = Maker()
    first = record(dtype, name=b"0", name_form=1, comm_rank=0, comm_size=4, t_call=10)
    second = record(dtype, name=b"0", name_form=1, comm_rank=0, comm_size=4, t_call=20)
    seen = maker.followed(first)
    assert seen is not None
    (row,) = rows_of(seen)
    assert (row["comm"], row["size"], row["job_rank"], row["parallel_role"]) == ("0", 4, 1, "world")
    assert maker.communicators.backends_of(2, 0) == {"gloo"}
    assert maker.followed(second) is None
    assert maker.followed(first[:0]) is None
    assert maker.finished(first[:0]).num_rows == 0


def test_a_process_identified_later_has_its_job_from_then_on(dtype: np.dtype[Any]) -> None:
    found: set[int] = set()
    processes = Processes(identify=lambda pid, start: whoever(pid, start) if pid in found else None)
    maker = Maker(processes)

    def job() -> str | None:
        (row,) = rows_of(maker.finished(record(dtype, tgid=7)))
        found: str | None = row["job"]
        return found

    assert job() is None
    found.add(7)
    assert job() == "job7"


def test_inflight_has_its_logical_schema(dtype: np.dtype[Any]) -> None:
    maker = Maker()
    batch = maker.inflight(record(dtype, op=0, state=2, t_call=400_000))
    assert batch.schema == table_named("comm.inflight").logical
    (row,) = rows_of(batch)
    assert (row["op"], row["state"], row["age_ns"]) == ("broadcast", "started", 600_000)
    assert maker.inflight(np.zeros(0, dtype)).num_rows == 0


@settings(deadline=None, max_examples=examples(60), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_no_record_breaks_the_batch(dtype: np.dtype[Any], data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 9))
    raw = data.draw(st.binary(min_size=count * dtype.itemsize, max_size=count * dtype.itemsize))
    records = np.frombuffer(raw, dtype)
    maker = Maker()
    batches = {"comm.ops": maker.finished(records), "comm.inflight": maker.inflight(records)}
    if (communicators := maker.followed(records)) is not None:
        batches["comm.communicators"] = communicators
    for table, batch in batches.items():
        batch.validate(full=True)
        assert batch.schema == table_named(table).physical
    assert batches["comm.ops"].num_rows == count


def enum(name: str) -> dict[str, int]:
    text = (FOLDER / "collectives.bpf.h").read_text()
    body = re.search(rf"enum {name} {{(.*?)}};", text, re.DOTALL)
    assert body
    return {key.lower(): int(value) for key, value in re.findall(r"(\w+) = (\d+)", body[1])}


def test_numbers_are_those_of_the_programs() -> None:
    states = {f"state_{name}": number for number, name in enumerate(names.STATES, 1)}
    assert enum("operation_state") == {**states, "state_unseen": 6}
    assert (states["state_failed"], states["state_abandoned"]) == (names.STATE_FAILED, names.STATE_ABANDONED)
    assert enum("timing_source") == {f"timing_{name}": number for number, name in enumerate(names.TIMINGS, 1)}
    assert enum("backend") == {"backend_gloo": names.GLOO, "backend_nccl": names.NCCL}


def test_dtypes_are_numbered_as_torch_numbers_them() -> None:
    import importlib.util

    spec = importlib.util.find_spec("torch")
    assert spec
    assert spec.origin
    text = (Path(spec.origin).parent / "include/torch/headeronly/core/ScalarType.h").read_text()
    numbered = dict(re.findall(r", (\w+)\) /\* (\d+) \*/", text))
    usual = {"Byte": "uint8", "Char": "int8", "Short": "int16", "Int": "int32", "Long": "int64", "Half": "float16"}
    usual |= {"Float": "float32", "Double": "float64", "ComplexHalf": "complex32", "ComplexFloat": "complex64"}
    usual |= {"ComplexDouble": "complex128"}
    # Newer versions add types: tests/wheels checks those.
    assert 40 < len(numbered) <= len(names.DTYPES)
    for name, number in numbered.items():
        assert names.DTYPES[int(number)] == usual.get(name, name.lower())
