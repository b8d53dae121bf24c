"""The operations of a rank from rows of several tables, also where a job makes a process group again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from probing.daemon.diagnose.gather.operations import operations_of
from probing.daemon.diagnose.gather.processes import Key
from probing.diagnosis.facts import Facts, NodeFacts, Rank
from probing.diagnosis.ladder import diagnose

S = 1_000_000_000
NOW = 1_800_000_000 * S
_ROW = {"comm": "0", "op": "all_reduce", "state": "done", "dtype": "float32", "count": 7, "bytes": 28, "redop": "sum"}
_REST = dict.fromkeys(("root", "peer", "error"))


def row(pid: int, seq: int, ago: float, **more: Any) -> dict[str, Any]:
    """A row of an operation that was called ``ago`` seconds before NOW, and ended within a millisecond."""
    called = NOW - round(ago * S)
    times = {"ts": called, "called_ns": called, "done_ns": called + S // 1000}
    own = {"pid": pid, "start_ns": 1, "tid": pid, "async_op": False, "seq": seq}
    return {**_ROW, **_REST, **own, **times, **more}


def progress(pid: int, seq: int, ago: float) -> dict[str, Any]:
    last = NOW - round(ago * S)
    own = {"comm": "0", "seq": seq, "op": "all_reduce", "calls": seq + 1, "last_call": last, "last_done": last}
    return {"pid": pid, "start_ns": 1, **own}


def old_group(pid: int, last: int, length: int) -> list[Mapping[str, Any]]:
    """The rows of the old group, the newest first, as the statement reads them; the last was called 100 s ago."""
    return [row(pid, last - n, 100 + n) for n in range(length)]


@pytest.mark.parametrize(("last", "length"), [(500, 60), (500, 0), (2, 3), (12, 13)])
def test_a_group_that_is_made_again_has_the_numbers_of_its_new_operations(last: int, length: int) -> None:
    # The new group has called 0 and 1, and waits in 2; comm.progress may lag behind or count ended operations only.
    new = [row(1, 1, 40), row(1, 0, 41)]
    made = operations_of([row(1, 2, 30)], [*new, *old_group(1, last, length)], [progress(1, 1, 40)])[Key(1, 1)]
    assert [one.seq for one in made.done] == [0, 1]
    assert [one.seq for one in made.open] == [2]
    assert [one.seq for one in made.progress] == [2]


@pytest.mark.parametrize(("last", "length"), [(500, 60), (500, 0), (2, 3)])
def test_the_first_operation_of_a_group_that_is_made_again_may_be_in_flight(last: int, length: int) -> None:
    made = operations_of([row(1, 0, 30)], old_group(1, last, length), [progress(1, last, 100)])[Key(1, 1)]
    assert (made.done, [one.seq for one in made.open], [one.seq for one in made.progress]) == ((), [0], [0])


@pytest.mark.parametrize(
    ("state", "group", "launched"), [("called", 7, False), ("called", None, None), ("launched", 7, None)]
)
def test_an_operation_of_a_group_that_has_not_ended_is_not_launched(
    state: str, group: int | None, launched: bool | None
) -> None:
    made = operations_of([row(1, 7, 30, state=state, group_id=group)], [], [])[Key(1, 1)]
    assert [one.launched for one in made.open] == [launched]


def test_calls_of_several_threads_in_another_order_are_of_one_group() -> None:
    done = [row(1, seq, 100 - n) for n, seq in enumerate((3, 5, 4, 7, 6, 8))]
    made = operations_of([row(1, 9, 30)], done, [progress(1, 8, 95)])[Key(1, 1)]
    assert [one.seq for one in made.done] == [3, 5, 4, 7, 6, 8]
    assert [one.seq for one in made.progress] == [9]


def test_the_rank_that_has_not_called_an_operation_of_the_new_group_is_named() -> None:
    new = [[row(pid, seq, 43 - seq) for seq in (2, 1, 0)] for pid in (1, 2, 3)]
    done = [one for pid, own in zip((1, 2, 3), new, strict=True) for one in (*own, *old_group(pid, 500, 61))]
    inflight = [row(pid, 3, 30) for pid in (1, 3)]
    counted = [progress(pid, 2, 41) for pid in (1, 2, 3)]
    found = operations_of(inflight, done, counted)

    def rank(number: int) -> Rank:
        own = found[Key(number + 1, 1)]
        return Rank(number, "a", number + 1, 1, open=own.open, done=own.done, progress=own.progress)

    facts = Facts("job", "run", 3, 10.0, NOW, (NodeFacts("a", NOW, NOW - 3600 * S),), tuple(map(rank, range(3))))
    [finding] = diagnose(facts).findings
    assert finding.verdict.id == "not_joined"
    assert [culprit.rank for culprit in finding.culprits] == [1]


def test_an_operation_that_ended_after_it_was_listed_is_not_in_flight_in_a_group_that_is_made_again() -> None:
    done = [row(1, 1, 30), row(1, 0, 31), row(1, 1, 100), row(1, 0, 101)]
    made = operations_of([row(1, 1, 30)], done, [progress(1, 1, 30)])[Key(1, 1)]
    assert (made.open, [one.seq for one in made.done]) == ((), [0, 1])
