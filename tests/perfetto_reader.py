"""Reads a Perfetto trace by the classes of the `perfetto` package into slices, points and counters by track."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

from perfetto.protos.perfetto.trace import perfetto_trace_pb2 as pb

__all__ = ("Event", "Read", "read")

_BEGIN, _END, _INSTANT, _COUNTER = 1, 2, 3, 4
Path = tuple[str, ...]


@dataclass
class Event:
    """A slice, a point (``end`` is ``begin``), or a value. ``depth``: slices of its track around it."""

    path: Path
    name: str
    category: str
    begin: int
    end: int | None
    args: dict[str, Any] = field(default_factory=dict)
    flows: tuple[int, ...] = ()
    depth: int = 0
    value: float | None = None
    stack: list[tuple[str, str, int]] = field(default_factory=list)
    weight: float = 0.0


@dataclass
class Read:
    """``tracks``: the descriptor of each track. ``attributes``: facts about the trace."""

    slices: list[Event]
    points: list[Event]
    values: list[Event]
    tracks: dict[Path, Any]
    attributes: dict[str, Any]
    realtime: int

    def of(self, category: str) -> list[Event]:
        return [event for event in [*self.slices, *self.points] if event.category == category]

    def by_flow(self) -> dict[int, list[Event]]:
        found: dict[int, list[Event]] = defaultdict(list)
        for event in [*self.slices, *self.points]:
            for flow in event.flows:
                found[flow].append(event)
        return dict(found)


class _Reader:
    def __init__(self) -> None:
        self.texts: dict[tuple[str, int], Any] = {}
        self.tracks: dict[int, Any] = {}

    def intern(self, data: Any) -> None:
        for kind, entries in data.ListFields():
            for entry in entries:
                # A number names one thing for ever, and nothing else is named before it is there.
                assert (kind.name, entry.iid) not in self.texts
                self.texts[kind.name, entry.iid] = entry

    def path(self, uuid: int) -> Path:
        track = self.tracks[uuid]
        return (*(self.path(track.parent_uuid) if track.HasField("parent_uuid") else ()), track.name)

    def event(self, packet: Any) -> Event:
        event = packet.track_event
        name = self.texts["event_names", event.name_iid].name if event.name_iid else ""
        category = self.texts["event_categories", event.category_iids[0]].name if event.category_iids else ""
        made = Event(self.path(event.track_uuid), name, category, packet.timestamp, None)
        made.flows = tuple(event.flow_ids)
        for annotation in event.debug_annotations:
            key = self.texts["debug_annotation_names", annotation.name_iid].name
            kind = annotation.WhichOneof("value")
            value = getattr(annotation, kind)
            if kind == "string_value_iid":
                value = self.texts["debug_annotation_string_values", value].str.decode()
            made.args[key] = value
        if event.callstack_iid:
            made.stack = [self.frame(number) for number in self.texts["callstacks", event.callstack_iid].frame_ids]
            made.weight = event.callstack_weight
        return made

    def frame(self, number: int) -> tuple[str, str, int]:
        frame = self.texts["frames", number]
        path = self.texts["source_paths", frame.source_path_iid].str.decode() if frame.source_path_iid else ""
        return self.texts["function_names", frame.function_name_id].str.decode(), path, frame.line_number


def read(data: bytes) -> Read:
    """Returns what a trace shows. Fails for what Perfetto would refuse, and for slices that do not nest."""
    trace = pb.Trace.FromString(data)
    reader = _Reader()
    found = Read([], [], [], {}, {}, 0)
    events = []
    assert trace.packet[0].sequence_flags & 1
    for packet in trace.packet:
        assert packet.trusted_packet_sequence_id == 1
        if packet.HasField("interned_data"):
            reader.intern(packet.interned_data)
        elif packet.HasField("track_descriptor"):
            assert packet.track_descriptor.uuid not in reader.tracks
            reader.tracks[packet.track_descriptor.uuid] = packet.track_descriptor
            found.tracks[reader.path(packet.track_descriptor.uuid)] = packet.track_descriptor
        elif packet.HasField("track_event"):
            assert packet.sequence_flags & 2
            events.append((packet.track_event.track_uuid, packet.track_event.type, reader.event(packet), packet))
        elif packet.HasField("clock_snapshot"):
            found.realtime = next(clock.timestamp for clock in packet.clock_snapshot.clocks if clock.clock_id == 1)
        elif packet.HasField("trace_attributes"):
            for one in packet.trace_attributes.attribute:
                found.attributes[one.key] = getattr(one, one.WhichOneof("value"))
    _replay(found, events)
    return found


def _replay(found: Read, events: list[Any]) -> None:
    open_slices: dict[int, list[Event]] = defaultdict(list)
    # As Perfetto does: by time, and in the order of the file where times are equal.
    for uuid, kind, event, packet in sorted(events, key=lambda one: one[3].timestamp):
        stack = open_slices[uuid]
        if kind == _END:
            stack.pop().end = event.begin
            continue
        event.depth = len(stack)
        if kind == _BEGIN:
            stack.append(event)
            found.slices.append(event)
        elif kind == _INSTANT:
            event.end = event.begin
            found.points.append(event)
        else:
            assert kind == _COUNTER
            event.value = packet.track_event.double_counter_value
            found.values.append(event)
