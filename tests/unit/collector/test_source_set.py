"""The list of sources, and what the collector takes of all of them together."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

import pyarrow as pa
import pytest

from probing.api.errors import InternalError
from probing.api.tables import TABLES
from probing.daemon.arrow import batch_of
from probing.daemon.bpf.build import FOLDER
from probing.daemon.clock import ClockPair, FakeClock
from probing.daemon.collector.row_buffer import RowBuffer
from probing.daemon.collector.source_set import SOURCES, SourceSet, objects_of, ring_sizes_of
from probing.daemon.config import Config
from probing.daemon.context import Context
from probing.daemon.source import Loss, ProbeSlot, Refused, RingConsumer, Source
from probing.daemon.source_state import SourceState, Totals

PAIR = ClockPair(5, 5, 7)
EVENTS = "process.events"


def event(pid: int) -> pa.RecordBatch:
    return batch_of(EVENTS, [{"node": "n1", "ts": 1, "pid": pid}])


class Events(Source):
    """Assembles rows of process.events, and has the probe slots 3 and 5."""

    name = "events"
    table = EVENTS

    @classmethod
    def make(cls, context: Context) -> Source:
        del context
        return cls()

    @property
    def rings(self) -> Mapping[str, RingConsumer]:
        return {"events": RingConsumer(lambda records, _: {EVENTS: event(len(records))}, EVENTS)}

    @property
    def probe_slots(self) -> Mapping[int, ProbeSlot]:
        return {slot: ProbeSlot(f"probe {slot}", "events", EVENTS) for slot in (3, 5)}


class Observer(Source):
    """Reads what ``Events`` makes; its probe has a slot of its own, or one that is taken."""

    name = "observer"

    def __init__(self, slot: int = 7) -> None:
        self.seen: list[tuple[int, ClockPair]] = []
        self._slot = slot

    @classmethod
    def make(cls, context: Context) -> Source:
        context.find(Events)
        return cls()

    @property
    def observed_tables(self) -> Mapping[str, Callable[[pa.RecordBatch, ClockPair], None]]:
        return {EVENTS: lambda batch, pair: self.seen.append((batch["pid"][0].as_py(), pair))}

    @property
    def probe_slots(self) -> Mapping[int, ProbeSlot]:
        return {self._slot: ProbeSlot("observer", "observer", EVENTS)}


@pytest.fixture
def buffer() -> RowBuffer:
    return RowBuffer("n1", FakeClock(5, 7))


def context() -> Context:
    parts: Any = dict.fromkeys(
        ("config", "node", "session", "readers", "parsers", "sink", "clock", "settings", "processes")
    )
    return Context(**parts)


def test_every_source_has_its_own_name_and_what_it_names_exists() -> None:
    assert len({kind.name for kind in SOURCES}) == len(SOURCES)  # type: ignore[attr-defined]
    assert {kind.table for kind in SOURCES} - {""} <= TABLES.keys()  # type: ignore[attr-defined]
    required, optional = objects_of(SOURCES)
    assert len({*required, *optional}) == len(required) + len(optional)
    assert all((FOLDER / f"{name}.bpf.c").is_file() for name in (*required, *optional))
    assert set(ring_sizes_of(SOURCES, Config())) == {"collectives", "python_samples"}


def test_a_source_reads_the_batches_of_another(buffer: RowBuffer) -> None:
    sources = SourceSet(buffer)
    sources.build((Events, Observer), context(), ExitStack())
    observer = next(source for source in sources if isinstance(source, Observer))
    # Assembled from a ring, with the clocks of the drain, and put into the buffer.
    assert sources.rings["events"].assemble([1, 2, 3], PAIR)[EVENTS].num_rows == 1  # type: ignore[arg-type]
    buffer.put(EVENTS, event(11))
    assert observer.seen == [(3, PAIR), (11, buffer._clock.pair())]


def test_an_error_of_an_observer_costs_no_rows_and_no_other_observer(buffer: RowBuffer) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("no")

    class Failing(Source):
        @property
        def observed_tables(self) -> Mapping[str, Callable[[pa.RecordBatch, ClockPair], None]]:
            return {EVENTS: fail}

        def rows_lost(self, loss: Loss) -> None:
            fail(loss)

    sources = SourceSet(buffer)
    observer = Observer()
    for source in (Events(), Failing(), observer):
        sources.add(source)
    assert sources.rings["events"].assemble([1, 2, 3], PAIR)[EVENTS].num_rows == 1  # type: ignore[arg-type]
    buffer.put(EVENTS, event(11))
    buffer.lost(Loss("a", "b", "c", "d", 1, 2, 3))
    assert [pid for pid, _ in observer.seen] == [3, 11]
    assert {table: len(batches) for table, batches in buffer.take().items()} == {EVENTS: 1, "probing.losses": 1}


def test_a_source_finds_only_those_above_it(buffer: RowBuffer) -> None:
    with pytest.raises(InternalError, match="a source needs Events, but no earlier source shares it"):
        SourceSet(buffer).build((Observer, Events), context(), ExitStack())


def test_two_sources_cannot_have_one_slot(buffer: RowBuffer) -> None:
    sources = SourceSet(buffer)
    sources.add(Events())
    sources.add(Observer(7))
    assert sorted(sources.probe_slots) == [3, 5, 7]
    sources.add(Observer(5))
    with pytest.raises(InternalError, match="the probe slot 5 is used by probe 5 and observer"):
        _ = sources.probe_slots


def test_states_count_rows_and_losses(buffer: RowBuffer) -> None:
    sources = SourceSet(buffer)
    for source in (Events(), Refused("sampler", "no rights")):
        sources.add(source)
    assert sources.states(Totals("paused", {EVENTS: 23}, {"events": 4})) == [
        SourceState("events", "paused", rows=23, lost=4),
        SourceState("sampler", "degraded", "no rights"),
    ]


def test_a_source_that_shows_no_state_hides_no_other(buffer: RowBuffer) -> None:
    class Failing(Source):
        name = "failing"

        def states(self, totals: Totals) -> list[SourceState]:
            raise RuntimeError("dictionary changed size during iteration")

    sources = SourceSet(buffer)
    for source in (Failing(), Events()):
        sources.add(source)
    assert sources.states(Totals("running", {}, {})) == [
        SourceState("failing", "degraded", "RuntimeError in its state"),
        SourceState("events", "running"),
    ]
