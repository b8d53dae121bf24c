"""Command lines and other text for people, without what looks like a secret: it is left out before it is stored."""

from __future__ import annotations

import re
from collections.abc import Sequence

from probing.daemon.processes.procfs import clean_text

__all__ = ("command_text", "redacted")

MAX_COMMAND = 1_024
HIDDEN = "***"
_WORDS = (
    r"(?:pass(?:word|wd|phrase|code)?|pwd|secrets?|token|credentials?|cred|auth(?:orization)?|bearer|cookie|signature|sas"
    r"|(?:api|access|private|secret|encryption|account|license|ssh|signing|master)[-_.]?keys?(?:[-_.]?id)?|apikey)"
)
# The name ends in such a word, cut off by punctuation: --max-tokens, --tokenizer and --keyboard are none.
_NAME = re.compile(rf"(?:^|[^a-z0-9]){_WORDS}$", re.IGNORECASE)
_CAMEL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
_ASSIGNMENT = re.compile(r"([^\s=:&?;,\"'{]{1,128})([=:]\s?[\"']?)([^\s&;,\"'}]+)")
_OPTION = re.compile(r"(?<!\S)(--?[A-Za-z][\w.-]{0,127})(\s+)(?!-)\S+")
_IN_URL = re.compile(r"([a-zA-Z][a-zA-Z0-9+.-]{1,20}://)[^\s/@]+@")
# Tokens that say themselves what they are: Hugging Face, OpenAI, GitHub, GitLab, Slack, AWS, JSON web tokens, PEM.
_TOKEN = re.compile(
    r"\b(?i:bearer|basic)\s+[^\s\"']+|\b(?:hf_[A-Za-z0-9]{16,}|sk-[A-Za-z0-9_-]{16,}|gh[pousr]_[A-Za-z0-9]{16,}|github_pat_\w{16,}|glpat-[\w-]{16,}"
    r"|xox[abprs]-[\w-]{10,}|A[KS]IA[A-Z0-9]{16}|eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*)|-----BEGIN [A-Z ]*PRIVATE KEY.*"
)


def command_text(cmdline: Sequence[str]) -> str:
    """The arguments joined by blanks, values of secret-looking names replaced by ``***``, at most 1024 characters."""
    shown = []
    hide_next = False
    for argument in cmdline:
        if hide_next and not argument.startswith("--"):
            shown.append(HIDDEN)
            hide_next = False
            continue
        hide_next = argument.startswith("-") and "=" not in argument and _secret(argument)
        shown.append(_redact(argument))
    return clean_text(" ".join(shown), MAX_COMMAND)


def redacted(text: str) -> str:
    """A line of any text with the values of secret-looking names, options and tokens as ``***``."""
    return _redact(_OPTION.sub(lambda m: m[1] + m[2] + HIDDEN if _secret(m[1]) else m[0], text))


def _redact(argument: str) -> str:
    name, equals, _ = argument.partition("=")
    if equals and _secret(name):
        return name + equals + HIDDEN
    text = _IN_URL.sub(rf"\1{HIDDEN}@", argument)
    text = _TOKEN.sub(HIDDEN, text)
    return _ASSIGNMENT.sub(lambda m: m[1] + m[2] + HIDDEN if _secret(m[1]) else m[0], text)


def _secret(name: str) -> bool:
    return _NAME.search(_CAMEL.sub("_", name[-128:])) is not None
