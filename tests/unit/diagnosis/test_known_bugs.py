"""Known bugs of libraries, by functions on native stacks."""

from __future__ import annotations

from typing import Any

from diagnosis_cases import ago, facts, frame, history, in_collective, op, rank, thread

from probing.diagnosis.facts import Condition, Rank, Thread
from probing.diagnosis.ladder import diagnose

STILL: dict[str, Any] = {"state": "S", "interval_ns": 10**9, "cpu_ns": 0, "switches": 0, "asleep_since_ns": ago(39)}


def waits(number: int) -> Rank:
    return rank(number, *history(6, ago=40), op(7, ago=39), stack=in_collective())


def evidence(*threads: Thread) -> list[str]:
    """Returns what is said of known bugs where rank 1 has ``threads`` and the others wait."""
    late = rank(1, *history(6, ago=40), threads=threads, condition=Condition(**STILL))
    (finding,) = diagnose(facts(waits(0), late, waits(2))).findings
    return [line for line in finding.evidence if "known bug" in line]


def stack(*functions: str, main: bool = True) -> Thread:
    native = [frame(name, native=True) for name in functions]
    return thread(*native, "launch train.py:40", main=main, moving=False)


def test_a_function_on_the_stack_of_a_rank_names_the_bug() -> None:
    # A rank in a call of NCCL counts as joined, so nobody is to blame.
    (line,) = evidence(stack("ncclLocalOpAppend", "ncclProxySaveOp", "ncclAllReduce"))
    assert evidence(stack("ncclLocalOpAppend", "mine")) == [line]
    assert line.startswith("rank 1 is in ncclLocalOpAppend: it may be a known bug. NCCL before 2.29.3 ")
    assert "NVIDIA/nccl#2353" in line


def test_a_bug_of_two_threads_needs_both() -> None:
    loads, copies = stack("cuLibraryLoadData"), stack("cudaMemcpyAsync", main=False)
    assert evidence(loads) == []
    (line,) = evidence(loads, copies)
    assert "cuLibraryLoadData" in line


def test_other_stacks_show_none() -> None:
    assert evidence(stack("pthread_cond_wait", "mineNcclLocalOpAppend")) == []
