"""Which process is a rank where several of a job claim it."""

from __future__ import annotations

import random
from typing import Any

import pytest

from probing.daemon.diagnose.gather.processes import JobProcess, Key, ranked
from probing.diagnosis.facts import Exit


def process(pid: int, rank: int | None, **fields: Any) -> JobProcess:
    given = {"world_size": 3, "state": "running", "started_ns": pid, "ppid": 1, **fields}
    return JobProcess(Key(pid, pid), "r", "trainer", rank, **given)


def place(pid: int, comm: str | None, comm_rank: int = 0) -> dict[str, Any]:
    return {"pid": pid, "start_ns": pid, "comm": comm, "comm_rank": comm_rank, "comm_size": 3}


RANKS = [process(10 + rank, rank) for rank in range(3)]
PLACES = [place(10 + rank, "c0", rank) for rank in range(3)]


def pids(processes: list[JobProcess], places: list[dict[str, Any]]) -> dict[int, int]:
    """The pid of each rank, whatever the order of the rows is."""
    results = []
    for seed in range(5):
        shuffled = random.Random(seed).sample(processes, len(processes))
        found = ranked(shuffled, places)
        results.append({rank: one.key.pid for rank, one in found.ranks.items()})
        # Nobody that lives is left out.
        shown = {one.key for one in (*found.ranks.values(), *found.others)}
        assert shown == {one.key for one in processes if one.alive or one.rank not in found.ranks} | {
            one.key for one in found.ranks.values()
        }
    assert all(result == results[0] for result in results)
    return results[0]


@pytest.mark.parametrize("comm", [None, "c9"])
def test_who_claims_a_rank_later_does_not_replace_it(comm: str | None) -> None:
    late = process(99, 1)
    assert pids([*RANKS, late], [*PLACES, place(99, comm)]) == {0: 10, 1: 11, 2: 12}
    [note] = ranked([*RANKS, late], [*PLACES, place(99, comm)]).missing
    assert note.text == (
        "pids 11 and 99 both claim rank 1; pid 11 counts: it shares communicators, parent or container with"
        " 2 other ranks"
    )


def test_two_who_claim_ranks_together_do_not_replace_three() -> None:
    late = [process(98, 1), process(99, 2)]
    assert pids([*RANKS, *late], [*PLACES, place(98, "c9"), place(99, "c9", 1)]) == {0: 10, 1: 11, 2: 12}


@pytest.mark.parametrize("shared", [{"ppid": 7}, {"container": "c" * 64}])
def test_ranks_without_communicators_belong_together_by_parent_or_container(shared: dict[str, Any]) -> None:
    ranks = [process(10 + rank, rank, **shared) for rank in range(3)]
    assert pids([*ranks, process(99, 1)], []) == {0: 10, 1: 11, 2: 12}


def test_a_rank_that_is_started_again_counts_once_the_first_has_ended() -> None:
    ended = process(11, 1, exit=Exit(50, 1), state="exited")
    assert pids([RANKS[0], ended, RANKS[2], process(99, 1)], PLACES) == {0: 10, 1: 99, 2: 12}


def test_of_equals_the_newer_counts() -> None:
    """The ranks of a run that was not stopped remain beside those of the next one on this node."""
    again = [process(90 + rank, rank) for rank in range(3)]
    places = [*PLACES, *(place(90 + rank, "c1", rank) for rank in range(3))]
    assert pids([*RANKS, *again], places) == {0: 90, 1: 91, 2: 92}
    assert "the newer one counts" in ranked([*RANKS, *again], places).missing[0].text
