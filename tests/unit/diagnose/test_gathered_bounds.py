"""A rank's facts stay below 64 KB: what is left out is named, and the most important is kept."""

from __future__ import annotations

from dataclasses import replace

from probing.daemon.diagnose.gather.assembly import fitted
from probing.diagnosis.facts import Frame, Helper, Operation, Rank, Sample, Series, Thread
from probing.diagnosis.facts_file import RANK_BYTES, size_of

S = 1_000_000_000


def operations(comm: str, count: int) -> tuple[Operation, ...]:
    return tuple(
        Operation(comm, n, "all_reduce", n * S, n * S + 7, "done", "float32", 1013, 4052) for n in range(count)
    )


def stack(tid: int, depth: int, *, main: bool = False) -> Thread:
    frames = tuple(Frame(f"function_{n}", f"/a/long/path/to/a/module_{n}.py", n) for n in range(depth))
    return Thread(tid, "name", main, "sleeping", False, frames)


def test_a_rank_that_fits_is_left_alone() -> None:
    rank = Rank(0, "n0", 1, 1, done=operations("0", 64), threads=(stack(1, 40, main=True),))
    assert fitted(rank) == (rank, [])


def test_old_operations_are_left_out_first() -> None:
    done = tuple(one for n in range(7) for one in operations(f"group {n}", 64))
    rank = Rank(3, "n0", 1, 1, done=done, threads=(stack(1, 40, main=True),))
    assert size_of(rank) > RANK_BYTES
    found, missing = fitted(rank)
    assert size_of(found) <= RANK_BYTES
    assert {comm: [one.seq for one in found.done if one.comm == comm] for comm in ("group 0", "group 6")} == {
        "group 0": list(range(32, 64)),
        "group 6": list(range(32, 64)),
    }
    assert found.threads == rank.threads
    assert [(one.kind, one.rank, one.node) for one in missing] == [("operations", 3, "n0")]
    assert missing[0].text == f"older operations of rank 3 were left out: more than {RANK_BYTES} bytes"


def test_whatever_is_too_large_fits_in_the_end() -> None:
    frames = stack(1, 64).frames
    rank = Rank(
        0,
        "n0",
        1,
        1,
        open=tuple(replace(one, t_done_ns=None) for one in operations("0", 64)),
        done=tuple(one for n in range(256) for one in operations(f"group {n}", 64)),
        threads=(stack(1, 64, main=True), *(stack(n, 64) for n in range(2, 17))),
        helpers=tuple(Helper(n, 1, "data_loader", "running", threads=(stack(n, 64, main=True),)) for n in range(64)),
        samples=tuple(Sample(frames, 0.1, on_cpu=True) for _ in range(6)),
        series=tuple(Series(f"name {n}", tuple(range(128)), (0.5,) * 128) for n in range(8)),
        logs=("x" * 300,) * 5,
    )
    found, missing = fitted(rank)
    assert size_of(found) <= RANK_BYTES
    assert found.threads[0].main
    # The oldest open ones show what is waited for.
    assert [one.seq for one in found.open] == list(range(32))
    assert {one.kind for one in missing} == {"operations", "size", "stacks"}


def test_even_a_single_value_that_is_too_large_fits() -> None:
    frames = tuple(Frame("f" * 2000, values=(("name", "v" * 2000),)) for _ in range(64))
    found, _ = fitted(Rank(0, "n0", 1, 1, threads=(Thread(1, "", True, None, None, frames),)))
    assert size_of(found) <= RANK_BYTES
