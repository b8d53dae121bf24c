"""No command says that something is not there, or that all is well, where its question was not answered.

What a command claims where nothing is there is read from its answer of nodes without rows; then each thing that it asks
fails in turn: a table, a call, a node of three.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from client_fake_node import FakeNode
from diagnosis_cases import facts as no_facts

from probing.api.errors import PeerError, PrivilegeError, ProbingError, QueryTimeout
from probing.api.tables import TABLES
from probing.diagnosis.facts import Facts, NodeFacts
from probing.diagnosis.facts_file import to_json

Run = Callable[..., tuple[int, str, str]]
_COMMANDS = (
    *("ps", "ps --ended", "events", "top --once", "nccl", "diagnose", "diagnose --history", "balance", "logs", "rdma"),
    *("net", "net --local", "gpu", "health", "memory", "topo", "ranks check", "stacks", "profile", "query SELECT_OPS"),
    *("preflight", "flamegraph -F folded", "timeline --job nobody -o nobody.pftrace"),
)
_FAILURES: dict[str, ProbingError] = {
    "the collector is gone": PeerError("the collector does not answer", hint="`probingctl status` says why"),
    "no SQL worker in time": QueryTimeout("the query did not end in time"),
    "no permission": PrivilegeError("permission denied", hint="`usermod -aG probing USER`"),
}
# Sentences about what is not there.
_CLAIM = re.compile(
    r"^\(.*\)$|\bno (rows|rank|RDMA|TCP|job|training|process|step|collective|line|GPU)\b"
    r"|\bnothing (is|was|went|prevents)\b|\bwork is even\b|\b0 rows\b"
)
_TRUE = re.compile("on the nodes that answered|of the nodes that answered")


def _words(command: str) -> list[str]:
    return [word.replace("SELECT_OPS", "SELECT * FROM comm.ops") for word in command.split()]


def _claims(text: str) -> set[str]:
    return {line for line in text.splitlines() if _CLAIM.search(line) and not _TRUE.search(line)}


def _idle(node: str) -> bytes:
    taken = no_facts().taken_ns
    return to_json(Facts("", "", None, 10.0, taken, (NodeFacts(node, taken),), ()))


@pytest.fixture
def three(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[FakeNode]]:
    """Three nodes without a row; the first is the target."""
    nodes = [FakeNode(tmp_path, name) for name in ("alpha", "beta", "gamma")]
    for node in nodes:
        node.hardware = _idle(node.name)
        node.settings["logs.enabled"] = "true"
    monkeypatch.setenv("PROBING_TARGET", nodes[0].address)
    yield nodes
    for node in nodes:
        node.stop()


def _tables_in(asked: list[str]) -> list[str]:
    text = " ".join(asked).replace('"', "").lower()
    return [name for name in TABLES if name in text]


@pytest.mark.parametrize("command", _COMMANDS)
def test_a_failure_is_no_absence(command: str, three: list[FakeNode], ctl: Run) -> None:
    words = _words(command)
    node = three[0]
    code, out, _ = ctl(*words)
    claims = _claims(out)
    assert claims or code != 0, out
    tables = _tables_in(node.asked)
    for what, error in _FAILURES.items():
        # Each table that it reads, one at a time, and all that it asks.
        for broken in (*({name: error} for name in tables), dict.fromkeys((*TABLES, "calls"), error)):
            node.broken = broken
            code, out, err = ctl(*words)
            assert not _claims(out), (what, list(broken)[:1], out)
            assert code != 0 or error.message in out + err, (what, list(broken)[:1], out, err)
    node.broken = {}


@pytest.mark.parametrize("command", _COMMANDS)
def test_one_node_of_three_is_no_absence(command: str, three: list[FakeNode], ctl: Run) -> None:
    words = [*_words(command), "--nodes", ",".join(node.address for node in three)]
    assert ctl(*words)[0] in (0, 1)
    three[2].stop()
    code, out, err = ctl(*words)
    if command == "preflight":
        assert ("nothing prevents" in out, code) == (False, 3)
    else:
        assert not {line for line in _claims(out) if "alpha" not in line and "beta" not in line}, out
        assert code == 4, (code, out, err)
    assert "gamma" in out + err
