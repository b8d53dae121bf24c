"""Writes lines to stderr in the form for a terminal, or for systemd's journal: with a priority before each line
(sd-daemon(3)).
"""

from __future__ import annotations

import logging
import os
import sys
import time

from probing.api.errors import ProbingError

__all__ = ("line_of", "log_to_stderr", "print_error", "to_journal")

_STDERR = 2
_PRIORITIES = {logging.CRITICAL: 2, logging.ERROR: 3, logging.WARNING: 4, logging.INFO: 6, logging.DEBUG: 7}
_ERROR = _PRIORITIES[logging.ERROR]


def to_journal() -> bool:
    """Returns whether stderr goes to the journal: JOURNAL_STREAM of systemd.exec(5) has its device and inode then."""
    named = os.environ.get("JOURNAL_STREAM", "")
    if not named:
        return False
    try:
        found = os.fstat(_STDERR)
    except OSError:
        return False
    return named == f"{found.st_dev}:{found.st_ino}"


def log_to_stderr(process: str) -> None:
    """Makes the loggers write to stderr, from level INFO on: TIME LEVEL PROCESS MODULE: MESSAGE, TIME in UTC.

    ``process`` is a kind of process of the daemon. In the journal TIME is left out, as the journal adds it.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_ForJournal(process) if to_journal() else _Lines(process))
    logging.basicConfig(level=logging.INFO, handlers=[handler])


def line_of(error: ProbingError) -> str:
    """Returns ``error: MESSAGE; hint: HINT`` in one line."""
    hint = f"; hint: {_plain(error.hint)}" if error.hint else ""
    return f"error: {_plain(error.message)}{hint}"


def print_error(error: ProbingError, more: str = "") -> None:
    """Prints ``error:`` and ``hint:`` to stderr on two lines; to the journal on one line, with ``more``."""
    if to_journal():
        text = f"<{_ERROR}>{line_of(error)}{more}\n"
    else:
        text = f"error: {_plain(error.message)}\n"
        if error.hint:
            text += f"hint: {_plain(error.hint)}\n"
    sys.stderr.write(text)
    sys.stderr.flush()


class _Lines(logging.Formatter):
    default_time_format = "%Y-%m-%dT%H:%M:%S"
    default_msec_format = "%s.%03dZ"
    _time = "%(asctime)s "

    def __init__(self, process: str) -> None:
        self.converter = time.gmtime
        super().__init__(f"{self._time}%(levelname)s {process} %(name)s: %(message)s")


class _ForJournal(_Lines):
    _time = ""

    def format(self, record: logging.LogRecord) -> str:
        priority = _PRIORITIES.get(record.levelno, 6)
        return "\n".join(f"<{priority}>{line}" for line in super().format(record).splitlines())


def _plain(text: str) -> str:
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())
