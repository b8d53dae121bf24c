"""Commands that a page of the documentation shows, and the shape of what it shows below them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from typing import NamedTuple

from e2e_support import ROOT

__all__ = ("ShownCommand", "shape", "shown_commands")

_SECTION = re.compile(r"^## (.*)\n", re.M)
_BLOCK = re.compile(r"^```\n(.*?)^```$", re.M | re.S)
_VARIES = re.compile(r"0-[0-9a-f]{6}|\d[\d.,:]*(?: ?(?:[numkM]?s|m\d+s|min|[kMG]i?B)\b)?|…")
_WORDS = 6


class ShownCommand(NamedTuple):
    """A command of a page. ``section``: the heading above it; ``output``: the first line below it, or an empty text."""

    section: str
    words: list[str]
    output: str


def shown_commands(page: str) -> Iterator[ShownCommand]:
    """Yields the commands that docs/``page`` shows behind a ``$``, in its order."""
    _, *parts = _SECTION.split((ROOT / "docs" / page).read_text())
    for section, text in zip(parts[::2], parts[1::2], strict=True):
        for block in _BLOCK.findall(text):
            lines = block.splitlines()
            for line, below in zip(lines, [*lines[1:], ""], strict=True):
                if line.startswith("$ "):
                    yield ShownCommand(section, shlex.split(line[2:]), below)


def shape(line: str) -> list[str]:
    """Returns the first words of a line, with numbers, times and sizes as #."""
    return _VARIES.sub("#", line).split()[:_WORDS]
