"""Columns from numpy arrays: NULLs, dictionaries, and identities that are asked once for each process."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from fakes import Processes

from probing.api.tables import table_named
from probing.daemon import columns
from probing.daemon.source import Identity


def identify(pid: int, start_ns: int) -> Identity | None:
    return Identity(pid, start_ns, f"job{pid}", "run", "trainer", rank=pid - 1) if pid < 3 else None


def test_numbers_times_and_flags_are_null_where_said() -> None:
    null = np.array([False, True, False])
    made = columns.numbers(np.array([1, 2, 2**64 - 1], np.uint64)[::-1], null)
    made.validate(full=True)
    assert (made.type, made.to_pylist()) == (pa.uint64(), [2**64 - 1, None, 1])
    assert columns.times(np.array([5, 6, 7]), null).cast(pa.int64()).to_pylist() == [5, None, 7]
    assert columns.flags(np.array([0, 1, 255], np.uint8), null).to_pylist() == [False, None, True]


def test_indices_outside_of_the_names_are_null() -> None:
    made = columns.named(np.array([1, -1, 2, 0]), ("a", "b"))
    made.validate(full=True)
    assert made.to_pylist() == ["b", None, None, "a"]


@pytest.mark.parametrize("values", [["b", "a", "b", None], [None, None, None, None]])
def test_equal_texts_of_groups_are_one_entry_of_the_dictionary(values: list[str | None]) -> None:
    which = np.array([3, 0, 1, 2, 0])
    made = columns.texts(values, which)
    made.validate(full=True)
    assert made.to_pylist() == [values[index] for index in which]
    assert len(made.dictionary) == len({value for value in values if value is not None})


def test_numbers_of_groups_keep_zero_and_negative_ones() -> None:
    made = columns.integers([0, None, -1], np.array([2, 1, 0, 0]))
    made.validate(full=True)
    assert (made.type, made.to_pylist()) == (pa.int32(), [-1, None, 0, 0])
    assert columns.integers([], np.zeros(0, np.intp)).to_pylist() == []


def test_each_process_is_identified_once() -> None:
    processes = Processes(identify=identify)
    pids, starts = np.array([2, 9, 2, 1, 2], np.uint32), np.array([7, 7, 8, 7, 7], np.uint64)
    who, which = columns.identities(processes, pids, starts)
    assert sorted(processes.asked) == [(1, 7), (2, 7), (2, 8), (9, 7)]
    found = [who[index] for index in which]
    assert [one and (one.pid, one.start_ns) for one in found] == [(2, 7), None, (2, 8), (1, 7), (2, 7)]
    made = columns.identity_columns("n", who, which, pids, starts)
    assert made["rank"].to_pylist() == [1, None, 1, 0, 1]
    assert made["job"].to_pylist() == ["job2", None, "job2", "job1", "job2"]
    assert made["node"].to_pylist() == ["n"] * 5


def test_a_batch_has_the_types_of_its_table_and_all_columns() -> None:
    schema = table_named("cuda.launches").physical
    who, which = columns.identities(Processes(identify=identify), np.array([1]), np.array([2]))
    made = columns.identity_columns("n", who, which, np.array([1]), np.array([2]))
    made |= {"ts": columns.times(np.array([3])), "kernels": columns.numbers(np.array([4], np.int32))}
    with pytest.raises(KeyError):
        columns.batch("cuda.launches", made)
    batch = columns.batch("cuda.launches", made | {"graphs": columns.numbers(np.array([5]))})
    assert batch.schema == schema
    assert batch.column("kernels").to_pylist() == [4]


def test_a_matrix_becomes_the_columns_that_each_part_would() -> None:
    values = np.arange(23 * 5, dtype=np.int64).reshape(23, 5)
    null = values % 7 == 0
    null[:, 2] = False
    found = columns.number_columns(values, null)
    assert found == [columns.numbers(values[:, at], null[:, at]) for at in range(5)]
    assert [array.null_count for array in found] == null.sum(axis=0).tolist()
    assert columns.number_columns(values[:0], null[:0]) == [columns.numbers(values[:0, 0])] * 5


def test_texts_of_targets_are_not_kept() -> None:
    before = pa.total_allocated_bytes()
    for number in range(300):
        made = columns.texts([f"{number} {text} {'x' * 200}" for text in range(500)], np.arange(500))
        assert len(made.dictionary) == 500
    assert pa.total_allocated_bytes() - before < 4 << 20
