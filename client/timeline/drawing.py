"""How an operation is drawn: as a slice, a slice without an end, or a point; and the parts of the slice."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from probing.client.timeline.coding import UNKNOWN, Ints
from probing.client.timeline.model import SPANNING, Columns, Operations

__all__ = ("FLYING", "POINT", "SLICE", "Drawn", "drawn")

SLICE, FLYING, POINT = 0, 1, 2


@dataclass(slots=True)
class Drawn(Columns):
    """``kind``: SLICE; FLYING, the operation has not ended; or POINT, nothing is known of its end.

    The operation goes from ``begin`` to ``end``. Until ``waited`` it waited for the rank that called last. It ended
    between ``doubt`` and ``end``. Either is UNKNOWN where there is no such part.
    """

    kind: Ints
    begin: Ints
    end: Ints
    waited: Ints
    doubt: Ints


def drawn(rows: Operations, errors: Ints, nodes: Ints) -> Drawn:
    """Returns how ``rows`` are drawn. ``errors`` and ``nodes`` have, for each process, by how many ns the clock of its
    node may be wrong, and the number of its node.

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
