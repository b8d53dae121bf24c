"""Translates DuckDB's errors to probing.api.errors."""

from __future__ import annotations

import re

import duckdb

from probing.api.errors import ProbingError, QueryError, QueryMemory, QueryRejected

__all__ = ("from_duckdb",)

_PREFIX = re.compile(r"^[A-Za-z ]+ Error: ")


def from_duckdb(error: duckdb.Error) -> ProbingError:
    """Returns ``error`` as a QueryError with a message of one line; DuckDB's suggestion becomes the hint."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    message = _PREFIX.sub("", lines[0]) if lines else type(error).__name__
    hint = next((line for line in lines[1:] if line.startswith(("Did you mean", "Candidate"))), "")
    if isinstance(error, duckdb.OutOfMemoryException):
        return QueryMemory(message)
    if isinstance(error, duckdb.PermissionException):
        return QueryRejected(message)
    return QueryError(message, hint=hint or "`probingctl tables` lists the tables and their columns")
