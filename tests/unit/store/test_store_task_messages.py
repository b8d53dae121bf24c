"""The steps of tasks cross to another process and back unchanged; anything else is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from probing.api.errors import FormatError
from probing.daemon.store.tasks.messages import (
    Contents,
    Data,
    LostGroup,
    Made,
    PartDecoded,
    Rows,
    SegmentBegun,
    Step,
    Turn,
    pack_step,
    unpack_step,
)

STEPS: list[Step] = [
    PartDecoded(3, {"t.small": 7}, 1_795_000_000_000_000_000, "bad from byte 9 on"),
    SegmentBegun("t.small", "2026-11-21"),
    Data(b"bytes"),
    Made(10, 1 << 31, 7, 1, 2, ("slurm:1",)),
    Made(10, 0, 7),
    LostGroup(2, 101, None, None, "its checksum is wrong"),
    LostGroup(2, 101, 1, 2, "its checksum is wrong"),
    Rows("t.small", b"an Arrow stream"),
    Contents({"table": "t.small", "rows": 7, "jobs": None}),
    Turn(),
]


@pytest.mark.parametrize("step", STEPS, ids=lambda step: type(step).__name__)
def test_a_step_crosses_unchanged(step: Step) -> None:
    header, payload = pack_step(step)
    assert unpack_step(json.loads(json.dumps(header)), bytes(payload)) == step


@pytest.mark.parametrize(
    "header",
    [
        {},
        {"part": [0]},
        {"part": [0, [], 0, ""]},
        {"segment": ["t.small"]},
        {"made": None},
        {"made": ["x", 0, 0, 0, 0, None]},
        {"lost": [0]},
        {"rows": []},
        {"contents": [5]},
        {"data": [], "rows": ["t.small"]},
        {"other": []},
    ],
)
def test_another_message_is_refused(header: dict[str, Any]) -> None:
    with pytest.raises(FormatError, match="a task sent an invalid message"):
        unpack_step(header, b"")
