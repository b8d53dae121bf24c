"""Which dumps were read already, kept in a file so that the next daemon does not tell them again."""

from __future__ import annotations

import json
import logging
from pathlib import Path

__all__ = ("KnownDumps",)

MAX_KNOWN = 4_096
MAX_BYTES = 1 << 20
_log = logging.getLogger(__name__)


class KnownDumps:
    """Numbers of dumps, the newest 4096. Without a path they are forgotten with the process."""

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._known: dict[int, None] = dict.fromkeys(_load(path))
        self._changed = False

    def __contains__(self, number: int) -> bool:
        return number in self._known

    def add(self, number: int) -> None:
        self._known[number] = None
        self._changed = True
        while len(self._known) > MAX_KNOWN:
            del self._known[next(iter(self._known))]

    def save(self) -> None:
        """Write down what was added since; a failure is logged, and tried again the next time."""
        if not self._changed or self._path is None:
            return
        fresh = self._path.with_suffix(".new")
        try:
            fresh.write_text(json.dumps(list(self._known)))
            fresh.replace(self._path)
            self._changed = False
        except OSError as e:
            _log.warning("which dumps were read cannot be kept: %s", e.strerror)


def _load(path: Path | None) -> list[int]:
    if path is None:
        return []
    try:
        with path.open("rb") as file:
            known = json.loads(file.read(MAX_BYTES))
    except (OSError, ValueError):
        return []
    return [number for number in known if isinstance(number, int)] if isinstance(known, list) else []
