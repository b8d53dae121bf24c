"""Allowlists of the gate: node classes of sqlglot, and functions of DuckDB.

Allowlists only, no denylists: DuckDB 2.0 has 1,702 scalar functions, of which some read files, settings and secrets or
sleep, and each version adds more. Names are those of sqlglot 30.30.
"""

from __future__ import annotations

__all__ = ("AGGREGATES", "FUNCTION_CLASSES", "FUNCTION_NAMES", "NODE_CLASSES", "TYPE_NAMES")


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

# Functions with their own class in sqlglot.
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

# Functions that sqlglot knows only by name.
FUNCTION_NAMES = _words(
    """
    add age arbitrary arg_max_null arg_min_null array_has_any array_sort base64 bin bit_count cardinality century
    current_localtime damerau_levenshtein date_part date_sub datepart datesub decade divide element_at entropy epoch_ns
    epoch_us era even favg fdiv fill fmod format_bytes formatreadabledecimalsize formatreadablesize fsum gamma gcd
    geomean get_current_timestamp hamming hash histogram isfinite isoyear jaccard jaro_similarity json_array_length
    json_contains json_exists json_transform json_valid json_value julian kahan_sum lcm list_aggr list_aggregate
    list_avg list_count list_element list_extract list_first list_has_all list_indexof list_last list_median
    list_position list_reverse list_reverse_sort list_slice list_sort list_sum list_unique list_zip mad
    make_timestamp_ms make_timestamp_ns map_contains map_entries map_extract map_values mean microsecond millennium
    millisecond multiply nanosecond now octet_length ord parse_dirname parse_filename prefix printf product
    regexp_escape regexp_split_to_array reservoir_quantile row sem strip_accents strlen struct_insert subtract suffix
    to_hours to_json to_microseconds to_milliseconds to_minutes to_months to_seconds to_weeks to_years
    transaction_timestamp try_strptime weekday weighted_avg yearweek
    """
)

# Aggregates that list_aggregate accepts by name.
AGGREGATES = _words(
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
