"""Limits the time and the size of answers."""

from __future__ import annotations

from typing import Any, NamedTuple

import grpc.aio

__all__ = ("Context", "Limits", "seconds_for")

# The node ends its work this many seconds before the caller's deadline, so that its answer arrives in time.
MARGIN_S = 0.1
MIN_TIMEOUT_S = 0.05
Context = grpc.aio.ServicerContext[Any, Any]


class Limits(NamedTuple):
    """Limits of answers. ``query_s``: default and maximum of a query's deadline; ``max_bytes``: default and maximum of
    an answer's size.

    ``stream_s``: maximum deadline of a query whose caller streams, and may take long to write the rows. ``unread_s``:
    how long a stream waits for a caller that reads nothing. ``facts_s``: default and maximum of the time for facts.
    ``preflight_s``, ``preflight_max_s``: default and maximum of the time for facts before a job. ``status_s``: the
    collector's time to answer for Status. ``finding_s``: default and maximum of the wait for a finding. ``eval_s``,
    ``eval_max_s``: default and maximum of the time for code.
    """

    query_s: float = 30.0
    stream_s: float = 3600.0
    unread_s: float = 300.0
    max_bytes: int = 1 << 30
    stacks_s: float = 2.0
    stacks_max_s: float = 30.0
    facts_s: float = 5.0
    preflight_s: float = 10.0
    preflight_max_s: float = 30.0
    control_s: float = 5.0
    eval_s: float = 5.0
    eval_max_s: float = 60.0
    status_s: float = 0.8
    finding_s: float = 30.0


def seconds_for(context: Context, asked_ms: int, default: float, most: float) -> float:
    """Returns the timeout of a call, s: ``asked_ms`` or ``default``, limited by ``most`` and the caller's deadline."""
    wanted = min(asked_ms / 1000 if asked_ms else default, most)
    left = context.time_remaining()
    return max(wanted if left is None else min(wanted, left - MARGIN_S), MIN_TIMEOUT_S)
