"""The rule of docs/adding.md: one file and one line bring it into the ladder, the answer and the vocabulary."""

from __future__ import annotations

from pathlib import Path

from toy_rule import many_threads

from probing.diagnosis.facts import Condition, Facts, Rank
from probing.diagnosis.ladder import RULES, diagnose
from probing.diagnosis.report import as_dict
from probing.diagnosis.vocabulary import page, verdicts

ADDING = Path(__file__).resolve().parents[3] / "docs" / "adding.md"


def facts(*threads: int) -> Facts:
    ranks = (Rank(n, "a", 100 + n, 7, condition=Condition(threads=count)) for n, count in enumerate(threads))
    return Facts("j", "r", len(threads), 10.0, 0, (), tuple(ranks))


def test_a_toy_rule_is_one_file_and_one_line() -> None:
    rules = (*RULES, many_threads)
    (found,) = diagnose(facts(5, 7, 61), rules).findings
    assert (found.verdict.id, [culprit.rank for culprit in found.culprits]) == ("many_threads", [2])
    assert as_dict(diagnose(facts(5, 7, 61), rules))["others"][0]["verdict"] == "many_threads"
    assert diagnose(facts(5, 7, 11), rules).findings == ()
    assert {v.id for v in verdicts(rules)} - {v.id for v in verdicts()} == {"many_threads"}
    assert "### many_threads\nA rank has many more threads than the others.\n" in page(rules)


def test_the_page_shows_the_toy_rule() -> None:
    shown = ADDING.read_text().partition("## A rule")[2].partition("```python\n")[2].partition("```")[0]
    source = Path(many_threads.__file__).read_text()
    assert shown
    for part in shown.split("...\n"):
        assert part.strip() in source
