"""Splits input into statements at semicolons outside of strings and comments."""

from __future__ import annotations

import re

__all__ = ("command_in", "is_whole", "statements")

_LEAVE, _HELP = "\\q", "\\?"

# An unclosed comment or string extends to the end.
_TOKEN = re.compile(r"--[^\n]*|/\*.*?(?:\*/|\Z)|'(?:[^']|'')*(?:'|\Z)|\"(?:[^\"]|\"\")*(?:\"|\Z)|;", re.DOTALL)


def statements(text: str) -> tuple[list[str], str]:
    """Returns the complete statements in ``text`` without their semicolons, and the rest behind the last one."""
    found: list[str] = []
    start = 0
    for match in _TOKEN.finditer(text):
        if match.group() == ";":
            found.append(text[start : match.start()].strip())
            start = match.end()
    return [statement for statement in found if statement], text[start:]


def command_in(text: str) -> tuple[str, str] | None:
    """Returns the text before the last line and that line, if it is a command; ``exit`` and ``quit`` are ``\\q``,
    ``help`` is ``\\?``."""
    before, _, line = text.rstrip().rpartition("\n")
    line = line.strip()
    word = line.rstrip("; ").lower()
    if word in ("exit", "quit"):
        return before, _LEAVE
    if word in ("help", "?") and not before.strip():
        return before, _HELP
    return (before, line) if line.startswith("\\") else None


def is_whole(text: str) -> bool:
    """Whether Enter ends the input: it is empty, its last line is a command, or its SQL ends with a semicolon."""
    if not text.strip() or command_in(text) is not None:
        return True
    whole, rest = statements(text)
    return bool(whole) and not _without_comments(rest)


def _without_comments(text: str) -> str:
    return re.sub(r"--[^\n]*|/\*.*?\*/", "", text, flags=re.DOTALL).strip()
