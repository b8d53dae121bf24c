"""Maps what Arrow and Python raise over the bytes of a damaged file to FormatError."""

from __future__ import annotations

import pyarrow as pa

from probing.api.errors import FormatError

__all__ = ("format_error",)

MAX_TEXT = 300


def format_error(e: Exception) -> FormatError | None:
    """Returns None for an exception that a damaged file does not explain."""
    if isinstance(e, pa.ArrowException | OSError | ValueError | KeyError | TypeError | OverflowError):
        return FormatError(" ".join(str(e).split())[:MAX_TEXT] or type(e).__name__)
    return None
