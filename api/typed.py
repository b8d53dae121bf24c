"""Checks values from ``json``, ``tomllib`` or ``yaml`` against a type, and makes objects of that type.

The type is a dataclass, a named tuple or a TypedDict, or is composed of these, tuples, sets, mappings and plain values.
No value is converted: a string is not accepted as a number, nor a bool as an integer. Fields that the type lacks are
left out.

``json`` parses the values, because ``msgspec`` refuses the strings that ``json`` writes for file and process names
that are not Unicode. Processes that must start fast do not import this module: the import takes
3 to 6 ms and 1 to 2 MB.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, get_type_hints, overload

import msgspec

from probing.api.errors import UsageError

__all__ = ("typed", "typed_json", "with_fields")

_T = TypeVar("_T")
_LACKS = {
    "array": "no list",
    "bool": "neither true nor false",
    "float": "no number",
    "int": "no integer",
    "object": "no object",
    "str": "no text",
}
_TYPE = re.compile(r"Expected `(\w+)(?: \| null)?`, got `\w+`")
_LENGTH = re.compile(r"Expected `array` of length (\d+(?: to \d+)?), got (\d+)")
_FIELD = re.compile(r"Object missing required field `(\w+)`")
_MAX_PROBLEM = 200


@overload
def typed(kind: type[_T], value: object) -> _T: ...
@overload
def typed(kind: Any, value: object) -> Any: ...
def typed(kind: Any, value: object) -> Any:
    """Returns ``value`` as an object of the type ``kind``. Raises ValueError, which names the field and the problem, as
    in "ranks[0]: no text".
    """
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as e:
        raise ValueError(_problem(str(e))) from None


@overload
def typed_json(kind: type[_T], data: bytes) -> _T: ...
@overload
def typed_json(kind: Any, data: bytes) -> Any: ...
def typed_json(kind: Any, data: bytes) -> Any:
    """Returns the JSON in ``data`` as an object of the type ``kind``. Raises ValueError."""
    try:
        value = json.loads(data)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    return typed(kind, value)


def with_fields(function: Callable[..., _T]) -> Callable[[Mapping[str, Any]], _T]:
    """Returns a function that calls ``function`` with the fields of an object as arguments, each checked against its
    annotation. Fields that are not parameters are left out. The returned function raises UsageError for fields that are
    missing or wrong.
    """
    hints = get_type_hints(function)
    hints.pop("return", None)
    defaults = getattr(function, "__defaults__", None) or ()
    given = [msgspec.NODEFAULT] * (len(hints) - len(defaults))
    fields = [(name, kind, default) for (name, kind), default in zip(hints.items(), [*given, *defaults], strict=True)]
    struct = msgspec.defstruct(function.__name__, fields)

    def call(request: Mapping[str, Any]) -> _T:
        try:
            arguments = typed(struct, request)
        except ValueError as e:
            raise UsageError(f"the request is malformed: {e}") from e
        return function(**msgspec.structs.asdict(arguments))

    return call


def _problem(text: str) -> str:
    text, _, place = text.partition(" - at `$")
    if (match := _TYPE.fullmatch(text)) and match[1] in _LACKS:
        text = _LACKS[match[1]]
    elif match := _LENGTH.fullmatch(text):
        text = f"{match[2]} values instead of {match[1]}"
    elif match := _FIELD.fullmatch(text):
        text = f"without {match[1]}"
    return f"{place.strip('.`') or 'it'}: {text[:_MAX_PROBLEM]}"
