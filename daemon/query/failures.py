"""Converts DuckDB's errors to ours: one line, a hint, and no path of the daemon's files."""

from __future__ import annotations

import re

from probing.api.errors import ProbingError, QueryError, QueryMemory, QueryTimeout

__all__ = ("explain",)

_KIND = re.compile(r"^\s*([A-Z][A-Za-z -]+?) Error: ")
_CANDIDATES = re.compile(r'(?:Candidate bindings|Did you mean):?\s*((?:"[^"]{1,100}"(?:, )?)+)')
_PATH = re.compile(r"(?:/[^\s/'\",:]+){2,}")
_NO_MEMORY = re.compile(r"malloc of size|\b[Aa]llocation failure|bad_alloc|bad allocation")
_ZONE_HINT = "ts and t_* are UTC without a zone: write ts > TIMESTAMP '2026-01-31 12:00:00'"


def explain(error: BaseException) -> ProbingError:
    """Converts an error of DuckDB or Arrow, raised while a query ran, for the user."""
    text = str(error)
    match = _KIND.match(text)
    kind = match[1] if match else ""
    if isinstance(error, MemoryError) or kind == "Out of Memory" or _NO_MEMORY.search(text):
        return QueryMemory("the query needs more memory than a worker has")
    if kind in ("INTERRUPT", "Interrupt"):
        return QueryTimeout("the query was interrupted")
    if kind in ("IO", "Permission", "HTTP"):
        return QueryError("a file of the store could not be read", hint="`probingd verify` checks the state directory")
    message = _first_line(text[match.end() :] if match else text)
    return QueryError(message, hint=_hint(text, kind))


def _first_line(text: str) -> str:
    line = next((part for part in text.splitlines() if part.strip()), "the query failed")
    return _PATH.sub("a file", " ".join(line.split()))[:300]


def _hint(text: str, kind: str) -> str:
    if "WITH TIME ZONE" in text and "TIMESTAMP" in text:
        return _ZONE_HINT
    if found := _CANDIDATES.search(text):
        return f"did you mean {' or '.join(found[1].split(', ')[:3])}?"
    if "No function matches" in text:
        return "the arguments have other types than the function takes: add a cast, as in x::BIGINT"
    if kind == "Conversion":
        return "TRY_CAST gives NULL where a value cannot be converted"
    if kind in ("Binder", "Catalog"):
        return "SELECT * FROM probing.column_docs lists the columns"
    return ""
