"""Keeps numpy out of a process that does not need it: pyarrow imports numpy if numpy is installed.

The import costs each SQL worker 11 MB and each command 65 ms. The budget of the whole command `ps` is 250 ms.
"""

from __future__ import annotations

import sys

__all__ = ("allow_numpy", "hide_numpy")


def hide_numpy() -> None:
    """Makes imports of numpy fail until ``allow_numpy`` is called. If pyarrow is imported before that call, it never
    uses numpy.
    """
    sys.modules.setdefault("numpy", None)  # type: ignore[arg-type]


def allow_numpy() -> None:
    """Lets numpy be imported again."""
    if "numpy" in sys.modules and sys.modules["numpy"] is None:
        del sys.modules["numpy"]
