"""Requests the status of the collector, as the service does."""

from __future__ import annotations

import json
from typing import Any

from probing.daemon.ipc import connect

__all__ = ("collector_status",)


def collector_status(path: str, timeout: float) -> dict[str, Any]:
    """Returns Status.to_dict of the collector at ``path``. Raises ChannelClosed, ChannelTimeout and its errors."""
    with connect(path, timeout) as channel:
        answer = channel.request({"op": "status"}, timeout=timeout)
    return {**answer.header, **json.loads(answer.payload or b"{}")}
