"""Requests the status of the collector, as the service does."""

from __future__ import annotations

import json

from probing.daemon.ipc import Header, connect

__all__ = ("collector_status",)


def collector_status(path: str, timeout: float) -> Header:
    """Returns Status.to_dict of the collector at ``path``. Raises ChannelClosed, ChannelTimeout and its errors."""
    with connect(path, timeout) as channel:
        answer = channel.request({"op": "status"}, timeout=timeout)
    return {**answer.header, **json.loads(answer.payload or b"{}")}
