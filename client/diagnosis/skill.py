"""``diagnose --skill``: runs the SQL steps of a skill of Probing, then its rules over the rows.

A rule consists of clauses about the rows of a step, joined by ``|``, and applies if all clauses hold:

::

    step:ID | rows >= 2 | column:NAME | max/min(ratio) > 1.5

Clauses about a step: ``rows OP NUMBER``. Clauses about a column: ``value OP NUMBER`` and ``value = TEXT`` (of the first
row), ``max > NUMBER``, ``avg >``, ``top >``, ``max/min(ratio) >``, ``ratio(A/B) >`` (of the first row), ``last > N *
avg(B)``, ``any_contains('a', 'b')``. Another clause is ``top(row).NAME > N * median(NAME)``. A number may be a product.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

from probing.api.errors import FormatError, NotFound, PeerError, ProbingError, UsageError
from probing.api.text import escape
from probing.client.absence import claim
from probing.client.diagnosis.skill_file import Skill, Step, load_skill, templated, values_of
from probing.client.jobs import silent_nodes
from probing.client.render.output import write_objects
from probing.client.render.rows import Row, rows_of
from probing.client.render.table import Field, render, show_value, terminal_width, wrapped
from probing.client.settings import Settings

if TYPE_CHECKING:
    from probing.client.cluster import Cluster

__all__ = (
    "condition_of",
    "run_skill",
)

_Condition = Callable[[Mapping[str, Sequence[Row]]], bool]
"""Returns whether a rule holds, given the rows of each step that has run, by step id. A rule about a step that has not
run does not hold."""
_Clause = Callable[[Sequence[Row]], bool]
_OPERATORS: dict[str, Callable[[float, float], bool]] = {
    "==": operator.eq,
    ">=": operator.ge,
    "<=": operator.le,
    ">": operator.gt,
    "<": operator.lt,
}
_COMPARED = re.compile(r"([\w/()]+) ?(==|>=|<=|>|<) ?([-\d.e+* ]+)", re.ASCII)
_RATIO = re.compile(r"ratio\((\w+) ?/ ?(\w+)\)", re.ASCII)
_LAST = re.compile(r"last > ?([\d.]+) ?\* ?avg\((\w+)\)", re.ASCII)
_TOP = re.compile(r"top\(row\)\.(\w+) > ?([\d.]+) ?\* ?median\((\w+)\)", re.ASCII)
_CONTAINS = re.compile(r"any_contains\((.+)\)")


def condition_of(when: str) -> _Condition:
    """Returns the condition that ``when`` describes. The caller has already replaced templates in ``when``. Raises
    ValueError if ``when`` cannot be read.
    """
    step, *clauses = [part.strip() for part in when.split("|")]
    if step == "always" and not clauses:
        return lambda _: True
    if not step.startswith("step:"):
        raise ValueError(f"{when!r:.80} names no step")
    name = step.removeprefix("step:").strip()
    checks = list(_clauses(clauses))
    return lambda steps: name in steps and all(check(steps[name]) for check in checks)


def _clauses(parts: Sequence[str]) -> Sequence[_Clause]:
    found: list[_Clause] = []
    waiting = iter(parts)
    for part in waiting:
        if part.startswith("column:"):
            found.append(_of_column(part.removeprefix("column:").strip(), next(waiting, "")))
        elif part != "always":
            found.append(_of_rows(part))
    return found


def _of_rows(part: str) -> _Clause:
    if match := _TOP.fullmatch(part):
        top, factor, own = match[1], _number(match[2]), match[3]

        def exceeds(rows: Sequence[Row]) -> bool:
            values, others = _numbers(rows, top), _numbers(rows, own)
            return len(rows) >= 2 and bool(values) and bool(others) and max(values) > factor * median(others)

        return exceeds
    match = _COMPARED.fullmatch(part)
    if match is None or match[1] != "rows":
        raise ValueError(f"{part!r:.80} is not understood")
    compare, bound = _OPERATORS[match[2]], _number(match[3])
    return lambda rows: compare(len(rows), bound)


def _of_column(name: str, part: str) -> _Clause:
    if match := _CONTAINS.fullmatch(part):
        wanted = [word.strip().strip("'\"").lower() for word in match[1].split(",")]
        return lambda rows: any(word in text.lower() for text in _texts(rows, name) for word in wanted)
    if match := _LAST.fullmatch(part):
        factor, column = _number(match[1]), match[2]
        return lambda rows: bool(own := _numbers(rows, column)) and own[-1] > factor * fmean(own)
    if part.startswith("value = "):
        expected = part.removeprefix("value = ").strip().strip("'\"")
        return lambda rows: _texts(rows[:1], name) == [expected]
    if (match := _COMPARED.fullmatch(part)) is None:
        raise ValueError(f"{part!r:.80} is not understood")
    value = _value(name, match[1])
    compare, bound = _OPERATORS[match[2]], _number(match[3])
    return lambda rows: (found := value(rows)) is not None and compare(found, bound)


def _value(name: str, what: str) -> Callable[[Sequence[Row]], float | None]:
    """Returns a function that computes ``what`` from rows. That function returns None if the column has no number."""
    if match := _RATIO.fullmatch(what):
        part, whole = match[1], match[2]
        return lambda rows: _quotient(_first(rows, part), _first(rows, whole))
    if what == "max/min(ratio)":
        return lambda rows: _spread(_numbers(rows, name))
    if what == "value":
        return lambda rows: _first(rows, name)
    if what in ("max", "top"):
        return lambda rows: max(_numbers(rows, name), default=None)
    if what == "avg":
        return lambda rows: fmean(own) if (own := _numbers(rows, name)) else None
    raise ValueError(f"{what!r:.80} is not understood")


def _first(rows: Sequence[Row], name: str) -> float | None:
    return next(iter(_numbers(rows[:1], name)), None)


def _quotient(part: float | None, whole: float | None) -> float | None:
    return part / whole if part is not None and whole else None


def _spread(values: Sequence[float]) -> float | None:
    if len(values) < 2:
        return None
    return max(values) / min(values) if min(values) > 0 else math.inf


def _numbers(rows: Sequence[Row], name: str) -> list[float]:
    found = []
    for row in rows:
        value = row.get(name)
        if isinstance(value, str):
            try:
                value = float(value)
            except ValueError:
                continue
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            found.append(float(value))
    return found


def _texts(rows: Sequence[Row], name: str) -> list[str]:
    return ["" if row.get(name) is None else str(row.get(name)) for row in rows]


def _number(text: str) -> float:
    """Returns the value of a text that is a number or a product of numbers."""
    return math.prod(float(part) for part in text.split("*"))


_WRONG, _UNDECIDED = 3, 4
_MOST_ROWS = 1000
_SHOWN_ROWS = 20


def run_skill(settings: Settings, cluster: Cluster, path: Path, job: str | None, given: Sequence[str]) -> int:
    """Writes the answer, and returns the exit code: 3 if a rule of severity error or warning holds, else 4 if a step
    failed or a node did not answer.

    ``given``: parameters as NAME=VALUE; ``job``: the value of the parameter ``job``.
    """
    asked = len(cluster.outcomes)
    skill = load_skill(path)
    values = values_of(skill, _given(skill, job, given), everywhere=len(_addresses(cluster)) > 1)
    rules = _rules(skill, values)
    _require_tables(skill)
    steps: list[Row] = []
    for step in skill.steps:
        steps.append(_run(cluster, step, values))
        if steps[-1]["status"] == "failed" and step.on_empty == "abort":
            break
    rows = {step["id"]: step["rows"] for step in steps if step["status"] in ("ok", "empty")}
    known = {**values, **_cells(steps)}
    findings = [
        {"rule": rule.id, "severity": rule.severity, "message": templated(rule.message, known)}
        for rule, holds in zip(skill.rules, rules, strict=True)
        if holds(rows)
    ]
    answer = {
        "skill": skill.id,
        "title": skill.title,
        "steps": steps,
        "findings": findings,
        "summary": templated(skill.summary, known).strip(),
        "next_steps": list(skill.next_steps),
    }
    width = terminal_width() if settings.output is None else None
    write_objects(settings, answer, _people(answer, width), findings)
    wrong = any(finding["severity"] != "info" for finding in findings)
    unknown = any(step["status"] == "failed" for step in steps) or bool(silent_nodes(cluster, asked))
    return _WRONG if wrong else _UNDECIDED if unknown else 0


def _addresses(cluster: Cluster) -> Sequence[str]:
    return cluster.addresses() if cluster.many else (cluster.target,)


def _given(skill: Skill, job: str | None, given: Sequence[str]) -> dict[str, str]:
    found = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not equals:
            raise UsageError(f"--set {text} is not NAME=VALUE")
        found[name] = value
    if job is not None:
        if all(parameter.name != "job" for parameter in skill.parameters):
            raise UsageError(
                f"the skill {skill.id} has no parameter job", hint="leave --job out: the skill reads all jobs"
            )
        found["job"] = job
    return found


def _rules(skill: Skill, values: Mapping[str, str]) -> list[_Condition]:
    try:
        return [condition_of(templated(rule.when, values)) for rule in skill.rules]
    except ValueError as e:
        raise FormatError(f"a rule of the skill {skill.id} is not understood: {e}", hint="correct its `when`") from None


def _require_tables(skill: Skill) -> None:
    from probing.api.tables import TABLES
    from probing.api.tables.views import VIEWS

    wanted = [table.removeprefix("global.") for table in skill.any_tables]
    # Tables of users' probes are accepted unchecked, because only the nodes know them.
    if wanted and not any(table in TABLES or table in VIEWS or table.startswith("user.") for table in wanted):
        hint = "`probingctl tables` lists the tables of this version"
        raise NotFound(f"the skill {skill.id} needs one of {', '.join(wanted[:8])}", hint=hint)


def _run(cluster: Cluster, step: Step, values: Mapping[str, str]) -> Row:
    """Returns the result of a step: ``status`` is ok, empty, skipped or failed; ``note`` says why."""
    own: Row = {"id": step.id, "title": step.title, "status": "skipped", "note": None, "row_count": 0, "rows": []}
    if step.kind != "sql":
        return {**own, "note": f"steps of type {step.kind} are not run here"}
    if step.when not in ("", "always") and templated(step.when, values) != "true":
        return {**own, "note": f"the step runs only when {step.when}"}
    try:
        table = cluster.query(templated(step.sql, values))
    except PeerError:
        raise
    except ProbingError as e:
        # A node may lack a table; a step whose ``on_empty`` is skip is then skipped.
        return {**own, "status": "skipped" if step.on_empty == "skip" else "failed", "note": e.message}
    own |= {"row_count": table.num_rows, "rows": rows_of(table.slice(0, _MOST_ROWS))}
    if table.num_rows:
        return {**own, "status": "ok"}
    return {**own, "status": "failed" if step.on_empty == "abort" else "empty", "note": step.empty_message or "no rows"}


def _cells(steps: Sequence[Row]) -> dict[str, str]:
    """Returns the values for templates: ``step.column`` and ``column`` from each step's first row, and
    ``step.row_count``.
    """
    found: dict[str, str] = {}
    for step in steps:
        found[f"{step['id']}.row_count"] = str(step["row_count"])
        for name, value in (step["rows"][0] if step["rows"] else {}).items():
            shown = show_value(value)
            found[f"{step['id']}.{name}"] = shown
            found.setdefault(name, shown)
    return found


def _people(answer: Mapping[str, Any], width: int | None) -> str:
    parts = [_lines([f"{answer['title']} ({answer['skill']})"], width)]
    for step in answer["steps"]:
        lines = [step["title"], *([f"  {step['status']}: {step['note']}"] if step["note"] else [])]
        parts.append(_lines(lines, width) + _table(step, width))
    findings = [f"{finding['severity']}: {finding['message']}" for finding in answer["findings"]]
    parts.append(_section("Findings:", findings or [claim("none")], width))
    parts.append(_lines(answer["summary"].splitlines(), width))
    parts.append(_section("Do next:", answer["next_steps"], width))
    return "\n".join(part for part in parts if part)


def _table(step: Row, width: int | None) -> str:
    rows = step["rows"]
    if not rows:
        return ""
    text = render([Field(name, name, flex=True) for name in rows[0]], rows[:_SHOWN_ROWS], width)
    more = step["row_count"] - _SHOWN_ROWS
    return text + (f"({more:,} more rows, in -f json)\n" if more > 0 else "")


def _section(title: str, texts: Sequence[str], width: int | None) -> str:
    return _lines([title, *(f"  - {' '.join(text.split())}" for text in texts)], width) if texts else ""


def _lines(texts: Sequence[str], width: int | None) -> str:
    return "".join(part + "\n" for text in texts for part in wrapped(escape(text), width) or [""])
