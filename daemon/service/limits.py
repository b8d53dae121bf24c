"""How long and how large an answer may be."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import grpc.aio

__all__ = ("Context", "Limits", "seconds_for")

# The answer of the node must be on its way before the caller's own deadline ends.
MARGIN_S = 0.1
MIN_TIMEOUT_S = 0.05
Context = grpc.aio.ServicerContext[Any, Any]


@dataclass(frozen=True)
class Limits:
    """``query_s``: deadline of a query that names none, and its upper bound; ``max_bytes`` of an answer likewise.

    ``stream_s`` is the upper bound where the caller streams: it may write for long what is read at once.
    ``unread_s``: how long a stream may wait for a caller that takes nothing. ``status_s``: what the collector has to
    answer for Status.
    """

    query_s: float = 30.0
    stream_s: float = 3600.0
    unread_s: float = 300.0
    max_bytes: int = 1 << 30
    stacks_s: float = 2.0
    stacks_max_s: float = 30.0
    control_s: float = 5.0
    status_s: float = 0.8


def seconds_for(context: Context, asked_ms: int, default: float, most: float) -> float:
    """Seconds that the node may take."""
    wanted = min(asked_ms / 1000 if asked_ms else default, most)
    left = context.time_remaining()
    return max(wanted if left is None else min(wanted, left - MARGIN_S), MIN_TIMEOUT_S)
