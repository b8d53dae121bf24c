"""When a statement is whole: SQL up to a semicolon that stands in no text and no comment."""

from __future__ import annotations

import re

__all__ = ("is_whole", "statements")

# What is not closed goes to the end.
_TOKEN = re.compile(r"--[^\n]*|/\*.*?(?:\*/|\Z)|'(?:[^']|'')*(?:'|\Z)|\"(?:[^\"]|\"\")*(?:\"|\Z)|;", re.DOTALL)


def statements(text: str) -> tuple[list[str], str]:
    """The whole statements in ``text`` without their semicolons, and what follows the last of them."""
    found: list[str] = []
    start = 0
    for match in _TOKEN.finditer(text):
        if match.group() == ";":
            found.append(text[start : match.start()].strip())
            start = match.end()
    return [statement for statement in found if statement], text[start:]


def is_whole(text: str) -> bool:
    """Whether Enter ends the input: nothing, a command, or SQL that ends with a semicolon."""
    if not text.strip() or text.lstrip().startswith("\\"):
        return True
    whole, rest = statements(text)
    return bool(whole) and not _without_comments(rest)


def _without_comments(text: str) -> str:
    return re.sub(r"--[^\n]*|/\*.*?\*/", "", text, flags=re.DOTALL).strip()
