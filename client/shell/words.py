"""Splits the shell's input into statements, and completes it: words of SQL, tables, and the columns of the tables that
a statement names.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence

__all__ = (
    "COMMANDS",
    "KEYWORDS",
    "candidates",
    "command_in",
    "is_whole",
    "statements",
)

# Tables by name, each with its columns and their types.
_Catalog = Mapping[str, Mapping[str, str]]

COMMANDS = {
    "\\d": "tables; \\d TABLE: its columns",
    "\\x": "one column per line: on, off or auto (if a row does not fit)",
    "\\timing": "show the time of each query: on or off",
    "\\f": "format: table, json, jsonl, csv",
    "\\o": "write the next answer to FILE; \\o alone: to the screen again",
    "\\all": "ask all nodes: on or off",
    "\\set": "value of $NAME: \\set NAME=VALUE; \\set alone shows them",
    "\\?": "this help",
    "\\q": "leave, as exit, quit and Ctrl-D do",
}
_KEYWORDS = """
ALL AND ANTI AS ASC ASOF BETWEEN BY CASE CAST COUNT CROSS CURRENT_TIMESTAMP DESC DISTINCT ELSE END EPOCH_NS EXCEPT
EXISTS FALSE FILTER FIRST FROM FULL GROUP HAVING ILIKE IN INNER INTERSECT INTERVAL IS JOIN LAST LEFT LIKE LIMIT MAX
MEDIAN MIN NATURAL NOT NOW NULL NULLS OFFSET ON OR ORDER OVER PARTITION QUALIFY QUANTILE RIGHT SELECT SEMI SUM THEN
TIME_BUCKET TRUE UNION USING VALUES WHEN WHERE WINDOW WITH
"""
KEYWORDS = tuple(_KEYWORDS.split())
_WORD = re.compile(r"[A-Za-z_][\w.]*$|\\\w*$")
_AFTER_TABLE = re.compile(r"\b(?:from|join)\s+(?:[\w.\"]+(?:\s+(?:as\s+)?\w+)?\s*,\s*)*[\w.]*$", re.IGNORECASE)
_SOURCE = re.compile(r"\b(?:from|join|,)\s+([a-z_]\w*\.[a-z_]\w*)(?:\s+(?:as\s+)?([a-z_]\w*))?", re.IGNORECASE)


def candidates(before: str, whole: str, catalog: Callable[[], _Catalog]) -> Iterator[tuple[str, int, str]]:
    """Yields completions of ``before`` in the statement ``whole``: the text, how many characters it replaces, and its
    meaning.
    """
    match = _WORD.search(before)
    word = match.group() if match else ""
    if before.lstrip().startswith("\\"):
        yield from _of_command(before.lstrip(), word, catalog)
        return
    if _in_quotes(before):
        return
    if _AFTER_TABLE.search(before):
        yield from _matching(word, [(name, "table") for name in catalog()])
        return
    if not word:
        return
    tables = catalog()
    sources = _sources(whole, tables)
    alias, dot, _ = word.rpartition(".")
    if dot:
        columns = tables.get(sources.get(alias.lower(), alias.lower()), {})
        yield from _matching(word, [(f"{alias}.{name}", kind) for name, kind in columns.items()])
        yield from _matching(word, [(name, "table") for name in tables])
        return
    named: dict[str, str] = {}
    for table in sources.values():
        named.update(tables[table])
    yield from _matching(word, list(named.items()))
    yield from _matching(word, [(alias, "alias") for alias in sources if "." not in alias])
    if len(word) > 1:
        upper = word.isupper()
        yield from _matching(word, [(k if upper else k.lower(), "") for k in KEYWORDS])


def _of_command(line: str, word: str, catalog: Callable[[], _Catalog]) -> Iterator[tuple[str, int, str]]:
    command, space, _ = line.partition(" ")
    if not space:
        yield from _matching(word, list(COMMANDS.items()))
        return
    choices = {
        "\\x": ("on", "off", "auto"),
        "\\timing": ("on", "off"),
        "\\all": ("on", "off"),
        "\\f": ("table", "json", "jsonl", "csv"),
    }
    found = list(catalog()) if command == "\\d" else choices.get(command, ())
    yield from _matching(word, [(name, "") for name in found])


def _matching(word: str, entries: Sequence[tuple[str, str]]) -> Iterator[tuple[str, int, str]]:
    lower = word.lower()
    for text, meaning in entries:
        if text.lower().startswith(lower) and text.lower() != lower:
            yield text, len(word), meaning


def _sources(statement: str, tables: _Catalog) -> dict[str, str]:
    """Returns the tables that the statement reads, by name and alias."""
    found: dict[str, str] = {}
    for table, alias in _SOURCE.findall(statement):
        name = table.lower()
        if name in tables:
            found[name] = name
            found[name.partition(".")[2]] = name
            if alias and alias.upper() not in KEYWORDS:
                found[alias.lower()] = name
    return found


def _in_quotes(before: str) -> bool:
    return before.count("'") % 2 == 1


_LEAVE, _HELP = "\\q", "\\?"

# An unclosed comment or string extends to the end of the text.
_TOKEN = re.compile(r"--[^\n]*|/\*.*?(?:\*/|\Z)|'(?:[^']|'')*(?:'|\Z)|\"(?:[^\"]|\"\")*(?:\"|\Z)|;", re.DOTALL)


def statements(text: str) -> tuple[list[str], str]:
    """Returns the complete statements in ``text`` without their semicolons, and the rest after the last semicolon."""
    found: list[str] = []
    start = 0
    for match in _TOKEN.finditer(text):
        if match.group() == ";":
            found.append(text[start : match.start()].strip())
            start = match.end()
    return [statement for statement in found if statement], text[start:]


def command_in(text: str) -> tuple[str, str] | None:
    r"""Returns the text before the last line, and the command in the last line; None if the last line is not a command.
    ``exit`` and ``quit`` become ``\q``, ``help`` becomes ``\?``."""
    before, _, line = text.rstrip().rpartition("\n")
    line = line.strip()
    word = line.rstrip("; ").lower()
    if word in ("exit", "quit"):
        return before, _LEAVE
    if word in ("help", "?") and not before.strip():
        return before, _HELP
    return (before, line) if line.startswith("\\") else None


def is_whole(text: str) -> bool:
    """Returns whether Enter ends the input: it is empty, its last line is a command, or its SQL ends with a
    semicolon.
    """
    if not text.strip() or command_in(text) is not None:
        return True
    whole, rest = statements(text)
    return bool(whole) and not _without_comments(rest)


def _without_comments(text: str) -> str:
    return re.sub(r"--[^\n]*|/\*.*?\*/", "", text, flags=re.DOTALL).strip()
