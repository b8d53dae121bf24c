"""Leaves out rows in which nothing happened, except for one now and then."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence

import numpy as np
import numpy.typing as npt

__all__ = ("Quiet",)

# A quiet row is written after so long, to show that the connections are there.
AGAIN_NS = 60_000_000_000
MAX_KNOWN = 16_384


class Quiet:
    """Not safe for two threads at once."""

    def __init__(self) -> None:
        self._written: OrderedDict[Hashable, int] = OrderedDict()

    def wanted(self, keys: Sequence[Hashable], active: npt.NDArray[np.bool_], mono_ns: int) -> npt.NDArray[np.bool_]:
        """Returns which rows are to be written: the active ones, and those not written for a minute."""
        found = active.copy()
        for row, key in enumerate(keys):
            if not found[row]:
                found[row] = mono_ns - self._written.get(key, mono_ns - AGAIN_NS) >= AGAIN_NS
            if found[row]:
                self._written[key] = mono_ns
                self._written.move_to_end(key)
        while len(self._written) > MAX_KNOWN:
            self._written.popitem(last=False)
        return found
