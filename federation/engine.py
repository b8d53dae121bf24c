"""Finds the version of the query engine, DuckDB. A node sends states of aggregates only to a caller with the same
version.
"""

from __future__ import annotations

from functools import cache
from importlib.metadata import version

__all__ = ("engine_version",)


@cache
def engine_version() -> str:
    """Returns the version of the installed DuckDB."""
    return version("duckdb")
