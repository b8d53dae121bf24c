"""Parts of the page's server: rates, names of hosts, parameters, contracts, numbers, trees of frames."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from fakes import Now
from hypothesis import given
from hypothesis import strategies as st

from probing.api.errors import (
    InternalError,
    NotFound,
    NotPython,
    Overloaded,
    PeerError,
    PrivilegeError,
    ProbingError,
    QueryRejected,
    QueryTimeout,
    Unauthenticated,
    UsageError,
)
from probing.client.profile.model import Frame, Profile, Sample
from probing.client.top.fetch import questions, statements
from probing.client.web.answers import contract_of, encoded, error_body, status_of
from probing.client.web.flames import _tree
from probing.client.web.guard import Rate, host_of
from probing.client.web.panels import Question
from probing.client.web.parameters import Parameters
from probing.client.web.sql import _exact
from probing.federation.execution.answer import Answered, Failed, Gathered
from probing.federation.execution.clocks import Clocks, Offset


def test_a_rate_admits_a_burst_and_then_as_many_as_it_says() -> None:
    now = Now(0.0)
    rate = Rate(burst=3, a_second=0.5, now=now)
    assert [rate.take("a") for _ in range(5)] == [True] * 3 + [False] * 2
    assert rate.take("b")
    now.now = 1.9
    assert not rate.take("a")
    now.now = 2.0
    assert [rate.take("a") for _ in range(2)] == [True, False]


def test_a_rate_remembers_a_bounded_number_of_keys() -> None:
    rate = Rate(burst=1, a_second=0.0, now=Now(0.0))
    assert rate.take("first")
    for n in range(Rate._MOST):
        rate.take(str(n))
    assert rate.take("first")
    assert not rate.take(str(Rate._MOST - 1))


@pytest.mark.parametrize(
    ("header", "name"),
    [
        ("127.0.0.1:7088", "127.0.0.1"),
        ("LocalHost", "localhost"),
        ("[::1]:7088", "[::1]"),
        ("[::1]", "[::1]"),
        ("evil.example:80", "evil.example"),
        ("127.0.0.1:80@evil.example", "127.0.0.1"),
        ("", ""),
    ],
)
def test_the_name_of_a_host(header: str, name: str) -> None:
    assert host_of(header) == name


@pytest.mark.parametrize("text", ["-1", "1.5", "٣", "1e3", "x" * 5000, "1234567890"])
def test_what_is_no_number_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        Parameters({"rank": text}).number("rank")


def test_parameters_have_defaults_and_names_in_their_errors() -> None:
    given = Parameters({"rank": "7", "native": "1"})
    assert (given.number("rank"), given.number("other")) == (7, None)
    assert (given.flag("native"), given.flag("locals")) == (True, False)
    with pytest.raises(UsageError, match="job"):
        given.text("job")
    with pytest.raises(UsageError):
        Parameters({"native": "yes"}).flag("native")


def test_a_job_of_the_live_view_is_asked_of_no_node() -> None:
    asks_nobody: Any = None
    assert Question(asks_nobody, Parameters({"job": "llm-7b"}), {"llm-7b"}).job_or_all() == "llm-7b"
    assert Question(asks_nobody, Parameters({}), {"llm-7b"}).job_or_all() is None
    with pytest.raises(AttributeError):
        Question(asks_nobody, Parameters({"job": "llm"}), {"llm-7b"}).job()


def test_a_body_has_texts_numbers_and_truth_values() -> None:
    given = Parameters.of_json({"sql": "SELECT 1", "all_nodes": True, "rank": 3})
    assert (given.text("sql"), given.flag("all_nodes"), given.number("rank")) == ("SELECT 1", True, 3)
    with pytest.raises(UsageError, match="half a surrogate pair"):
        Parameters.of_json({"sql": "SELECT '\ud800'"}).text("sql")
    for value in (None, [1], {"a": 1}):
        with pytest.raises(UsageError):
            Parameters.of_json({"sql": value})


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (UsageError("x"), 400),
        (Unauthenticated("x"), 401),
        (PrivilegeError("x"), 403),
        (NotFound("x"), 404),
        (QueryRejected("x"), 400),
        (QueryTimeout("x"), 504),
        (Overloaded("x"), 429),
        (PeerError("x"), 502),
        (NotPython("x"), 502),
        (InternalError("x"), 500),
        (ProbingError("x"), 500),
    ],
)
def test_each_error_has_a_status(error: ProbingError, status: int) -> None:
    assert status_of(error) == status
    assert error_body(error) == {"error": "x", "hint": error.hint, "code": error.kind}


def test_a_contract_counts_nodes_and_names_those_that_failed() -> None:
    clocks = Clocks()
    for node, ahead in (("a", 5_000_000_000), ("b", 0)):
        clocks.add(node, Offset(ahead, 1_000_000), 0)
    first: Gathered[int] = Gathered(("x:1", "x:2", "x:3"))
    first.answered += [Answered("x:1", "a", 1), Answered("x:2", "b", 2), Answered("x:3", "c", 3)]
    second: Gathered[int] = Gathered(("x:1", "x:3"))
    second.failed.append(Failed("x:3", "c", PeerError("it is gone")))
    cluster: Any = SimpleNamespace(outcomes=[first, second], clocks=clocks)
    contract = contract_of(cluster, 17, [{"node": "a", "error": "pid 7: gone"}])
    assert (contract["asked"], contract["answered"], contract["lost_rows"]) == (3, 2, 17)
    assert contract["failures"] == [{"node": "c", "error": "it is gone"}, {"node": "a", "error": "pid 7: gone"}]
    assert contract["clock_error_ns"] is not None
    assert contract["clock_error_ns"] >= 5_000_000_000


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
        lambda c: st.lists(c) | st.dictionaries(st.text(), c),
    )
)
def test_any_answer_is_json_in_ascii(value: Any) -> None:
    text = encoded(value)
    assert text.isascii()
    json.loads(text, parse_constant=lambda name: pytest.fail(name))


def test_numbers_that_a_browser_lacks_are_texts() -> None:
    table = pa.table(
        {
            "large": pa.array([2**53, 2**53 + 1, -(2**63)]),
            "real": pa.array([1.5, float("nan"), float("-inf")]),
            "flag": pa.array([True, None, False]),
            "list": pa.array([[1], [2**60], []]),
        }
    )
    shown = [list(_exact(column.to_pylist(), column)) for column in table.columns]
    assert shown == [
        [2**53, str(2**53 + 1), str(-(2**63))],
        [1.5, "NaN", "-Infinity"],
        [True, None, False],
        [[1], [str(2**60)], []],
    ]


def profile(*stacks: tuple[str, int, str]) -> Profile:
    """Samples by frames, outermost first, with their ns and rank."""
    samples = tuple(
        Sample(tuple(Frame(name, "t.py") for name in frames), ns, 1, (("rank", rank),)) for frames, ns, rank in stacks
    )
    return Profile("job x", "cpu", samples)


def test_a_tree_of_frames_adds_up() -> None:
    tree = _tree([profile(("ab", 600, "0"), ("ab", 300, "1"), ("ac", 97, "2"), ("ad", 0, "3"))], by_rank=True)
    assert (tree["value"], tree["seen"]) == (997, [4])
    (a,) = tree["children"]
    assert (a["value"], a["ranks"]) == (997, "0-3")
    assert [(child["name"], child["value"], child["ranks"]) for child in a["children"]] == [
        ("b (t.py)", 900, "0-1"),
        ("c (t.py)", 97, "2"),
    ]


def test_two_profiles_are_one_tree() -> None:
    tree = _tree([profile(("ab", 7, "0")), profile(("ac", 11, "1"))])
    (a,) = tree["children"]
    assert (a["value"], a["base"]) == (7, 11)
    assert {(child["name"], child["value"], child["base"]) for child in a["children"]} == {
        ("b (t.py)", 7, 0),
        ("c (t.py)", 0, 11),
    }


def test_a_tree_of_many_frames_is_cut() -> None:
    stacks = [("a" + chr(0x4E00 + n % 20_000) + chr(0x4E00 + n // 5_000), 1, "0") for n in range(30_000)]
    tree = _tree([profile(*stacks)])
    assert tree["value"] == 30_000
    assert len(tree["children"][0]["children"]) <= 20_000


def test_a_calm_view_asks_for_findings_each_time_and_for_figures_every_third() -> None:
    asked = questions("true", calm=True)
    tables = {question.table for question in asked.values() if question.table}
    turns = [statements(asked, turn, tables, new=turn <= 1) for turn in range(2, 32)]
    counts = {name: sum(name in turn for turn in turns) for name in asked}
    assert {name for name, count in counts.items() if count == 30} == {"progress", "inflight", "findings"}
    assert {name for name, count in counts.items() if count == 10} == {
        "ranks",
        "steps",
        "phases",
        "cpu",
        "gpus",
        "gpu_processes",
    }
    # What depends on a table is asked once it is known, with its history.
    assert {"cpu", "gpus", "gpu_processes"} <= statements(asked, 1, tables, new=True).keys()
