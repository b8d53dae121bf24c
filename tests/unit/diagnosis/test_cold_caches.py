"""A cache that is cold on one rank: of compiled code, and of pages of files."""

from __future__ import annotations

from dataclasses import replace

import pytest
from diagnosis_cases import TORCH, comm, elsewhere, facts, frame, history, in_collective, op, rank, thread
from test_slow_ranks import FORWARD, LOOP, condition, job_with, samples

from probing.diagnosis.facts import Condition, Facts, Helper, Rank, Sample
from probing.diagnosis.ladder import diagnose
from probing.diagnosis.verdict import Finding

CONVERT = f"_compile {TORCH}_dynamo/convert_frame.py:1100"
MIB = 1 << 20


def compiling(share: float) -> tuple[Sample, ...]:
    stack = (frame(f"step {TORCH}_dynamo/symbolic_convert.py:1"), frame(CONVERT), frame("step train.py:40"), LOOP)
    return (*samples(forward=0.4), Sample(stack, share, True))


def test_a_rank_that_compiles_alone_is_slow_by_a_cold_cache() -> None:
    finding = job_with({"samples": compiling(0.5)}, {"samples": samples(forward=0.4, wait=0.5)})
    (culprit,) = finding.culprits
    assert (culprit.activity, culprit.why) == (
        "compiling",
        "it compiles in step, train.py:40, 50% of the time, the others 0%: its cache is cold, or its shapes are new",
    )
    assert finding.next_steps[0].startswith("Let all ranks share the compiler's cache")


def test_a_compiler_that_has_just_begun_is_the_reason_unless_other_code_takes_more() -> None:
    begun, usual = compiling(0.07), {"samples": samples(forward=0.4, wait=0.5)}
    assert job_with({"samples": begun}, usual).culprits[0].why.startswith("it compiles in step, train.py:40, 7%")
    assert "compiles" not in job_with({"samples": compiling(0.04)}, usual).culprits[0].why
    both = (*begun, *samples(augment=0.4))
    assert job_with({"samples": both}, usual).culprits[0].why.startswith("it computes in augment")


def test_compilation_on_all_ranks_is_no_reason() -> None:
    finding = job_with({"samples": compiling(0.5)}, {"samples": compiling(0.3)})
    assert "cache" not in finding.culprits[0].why


def hang(*others: Rank) -> Finding:
    """Rank 1 compiles for 70 s while ``others`` wait."""
    stack = thread(CONVERT, "step train.py:40", state="R", moving=True)
    busy = Condition(state="R", interval_ns=10**9, cpu_ns=9 * 10**8, switches=9)
    late = rank(1, *history(811, ago=71), stack=stack, condition=busy)
    given: Facts = facts(late, *others, comms=[comm("0", [0, 1, 2])], stall_s=2.0)
    return next(one for one in diagnose(given).findings if one.verdict.id == "not_joined")


def waiting(number: int) -> Rank:
    return rank(number, *history(811, ago=71), op(812, ago=70), stack=in_collective())


def test_a_rank_that_holds_others_up_while_it_alone_compiles() -> None:
    finding = hang(waiting(0), waiting(2))
    (culprit,) = finding.culprits
    assert culprit.why == (
        "it compiles in step, train.py:40, and no other rank does: its cache is cold, or its shapes are new"
    )
    assert "its cache is cold" in finding.sentence
    assert any("TORCH_LOGS=recompiles" in step for step in finding.next_steps)


def test_nothing_is_said_of_caches_where_another_rank_may_compile_too() -> None:
    unseen = replace(waiting(2), threads=())
    assert "cache" not in hang(waiting(0), unseen).culprits[0].why
    both = rank(2, *history(811, ago=71), stack=elsewhere())
    assert all("cache" not in culprit.why for culprit in hang(waiting(0), both).culprits)


READS = frame("read_shard data.py:7")


def reading(share: float) -> tuple[Sample, ...]:
    return (Sample((FORWARD, LOOP), 0.5, True), Sample((READS, LOOP), share, False))


def test_a_rank_that_reads_from_storage_what_others_have_in_memory() -> None:
    finding = job_with(
        {"samples": reading(0.45), "condition": condition(read_bytes=640 * MIB, storage_read_bytes=600 * MIB)},
        {
            "samples": samples(forward=0.5, wait=0.45),
            "condition": condition(read_bytes=700 * MIB, storage_read_bytes=0),
        },
    )
    (culprit,) = finding.culprits
    assert (culprit.activity, culprit.why) == (
        "disk_io",
        "it waits for I/O in read_shard, data.py:7, 45% of the time; the others 0%: its page cache is cold: it reads"
        " 60 MiB a second from storage; the others read as much, but only 0 B a second from storage",
    )
    assert finding.next_steps[0].startswith("Read the files once before the job")


def test_the_workers_of_a_loader_count_as_their_rank() -> None:
    queue = frame("get /usr/lib/python3.11/queue.py:180")
    loader = frame("_next_data /x/torch/utils/data/dataloader.py:700")
    slow = (*samples(forward=0.5), Sample((queue, loader, LOOP), 0.45, False))

    def own(stored: int) -> dict[str, object]:
        reads = condition(read_bytes=640 * MIB, storage_read_bytes=stored)
        nothing = condition(read_bytes=0, storage_read_bytes=0)
        return {"helpers": (Helper(77, 1, "data_loader", "S", condition=reads),), "condition": nothing}

    finding = job_with({"samples": slow, **own(600 * MIB)}, {"samples": samples(forward=0.5, wait=0.45), **own(0)})
    assert "its page cache is cold: it reads 60 MiB a second" in finding.culprits[0].why


@pytest.mark.parametrize(
    ("mine", "theirs"),
    [
        ((640, 600), (10, 0)),  # the others read less
        ((640, 600), (640, 500)),  # they read from storage as well
        ((640, 2), (640, 0)),  # next to nothing
        ((100, 600), (100, 0)),  # what it read ahead, or mapped, is not what its calls returned
        ((640, None), (640, 0)),
        ((640, 600), (640, None)),
    ],
)
def test_other_reads_say_nothing_of_the_cache(mine: tuple[int, int | None], theirs: tuple[int, int | None]) -> None:
    def reads(read: int, stored: int | None) -> Condition:
        return condition(read_bytes=read * MIB, storage_read_bytes=None if stored is None else stored * MIB)

    finding = job_with(
        {"samples": reading(0.45), "condition": reads(*mine)},
        {"samples": samples(forward=0.5, wait=0.45), "condition": reads(*theirs)},
    )
    assert "cache" not in finding.culprits[0].why


@pytest.mark.parametrize(("stored", "cold"), [(6000, True), (600, False)])
def test_a_fast_disk_that_keeps_the_rank_busy(stored: int, cold: bool) -> None:
    busy = (Sample((FORWARD, LOOP), 0.5, True), Sample((READS, LOOP), 0.45, True))
    reads = {"read_bytes": stored * MIB, "storage_read_bytes": stored * MIB}
    finding = job_with(
        {"samples": busy, "condition": condition(**reads)},
        {"samples": samples(forward=0.5, wait=0.45), "condition": condition(**{**reads, "storage_read_bytes": 0})},
    )
    assert ("its page cache is cold" in finding.culprits[0].why) is cold
    assert finding.culprits[0].activity == ("disk_io" if cold else "computing")
