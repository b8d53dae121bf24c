"""Assembles lines from the pieces that threads write, and chooses the lines to store: lines that contain a configured
text, and the last lines of tracebacks. The rate of stored lines is limited for each process.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

__all__ = (
    "Line",
    "Lines",
    "Patterns",
    "Piece",
    "RateLimit",
    "Tracebacks",
    "Writer",
)

# MAX_LINE: the maximum size of a line, bytes; the rest of a longer line is dropped. MAX_WRITERS: the maximum number of
# unfinished lines. If there are more, the oldest line of the process with the most unfinished lines is ended.
MAX_LINE = 4096
MAX_WRITERS = 4096
# A carriage return ends a line, too, since progress bars write no newlines.
_END = re.compile(rb"[\r\n]")


class Writer(NamedTuple):
    """A thread, and the descriptor to which it writes. Lines are assembled for each writer, so that lines of two
    threads do not mix.
    """

    pid: int
    start_ns: int
    tid: int
    fd: int


class Piece(NamedTuple):
    """A part of the text of one call, ``offset`` bytes after the beginning of the text. ``cut``: whether the rest of
    the text was not recorded.
    """

    writer: Writer
    mono_ns: int
    offset: int
    text: bytes
    cut: bool = False


class Line(NamedTuple):
    """A finished line. ``mono_ns``: when its first piece was written, adjusted so that it is later than the previous
    line of the writer, even in the same call.

    ``cut``: whether the text that its call wrote after the line was not recorded.
    """

    writer: Writer
    mono_ns: int
    text: bytes
    cut: bool = False


class _Partial(NamedTuple):
    mono_ns: int
    text: bytes
    # The offset at which the next piece of the same call has to begin.
    call_ns: int
    expected: int
    # The time of the last line that the writer ended.
    newest_ns: int


class Lines:
    """Assembles lines; keeps the unfinished line of each writer. Not thread-safe."""

    def __init__(self) -> None:
        # By process, and then by writer, the oldest writer first.
        self._partial: dict[tuple[int, int], dict[Writer, _Partial]] = {}
        self._writers = 0

    def feed(self, piece: Piece) -> list[Line]:
        """Returns the lines that ``piece`` completes, without line ends and without empty lines."""
        writer = piece.writer
        before = self._take(writer)
        lines: list[Line] = []
        newest = before.newest_ns if before is not None else 0

        def add(mono_ns: int, text: bytes) -> None:
            nonlocal newest
            if text:
                newest = max(mono_ns, newest + 1)
                lines.append(Line(writer, newest, text[:MAX_LINE]))

        if before is not None and not _follows(before, piece):
            # Text between the two pieces was lost.
            add(before.mono_ns, before.text)
            before = None
        *ended, rest = _END.split(piece.text)
        began, head = (before.mono_ns, before.text) if before is not None and before.text else (piece.mono_ns, b"")
        for text in ended:
            add(began, head + text)
            began, head = piece.mono_ns, b""
        rest = (head + rest)[:MAX_LINE]
        if piece.cut:
            add(began, rest)
            lines[-1:] = [line._replace(cut=True) for line in lines[-1:]]
        else:
            lines += self._keep(writer, _Partial(began, rest, piece.mono_ns, piece.offset + len(piece.text), newest))
        return lines

    def end(self, pid: int, start_ns: int) -> list[Line]:
        """Returns the lines that a process left unfinished."""
        partials = self._partial.pop((pid, start_ns), {})
        self._writers -= len(partials)
        return [line for writer, partial in partials.items() for line in _unfinished(writer, partial)]

    def _keep(self, writer: Writer, partial: _Partial) -> list[Line]:
        """Keeps an unfinished line. If there are more than MAX_WRITERS, ends another unfinished line and returns it."""
        self._partial.setdefault((writer.pid, writer.start_ns), {})[writer] = partial
        self._writers += 1
        if self._writers <= MAX_WRITERS:
            return []
        crowd: dict[Writer, _Partial] = max(self._partial.values(), key=len)
        oldest = next(iter(crowd))
        left = self._take(oldest)
        return _unfinished(oldest, left) if left is not None else []

    def _take(self, writer: Writer) -> _Partial | None:
        process = writer.pid, writer.start_ns
        of_process = self._partial.get(process, {})
        partial = of_process.pop(writer, None)
        if partial is not None:
            self._writers -= 1
            if not of_process:
                del self._partial[process]
        return partial


def _unfinished(writer: Writer, partial: _Partial) -> list[Line]:
    return [Line(writer, max(partial.mono_ns, partial.newest_ns + 1), partial.text)] if partial.text else []


def _follows(before: _Partial, piece: Piece) -> bool:
    """Returns whether ``piece`` follows ``before`` in the same call, or begins another call."""
    return piece.offset == (before.expected if piece.mono_ns == before.call_ns else 0)


SECOND_NS = 1_000_000_000
MAX_PROCESSES = 4096
_TRACEBACK = b"Traceback (most recent call last):"
_FRAME = b'  File "'
# The maximum number of lines of a traceback. If there are more, the traceback is dropped: it was mixed with other
# output, or its end was not recorded.
_MOST_FRAMES = 2048
MAX_TRACEBACKS = 1024


class Patterns:
    """The configured texts, matched as bytes (UTF-8), case-sensitive."""

    def __init__(self, texts: Sequence[str]) -> None:
        self._texts = [(text, text.encode()) for text in texts if text]

    def kind(self, line: bytes) -> str | None:
        """Returns the first configured text that ``line`` contains, or None."""
        return next((text for text, encoded in self._texts if encoded in line), None)


class _Open(NamedTuple):
    """An unfinished traceback. ``prefix``: the length of the prefix of each line; None before the first frame."""

    kind: str
    prefix: int | None = None
    lines: int = 0


class Tracebacks:
    """Recognizes the last line of a traceback, which names the exception: the first line after the frames that is not
    indented. Not thread-safe.

    Launchers and torch put a prefix before each line, such as ``[rank1]: ``; some prefixes contain the time.
    """

    def __init__(self) -> None:
        self._open: dict[Writer, _Open] = {}

    def kind(self, writer: Writer, line: bytes, kind: str | None) -> str | None:
        """Returns the kind of ``line``: ``kind``, the configured text that the line contains, or, without such a text,
        the kind of the traceback whose last line it is.
        """
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
        """Drops the unfinished traceback of ``writer``, whose end was not recorded."""
        self._open.pop(writer, None)

    def forget(self, pid: int, start_ns: int) -> None:
        """Drops the state of a process that ended."""
        for writer in [one for one in self._open if (one.pid, one.start_ns) == (pid, start_ns)]:
            del self._open[writer]


class _Allowance(NamedTuple):
    """Counts of lines of a process: the lines ``stored`` in ``second``, and for each kind the lines ``suppressed``
    since a line of that kind was last stored.
    """

    second: int
    stored: int
    suppressed: tuple[tuple[str, int], ...]


class RateLimit:
    """Limits how many lines of each process are stored a second. The times of the lines count, not the present time.
    Not thread-safe.
    """

    def __init__(self, lines_per_s: int) -> None:
        self.lines_per_s = lines_per_s
        self._known: dict[tuple[int, int], _Allowance] = {}

    def take(self, pid: int, start_ns: int, kind: str, mono_ns: int) -> int | None:
        """Returns the number of lines of ``kind`` that were suppressed since a line of ``kind`` was last stored, or
        None if this line must be suppressed, too.
        """
        known = self._known.pop((pid, start_ns), None)
        # A line arrives when it ends, but has the time at which it began. So times can go back, and an earlier second
        # must not be counted again.
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
        self._known[pid, start_ns] = _Allowance(second, stored, tuple(suppressed.items()))
        return left_out

    def forget(self, pid: int, start_ns: int) -> int:
        """Drops the state of a process that ended. Returns the number of suppressed lines that no row reports."""
        known = self._known.pop((pid, start_ns), None)
        return 0 if known is None else sum(number for _, number in known.suppressed)
