"""The ladder: order, isolation of rules."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from diagnosis_cases import ago, elsewhere, facts, in_collective, rank

from probing.diagnosis.case import Case
from probing.diagnosis.facts import Facts, Missing
from probing.diagnosis.ladder import diagnose
from probing.diagnosis.verdict import ERROR, WARNING, Finding, Verdict


class _Gives:
    def __init__(self, name: str, severity: str, confidence: float = 1.0) -> None:
        self.VERDICTS = (Verdict(name, "hang", name, "", "", "", "", ()),)
        self.severity, self.confidence = severity, confidence

    def find(self, case: Case) -> Iterator[Finding]:
        yield Finding(self.VERDICTS[0], self.severity, self.confidence, "a sentence")


class _Fails(_Gives):
    def find(self, case: Case) -> Iterator[Finding]:
        yield Finding(self.VERDICTS[0], self.severity, self.confidence, "before it failed")
        raise ZeroDivisionError


FACTS = Facts("j", "r", 2, 10.0, 0, (), ())


def test_the_worst_finding_comes_first() -> None:
    found = diagnose(FACTS, (_Gives("a", WARNING), _Gives("b", ERROR, 0.5), _Gives("c", ERROR, 0.9)))
    assert [f.verdict.id for f in found.findings] == ["c", "b", "a"]


def test_a_rule_that_fails_is_named_and_the_others_answer() -> None:
    found = diagnose(FACTS, (_Fails("bad", ERROR), _Gives("good", WARNING)))
    assert [f.verdict.id for f in found.findings] == ["good"]
    assert [m.text for m in found.missing] == ["rule bad failed: ZeroDivisionError"]


def test_while_a_node_does_not_answer_findings_are_less_sure_and_name_it() -> None:
    rules = (_Gives("a", ERROR, 0.95), _Gives("b", ERROR, 0.5))
    silent = Missing("node", "node n9 did not answer: it is down", node="n9")
    found = diagnose(replace(FACTS, missing=(silent, Missing("stacks", "none"))), rules)
    assert [(f.verdict.id, f.confidence, f.missing) for f in found.findings] == [
        ("a", 0.8, (silent.text,)),
        ("b", 0.5, (silent.text,)),
    ]


@pytest.mark.parametrize(("wait", "elsewhere_since", "ripens"), [(4, 9, 6), (13, 9, 1), (13, 11, None)])
def test_a_wait_ripens_when_the_ranks_that_it_waits_for_have_stood_still_as_long(
    wait: float, elsewhere_since: float, ripens: float | None
) -> None:
    waits = rank(0, stack=in_collective("init_process_group", since_ns=ago(wait)))
    other = rank(1, stack=elsewhere(since_ns=ago(elsewhere_since)))
    found = diagnose(facts(waits, other, comms=[])).ripens_ns
    assert found == (None if ripens is None else ripens * 10**9)
