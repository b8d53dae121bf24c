"""A decorator that makes a dataclass a table of the job, as in Probing."""

from __future__ import annotations

import dataclasses
import operator
import re
from typing import TYPE_CHECKING, Any

from probing.rows import ExternalTable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

__all__ = ("table",)

_WORD = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=.)(?=[A-Z][a-z])")


def table(name: str | type | None = None, *, capacity_bytes: int | None = None) -> Any:  # noqa: ARG001
    """Returns a dataclass whose objects are rows: ``@table``, ``@table("name")`` or ``@table()`` above ``@dataclass``.

    The class gets the class methods ``append(row)``, ``append_many(rows)``, ``take(limit)``, ``drop()`` and
    ``init_table()``, and its objects get the method ``save()``. The fields are the columns; the table is named after
    the class, as in ``train_step`` for ``TrainStep``. The first row, or ``init_table``, makes the table. Raises
    TypeError for a class that is not a dataclass; ``ExternalTable`` describes types, limits and other errors.
    ``capacity_bytes`` exists for compatibility with Probing and is ignored.
    """
    if isinstance(name, type):
        return _with_table(name, "")
    return lambda cls: _with_table(cls, (name or "").lower())


def _with_table(cls: Any, name: str) -> Any:
    if not hasattr(cls, "__dataclass_fields__"):
        raise TypeError(f"{cls!r} is not a dataclass: put @table above @dataclass")
    name = name or _WORD.sub("_", cls.__name__).lower()
    columns = [field.name for field in dataclasses.fields(cls)]
    values = _values(columns)

    def init_table(_cls: Any) -> ExternalTable:
        made = ExternalTable.get_or_create(name, columns)
        if made.names() != columns:
            raise ValueError(f"the table {name} exists with other columns")
        return made

    def append(cls: Any, row: Any) -> None:
        cls.init_table().append(values(row))

    def append_many(cls: Any, rows: Iterable[Any]) -> None:
        cls.init_table().append_many(map(values, rows))

    def take(cls: Any, limit: int | None = None) -> list[tuple[int, list[Any]]]:
        return list(cls.init_table().take(limit))

    def drop(_cls: Any) -> None:
        ExternalTable.drop(name)

    for method in (init_table, append, append_many, take, drop):
        setattr(cls, method.__name__, classmethod(method))
    cls.save = lambda row: type(row).append(row)
    return cls


def _values(columns: list[str]) -> Callable[[Any], tuple[Any, ...]]:
    """Returns a function that returns the values of a row in the order of the columns."""
    read = operator.attrgetter(*columns) if columns else tuple
    return read if len(columns) > 1 else lambda row: (read(row),)
