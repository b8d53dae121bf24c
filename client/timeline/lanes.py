"""Lanes of a track: intervals that overlap are drawn in lanes of their own, since slices of a lane must nest."""

from __future__ import annotations

import numpy as np

from probing.client.timeline.coding import Ints, runs

__all__ = ("Lanes",)


class Lanes:
    """Gives out lanes of tracks. An interval takes the first lane of its track whose last interval ended before."""

    def __init__(self, most: int) -> None:
        """``most``: lanes of a track; intervals that find all of them taken get none."""
        self._most = most
        self._ends: dict[int, list[int]] = {}

    def of(self, track: Ints, begin: Ints, end: Ints) -> Ints:
        """Returns the lane of each interval, from 0; -1 where all are taken.

        The end of an interval belongs to it: the next one in its lane begins later.
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
