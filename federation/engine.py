"""The version of the engine, DuckDB: states of aggregates go from node to asker only where both have the same."""

from __future__ import annotations

from functools import cache
from importlib.metadata import version

__all__ = ("engine_version",)


@cache
def engine_version() -> str:
    """Returns the version of DuckDB here."""
    return version("duckdb")
