"""Translates DuckDB's errors into errors of probing.api.errors."""

from __future__ import annotations

import re

import duckdb

from probing.api.errors import ProbingError, QueryError, QueryMemory, QueryRejected

__all__ = ("from_duckdb",)

# Frequent mistakes: DuckDB's message for each, and what to write instead.
_INSTEAD = (
    (re.compile(r'"[-+]\(TIMESTAMP.*STRING_LITERAL'), "a length of time is an INTERVAL: now() - INTERVAL '5 minutes'"),
    (re.compile(r"to INTERVAL|[Ii]nterval.*unit"), "write it as in INTERVAL '5 minutes' or INTERVAL 1 HOUR"),
    (re.compile(r"json_transform|from_json"), """as in from_json(culprits, '[{"rank": "INT", "node": "VARCHAR"}]')"""),
)
_PREFIX = re.compile(r"^[A-Za-z ]+ Error: ")


def from_duckdb(error: Exception) -> ProbingError:
    """Returns ``error`` as an error of probing.api.errors with a message of one line; a suggestion of DuckDB becomes
    the hint.
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    message = _PREFIX.sub("", lines[0]) if lines else type(error).__name__
    instead = (hint for pattern, hint in _INSTEAD if pattern.search(message))
    hint = next(instead, next((line for line in lines[1:] if line.startswith(("Did you mean", "Candidate"))), ""))
    if isinstance(error, duckdb.OutOfMemoryException):
        return QueryMemory(message)
    if isinstance(error, duckdb.PermissionException):
        return QueryRejected(message)
    return QueryError(message, hint=hint or "`probingctl tables` lists the tables and their columns")
