"""Facts about a whole timeline: its range, the clocks, and notes about missing rows."""

from __future__ import annotations

from collections.abc import Iterator

from probing.api.text import utc
from probing.client.timeline.coding import shown
from probing.client.timeline.reading import Timeline
from probing.client.version import program

__all__ = ("about",)

_SEEN = "observed by probingd from outside the processes; docs/timeline.md says how exact the times are"


def about(timeline: Timeline) -> Iterator[tuple[str, str | int]]:
    """Yields facts about ``timeline`` as keys and values; call it after all rows have been read."""
    yield "written_by", program()
    yield "evidence", _SEEN
    yield "job", shown(timeline.job)
    yield "from", utc(timeline.begin)
    yield "to", utc(timeline.end)
    yield "rows", timeline.rows
    for clock in timeline.clocks:
        node = shown(clock.node)
        if clock.offset_ns is not None and clock.error_ns is not None:
            yield f"clock_offset_ns/{node}", clock.offset_ns
            yield f"clock_error_ns/{node}", clock.error_ns
        else:
            yield f"clock/{node}", timeline.clock_text(node)
    for number, note in enumerate(timeline.notes):
        yield f"left_out/{number}", note
