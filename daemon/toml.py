"""Reads TOML. The parser is imported at its first use, because most processes get their options as arguments."""

from __future__ import annotations

import sys
from typing import Any

__all__ = ("loads",)


def loads(text: str) -> dict[str, Any]:
    """Returns the tables and values of ``text``. Raises ValueError, whose message may quote the text."""
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    return tomllib.loads(text)
