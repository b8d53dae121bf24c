"""Decides whether an operation is drawn as a slice, as a slice without an end, or as a point; also the parts of the
slice, and its lane.

Overlapping intervals of a track are drawn in different lanes, because slices of a lane must nest.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from probing.client.timeline.coding import UNKNOWN, Ints, runs
from probing.client.timeline.model import SPANNING, Columns, Operations

__all__ = ("COMMS", "FLYING", "MOST_LANES", "POINT", "SLICE", "Drawn", "Lanes", "drawn")

SLICE, FLYING, POINT = 0, 1, 2
MOST_LANES = 32
"""The maximum number of lanes of a communicator in one rank."""
COMMS = 1 << 16
"""An upper bound on the number of communicators. A track has the number PROCESS * COMMS + COMMUNICATOR."""


@dataclass(slots=True)
class Drawn(Columns):
    """``kind``: SLICE; FLYING, the operation has not ended; or POINT, its end is unknown.

    The operation goes from ``begin`` to ``end``. Until ``waited`` it waited for the rank that called last. It ended
    between ``doubt`` and ``end``. ``waited`` and ``doubt`` are UNKNOWN for operations without such a part.
    """

    kind: Ints
    begin: Ints
    end: Ints
    waited: Ints
    doubt: Ints


def drawn(rows: Operations, errors: Ints, nodes: Ints) -> Drawn:
    """Returns the shapes of ``rows``. ``errors`` has, for each process, by how many ns the clock of its node may be
    wrong; ``nodes`` has the number of the node.

    A wait for a rank of another node that is shorter than the errors of both clocks is not drawn.
    """
    begin = rows.call
    done = np.where(rows.done_hi != UNKNOWN, rows.done_hi, rows.done_lo)
    kind = np.where(rows.done_hi == SPANNING, FLYING, np.where(done == UNKNOWN, POINT, SLICE))
    end = np.where(kind == POINT, begin, np.maximum(done, begin))
    compared = rows.last_call != UNKNOWN
    last = np.where(compared, rows.last, rows.process)
    error = np.where(nodes[last] == nodes[rows.process], 0, errors[last] + errors[rows.process])
    until = np.minimum(rows.last_call, end)
    waits = compared & (kind != POINT) & (rows.last_call - begin > error) & (until > begin)
    waited = np.where(waits, until, UNKNOWN)
    low = np.where(rows.done_lo != UNKNOWN, rows.done_lo, rows.start)
    low = np.maximum(np.maximum(low, begin), waited)
    open_ended = (kind == SLICE) & (rows.done_hi != UNKNOWN) & (rows.done_lo != rows.done_hi) & (low < end)
    return Drawn(kind, begin, end, waited, np.where(open_ended, low, UNKNOWN))


class Lanes:
    """Assigns intervals to lanes: an interval gets the first lane of its track that is free at its begin."""

    def __init__(self, most: int) -> None:
        """``most``: the maximum number of lanes of a track."""
        self._most = most
        self._ends: dict[int, list[int]] = {}

    def of(self, track: Ints, begin: Ints, end: Ints) -> Ints:
        """Returns the lane of each interval, from 0; -1 if all lanes are in use.

        Intervals include their ends, so the next interval of a lane begins later.
        """
        lanes = np.zeros(len(track), np.int64)
        order = np.lexsort((begin, track))
        tracks, begins, ends = track[order], begin[order], end[order]
        firsts, counts = runs(tracks)
        free = np.r_[True, begins[1:] > ends[:-1]][: len(order)]
        earlier = [self._ends.get(key, [-1])[0] for key in tracks[firsts].tolist()]
        free[firsts] = begins[firsts] > np.array(earlier, np.int64)
        for first, last in zip(firsts.tolist(), (firsts + counts).tolist(), strict=True):
            lasts = self._ends.setdefault(int(tracks[first]), [])
            if free[first:last].all():
                lasts[:1] = [int(ends[last - 1])]
            else:
                rows = zip(begins[first:last].tolist(), ends[first:last].tolist(), strict=True)
                lanes[order[first:last]] = [self._lane(lasts, *row) for row in rows]
        return lanes

    def _lane(self, lasts: list[int], begin: int, end: int) -> int:
        for lane, before in enumerate(lasts):
            if before < begin:
                lasts[lane] = end
                return lane
        if len(lasts) >= self._most:
            return -1
        lasts.append(end)
        return len(lasts) - 1
