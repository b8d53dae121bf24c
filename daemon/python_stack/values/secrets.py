"""Hides secrets in values, by the rules for command lines (``processes.redaction``)."""

from __future__ import annotations

from probing.daemon.processes.procfs import clean_text
from probing.daemon.processes.redaction import command_text, names_secret, takes_secret

__all__ = ("HIDDEN", "looks_secret", "names_secret", "takes_secret")

HIDDEN = "<redacted>"
_MAX_TEXT = 1024


def looks_secret(text: str) -> bool:
    """Whether ``text`` has the shape of a token or holds a password, so that a command line would hide it."""
    shown = text[:_MAX_TEXT]
    return command_text((shown,)) != clean_text(shown, _MAX_TEXT)
