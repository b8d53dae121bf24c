"""The parameters of a request: texts of bounded length, each parsed as the type that it must have."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from probing.api.errors import UsageError
from probing.client.settings import process_id
from probing.client.times import Interval, interval

__all__ = ("Parameters",)

_MOST_CHARACTERS = 4096
_LIST = "docs/web.md lists the addresses with their parameters"
# JSON may contain surrogates, which UTF-8 cannot encode.
_SURROGATE = re.compile("[\ud800-\udfff]")


class Parameters:
    """Parses ``texts``, the parameters by name. All methods raise UsageError for a missing or invalid parameter."""

    @classmethod
    def of_json(cls, body: Mapping[str, Any]) -> Parameters:
        """Returns the parameters that a POST has: texts, numbers and truth values of one object."""
        plain = {name: str(int(v) if isinstance(v, bool) else v) for name, v in body.items() if not _nested(v)}
        if len(plain) < len(body):
            raise UsageError("a parameter is neither a text nor a number", hint=_LIST)
        return cls(plain)

    def __init__(self, texts: Mapping[str, str]) -> None:
        self._texts = texts

    def text(self, name: str, default: str | None = None, most: int = _MOST_CHARACTERS) -> str:
        found = self._texts.get(name) or default
        if found is None:
            raise UsageError(f"the parameter {name} is missing", hint=f"add {name}=... to the address")
        if len(found) > most:
            raise UsageError(f"the parameter {name} has more than {most} characters", hint=_LIST)
        if _SURROGATE.search(found):
            raise UsageError(f"the parameter {name} is not valid Unicode: it has half a surrogate pair", hint=_LIST)
        return found

    def flag(self, name: str, *, default: bool = False) -> bool:
        text = self.text(name, "1" if default else "0")
        if text not in ("0", "1"):
            raise UsageError(f"the parameter {name} is neither 0 nor 1", hint=_LIST)
        return text == "1"

    def number(self, name: str, digits: int = 9) -> int | None:
        """Returns a whole number, 0 or more, of at most ``digits`` digits; None if the parameter is missing."""
        text = self.text(name, "")
        if not text:
            return None
        if not (text.isascii() and text.isdigit() and len(text) <= digits):
            raise UsageError(f"the parameter {name} is not a number", hint="for example 7")
        return int(text)

    def pid(self) -> int:
        return process_id(self.text("pid"))

    def interval(self, since: str) -> Interval:
        """Returns the interval from ``bounds``."""
        return interval(*self.bounds(since))

    def bounds(self, since: str) -> tuple[str, str | None]:
        """Returns the begin and the end as texts: the parameters ``from`` and ``to``, else ``since`` and ``until``.

        The argument ``since`` is the default of the begin. The end is None if both of its parameters are missing.
        """
        begin, end = self.text("from", self.text("since", since)), self.text("to", self.text("until", ""))
        return begin, end or None


def _nested(value: Any) -> bool:
    return value is None or isinstance(value, (list, dict))
