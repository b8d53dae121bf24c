"""Name and version of this client."""

from __future__ import annotations

from importlib.metadata import version

__all__ = ("program",)


def program() -> str:
    """Returns a text such as ``probingctl 0.1.0``."""
    return f"probingctl {version('probingd')}"
