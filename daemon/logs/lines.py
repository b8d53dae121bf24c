"""Assembles lines from the pieces that threads write."""

from __future__ import annotations

import re
from typing import NamedTuple

__all__ = ("Line", "Lines", "Piece", "Writer")

# The rest of a longer line is dropped; with more writers the oldest unfinished line is evicted.
MAX_LINE = 4096
MAX_WRITERS = 4096
# A carriage return ends a line as well: progress bars end none otherwise.
_END = re.compile(rb"[\r\n]")


class Writer(NamedTuple):
    """A thread and the descriptor that it writes to: two threads' lines do not mix."""

    pid: int
    start_ns: int
    tid: int
    fd: int


class Piece(NamedTuple):
    """A part of the text of one call, ``offset`` bytes from its begin. ``cut``: the rest of it was not seen."""

    writer: Writer
    mono_ns: int
    offset: int
    text: bytes
    cut: bool = False


class Line(NamedTuple):
    """``mono_ns``: when its first piece was written; later than that of the line before, also in one call.

    ``cut``: what its call wrote after it was not seen.
    """

    writer: Writer
    mono_ns: int
    text: bytes
    cut: bool = False


class _Partial(NamedTuple):
    mono_ns: int
    text: bytes
    # Where the next piece of the same call has to begin.
    call_ns: int
    expected: int
    # Of the last line that the writer ended.
    newest_ns: int


class Lines:
    """Unfinished lines, by writer. For one thread."""

    def __init__(self) -> None:
        self._partial: dict[Writer, _Partial] = {}

    def feed(self, piece: Piece) -> list[Line]:
        """Returns the lines that ``piece`` ends, without line ends and without empty lines."""
        writer = piece.writer
        before = self._partial.pop(writer, None)
        lines: list[Line] = []
        newest = before.newest_ns if before is not None else 0

        def add(mono_ns: int, text: bytes) -> None:
            nonlocal newest
            if text:
                newest = max(mono_ns, newest + 1)
                lines.append(Line(writer, newest, text[:MAX_LINE]))

        if before is not None and not _follows(before, piece):
            # Something between the two was lost.
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
            self._keep(writer, _Partial(began, rest, piece.mono_ns, piece.offset + len(piece.text), newest))
        return lines

    def end(self, pid: int, start_ns: int) -> list[Line]:
        """Returns the lines that a process left unfinished."""
        left = [writer for writer in self._partial if (writer.pid, writer.start_ns) == (pid, start_ns)]
        partials = [(writer, self._partial.pop(writer)) for writer in left]
        return [Line(w, max(p.mono_ns, p.newest_ns + 1), p.text) for w, p in partials if p.text]

    def _keep(self, writer: Writer, partial: _Partial) -> None:
        if len(self._partial) >= MAX_WRITERS:
            del self._partial[next(iter(self._partial))]
        self._partial[writer] = partial


def _follows(before: _Partial, piece: Piece) -> bool:
    """Returns whether ``piece`` continues ``before``: in the same call, or at the begin of the next one."""
    return piece.offset == (before.expected if piece.mono_ns == before.call_ns else 0)
