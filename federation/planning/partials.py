"""Aggregates that can be computed in parts: the columns that each node sends, and how they are combined.

Each recipe has the columns that a node sends for one aggregate, as SQL over the node's rows, and the SQL over these
columns (``{0}``, ``{1}``...) that computes the value. A node without rows sends 0 or NULL, which do not change the
value.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sqlglot import exp

from probing.federation.planning.shapes import Unsplittable
from probing.federation.sql.dialect import to_sql
from probing.federation.sql.states import exported

__all__ = ("Recipe", "recipe")


@dataclass(frozen=True, slots=True)
class Recipe:
    """The recipe for an aggregate. ``sends``: expressions that each node computes. ``combine``: SQL over the columns
    that the nodes send, as a format string.

    ``means``: pairs of indices into ``sends``: the index of a count and the index of a mean. ``combine`` reads the
    overall mean of the first pair as ``{mean0}``, of the second as ``{mean1}``.
    """

    sends: tuple[str, ...]
    combine: str
    means: tuple[tuple[int, int], ...] = ()


_COUNTS = "coalesce(sum({0}), 0)"
# The sum of squares by Chan, Golub and LeVeque, which avoids cancellation: the sum within the parts, plus the sum
# between the means of the parts.
_SQUARES = "(sum({0} * {2}) + sum({0} * ({1} - {mean0}) * ({1} - {mean0})))"
_VARIANCES: dict[type[exp.Expr], tuple[str, bool]] = {
    exp.VariancePop: ("{}", True),
    exp.Variance: ("{}", False),
    exp.StddevPop: ("sqrt({})", True),
    exp.StddevSamp: ("sqrt({})", False),
    exp.Stddev: ("sqrt({})", False),
}
_SAME: dict[type[exp.Expr], str] = {
    exp.Sum: "sum",
    exp.Min: "min",
    exp.Max: "max",
    exp.LogicalAnd: "bool_and",
    exp.LogicalOr: "bool_or",
    exp.BitwiseAndAgg: "bit_and",
    exp.BitwiseOrAgg: "bit_or",
    exp.BitwiseXorAgg: "bit_xor",
}
# The columns that a node sends for an aggregate of pairs (y, x): number, means, covariance, sums of squares. corr adds
# minima and maxima.
_PAIRS = ("regr_count", "regr_avgy", "regr_avgx", "covar_pop", "regr_syy", "regr_sxx")
_PRODUCTS = "(sum({0} * {3}) + sum({0} * ({1} - {mean0}) * ({2} - {mean1})))"
_SQUARES_Y = "(sum({4}) + sum({0} * ({1} - {mean0}) * ({1} - {mean0})))"
_SQUARES_X = "(sum({5}) + sum({0} * ({2} - {mean1}) * ({2} - {mean1})))"
_CONSTANT = "min({6}) = max({7}) OR min({8}) = max({9})"
_IDEMPOTENT = (exp.Min, exp.Max, exp.LogicalAnd, exp.LogicalOr, exp.BitwiseAndAgg, exp.BitwiseOrAgg)


def recipe(node: exp.Expr, *, states: bool = True) -> Recipe:
    """Returns the recipe for the aggregate call ``node``, including its FILTER. Raises Unsplittable.

    ``states``: nodes may send the engine's own states of an aggregate if there is no other way to compute it in parts.
    """
    call, condition = (node.this, node.expression.this) if isinstance(node, exp.Filter) else (node, None)
    if isinstance(call, exp.IgnoreNulls) and isinstance(call.this, exp.AnyValue):
        call = call.this
    for kinds, build in (*_BUILDERS, *(_OF_STATES if states else ())):
        if isinstance(call, kinds):
            return build(call, condition)
    raise Unsplittable(f"{type(call).__name__} is not computed in parts")


def _count(call: exp.Expr, condition: exp.Expr | None) -> Recipe:
    if call.args.get("expressions"):
        raise Unsplittable("count of several columns")
    inner = call.this
    if not isinstance(inner, exp.Distinct):
        return Recipe((_filtered(to_sql(call), condition),), _COUNTS)
    if len(inner.expressions) != 1 or inner.args.get("on"):
        raise Unsplittable("count distinct of several columns")
    values = _filtered(f"list(DISTINCT {to_sql(inner.expressions[0])})", condition)
    return Recipe((values,), "coalesce(len(list_distinct(flatten(list({0})))), 0)")


def _count_if(call: exp.Expr, condition: exp.Expr | None) -> Recipe:
    # In DuckDB count_if behaves like sum, not like count: it is a HUGEINT, and NULL over no rows.
    return Recipe((_filtered(f"count_if({_argument(call)})", condition),), "sum({0})::HUGEINT")


def _same(call: exp.Expr, condition: exp.Expr | None) -> Recipe:
    name = _SAME[type(call)]
    inner = call.this
    if isinstance(inner, exp.Distinct) and isinstance(call, _IDEMPOTENT) and len(inner.expressions) == 1:
        inner.replace(inner.expressions[0])
    return Recipe((_filtered(f"{name}({_argument(call)})", condition),), name + "({0})")


def _any_value(call: exp.Expr, condition: exp.Expr | None) -> Recipe:
    return Recipe((_filtered(f"any_value({_argument(call)})", condition),), "any_value({0})")


def _avg(call: exp.Expr, condition: exp.Expr | None) -> Recipe:
    x = _argument(call)
    sends = (_filtered(f"sum({x})", condition), _filtered(f"count({x})", condition))
    return Recipe(sends, "sum({0})::DOUBLE / nullif(sum({1}), 0)::DOUBLE")


def _variance(call: exp.Expr, condition: exp.Expr | None) -> Recipe:
    x = f"({_argument(call)})::DOUBLE"
    sends = tuple(_filtered(f"{f}({x})", condition) for f in ("count", "avg", "var_pop"))
    shape, population = _VARIANCES[type(call)]
    divisor = "sum({0})" if population else "(sum({0}) - 1)"
    least = 0 if population else 1
    value = f"CASE WHEN sum({{0}}) > {least} THEN {_SQUARES} / {divisor} END"
    return Recipe(sends, shape.format(value), means=((0, 1),))


def _covariance(call: exp.Expr, condition: exp.Expr | None) -> Recipe:
    least = 0 if isinstance(call, exp.CovarPop) else 1
    divisor = "sum({0})" if least == 0 else "(sum({0}) - 1)"
    value = f"CASE WHEN sum({{0}}) > {least} THEN {_PRODUCTS} / {divisor} END"
    return Recipe(tuple(_pairs(call, condition)[:4]), value, means=((0, 1), (0, 2)))


def _corr(call: exp.Expr, condition: exp.Expr | None) -> Recipe:
    sends = _pairs(call, condition)
    y, x = f"({_argument(call, 'expression')})::DOUBLE", f"({to_sql(call.expression)})::DOUBLE"
    both = f"({y}) IS NOT NULL AND ({x}) IS NOT NULL"
    both += f" AND ({to_sql(condition)})" if condition is not None else ""
    sends += [f"{name}({value}) FILTER (WHERE {both})" for value in (y, x) for name in ("min", "max")]
    # DuckDB returns NaN if one side is constant; rounding must not turn this into a small number.
    ratio = f"{_PRODUCTS} / sqrt({_SQUARES_Y} * {_SQUARES_X})"
    value = f"CASE WHEN sum({{0}}) > 0 THEN CASE WHEN {_CONSTANT} THEN 'nan'::DOUBLE ELSE {ratio} END END"
    return Recipe(tuple(sends), value, means=((0, 1), (0, 2)))


def _pairs(call: exp.Expr, condition: exp.Expr | None) -> list[str]:
    both = f"({_argument(call, 'expression')})::DOUBLE, ({to_sql(call.expression)})::DOUBLE"
    return [_filtered(f"{name}({both})", condition) for name in _PAIRS]


def _arg_extreme(call: exp.Expr, condition: exp.Expr | None) -> Recipe:
    x, by = _argument(call, "expression"), to_sql(call.expression)
    name, extreme = ("arg_min", "min") if isinstance(call, exp.ArgMin) else ("arg_max", "max")
    # arg_min and arg_max ignore rows whose value is NULL, so these rows must not set the extreme.
    there = f"({x}) IS NOT NULL"
    both = f"{there} AND ({to_sql(condition)})" if condition is not None else there
    sends = (_filtered(f"{name}({x}, {by})", condition), f"{extreme}({by}) FILTER (WHERE {both})")
    return Recipe(sends, name + "({0}, {1})")


def _approx_distinct(call: exp.Expr, condition: exp.Expr | None) -> Recipe:
    # The registers in the state do not depend on the type of the counted values, so any type will do.
    return _of_state("approx_count_distinct", (_argument(call),), condition, "['VARCHAR']")


def _approx_quantile(call: exp.Expr, condition: exp.Expr | None) -> Recipe:
    x, share = _argument(call, "quantile"), call.args["quantile"]
    numbers, kind = (share.expressions, "FLOAT[]") if isinstance(share, exp.Array) else ([share], "FLOAT")
    if not numbers or not all(isinstance(number, exp.Literal) and not number.is_string for number in numbers):
        raise Unsplittable("a quantile that is not a number")
    of_type = f"['DOUBLE', '{kind}'], [NULL, {to_sql(share)}]"
    # A sum instead of a cast: DuckDB could cast a time, but cannot add DOUBLE to a time. So an aggregate of times does
    # not bind in parts, and its rows are shipped.
    return _of_state("approx_quantile", (f"({x}) + 0::DOUBLE", to_sql(share)), condition, of_type)


def _of_state(name: str, arguments: Sequence[str], condition: exp.Expr | None, of_type: str) -> Recipe:
    """Returns a recipe that uses a state of the engine. ``of_type``: types of the arguments, and values of constant
    arguments, for to_aggregate_state.
    """
    send = exported(_filtered(f"{name}({', '.join(arguments)})", condition))
    return Recipe((send,), f"finalize(combine_aggr(to_aggregate_state({{0}}, '{name}', {of_type})))")


def _argument(call: exp.Expr, *others: str) -> str:
    """Returns the SQL of the first argument of ``call``. ``others``: the names of the other arguments that the call may
    have.

    Raises Unsplittable if the call has any further argument, DISTINCT or ORDER BY.
    """
    if any(value for name, value in call.args.items() if name not in ("this", *others)):
        raise Unsplittable("an aggregate with more arguments")
    if not isinstance(call.this, exp.Expr) or isinstance(call.this, (exp.Distinct, exp.Order, exp.Star)):
        raise Unsplittable("an aggregate over an order or distinct values")
    return to_sql(call.this)


def _filtered(sql: str, condition: exp.Expr | None) -> str:
    return sql if condition is None else f"{sql} FILTER (WHERE {to_sql(condition)})"


_Build = Callable[[exp.Expr, "exp.Expr | None"], Recipe]
_BUILDERS: Sequence[tuple[tuple[type[exp.Expr], ...], _Build]] = (
    ((exp.Count,), _count),
    ((exp.CountIf,), _count_if),
    ((exp.AnyValue,), _any_value),
    ((exp.Avg,), _avg),
    (tuple(_VARIANCES), _variance),
    ((exp.CovarPop, exp.CovarSamp), _covariance),
    ((exp.Corr,), _corr),
    ((exp.ArgMin, exp.ArgMax), _arg_extreme),
    (tuple(_SAME), _same),
)
_OF_STATES: Sequence[tuple[tuple[type[exp.Expr], ...], _Build]] = (
    ((exp.ApproxDistinct,), _approx_distinct),
    ((exp.ApproxQuantile,), _approx_quantile),
)
