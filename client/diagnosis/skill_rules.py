"""Rules of a skill of Probing: clauses about the rows of a step, joined by ``|``, all of which must hold.

::

    step:ID | rows >= 2 | column:NAME | max/min(ratio) > 1.5

of a step ``rows OP NUMBER``; of a column ``value OP NUMBER`` and ``value = TEXT`` (of the first row), ``max > NUMBER``,
``avg >``, ``top >``, ``max/min(ratio) >``, ``ratio(A/B) >`` (of the first row), ``last > N * avg(B)``,
``any_contains('a', 'b')``; and ``top(row).NAME > N * median(NAME)``. A number may be a product.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean, median

from probing.client.render.rows import Row

__all__ = ("Condition", "condition_of")

Condition = Callable[[Mapping[str, Sequence[Row]]], bool]
"""Whether a rule holds for the rows of the steps that have run, by step. A step that has not run fulfils no rule."""
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


def condition_of(when: str) -> Condition:
    """Returns the condition that ``when`` describes; its templates are filled in. Raises ValueError for other text."""
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
    """Returns the function that computes ``what`` of rows; its value is None where the column has no number."""
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
    """Returns a product of numbers."""
    return math.prod(float(part) for part in text.split("*"))
