"""Findings of another node: whole rows of jobs that run here, by a node that takes part, of what it may speak of."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from probing.api.errors import FormatError, Overloaded, PrivilegeError, UsageError
from probing.api.tables import table_named
from probing.daemon.diagnose.coordination.peers import Holding
from probing.daemon.query.caller import Caller
from probing.daemon.service.received_findings import AT_ONCE, ROWS_AN_HOUR, ReceivedFindings

NAMES = ("job", "run", "finding_id", "verdict", "sentence", "found_by")
LISTS = ("culprits", "evidence", "missing", "refuted_by", "next_steps", "stacks")


def culprits(*named: tuple[int, str]) -> dict[str, str]:
    """The columns of a finding that name ranks."""
    items = [{"rank": rank, "node": node, "pid": 7, "why": "w", "activity": "computing"} for rank, node in named]
    ranks, nodes = (",".join(map(str, part)) for part in ([r for r, _ in named], dict.fromkeys(n for _, n in named)))
    return {"culprits": json.dumps(items), "ranks": ranks, "nodes": nodes}


# Ranks 0 and 1 are on n1, which speaks; 2 and 3 on n2, which listens; 4 and 5 on n3.
ROW: dict[str, Any] = {
    **dict.fromkeys(NAMES, "x"),
    **dict.fromkeys(LISTS, "[]"),
    **culprits((2, "n2")),
    "job": "j",
    "run": "r",
    "severity": "error",
    "victims": "0,1",
    "about": "x",
    "state": "open",
    "found_by": "n1",
    "confidence": 0.9,
    "since": None,
    "opened": 7,
    "closed": None,
}
OTHERS = frozenset(("n1", "n3", "-"))


def peer(*names: str) -> Caller:
    """A node with a certificate."""
    return Caller("tcp", "10.0.0.1", nodes=frozenset(names))


PLAIN = Caller("tcp", "10.0.0.1")


class Node:
    """The watch of n2, and who takes part in its job: n1 and n3. The node "-" says that it does."""

    def __init__(self) -> None:
        self.taken: list[Mapping[str, Any]] = []
        self.now = 0.0
        self.certified = ""
        self.received = ReceivedFindings(
            "n2", self, self, certified=lambda node: node == self.certified, now=lambda: self.now
        )

    def watches(self, job: str, run: str) -> bool:
        return (job, run) == ("j", "r")

    def take(self, row: Mapping[str, Any]) -> None:
        self.taken.append(row)

    def claims(self, job: str, run: str) -> Collection[str]:
        return OTHERS

    def takes_part(self, job: str, run: str, node: str) -> bool:
        return node in OTHERS - {"-"}

    def holding(self, job: str, run: str) -> Holding:
        return Holding(frozenset((2, 3)), 6, 7, living=True)

    def send(self, *changes: Mapping[str, Any], by: Caller = PLAIN) -> int:
        return self.received.take(json.dumps([{**ROW, **change} for change in changes]).encode(), by)


def test_rows_of_known_jobs_are_taken() -> None:
    node = Node()
    assert node.send({}, {"job": "other"}) == 1
    assert node.taken == [ROW]


@pytest.mark.parametrize(
    ("named", "by", "fits"),
    [
        ([(2, "n2")], "n1", True),
        ([(0, "n1")], "n1", True),
        ([(4, "n3")], "n1", True),
        ([(0, "n1"), (2, "n2"), (4, "n3")], "n1", True),
        ([(0, "")], "n1", True),
        ([], "n1", True),
        # A rank of this node is named as that of another, and the other way round.
        ([(2, "n1")], "n1", False),
        ([(3, "n3")], "n1", False),
        ([(2, "")], "n1", False),
        ([(4, "n2")], "n1", False),
        ([(0, "n2")], "n1", False),
        # Of a node that does not take part.
        ([(0, "n7")], "n1", False),
        # n3 comes after this node, so it does not diagnose the job of others.
        ([(4, "n3")], "n3", True),
        ([(2, "n2")], "n3", True),
        ([(0, "n1")], "n3", False),
        ([(0, "")], "n3", False),
    ],
)
def test_a_node_names_its_own_ranks_and_those_of_this_one(named: list[tuple[int, str]], by: str, fits: bool) -> None:
    node = Node()
    change = {**culprits(*named), "found_by": by}
    if fits:
        assert node.send(change, by=peer(by)) == 1
        return
    with pytest.raises(PrivilegeError):
        node.send(change, by=peer(by))
    assert node.taken == []
    assert node.received.refused == 1
    assert by in node.received.problems[0]


@pytest.mark.parametrize(
    ("by", "says", "counts_as"),
    [
        (peer("n1"), "n1", "n1"),
        # The certificate says who it is.
        (peer("n1"), "n3", "n1"),
        (peer("n1"), "n2", "n1"),
        (peer("n1", "n1.example.org"), "n1", "n1"),
        (peer("-"), "-", None),
        (peer("-"), "n1", None),
        (peer("other"), "n1", None),
        # A certificate that all nodes share does not say which of them calls, so the row does.
        (peer("n1", "n2", "n3"), "n3", "n3"),
        (peer("n1", "n2", "n3"), "-", None),
        # Without certificates nothing proves it.
        (PLAIN, "n1", "n1"),
        (PLAIN, "-", None),
        (PLAIN, "n2", None),
        (PLAIN, "other", None),
    ],
    ids=str,
)
def test_the_finder_is_who_the_connection_proves(by: Caller, says: str, counts_as: str | None) -> None:
    node = Node()
    if counts_as is None:
        with pytest.raises(PrivilegeError):
            node.send({"found_by": says}, by=by)
        assert node.taken == []
    else:
        node.send({"found_by": says}, by=by)
        assert [row["found_by"] for row in node.taken] == [counts_as]
    assert bool(node.received.detail) == (by is PLAIN and counts_as is not None)


def test_what_is_refused_is_shown_without_control_characters() -> None:
    node = Node()
    with pytest.raises(PrivilegeError):
        node.send(culprits((7, "\x1b[2J")))
    assert node.received.problems[0].isprintable()


def test_who_is_known_by_a_certificate_shows_it() -> None:
    node = Node()
    node.certified = "n1"
    with pytest.raises(PrivilegeError):
        node.send({})
    node.send({}, by=peer("n1"))
    node.send({**culprits((4, "n3")), "found_by": "n3"})
    assert [row["found_by"] for row in node.taken] == ["n1", "n3"]


def test_a_node_sends_some_findings_an_hour() -> None:
    node = Node()
    for _ in range(AT_ONCE):
        node.send({}, by=peer("n1"))
    for _ in range(9):
        with pytest.raises(Overloaded):
            node.send({}, by=peer("n1"))
    assert (len(node.taken), node.received.refused) == (AT_ONCE, 9)
    assert "n1" in node.received.problems[0]
    # Others have their own number, and it has so many again later.
    node.send({**culprits((4, "n3")), "found_by": "n3"}, by=peer("n3"))
    node.now = 3600 / ROWS_AN_HOUR + 1
    node.send({}, by=peer("n1"))
    assert node.received.problems == []


@pytest.mark.parametrize(
    "change",
    [
        {"node": "n1"},
        {"ts": 7},
        {"more": 1},
        {"job": None},
        {"state": "perhaps"},
        {"severity": "fatal"},
        {"opened": None},
        {"opened": "x"},
        {"opened": 1 << 63},
        {"confidence": "high"},
        {"stacks": "{}"},
        {"stacks": "["},
        {"stacks": None},
        {"stacks": "[" * 100_000},
        {"stacks": "[1]"},
        {"stacks": '[{"rank": 1}]'},
        {"culprits": '[{"rank": "1", "node": "n1"}]'},
        {"culprits": '[{"rank": 1, "node": 1}]'},
        {"culprits": json.dumps([{"rank": 1, "node": "n" * 256}])},
        {"ranks": "0"},
        {"ranks": "2,3"},
        {"ranks": "x"},
        {"ranks": None},
        {"nodes": "n1"},
        {"victims": "0,x"},
        {"victims": ",".join(["0"] * 513)},
        {"evidence": json.dumps(["x" * 300_000])},
        {"sentence": 7},
        {"job": "x" * 5000},
    ],
)
def test_what_is_no_row_is_refused(change: Mapping[str, Any]) -> None:
    node = Node()
    with pytest.raises(UsageError):
        node.send(change)
    assert node.taken == []


def test_stacks_are_of_nodes_that_take_part() -> None:
    node = Node()
    node.send({"stacks": json.dumps([{"rank": 0, "node": "n1"}, {"rank": 4, "node": "n3"}])})
    with pytest.raises(PrivilegeError):
        node.send({"stacks": json.dumps([{"rank": 0, "node": "n7"}])})


@pytest.mark.parametrize("text", [b"", b"{", b"\xff", b"[" * 100_000, b"[NaN" * 9])
def test_what_is_no_json_is_refused(text: bytes) -> None:
    with pytest.raises(FormatError):
        Node().received.take(text, PLAIN)


def test_too_many_rows_are_refused() -> None:
    with pytest.raises(UsageError):
        Node().send(*[{}] * 17)


COLUMNS = [name for name in table_named("diagnosis.findings").physical.names if name not in ("node", "ts")]
VALUES = st.none() | st.integers() | st.floats() | st.text() | st.lists(st.none()) | st.booleans()


@given(st.lists(st.dictionaries(st.sampled_from(COLUMNS), VALUES)))
def test_any_rows_are_taken_or_refused(changes: list[dict[str, Any]]) -> None:
    node = Node()
    try:
        node.send(*changes)
    except (UsageError, FormatError, PrivilegeError):
        assert node.taken == []
    assert all(isinstance(row["job"], str) and row["state"] in ("open", "closed") for row in node.taken)
