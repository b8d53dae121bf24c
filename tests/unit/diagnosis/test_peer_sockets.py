"""Who closed its connections first: the addresses that errors name, joined with the sockets of ranks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from diagnosis_cases import WORLD, ago, elsewhere, facts, history, in_collective, op, rank

from probing.diagnosis.case import Case
from probing.diagnosis.facts import Endpoint, Exit, Facts, Operation, Rank, Witness
from probing.diagnosis.ladder import diagnose
from probing.diagnosis.peer_sockets import named_sockets
from probing.diagnosis.rules.death import find
from probing.diagnosis.verdict import Finding

TERM = 15
OPEN, CLOSED = Endpoint("10.0.0.9", 46084), Endpoint("10.0.0.9", 46084, closed=True)


def died(number: int, error: str = "", seconds: float = 20, *, by: int | None = None, **fields: Any) -> Rank:
    """Returns a rank that ended in an all_reduce."""
    failed = op(9, ago=seconds, took=0.1, state="failed", error=error or None)
    end = Exit(ago(seconds), None if by else 1, by)
    return rank(number, *history(8, ago=seconds + 1), failed, state="exited", exit=end, **fields)


def lives(number: int, *ops: Operation, **fields: Any) -> Rank:
    """Returns a rank that lives, of which it is not known whether it is behind."""
    own: dict[str, Any] = {"lost": 4, "stack": elsewhere("upload_logs train.py:29"), **fields}
    return rank(number, *(ops or history(5, ago=30)), **own)


def the(made: Facts) -> Finding:
    (finding,) = find(Case(made))
    return finding


def owners(error: str, *ends: Endpoint, node: str = "a") -> list[int]:
    case = Case(facts(died(0, error), lives(1, endpoints=ends, node=node)))
    return [one.owner for one in named_sockets(case)]


@pytest.mark.parametrize(
    "error",
    [
        "Connection closed by peer [10.0.0.9]:46084.",
        # The gloo of torch 2.13 writes the port in network order: 1204 is 0x04b4, 46084 is 0xb404.
        "Connection closed by peer [10.0.0.9]:1204.",
        "Read error [10.0.0.9]:1204: Connection reset by peer",
        "Read error [::ffff:10.0.0.9]:46084$7: Connection reset by peer",
        "NCCL WARN socketProgress: Connection closed by remote peer 10.0.0.9<46084>",
        "recvValue failed on SocketImpl(fd=3, addr=[10.0.0.7]:4, remote=[10.0.0.9]:46084): Connection reset by peer",
    ],
)
def test_the_address_of_an_error_is_that_of_a_socket(error: str) -> None:
    assert owners(error, OPEN) == owners(error, CLOSED) == [1]
    assert owners(error, Endpoint("10.0.0.8", 46084), Endpoint("10.0.0.9", 1205)) == []


@pytest.mark.parametrize(
    "error",
    [
        # A time-out names a socket that is open, of a rank that may itself wait.
        "Timed out waiting 1800000ms for recv operation to complete [10.0.0.9]:46084",
        # It is cut: the port may have more digits.
        "Connection closed by peer [10.0.0.9]:4608…",
        "Connection closed by peer [10.0.0.9]:460849",
        "Connection closed by peer [ten.0.0.9]:46084",
        "NCCL WARN socketProgress: Connection closed by remote peer 10.0.0.9<1204>",
    ],
)
def test_an_error_that_names_no_socket_for_certain(error: str) -> None:
    assert owners(error, OPEN, Endpoint("10.0.0.9", 4608)) == []


def test_a_loopback_address_is_one_of_the_same_node() -> None:
    error = "Connection closed by peer [127.0.0.1]:46084."
    assert owners(error, Endpoint("127.0.0.1", 46084)) == owners(error, Endpoint("::1", 46084)) == [1]
    assert owners(error, Endpoint("127.0.0.1", 46084), node="b") == []


def test_the_rank_that_closed_its_connections_and_lives_on_is_to_blame() -> None:
    by = [died(n, f"Connection closed by peer [10.0.0.9]:{port}", 20 + n) for n, port in ((0, 46084), (2, 8))]
    finding = the(facts(by[0], lives(1, endpoints=(CLOSED, Endpoint("10.0.0.9", 8))), by[1]))
    assert ([c.rank for c in finding.culprits], finding.victims, finding.confidence) == ([1], (0, 2), 0.75)
    assert "which is alive and has closed its connections: " in finding.sentence
    assert "the error of rank 0 names 10.0.0.9:46084, a socket of rank 1, which is closed" in finding.evidence
    swapped = died(0, "Connection closed by peer [10.0.0.9]:1204")
    text = "the error of rank 0 names 10.0.0.9:46084 (its port as 1204, with swapped bytes), a socket of rank 1"
    assert text in the(facts(swapped, lives(1, endpoints=(OPEN,)))).evidence
    behind = lives(1, endpoints=(CLOSED,), lost=0)
    assert the(facts(by[0], behind, by[1])).confidence == 0.85


def test_a_rank_that_died_of_it_and_is_named_by_another_is_not_to_blame() -> None:
    first = died(0, "Connection closed by peer [10.0.0.9]:46084", 20, endpoints=(Endpoint("10.0.0.7", 5),))
    second = died(2, "Connection closed by peer [10.0.0.7]:5", 19)
    finding = the(facts(first, lives(1, endpoints=(CLOSED,)), second))
    assert [c.rank for c in finding.culprits] == [1]
    # Nobody knows whose the first socket was: the second one only names a victim.
    assert the(facts(first, lives(1), second)).confidence == 0.4


def test_a_rank_that_lost_a_peer_itself_and_lives_on_is_not_to_blame() -> None:
    lost = op(8, ago=21, took=0.1, state="failed", error="Connection closed by peer [10.0.0.3]:1")
    survivor = lives(1, *history(7, ago=22), lost, endpoints=(CLOSED,))
    assert the(facts(died(0, "Connection closed by peer [10.0.0.9]:46084"), survivor)).confidence == 0.4


def test_errors_that_name_two_ranks_blame_neither() -> None:
    ones = [died(n, f"Connection closed by peer [10.0.0.9]:{port}") for n, port in ((0, 46084), (2, 8))]
    made = facts(ones[0], lives(1, endpoints=(CLOSED,)), ones[1], lives(3, endpoints=(Endpoint("10.0.0.9", 8),)))
    assert the(made).confidence == 0.4


def test_a_rank_that_destroyed_the_communicator_of_the_others_is_said_to_have() -> None:
    left = Witness("probe", WORLD, ago(25), state="destroyed")
    gone = lives(1, lost=0, witnesses=(replace(left, state="active"), replace(left, comm="another"), left))
    waits = [rank(r, *history(8, ago=21), op(9, ago=20), stack=in_collective()) for r in (0, 2)]
    (finding, *_) = diagnose(facts(waits[0], gone, waits[1])).findings
    assert (finding.verdict.id, [c.rank for c in finding.culprits]) == ("not_joined", [1])
    assert [text for text in finding.evidence if "destroyed" in text] == ["rank 1 has destroyed default_pg 25 s ago"]
    assert "rank 1 has destroyed default_pg 25 s ago" in the(facts(died(0), gone, died(2))).evidence


def test_a_launcher_ends_the_rank_that_left_once_another_died_of_that() -> None:
    first = died(0, "Connection closed by peer [10.0.0.9]:46084", 20)
    left = died(1, seconds=18, by=TERM, endpoints=(CLOSED,))
    finding = the(facts(first, left, died(2, seconds=18, by=TERM)))
    assert [c.rank for c in finding.culprits] == [1]
    assert finding.culprits[0].why == "was killed by SIGTERM, 2 s after them"
    # One that was ended before the error closed its connections by that.
    sooner = died(1, seconds=21, by=TERM, endpoints=(CLOSED,))
    assert "closed its connections" not in the(facts(first, sooner, died(2, seconds=20))).sentence
