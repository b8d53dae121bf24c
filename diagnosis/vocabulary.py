"""The vocabulary: all verdicts, and the page that describes them: ``make docs`` writes docs/verdicts.md."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from probing.diagnosis.activity.kinds import ACTIVITIES
from probing.diagnosis.ladder import RULES, Rule
from probing.diagnosis.situations import SITUATIONS
from probing.diagnosis.verdict import CANNOT_TELL, Verdict

__all__ = ("GENERAL", "page", "verdicts")

GENERAL = (
    Verdict(
        "healthy",
        "general",
        "Nothing is wrong",
        "No rule finds anything in the facts of the job.",
        "None.",
        "1, or 0.5 where ranks or operations are missing from the facts.",
        "A rank that was not seen. The lines under `missing` name what was not.",
        (),
    ),
    CANNOT_TELL,
)
_TITLES = {
    "hang": "Hangs",
    "death": "Deaths",
    "slow": "Slowness",
    "memory": "Memory",
    "numbers": "Numbers",
    "hardware": "Hardware",
    "general": "In general",
}
_HEAD = """# The vocabulary of `diagnose`

Made from the code by `make docs`. The id of a verdict stays the same between versions; `probingctl diagnose -f json`
and `diagnosis.findings` have it. Rules run in the order of the table, causes before symptoms.
"""


def verdicts(rules: Sequence[Rule] = RULES) -> tuple[Verdict, ...]:
    """Returns all verdicts, those of ``rules`` in their order, then the general ones."""
    found = {verdict.id: verdict for rule in rules for verdict in rule.VERDICTS}
    return tuple((found | {verdict.id: verdict for verdict in GENERAL if verdict.id not in found}).values())


def page(rules: Sequence[Rule] = RULES) -> str:
    """Returns docs/verdicts.md."""
    known = verdicts(rules)
    lines = [_HEAD, "| verdict | group | means |", "|---|---|---|"]
    lines += [f"| [`{v.id}`](#{v.id}) | {v.group} | {v.title} |" for v in known]
    for group, title in _TITLES.items():
        having = [verdict for verdict in known if verdict.group == group]
        lines += ["", f"## {title}"] * bool(having)
        lines += [line for verdict in having for line in _section(verdict)]
    return "\n".join([*lines, *_activities(), *_situations(known), ""])


def _section(verdict: Verdict) -> Iterator[str]:
    texts = {situation.id: situation.text for situation in SITUATIONS}
    yield from ("", f"### {verdict.id}", f"{verdict.title}.", "")
    yield f"* **Rule**: {verdict.rule}"
    yield f"* **Evidence**: {verdict.evidence}"
    yield f"* **Confidence**: {verdict.confidence}"
    yield f"* **Refuted by**: {verdict.refuted_by}"
    if verdict.next_steps:
        yield "* **Next steps**:"
        yield from (f"    * {step}" for step in verdict.next_steps)
    if verdict.situations:
        yield "* **Recognises**:"
        yield from (f"    * {texts.get(situation, situation)}" for situation in verdict.situations)
    if verdict.tests:
        yield f"* **Shown by**: {', '.join(f'`{test}`' for test in verdict.tests)}"


def _activities() -> Iterator[str]:
    yield from ("", "## What a rank does", "The `activity` of a culprit; its `why` says the same in a clause.", "")
    yield from ("| activity | means | shown by | next steps |", "|---|---|---|---|")
    for name, kind in ACTIVITIES.items():
        cells = (f"`{name}`", kind.title, kind.shown_by, " ".join(kind.next_steps))
        yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def _situations(known: Sequence[Verdict]) -> Iterator[str]:
    yield from ("", "## Situations", "| situation | verdicts |", "|---|---|")
    for situation in SITUATIONS:
        having = [f"[`{verdict.id}`](#{verdict.id})" for verdict in known if situation.id in verdict.situations]
        yield f"| {situation.text} | {', '.join([*having, *([situation.shown_by] * bool(situation.shown_by))])} |"
