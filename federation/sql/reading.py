"""Parses SQL with limited work.

sqlglot tries several readings of a construct and parses its content again for each: nested `(SELECT 1 LIMIT (` or
`ROW(` take 2^depth steps. So the number of tokens that it parses again is limited.
"""

from __future__ import annotations

from sqlglot import exp
from sqlglot.dialects.duckdb import DuckDB
from sqlglot.errors import ErrorLevel, ParseError
from sqlglot.parsers.duckdb import DuckDBParser
from sqlglot.tokenizer_core import Token, TokenType

from probing.api.errors import QueryRejected
from probing.api.text import size

__all__ = ("MAX_NESTING", "MAX_TEXT", "statements")

MAX_TEXT = 64 * 1024
MAX_NESTING = 64
# The maximum number of tokens that are parsed again: _REREAD_EACH for each token of the query, plus _REREAD_MORE.
_REREAD_EACH = 4
_REREAD_MORE = 500
_OPEN = frozenset((TokenType.L_PAREN, TokenType.L_BRACKET, TokenType.L_BRACE))
_CLOSE = frozenset((TokenType.R_PAREN, TokenType.R_BRACKET, TokenType.R_BRACE))
# The units that DuckDB accepts outside of quotes. Inside quotes it accepts more, as in '90 min'.
_UNITS = frozenset(
    f"{unit}{end}"
    for unit in [
        "MICROSECOND",
        "MILLISECOND",
        "SECOND",
        "MINUTE",
        "HOUR",
        "DAY",
        "WEEK",
        "MONTH",
        "QUARTER",
        "YEAR",
        "DECADE",
    ]
    for end in ("", "S")
)
# The texts of these tokens stay in quotes when the tree is printed, so invisible characters in them do no harm.
_QUOTED = frozenset(kind for kind in TokenType if kind.name.endswith("STRING")) | {TokenType.IDENTIFIER}
_HINT = "use WITH for its parts"


def statements(sql: str, times: int = 1) -> list[exp.Expr]:
    """Returns the trees of the statements in ``sql``, in DuckDB's dialect. ``times``: a factor for all limits.

    Raises QueryRejected above the limits and for invisible characters in names, and SqlglotError for invalid SQL.
    """
    if len(sql) > MAX_TEXT * times:
        raise QueryRejected(f"the query is longer than {size(MAX_TEXT)}", hint="shorten it")
    dialect = _Dialect()
    tokens = dialect.tokenize(sql)
    _check_nesting(tokens, MAX_NESTING * times)
    _check_names(tokens)
    parser = _Parser(dialect=dialect, error_level=ErrorLevel.IMMEDIATE)
    parser.rereads = _REREAD_EACH * len(tokens) + _REREAD_MORE
    try:
        return [statement for statement in parser.parse(tokens, sql) if statement]
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as e:
        # sqlglot checks few arguments before it uses them, as in {: 1}.
        raise ParseError("an expression is not complete") from e


def _check_nesting(tokens: list[Token], most: int) -> None:
    depth = 0
    for token in tokens:
        depth = max(depth + (token.token_type in _OPEN) - (token.token_type in _CLOSE), 0)
        if depth > most:
            raise QueryRejected("the query is nested too deeply", hint=_HINT)


def _check_names(tokens: list[Token]) -> None:
    """Raises QueryRejected for a name with an invisible character. DuckDB reads some of these characters, such as
    U+200B, as spaces: what is one name for sqlglot could be several words for DuckDB, such as FROM and a table.
    """
    for token in tokens:
        if token.token_type not in _QUOTED and not token.text.isprintable():
            codes = ", ".join(f"U+{ord(c):04X}" for c in token.text if not c.isprintable())
            hint = "delete it: text that was copied may contain such characters"
            raise QueryRejected(f"the query has an invisible character outside of quotes: {codes[:80]}", hint=hint)


class _Dialect(DuckDB):
    """DuckDB's dialect, but a path into JSON that does not begin with $ stays one name: 'a.b' is not b within a."""

    def to_json_path(self, path: exp.Expr | None) -> exp.Expr | None:
        if isinstance(path, exp.Literal) and path.is_string and not path.name.startswith("$"):
            return path
        return super().to_json_path(path)


class _Parser(DuckDBParser):
    """A parser with limited work. ``rereads``: the number of tokens that it may still parse again."""

    rereads = 0

    def _retreat(self, index: int) -> None:
        self.rereads -= self._index - index
        if self.rereads < 0:
            raise QueryRejected("the query is nested too deeply", hint=_HINT)
        super()._retreat(index)

    def _parse_interval_span(self, this: exp.Expr, parse_function_unit: bool = True) -> exp.Interval:
        """Returns the interval with the text ``this``. sqlglot would take one number and one word out of the text and
        drop the rest, so a text with more, such as '1 day 02:00:00' or '1 day ago', is kept as it is.
        """
        interval = super()._parse_interval_span(this, parse_function_unit)
        unit = interval.args.get("unit")
        if not this.is_string or interval.this is this or not isinstance(unit, exp.Var):
            return interval
        is_whole = exp.INTERVAL_STRING_RE.fullmatch(this.name) and unit.name.upper() in _UNITS
        return interval if is_whole else exp.Interval(this=this)
