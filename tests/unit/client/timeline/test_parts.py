"""The parts of a timeline, held to slow programs that do the same one row at a time."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from long import examples

from probing.client.timeline.coding import UNKNOWN, Entries, Ints, distinct, mixed, runs
from probing.client.timeline.drawing import Lanes
from probing.client.timeline.matching import awaited, steps_at
from probing.client.timeline.model import Operations, Steps
from probing.client.timeline.packets import Hole, Template, fixed, message, number, packet, text

_SPANS = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 60), st.integers(0, 30)), max_size=41)


def array(values: list[int]) -> Ints:
    return np.array(values, np.int64)


@settings(max_examples=examples(300))
@given(st.lists(_SPANS, min_size=1, max_size=3), st.integers(1, 4))
def test_slices_of_a_lane_never_overlap(parts: list[list[tuple[int, int, int]]], most: int) -> None:
    lanes = Lanes(most)
    taken: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for part in parts:
        track, begin, length = (array([row[place] for row in part]) for place in range(3))
        given_out = lanes.of(track, begin, begin + length)
        for lane, one, low, high in zip(
            given_out.tolist(), track.tolist(), begin.tolist(), (begin + length).tolist(), strict=True
        ):
            assert lane < most
            if lane >= 0:
                taken.setdefault((one, lane), []).append((low, high))
    for spans in taken.values():
        spans.sort()
        assert all(after[0] > before[1] for before, after in pairwise(spans))
    if len(parts) == 1:
        # Sorted by begin, the first lane that is free is as good as any other choice.
        whole = parts[0]
        for one in {row[0] for row in whole}:
            spans = [(begin, begin + length) for track, begin, length in whole if track == one]
            depth = max(sum(low <= at <= high for low, high in spans) for at, _ in spans)
            assert len([key for key in taken if key[0] == one]) == min(depth, most)


@settings(max_examples=examples(300))
@given(
    st.lists(
        st.tuples(st.integers(0, 4), st.integers(0, 2), st.one_of(st.just(UNKNOWN), st.integers(0, 5))),
        max_size=40,
        unique=True,
    ),
    st.lists(st.integers(0, 5), min_size=3, max_size=3),
    st.integers(1, 40),
)
def test_who_called_last(rows: list[tuple[int, int, int]], sizes: list[int], first: int) -> None:
    whole = Operations.joined([])
    columns = {name: np.full(len(rows), UNKNOWN) for name in Operations.__slots__}
    columns |= {
        "process": array([row[0] for row in rows]),
        "comm": array([row[1] for row in rows]),
        "seq": array([row[2] for row in rows]),
        "call": np.arange(len(rows)),
    }
    whole = Operations(**columns)
    places = np.arange(len(rows))
    parts = [whole.taken(places[:first]), whole.taken(places[first:])]
    found = Operations.joined(list(awaited(parts, lambda: array(sizes))))
    for place, (_, comm, seq) in enumerate(rows):
        members = [other for other, row in enumerate(rows) if row[1:] == (comm, seq)]
        complete = seq != UNKNOWN and sizes[comm] > 1 and len(members) == sizes[comm]
        wanted = (members[-1], rows[members[-1]][0]) if complete else (UNKNOWN, UNKNOWN)
        assert (found.last_call[place], found.last[place]) == wanted


@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 9)), max_size=20, unique=True),
    st.lists(st.tuples(st.integers(0, 3), st.integers(-5, 15)), max_size=20),
    st.sampled_from([1, 10**17]),
)
def test_steps_of_operations(steps: list[tuple[int, int]], at: list[tuple[int, int]], unit: int) -> None:
    ordered = sorted(steps)
    begin = array([low * unit for _, low in ordered])
    nothing = np.full(len(ordered), UNKNOWN)
    table = Steps(array([who for who, _ in ordered]), np.arange(len(ordered)), begin, begin + unit, nothing, nothing)
    found = steps_at(table, array([who for who, _ in at]), array([when * unit for _, when in at]))
    wanted = [next((n for n, one in enumerate(ordered) if one == key), UNKNOWN) for key in at]
    assert found.tolist() == wanted


@given(st.lists(st.integers(0, 3)))
def test_runs(values: list[int]) -> None:
    starts, counts = runs(array(values))
    found = [values[start] for start, count in zip(starts, counts, strict=True) for _ in range(count)]
    assert found == values
    assert all(values[start] != values[start - 1] for start in starts[1:])


def test_distinct_asks_once_for_a_key() -> None:
    known: dict[int, int] = {7: 70}
    asked: list[int] = []
    keys = array([7, 8, 9, 8, 9, 7])
    found = distinct(keys, lambda row: asked.append(row) or 10 * int(keys[row]), known)
    assert found.tolist() == [70, 80, 90, 80, 90, 70]
    assert asked == [1, 2]
    assert known == {7: 70, 8: 80, 9: 90}


def test_entries_beyond_the_most_are_others() -> None:
    entries: Entries[str] = Entries(3, "(others)")
    assert [entries.index(name) for name in "abcda"] == [0, 1, 2, 2, 0]
    assert entries.values == ["a", "b", "(others)"]


def test_mixed_depends_on_each_column_and_their_order() -> None:
    one, other = array([1, 1, 2]), array([5, 6, 1])
    assert len({*mixed(one, other).tolist(), *mixed(other, one).tolist()}) == 6


@pytest.mark.parametrize("value", [0, 1, 127, 128, 300, 2**31, 2**63 - 1, -1, -(2**63)])
def test_numbers_in_holes_are_varints_that_decoders_take(value: int) -> None:
    from google.protobuf import wrappers_pb2

    template = Template(number(1, Hole("value", 10)))
    data = template.filled(2, {"value": array([value, value])})
    assert data.shape == (2, 11)
    assert wrappers_pb2.Int64Value.FromString(data[1].tobytes()).value == value
    assert wrappers_pb2.Int64Value.FromString(packet(number(1, value))).value == value


def test_messages_nest_and_know_their_length() -> None:
    from perfetto.protos.perfetto.trace import perfetto_trace_pb2 as pb

    template = Template(message(1, number(8, Hole("at", 9)), message(11, fixed(44, "value"), text(23, "ü" * 100))))
    data = template.filled(3, {"at": array([1, 2, 2**62]), "value": np.array([0.5, -1.0, 2.0])})
    trace = pb.Trace.FromString(data.tobytes())
    assert [one.timestamp for one in trace.packet] == [1, 2, 2**62]
    assert [one.track_event.double_counter_value for one in trace.packet] == [0.5, -1.0, 2.0]
    assert trace.packet[0].track_event.name == "ü" * 100
