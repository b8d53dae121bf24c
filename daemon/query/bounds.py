"""Bounds the size of what a short expression can produce, and checks functions that are named by a string.

DuckDB checks deadlines and memory between vectors, so one huge scalar call escapes both: ``repeat('x', 4000000000)``
under a memory limit of 200 MB took 7.7 GiB and 32 s (DuckDB 2.0.0). Such calls must have literal sizes.
"""

from __future__ import annotations

import re

from sqlglot import exp

from probing.api.errors import QueryRejected
from probing.daemon.query.allowed import AGGREGATES

__all__ = ("check_sizes",)

MAX_STRING = 100_000
MAX_SERIES = 1_000_000
# Widths such as %9999d or {:>9999}. A star or a nested brace takes the width from an argument.
_WIDE = re.compile(r"\d{4,}|\*|\{[^}]*\{")
_BY_NAME = frozenset(("list_aggr", "list_aggregate"))
_TIME_STEPS = frozenset(("SECOND", "MINUTE", "HOUR", "DAY", "WEEK", "MONTH", "QUARTER", "YEAR"))


def check_sizes(root: exp.Expr) -> None:
    """Raises QueryRejected for a size that is too large or not a literal, and for a name of no allowed function."""
    for node in root.find_all(exp.Repeat, exp.Pad, exp.GenerateSeries, exp.Format, exp.Anonymous, exp.DataTypeParam):
        if isinstance(node, exp.Repeat):
            _check_repeat(node)
        elif isinstance(node, exp.Pad):
            if not 0 <= _integer(node.expression, "the length given to lpad and rpad") <= MAX_STRING:
                raise _too_large("lpad and rpad", MAX_STRING)
        elif isinstance(node, exp.GenerateSeries):
            _check_series(node)
        elif isinstance(node, exp.DataTypeParam):
            _integer(node.this, "the parameter of a type")
        elif isinstance(node, exp.Format) or node.name.lower() == "printf":
            template = node.this if isinstance(node, exp.Format) else next(iter(node.expressions), None)
            _check_template(template)
        elif isinstance(node, exp.Anonymous) and node.name.lower() in _BY_NAME:
            _check_aggregate(node)


def _check_repeat(node: exp.Repeat) -> None:
    times = _integer(node.args.get("times"), "the count given to repeat")
    if not (isinstance(node.this, exp.Literal) and node.this.is_string):
        raise QueryRejected("repeat takes a literal text", hint="write the text itself, as in repeat('#', 10)")
    if max(times, 0) * len(node.this.name) > MAX_STRING:
        raise _too_large("repeat", MAX_STRING)


def _check_series(node: exp.GenerateSeries) -> None:
    step = node.args.get("step")
    if isinstance(step, exp.Interval):
        _check_time_series(node, step)
        return
    start = _integer(node.args.get("start"), "an argument of range and generate_series")
    end = _integer(node.args.get("end"), "an argument of range and generate_series")
    width = 1 if step is None else abs(_integer(step, "an argument of range and generate_series"))
    if width == 0 or abs(end - start) // width > MAX_SERIES:
        raise _too_large("range and generate_series", MAX_SERIES)


def _check_time_series(node: exp.GenerateSeries, step: exp.Interval) -> None:
    """Accepts a series of times in FROM, where DuckDB streams it and a deadline stops it, in steps of 1 s or more."""
    if not isinstance(node.parent, exp.Table):
        raise QueryRejected("a series of times belongs in FROM")
    if not isinstance(step.this, exp.Literal) or not step.this.name.isdigit():
        raise QueryRejected("the step of a series of times is a literal", hint="write it as in INTERVAL 1 MINUTE")
    if step.text("unit").upper().rstrip("S") not in _TIME_STEPS or int(step.this.name) < 1:
        raise QueryRejected("the step of a series of times is a second at least")


def _check_template(template: exp.Expr | None) -> None:
    if not (isinstance(template, exp.Literal) and template.is_string):
        raise QueryRejected("format and printf take a literal format")
    if _WIDE.search(template.name):
        raise QueryRejected("a width in the format is too large or is no literal", hint="use at most three digits")


def _check_aggregate(node: exp.Anonymous) -> None:
    name = node.expressions[1] if len(node.expressions) > 1 else None
    if not (isinstance(name, exp.Literal) and name.is_string and name.name.lower() in AGGREGATES):
        hint = f"write one of {', '.join(sorted(AGGREGATES))}"
        raise QueryRejected(f"{node.name.lower()} takes the name of an aggregate", hint=hint)


def _integer(node: exp.Expr | None, what: str) -> int:
    negative = isinstance(node, exp.Neg)
    literal = node.this if isinstance(node, exp.Neg) else node
    if isinstance(literal, exp.Literal) and not literal.is_string and literal.name.isdigit() and len(literal.name) < 19:
        return -int(literal.name) if negative else int(literal.name)
    raise QueryRejected(f"{what} is a literal integer", hint="write the number itself")


def _too_large(what: str, limit: int) -> QueryRejected:
    return QueryRejected(f"{what}: more than {limit}", hint="ask for less")
