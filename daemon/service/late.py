"""Makes a part of the service when a call first needs it, so that the start does not wait for its imports."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

__all__ = ("Late",)

_T = TypeVar("_T")


class Late(Generic[_T]):
    """A part of the service. ``make`` imports and makes it. Safe for many threads."""

    def __init__(self, make: Callable[[], _T]) -> None:
        self._make = make
        self._lock = threading.Lock()
        self.made: _T | None = None

    def get(self) -> _T:
        """Returns the part; the first call makes it, which may take 50 ms."""
        with self._lock:
            if self.made is None:
                self.made = self._make()
            return self.made
