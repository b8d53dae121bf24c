"""Chooses the lines that are stored: those that contain one of a few texts, and the exceptions below tracebacks; at a
limited rate for each process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from probing.daemon.logs.lines import Writer

__all__ = ("Allowance", "Patterns", "RateLimit", "Tracebacks")

SECOND_NS = 1_000_000_000
MAX_PROCESSES = 4096
_TRACEBACK = b"Traceback (most recent call last):"
_FRAME = b'  File "'
# A traceback that is not over after so many lines was mixed with other output, or its end was not seen.
_MOST_FRAMES = 2048
MAX_TRACEBACKS = 1024


class Patterns:
    """Plain texts, matched by bytes (UTF-8), with case."""

    def __init__(self, texts: Sequence[str]) -> None:
        self._texts = [(text, text.encode()) for text in texts if text]

    def kind(self, line: bytes) -> str | None:
        """Returns the first of the texts that ``line`` contains."""
        return next((text for text, encoded in self._texts if encoded in line), None)


class _Open(NamedTuple):
    """A traceback that has begun. ``prefix``: the length of what precedes each line; None before the first frame."""

    kind: str
    prefix: int | None = None
    lines: int = 0


class Tracebacks:
    """Finds the line that says which exception a traceback is of: the first one below it that is not indented.

    For one thread. Launchers and torch put a prefix before each line, as ``[rank1]: ``, some with the time.
    """

    def __init__(self) -> None:
        self._open: dict[Writer, _Open] = {}

    def kind(self, writer: Writer, line: bytes, kind: str | None) -> str | None:
        """Returns the kind of ``line``: ``kind``, the text that it contains, or that of the traceback that it ends."""
        begun = self._open.pop(writer, None)
        if kind is not None and _TRACEBACK in line:
            if len(self._open) >= MAX_TRACEBACKS:
                del self._open[next(iter(self._open))]
            self._open[writer] = _Open(kind)
            return kind
        if begun is None:
            return kind
        prefix = begun.prefix if begun.prefix is not None else line.find(_FRAME)
        if prefix < 0 or not line[prefix : prefix + 1].isspace():
            return kind or begun.kind
        if begun.lines < _MOST_FRAMES:
            self._open[writer] = _Open(begun.kind, prefix, begun.lines + 1)
        return kind

    def end(self, writer: Writer) -> None:
        """Drops a traceback whose end was not seen."""
        self._open.pop(writer, None)

    def forget(self, pid: int, start_ns: int) -> None:
        """Drops the state of a process that ended."""
        for writer in [one for one in self._open if (one.pid, one.start_ns) == (pid, start_ns)]:
            del self._open[writer]


class Allowance(NamedTuple):
    """Lines of a process: stored in ``second``, and suppressed since the last stored one, by kind."""

    second: int
    stored: int
    suppressed: tuple[tuple[str, int], ...]


class RateLimit:
    """For one thread. ``lines_per_s`` is for each process, by the clock of its own lines."""

    def __init__(self, lines_per_s: int) -> None:
        self.lines_per_s = lines_per_s
        self._known: dict[tuple[int, int], Allowance] = {}

    def take(self, pid: int, start_ns: int, kind: str, mono_ns: int) -> int | None:
        """Returns how many lines of this kind were suppressed before this one, or None to suppress it, too."""
        known = self._known.pop((pid, start_ns), None)
        # Lines are reported when they end: one that began long ago must not open an older second again.
        second = max(mono_ns // SECOND_NS, known.second if known is not None else 0)
        stored = known.stored if known is not None and known.second == second else 0
        suppressed = dict(known.suppressed) if known is not None else {}
        left_out: int | None = None
        if stored < self.lines_per_s:
            left_out, stored = suppressed.pop(kind, 0), stored + 1
        else:
            suppressed[kind] = suppressed.get(kind, 0) + 1
        if len(self._known) >= MAX_PROCESSES:
            del self._known[next(iter(self._known))]
        self._known[pid, start_ns] = Allowance(second, stored, tuple(suppressed.items()))
        return left_out

    def forget(self, pid: int, start_ns: int) -> int:
        """Drop the state of a process that ended. Returns how many suppressed lines no row reports."""
        known = self._known.pop((pid, start_ns), None)
        return 0 if known is None else sum(number for _, number in known.suppressed)
