"""Writes the parts of a Perfetto trace that its events refer to: tracks and texts, each before its first use.

The field numbers come from protos/perfetto/trace/ in https://github.com/google/perfetto (v59.1).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import IO

from probing.client.timeline.packets import Part, message, number, packet, text

__all__ = ("ANNOTATIONS", "CATEGORIES", "FRAMES", "FUNCTIONS", "NAMES", "PATHS", "STACKS", "TEXTS", "Trace", "in_trace")

# Fields of InternedData.
CATEGORIES, NAMES, ANNOTATIONS, FUNCTIONS, FRAMES, STACKS, PATHS, TEXTS = 1, 2, 3, 5, 6, 7, 18, 29
# TrackDescriptor.ChildTracksOrdering.EXPLICIT
_EXPLICIT = 3
_CLEARED, _NEEDS_STATE = 1, 2
_SEQUENCE = number(10, 1)


def in_trace(*parts: list[Part]) -> list[Part]:
    """Returns a packet of a Trace with the fields ``parts``, in the one sequence of packets that we write."""
    return message(1, *parts, _SEQUENCE, number(13, _NEEDS_STATE))


class Trace:
    """Writes packets to ``sink``, and numbers the tracks and texts of the trace."""

    def __init__(self, sink: IO[bytes], begin: int) -> None:
        """``begin``: the begin of the trace, UTC ns. Times of the trace are UTC ns, too."""
        self._sink = sink
        self._tracks: dict[Hashable, int] = {}
        self._texts: dict[int, dict[Hashable, int]] = {}
        # Perfetto's clocks: 6 is BOOTTIME, the clock of a trace, 1 is REALTIME.
        clocks = [message(1, number(1, clock), number(2, begin)) for clock in (6, 1)]
        sequence = (_SEQUENCE, number(13, _CLEARED | _NEEDS_STATE), number(87, 1))
        self._write(message(1, number(8, begin), message(6, *clocks), *sequence))

    def write(self, data: bytes) -> None:
        self._sink.write(data)

    def attributes(self, values: Iterable[tuple[str, str | int]]) -> None:
        """Writes facts about the whole trace, which Perfetto shows as its metadata."""
        attributes = [
            message(1, text(1, key), number(2, value) if isinstance(value, int) else text(3, value))
            for key, value in values
        ]
        self._write(in_trace(message(126, *attributes)))

    def track(
        self,
        key: Hashable,
        name: str,
        parent: int = 0,
        *,
        order: int = 0,
        about: str = "",
        unit: str | None = None,
    ) -> int:
        """Returns the uuid of the track ``key``, below the track ``parent``. ``unit``: the unit of a counter's values;
        None: the track is not a counter.

        Perfetto shows tracks with the same name and parent as one track.
        """
        if (uuid := self._tracks.get(key)) is not None:
            return uuid
        uuid = self._tracks[key] = len(self._tracks) + 1
        parts = [number(1, uuid), text(2, name), number(11, _EXPLICIT), number(12, order)]
        parts += [number(5, parent)] if parent else []
        parts += [text(14, about)] if about else []
        parts += [message(8, text(6, unit))] if unit is not None else []
        self._write(in_trace(message(60, *parts)))
        return uuid

    def interned(self, kind: int, value: str) -> int:
        """Returns the number of a text of ``kind``, a field of InternedData."""
        return self._entry(kind, value, [text(2, value)])

    def frame(self, function: str, path: str, line: int | None) -> int:
        """Returns the number of a frame."""
        if (iid := self._texts.get(FRAMES, {}).get((function, path, line))) is not None:
            return iid
        parts = [number(2, self.interned(FUNCTIONS, function))]
        parts += [number(5, self.interned(PATHS, path))] if path else []
        parts += [number(6, line)] if line is not None and line >= 0 else []
        return self._entry(FRAMES, (function, path, line), parts)

    def stack(self, frames: Sequence[int]) -> int:
        """Returns the number of a stack, whose frames are outermost first."""
        return self._entry(STACKS, tuple(frames), [number(2, frame) for frame in frames])

    def _entry(self, kind: int, key: Hashable, parts: list[list[Part]]) -> int:
        table = self._texts.setdefault(kind, {})
        if (iid := table.get(key)) is not None:
            return iid
        iid = table[key] = len(table) + 1
        self._write(in_trace(message(12, message(kind, number(1, iid), *parts))))
        return iid

    def _write(self, parts: list[Part]) -> None:
        self._sink.write(packet(parts))
