"""Requests the status of the collector, as the service does."""

from __future__ import annotations

import json

from probing.daemon.ipc import Header, connect

__all__ = ("collector_status",)


def collector_status(path: str, timeout: float) -> Header:
    """Returns the collector's Status.to_dict. ``path``: its control socket. Raises ChannelClosed, ChannelTimeout, or
    the collector's error.
    """
    with connect(path, timeout) as channel:
        answer = channel.request({"op": "status"}, timeout=timeout)
    return {**answer.header, **json.loads(answer.payload or b"{}")}
