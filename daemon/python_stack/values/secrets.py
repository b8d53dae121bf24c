"""What is not shown of a value: by the rules that hold for command lines (``processes.redaction``)."""

from __future__ import annotations

from probing.daemon.processes.procfs import clean_text
from probing.daemon.processes.redaction import command_text

__all__ = ("HIDDEN", "looks_secret", "names_secret")

HIDDEN = "<redacted>"
_MAX_TEXT = 1024


def names_secret(name: str) -> bool:
    """Whether a variable, attribute or key of this name is likely to hold a secret: api_key, hf_token, dbPassword."""
    option = f"--{name.strip('_')[-128:].replace('=', '_')}="
    return command_text((option + "0",)) != clean_text(option + "0", _MAX_TEXT)


def looks_secret(text: str) -> bool:
    """Whether ``text`` has the shape of a token, or holds a password: what a command line would not show of it."""
    shown = text[:_MAX_TEXT]
    return command_text((shown,)) != clean_text(shown, _MAX_TEXT)
