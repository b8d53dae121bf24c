"""Names the columns of a query after the text that was typed. DuckDB would name them after the rewritten text that it
runs.
"""

from __future__ import annotations

from typing import TypeVar

from sqlglot import exp
from sqlglot.dialects.duckdb import DuckDB
from sqlglot.errors import SqlglotError
from sqlglot.tokenizer_core import Token, TokenType

__all__ = ("with_headings",)

_Tree = TypeVar("_Tree", bound=exp.Expr)
_OPEN = frozenset((TokenType.L_PAREN, TokenType.L_BRACKET, TokenType.L_BRACE))
_CLOSE = frozenset((TokenType.R_PAREN, TokenType.R_BRACKET, TokenType.R_BRACE))
# Tokens that end the list of items of a SELECT.
_ENDS = frozenset(
    {TokenType.FROM, TokenType.WHERE, TokenType.GROUP_BY, TokenType.HAVING, TokenType.QUALIFY, TokenType.WINDOW}
    | {TokenType.ORDER_BY, TokenType.LIMIT, TokenType.OFFSET, TokenType.UNION, TokenType.EXCEPT, TokenType.INTERSECT}
    | {TokenType.SEMICOLON, TokenType.TABLE_SAMPLE, TokenType.USING}
)
# Expressions that already have a name, or become several columns.
_NAMED = (exp.Alias, exp.Aliases, exp.Column, exp.Columns, exp.Dot, exp.Literal, exp.Star, exp.Boolean, exp.Null)
_SEVERAL = (exp.Star, exp.Columns, exp.Explode, exp.Unnest)


def with_headings(root: _Tree, sql: str) -> _Tree:
    """Returns ``root``, the tree of ``sql``, with aliases for the expressions of the first SELECT that have no alias.

    An item whose text in ``sql`` is not certain gets no alias.
    """
    select: exp.Expr = root
    while isinstance(select, exp.SetOperation):
        select = select.this
    if not isinstance(select, exp.Select):
        return root
    texts = _items(sql)
    if len(texts) == len(select.expressions):
        items = [_named(item, text) for item, text in zip(select.expressions, texts, strict=True)]
        select.set("expressions", items)
    return root


def _named(item: exp.Expr, text: str) -> exp.Expr:
    several = any(not isinstance(part.parent, exp.Count) for part in item.find_all(*_SEVERAL))
    if isinstance(item, _NAMED) or several or not text.isprintable() or "--" in text or "/*" in text:
        return item
    return exp.alias_(item, exp.to_identifier(text, quoted=True), copy=False)


def _items(sql: str) -> list[str]:
    """Returns the texts of the items of the first SELECT outside of brackets, each in one line."""
    try:
        tokens = DuckDB().tokenize(sql)
    except SqlglotError:
        return []
    found: list[str] = []
    depth, begin, before = 0, -1, None
    for place, token in enumerate(tokens):
        kind = token.token_type
        if kind in _CLOSE:
            depth -= 1
        if begin >= 0 and depth == 0 and (kind == TokenType.COMMA or _ends(kind, before)):
            found.append(_text(sql, tokens[begin:place]))
            begin = place + 1
            if kind != TokenType.COMMA:
                return found
        elif begin < 0 and depth == 0 and kind == TokenType.SELECT:
            begin = place + 1
        elif place == begin and kind == TokenType.ALL:
            begin += 1
        elif place == begin and kind == TokenType.DISTINCT:
            if place + 1 < len(tokens) and tokens[place + 1].token_type == TokenType.ON:
                return []
            begin += 1
        if kind in _OPEN:
            depth += 1
        before = kind
    return [*found, _text(sql, tokens[begin:])] if begin >= 0 else []


def _ends(kind: TokenType, before: TokenType | None) -> bool:
    # The FROM in `a IS DISTINCT FROM b` does not end a list.
    return kind in _ENDS and not (kind == TokenType.FROM and before == TokenType.DISTINCT)


def _text(sql: str, tokens: list[Token]) -> str:
    return " ".join(sql[tokens[0].start : tokens[-1].end + 1].split()) if tokens else ""
