"""The vocabulary: each verdict says all, each situation is recognised, and the page is that of the code."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

from probing.diagnosis.ladder import RULES
from probing.diagnosis.verdict import Verdict
from probing.diagnosis.vocabulary import GENERAL, SITUATIONS, Situation, page, verdicts

ROOT = Path(__file__).resolve().parents[3]
GROUPS = {"hang", "slow", "death", "memory", "numbers", "hardware", "general"}


@cache
def functions_of_tests() -> frozenset[str]:
    paths = (ROOT / "tests").rglob("test_*.py")
    return frozenset(name for path in paths for name in re.findall(r"^ *def (test_\w+)", path.read_text(), re.M))


@pytest.mark.parametrize("verdict", verdicts(), ids=lambda verdict: verdict.id)
def test_each_verdict_says_all_of_itself(verdict: Verdict) -> None:
    assert verdict.id.isidentifier()
    assert verdict.id.islower()
    assert verdict.group in GROUPS
    for text in (verdict.title, verdict.rule, verdict.evidence, verdict.confidence, verdict.refuted_by):
        assert text.strip() == text != ""
    assert not verdict.title.endswith(".")
    assert set(verdict.situations) <= {situation.id for situation in SITUATIONS}
    if verdict not in GENERAL:
        assert verdict.next_steps
        assert verdict.tests
    assert set(verdict.tests) <= functions_of_tests()


def test_no_two_rules_give_one_verdict_two_meanings() -> None:
    given = {verdict for rule in RULES for verdict in rule.VERDICTS}
    assert len({verdict.id for verdict in given}) == len(given)


def test_ids_of_situations_are_unique() -> None:
    assert len({situation.id for situation in SITUATIONS}) == len(SITUATIONS)


@pytest.mark.parametrize("situation", SITUATIONS, ids=lambda situation: situation.id)
def test_each_situation_is_recognised_by_a_verdict_or_says_by_what(situation: Situation) -> None:
    recognised = {name for verdict in verdicts() for name in verdict.situations}
    assert situation.id in recognised or situation.shown_by


def test_the_page_is_that_of_the_code() -> None:
    assert (ROOT / "docs" / "verdicts.md").read_text() == page(), "run `make docs`"


def test_the_page_has_each_verdict_and_each_situation() -> None:
    lines = page().split("\n")
    assert [line[4:] for line in lines if line.startswith("### ")] == [verdict.id for verdict in in_order()]
    assert {line[2:].partition(" | ")[0] for line in lines} >= {situation.text for situation in SITUATIONS}


def in_order() -> list[Verdict]:
    groups = ["hang", "death", "slow", "memory", "numbers", "hardware", "general"]
    return sorted(verdicts(), key=lambda verdict: groups.index(verdict.group))
