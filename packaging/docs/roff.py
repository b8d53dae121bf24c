"""Writes Markdown as roff with the macros of man(7), for mandoc and groff."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence

from markdown_it import MarkdownIt
from markdown_it.token import Token

# What roff would read as a request, a typographic sign, or a hyphen that is no minus.
_ESCAPES = {"\\": "\\(rs", "-": "\\-", "'": "\\(aq", "`": "\\(ga", "~": "\\(ti", "^": "\\(ha", '"': "\\(dq"}
_WIDTH = 80


def parse(markdown: str) -> list[Token]:
    """Returns the tokens of a page; its tables are those of GitHub."""
    return MarkdownIt("commonmark").enable("table").parse(markdown)


def escape(text: str) -> str:
    """Returns ``text`` in ASCII, so that each program shows the same whatever its locale is."""
    return "".join(_ESCAPES.get(c) or (c if c.isascii() else f"\\[u{ord(c):04X}]") for c in text)


def render(tokens: Sequence[Token]) -> Iterator[str]:
    """Yields the lines of ``tokens``; a heading below the second level becomes a subsection."""
    before = ""
    for line in _blocks(tokens):
        # A heading begins a paragraph by itself.
        if line != ".PP" or before[:3] not in (".SH", ".SS"):
            yield line
        before = line


def _blocks(tokens: Sequence[Token]) -> Iterator[str]:
    at = 0
    while at < len(tokens):
        token = tokens[at]
        end = _closing(tokens, at)
        inside = tokens[at + 1 : end]
        if token.type == "heading_open":
            yield f".SS {_inline(inside[0])}" if token.tag > "h2" else f".SH {_inline(inside[0]).upper()}"
        elif token.type == "paragraph_open":
            yield from (".PP", *_text(_inline(inside[0])))
        elif token.type in ("fence", "code_block"):
            lines = (_guarded(escape(line)) for line in token.content.splitlines())
            yield from (".PP", ".RS 4", ".EX", *lines, ".EE", ".RE")
        elif token.type in ("bullet_list_open", "ordered_list_open"):
            yield from _items(inside)
        elif token.type == "table_open":
            yield from _table(inside)
        at = end + 1


def _closing(tokens: Sequence[Token], at: int) -> int:
    """Returns the index of the token that closes the one at ``at``, or ``at`` where nothing does."""
    depth = 0
    for index in range(at, len(tokens)):
        depth += tokens[index].nesting
        if depth <= 0:
            return index
    return len(tokens)


def _items(tokens: Sequence[Token]) -> Iterator[str]:
    at = 0
    while at < len(tokens):
        end = _closing(tokens, at)
        first, *rest = _blocks(tokens[at + 1 : end])
        yield ".IP \\(bu 2" if first == ".PP" else first
        # A list or a paragraph of the item is set in with it.
        deeper = next((n for n, line in enumerate(rest) if line[:3] in (".PP", ".IP", ".TP")), len(rest))
        yield from rest[:deeper]
        if rest[deeper:]:
            yield from (".RS 2", *rest[deeper:], ".RE")
        at = end + 1


def _table(tokens: Sequence[Token]) -> Iterator[str]:
    """Yields a definition for each row: the first cell with those of the middle, and the last cell as its text."""
    cells = [[_inline(cell) for cell in row] for row in _rows(tokens)]
    head, *body = cells
    name = ""
    for first, *middle, last in body:
        # An empty cell is about the same as the one above it.
        name = first or name
        more = "; ".join(f"{title}: {cell}" for title, cell in zip(head[1:], middle, strict=False) if cell)
        yield from (".TP", _guarded(f"{name} ({more})" if more else name), *_text(last or "\\&"))


def _rows(tokens: Sequence[Token]) -> Iterator[list[Token]]:
    row: list[Token] = []
    for token in tokens:
        if token.type == "tr_open":
            row = []
        elif token.type == "inline":
            row.append(token)
        elif token.type == "tr_close":
            yield row


def _inline(token: Token) -> str:
    """Returns the text with fonts; a link is its text."""
    parts = []
    for child in token.children or ():
        if child.type == "code_inline":
            parts.append(f"\\fB{escape(child.content)}\\fR")
        elif child.type in ("softbreak", "hardbreak"):
            parts.append(" ")
        elif child.type in ("strong_open", "em_open"):
            parts.append("\\fI")
        elif child.type in ("strong_close", "em_close"):
            parts.append("\\fR")
        elif child.content:
            parts.append(escape(child.content))
    return "".join(parts)


def _text(text: str) -> list[str]:
    return [_guarded(line) for line in textwrap.wrap(text, _WIDTH, break_long_words=False, break_on_hyphens=False)]


def _guarded(line: str) -> str:
    # A line that begins with a dot would be a request.
    return f"\\&{line}" if line.startswith(".") else line
