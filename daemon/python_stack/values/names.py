"""Parses names of variables: ``trainer.state.step``, ``sizes[0]``, ``config["lr"]``, ``module:torch.backends``."""

from __future__ import annotations

import re
from typing import NamedTuple

from probing.api.errors import UsageError

__all__ = ("MAX_NAMES", "Name", "parse_name", "parse_names")

MAX_NAMES = 64
MAX_LENGTH = 256
MAX_PARTS = 16
_MODULE = "module:"
_FIRST = re.compile(r"[^\W\d]\w*")
_PART = re.compile(
    r"\.(?P<name>[^\W\d]\w*)|\.(?P<number>\d{1,9})|\[(?P<index>-?\d{1,9})\]|\[(?P<quote>[\"'])(?P<key>.*?)(?P=quote)\]"
)


class Name(NamedTuple):
    """The name of a variable. ``parts`` follow ``first``: a str is an attribute or key, an int an index or key."""

    text: str
    first: str
    parts: tuple[str | int, ...] = ()
    module: bool = False


def parse_names(texts: object) -> list[Name]:
    """Returns the names of a request. Raises UsageError for more than 64 names, and for text that names no variable."""
    if not isinstance(texts, list) or not texts or len(texts) > MAX_NAMES:
        raise UsageError(f"a request for variables has 1 to {MAX_NAMES} names")
    return [parse_name(text) for text in dict.fromkeys(map(str, texts))]


def parse_name(text: str) -> Name:
    """Returns the name in ``text``. Raises UsageError for text that names no variable."""
    module = text.startswith(_MODULE)
    at = len(_MODULE) if module else 0
    first = _FIRST.match(text, at)
    if first is None or len(text) > MAX_LENGTH:
        raise _wrong(text)
    parts: list[str | int] = []
    at = first.end()
    while at < len(text):
        part = _PART.match(text, at)
        if part is None or len(parts) >= MAX_PARTS:
            raise _wrong(text)
        number = part["number"] or part["index"]
        parts.append(int(number) if number else part["name"] or part["key"] or "")
        at = part.end()
    return Name(text, first[0], tuple(parts), module)


def _wrong(text: str) -> UsageError:
    return UsageError(
        f"{text[:MAX_LENGTH]!r} names no variable",
        hint='such as loss, trainer.state.step, sizes[0], config["lr"] or module:torch.backends',
    )
