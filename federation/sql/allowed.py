"""Allow-lists for SQL: node classes of sqlglot, and functions of DuckDB. A node checks each query against them
before it runs the query. So does the client process that runs the last step of a query over many nodes.

Allow-lists are used instead of deny-lists, because DuckDB 2.0 has 1,702 scalar functions, and each version adds more.
Some of them read files, settings or secrets, or sleep. The names come from sqlglot 30.30.

``check_sizes`` limits the size of values that a short expression can produce, and checks functions that are named by a
string.

DuckDB checks deadlines and memory between vectors, so neither stops a huge scalar call: ``repeat('x', 4000000000)``
under a memory limit of 200 MB took 7.7 GiB and 32 s (DuckDB 2.0.0). Such calls must have literal sizes.
"""

from __future__ import annotations

import difflib
import re

from sqlglot import exp
from sqlglot.dialects.duckdb import DuckDB

from probing.api.errors import QueryRejected
from probing.federation.sql.states import is_export, require_export

__all__ = (
    "FUNCTION_CLASSES",
    "FUNCTION_NAMES",
    "NODE_CLASSES",
    "TYPE_NAMES",
    "check_node",
    "check_sizes",
    "function_refused",
)


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


NODE_CLASSES = _words(
    """
    Add Alias Aliases All And Any AtTimeZone Between BitwiseAnd BitwiseLeftShift BitwiseNot BitwiseOr BitwiseRightShift
    Boolean Bracket Case Cast Column Columns CTE Cube DataType DataTypeParam Distinct Div Dot DPipe EQ Escape Except
    Exists Filter From Glob Group GroupingSets GT GTE Having Identifier IgnoreNulls ILike In IntDiv Intersect Interval
    IntervalSpan Is Join JSONPath JSONPathKey JSONPathRoot JSONPathSubscript JSONPathWildcard Lateral Like Limit
    LimitOptions Literal LT LTE Mod Mul Neg NEQ Not Null NullSafeEQ NullSafeNEQ Offset Or Order Ordered Paren
    PropertyEQ Qualify RespectNulls Rollup Select SimilarTo Slice Star Sub Subquery Table TableAlias TableSample
    ToMap TryCast Tuple Union Unnest Values Var Where Window WindowSpec With WithinGroup
    """
)

# Functions for which sqlglot has a class.
FUNCTION_CLASSES = _words(
    """
    Abs Acos AnyValue ApproxDistinct ApproxQuantile ApproxTopK ArgMax ArgMin Array ArrayAgg ArrayAppend ArrayConcat
    ArrayContains ArrayContainsAll ArrayDistinct ArrayMax ArrayMin ArrayOverlaps ArrayPosition ArrayPrepend ArraySize
    ArraySlice ArraySort ArrayToString Ascii Asin Atan Atan2 Avg BitLength BitwiseAndAgg BitwiseOrAgg BitwiseXor
    BitwiseXorAgg Cbrt Ceil Chr Coalesce Concat ConcatWs Contains Corr Cos Cot Count CountIf CovarPop CovarSamp CumeDist
    CurrentDate CurrentTime CurrentTimestamp DateAdd DateBin DateDiff DateFromParts DateTrunc Day DayOfMonth DayOfWeek
    DayOfWeekIso DayOfYear Dayname Degrees DenseRank EndsWith Exp Explode Extract Factorial First FirstValue Flatten
    Floor Format FromBase64 FromJson GenerateSeries Greatest GroupConcat Grouping Hex Hour If IsInf IsNan JSONArray
    JSONExtract JSONExtractScalar JSONKeys JSONObject JSONType JarowinklerSimilarity Kurtosis Lag Last LastDay LastValue
    Lead Least Left Length Levenshtein Ln Localtime Localtimestamp Log LogicalAnd LogicalOr Lower MD5 Map MapFromEntries
    MapKeys Max Median Min Minute Mode Month Monthname NthValue Ntile Nullif Pad ParseJSON PercentRank PercentileCont
    PercentileDisc Pi Pow Quantile Quarter Radians Rand Rank RegexpExtract RegexpExtractAll RegexpFullMatch RegexpLike
    RegexpReplace RegexpSplit RegrAvgx RegrAvgy RegrCount RegrIntercept RegrR2 RegrSlope RegrSxx RegrSxy RegrSyy Repeat
    Replace Reverse Right Round RowNumber SHA SHA2 Second Sign Sin Skewness Split SplitPart Sqrt StartsWith Stddev
    StddevPop StddevSamp StrPosition StrToTime Struct StructExtract Substring Sum Tan TimeFromParts TimeToStr TimeToUnix
    TimestampFromParts TimestampTrunc ToBase64 ToDays Translate Trim Trunc Try Typeof Unhex Unicode UnixToTime Upper
    Variance VariancePop Week WeekOfYear Year
    """
)

# Functions for which sqlglot has no class of their own, at least in some calls. It parses these calls as exp.Anonymous,
# so the functions are recognized by name.
FUNCTION_NAMES = _words(
    """
    add age arbitrary arg_max_null arg_min_null array_has_any array_sort base64 bin bit_count cardinality century
    current_localtime damerau_levenshtein date_part date_sub datepart datesub decade divide element_at entropy epoch_ns
    epoch_us era even favg fdiv fill fmod format_bytes formatreadabledecimalsize formatreadablesize fsum gamma gcd
    geomean geometric_mean get_current_timestamp hamming hash histogram isfinite isoyear jaccard jaro_similarity
    json_array_length json_contains json_exists json_transform json_valid json_value julian kahan_sum lcm list_aggr
    list_aggregate list_avg list_count list_element list_extract list_first list_has_all list_indexof list_last
    list_median list_position list_reverse list_reverse_sort list_slice list_sort list_sum list_unique list_zip mad
    make_timestamp_ms make_timestamp_ns map_contains map_entries map_extract map_values mean microsecond millennium
    millisecond multiply nanosecond now octet_length ord parse_dirname parse_filename prefix printf product
    regexp_escape regexp_split_to_array reservoir_quantile row sem strip_accents strlen struct_insert subtract suffix
    to_hours to_json to_microseconds to_milliseconds to_minutes to_months to_seconds to_weeks to_years
    transaction_timestamp try_strptime weekday weighted_avg yearweek
    """
)

# Aggregates that list_aggregate accepts by name.
_AGGREGATES = _words(
    """
    any_value approx_count_distinct avg bit_and bit_or bit_xor bool_and bool_or count entropy favg first fsum
    geomean histogram kahan_sum kurtosis last mad max mean median min mode product sem skewness stddev stddev_pop
    stddev_samp string_agg sum var_pop var_samp variance
    """
)

# Members of sqlglot's DataType.Type. The types inside LIST, STRUCT and MAP are checked in turn.
TYPE_NAMES = _words(
    """
    ARRAY BIGDECIMAL BIGINT BINARY BIT BLOB BOOLEAN CHAR DATE DECIMAL DOUBLE FLOAT INT INT128 INT256 INTERVAL
    JSON LIST MAP SMALLINT STRUCT TEXT TIME TIMESTAMP TIMESTAMPNTZ TIMESTAMPTZ TIMESTAMP_MS TIMESTAMP_NS TIMESTAMP_S
    TINYINT UBIGINT UINT UINT128 USMALLINT UTINYINT UUID VARBINARY VARCHAR
    """
)


MAX_STRING = 100_000
MAX_SERIES = 1_000_000
# Matches widths such as %9999d or {:>9999}. A star or a nested brace reads the width from an argument.
_WIDE = re.compile(r"\d{4,}|\*|\{[^}]*\{")
_BY_NAME = frozenset(("list_aggr", "list_aggregate"))
_TIME_STEPS = frozenset(("SECOND", "MINUTE", "HOUR", "DAY", "WEEK", "MONTH", "QUARTER", "YEAR"))


# Hints for functions that are not allowed or that DuckDB lacks.
_ELEMENTS = """unnest(from_json(culprits, '[{"rank": "INT", "node": "VARCHAR"}]')) makes a row of each element"""
_INSTEAD = {
    "timezone": "write ts AT TIME ZONE 'Asia/Shanghai'",
    "json_each": _ELEMENTS,
    "json_table": _ELEMENTS,
    "bar": "show the number, or draw the output of -f csv",
}


def check_node(node: exp.Expr) -> None:
    """Raises QueryRejected unless ``node`` itself is allowed."""
    name = type(node).__name__
    if is_export(node):
        require_export(node)
    elif isinstance(node, exp.Anonymous):
        if not isinstance(node.this, str) or node.this.lower() not in FUNCTION_NAMES:
            raise function_refused(node.name)
    elif isinstance(node, exp.DataType):
        _check_type(node)
    elif isinstance(node, exp.With) and node.args.get("recursive"):
        raise QueryRejected("WITH RECURSIVE is not allowed")
    elif name in NODE_CLASSES or name in FUNCTION_CLASSES:
        return
    elif isinstance(node, exp.Func):
        raise function_refused(node.sql_name())
    else:
        raise QueryRejected(f"{_spelt(name)} is not allowed in a query")


def _check_type(node: exp.DataType) -> None:
    kind = node.this
    if not isinstance(kind, exp.DataType.Type) or kind.name not in TYPE_NAMES or node.args.get("values"):
        raise QueryRejected(f"the type {node.sql(dialect=DuckDB)[:80]} is not allowed")


def function_refused(name: str) -> QueryRejected:
    """Returns the error for a query that calls the function ``name``, which is not allowed."""
    near = difflib.get_close_matches(name.lower(), FUNCTION_NAMES | {c.lower() for c in FUNCTION_CLASSES}, 3)
    usual = "the usual aggregate, text, list, JSON and time functions of DuckDB are allowed"
    hint = _INSTEAD.get(name.lower()) or (f"similar names: {', '.join(sorted(near))}" if near else usual)
    return QueryRejected(f"the function {name.lower()[:80]} is not allowed", hint=hint)


def _spelt(name: str) -> str:
    return "".join(f" {c}" if c.isupper() else c.upper() for c in name).strip().upper()


def check_sizes(root: exp.Expr) -> None:
    """Raises QueryRejected for a size that is too large or not a literal, and for a name of a function that is not
    allowed.
    """
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
        raise QueryRejected("repeat needs a literal text", hint="write the text itself, as in repeat('#', 10)")
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
    """Accepts a series of timestamps only in FROM, because DuckDB streams it there, so that a deadline can stop it. The
    step must be at least 1 s.
    """
    if not isinstance(node.parent, exp.Table):
        raise QueryRejected("range and generate_series over timestamps are allowed only in FROM")
    if not isinstance(step.this, exp.Literal) or not step.this.name.isdecimal():
        raise QueryRejected(
            "the step of range and generate_series over timestamps must be a literal",
            hint="write it as in INTERVAL 1 MINUTE",
        )
    if step.text("unit").upper().rstrip("S") not in _TIME_STEPS or int(step.this.name) < 1:
        raise QueryRejected("the step of range and generate_series over timestamps must be at least a second")


def _check_template(template: exp.Expr | None) -> None:
    if not (isinstance(template, exp.Literal) and template.is_string):
        raise QueryRejected("format and printf need a literal format")
    if _WIDE.search(template.name):
        raise QueryRejected("a width in the format is too large, or not a literal", hint="use at most three digits")


def _check_aggregate(node: exp.Anonymous) -> None:
    name = node.expressions[1] if len(node.expressions) > 1 else None
    if not (isinstance(name, exp.Literal) and name.is_string and name.name.lower() in _AGGREGATES):
        hint = f"write one of {', '.join(sorted(_AGGREGATES))}"
        raise QueryRejected(f"{node.name.lower()} needs the name of an aggregate", hint=hint)


def _integer(node: exp.Expr | None, what: str) -> int:
    negative = isinstance(node, exp.Neg)
    literal = node.this if isinstance(node, exp.Neg) else node
    digits = literal.name if isinstance(literal, exp.Literal) and not literal.is_string else ""
    if digits.isdecimal() and len(digits) < 19:
        return -int(digits) if negative else int(digits)
    raise QueryRejected(f"{what} must be a literal integer", hint="write the number itself")


def _too_large(what: str, limit: int) -> QueryRejected:
    return QueryRejected(f"{what}: the size is above {limit}", hint="use a smaller size")
