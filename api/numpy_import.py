"""Keeps numpy out of a process that does not need it: pyarrow imports numpy wherever it is installed.

The import takes 11 MB of each SQL worker, and 65 ms of each command; the command `ps` may take 250 ms in all.
"""

from __future__ import annotations

import sys

__all__ = ("allow_numpy", "hide_numpy")


def hide_numpy() -> None:
    """Makes imports of numpy fail until ``allow_numpy`` is called. A pyarrow that is imported meanwhile never uses
    numpy.
    """
    sys.modules.setdefault("numpy", None)  # type: ignore[arg-type]


def allow_numpy() -> None:
    """Lets numpy be imported again."""
    if "numpy" in sys.modules and sys.modules["numpy"] is None:
        del sys.modules["numpy"]
