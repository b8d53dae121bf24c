"""``status`` for people: how long a node is in its state, which is not how long its daemon runs."""

from __future__ import annotations

from typing import Any

import pytest

from probing.api.proto.probing.v1 import node_pb2 as pb
from probing.client.commands.status import _node_text, as_object

SECOND = 1_000_000_000
NOW = 1_795_872_735 * SECOND  # 2026-11-28 13:32:15 UTC


def shown(**fields: Any) -> tuple[int | None, str]:
    """Returns state_ns, and the line of the state, of a daemon that runs for 20 minutes."""
    given = {"node": "n", "started_ns": NOW - 1200 * SECOND, "node_time_ns": NOW, **fields}
    node = as_object("unix:/s", pb.StatusReply(**given))
    return node["state_ns"], _node_text(node, None).splitlines()[1].strip()


@pytest.mark.parametrize(
    ("fields", "lasts", "line"),
    [
        ({"state": "running"}, 1200 * SECOND, "running for 20m00s"),
        (
            {"state": "paused", "reason": "paused since 2026-11-28 13:32:10Z by `probingctl pause`"},
            5 * SECOND,
            "paused for 5 s: paused since 2026-11-28 13:32:10Z by `probingctl pause`; the daemon runs for 20m00s",
        ),
        # An earlier daemon was paused already.
        (
            {"state": "paused", "reason": "paused by `probingctl pause`"},
            None,
            "paused: paused by `probingctl pause`; the daemon runs for 20m00s",
        ),
        # The clock was set back since.
        (
            {"state": "paused", "reason": "paused since 2026-11-28 14:32:10Z by the file /x"},
            None,
            "paused: paused since 2026-11-28 14:32:10Z by the file /x; the daemon runs for 20m00s",
        ),
        (
            {"state": "degraded", "reason": "no /proc/pressure"},
            None,
            "degraded: no /proc/pressure; the daemon runs for 20m00s",
        ),
        ({"state": "running", "started_ns": 0}, None, "running"),
    ],
)
def test_the_state_lasts_as_long_as_it_is_so(fields: dict[str, Any], lasts: int | None, line: str) -> None:
    assert shown(**fields) == (lasts, line)
