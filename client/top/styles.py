"""The colours of the screen: the sixteen of the terminal, so that they suit its theme."""

from __future__ import annotations

from functools import lru_cache

from rich.style import Style

__all__ = ("style_of",)

_STYLES = {
    "": "",
    "dim": "dim",
    "bold": "bold",
    "title": "reverse",
    "head": "bold underline",
    "keys": "dim",
    "prompt": "bold yellow",
    "job": "bold",
    "cursor": "reverse",
    "alarm": "bold white on red",
    "caution": "bold black on yellow",
    "fine": "bold black on green",
    "alarm text": "bold red",
    "caution text": "bold yellow",
    "bad": "bold red",
    "warn": "yellow",
    "cpu": "cyan",
    "gpu": "green",
    "mem": "blue",
    "power": "magenta",
    "temp": "yellow",
    "step": "green",
}


@lru_cache(maxsize=128)
def style_of(name: str, *, selected: bool = False) -> Style:
    """Returns the style of a span; the selected line is reversed, without colours."""
    return Style(reverse=True) if selected else Style.parse(_STYLES[name])
