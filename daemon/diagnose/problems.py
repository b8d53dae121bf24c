"""Keeps the last failure of each subject, for `status`, until that subject succeeds."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from probing.api.errors import PeerError, ProbingError

__all__ = ("Problems", "printable")

_log = logging.getLogger(__name__)


class Problems:
    """The texts of the failures. Iterating is safe for any thread."""

    def __init__(self) -> None:
        self._texts: dict[str, str] = {}

    def __iter__(self) -> Iterator[str]:
        return iter(list(self._texts.values()))

    @contextmanager
    def noted(self, what: str) -> Iterator[None]:
        """Keeps the text of an exception of the block until a block of the same name succeeds; raises nothing."""
        try:
            yield
        except Exception as e:
            text = f"{what}: {e.message if isinstance(e, ProbingError) else f'{type(e).__name__}: {e}'}"
            known, self._texts[what] = self._texts.get(what), printable(text)
            # The same problem is logged once, and a collector that is being replaced not at all.
            if known is None and not isinstance(e, PeerError):
                _log.warning("%s", printable(text), exc_info=not isinstance(e, ProbingError))
        else:
            self._texts.pop(what, None)

    def forget(self, what: str) -> None:
        """Drops the problem of a subject that is gone."""
        self._texts.pop(what, None)


def printable(text: str) -> str:
    """Returns ``text`` with a question mark for each character that is not printable."""
    return "".join(c if c.isprintable() else "?" for c in text)
