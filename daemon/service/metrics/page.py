"""Makes the families of /metrics from what a scrape has read. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from probing.api.text import escape
from probing.daemon.service.metrics.parts import MOST_SERIES, PARTS, Part

__all__ = ("NUMBERS", "Family", "Readings", "families")

# Texts of jobs may be long; two that are equal after the cut share a series, with the larger value.
MAX_LABEL = 128
MAX_SOURCES = 256
_STATES = ("running", "paused", "degraded", "starting", "lost")
# "other": a state that this version does not know.
_SOURCE_STATES = ("running", "degraded", "paused", "stopped", "other")
_SINGLE = (
    ("processes", "probingd_processes", "Processes that are watched.", 1.0),
    ("store_bytes", "probingd_store_bytes", "Bytes of the state directory.", 1.0),
    ("store_segments", "probingd_store_segments", "Segments of the store.", 1.0),
    ("drain_backlog_bytes", "probingd_ring_backlog_bytes", "Bytes that wait in the rings of the kernel.", 1.0),
    ("drain_age_ms", "probingd_drain_age_seconds", "Time since the rings were last drained.", 1e-3),
    ("waiting_rows", "probingd_waiting_rows", "Rows that wait to be written to the log.", 1.0),
)
# Keys of the status that become metrics of one value.
NUMBERS = tuple(key for key, *_ in _SINGLE)
_Row = Mapping[str, Any]
_Key = tuple[str, ...]


@dataclass(frozen=True)
class Readings:
    """What one scrape has read. ``failed``: why a part has no rows. ``status``: the collector's; its state is ``lost``
    where it does not answer. ``seconds``: how long the reading took. ``refused``: connections and calls, by reason.
    ``calls``: calls under way, by kind. ``hooks``: hooks of findings, by outcome."""

    version: str
    node: str
    rows: Mapping[str, Sequence[_Row]] = field(default_factory=dict)
    failed: Mapping[str, str] = field(default_factory=dict)
    status: Mapping[str, Any] = field(default_factory=dict)
    running_queries: int = 0
    seconds: float = 0.0
    refused: Mapping[str, int] = field(default_factory=dict)
    waiting_queries: int = 0
    calls: Mapping[str, int] = field(default_factory=dict)
    hooks: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Family:
    """The series of one name: values by the values of ``labels``. A counter's name ends in ``_total`` on the page."""

    name: str
    doc: str
    labels: tuple[str, ...]
    values: Mapping[_Key, float]
    counter: bool = False


def families(readings: Readings) -> Iterator[Family]:
    """Yields each family of the page once. What was not read is absent, and probingd_scrape_success says so."""
    for part in PARTS:
        yield from _of_part(part, readings.rows.get(part.name, ())[:MOST_SERIES])
    who = {"version": readings.version, "node": readings.node}
    values = {tuple(map(_label, who.values())): 1.0}
    yield Family("probingd_build_info", "1; the version of the daemon, and its node.", tuple(who), values)
    yield _single("probingd_queries_running", "Queries that run now.", readings.running_queries)
    yield _single("probingd_queries_waiting", "Queries that wait for others to end.", readings.waiting_queries)
    calls: dict[_Key, float] = {(_label(kind),): float(count) for kind, count in readings.calls.items()}
    if calls:
        yield Family("probingd_calls_running", "Calls of clients and nodes under way.", ("kind",), calls)
    refused: dict[_Key, float] = {(_label(reason),): float(count) for reason, count in readings.refused.items()}
    if refused:
        yield Family("probingd_refused", "Connections and calls that were refused.", ("reason",), refused, counter=True)
    hooks: dict[_Key, float] = {(_label(outcome),): float(count) for outcome, count in readings.hooks.items()}
    if hooks:
        doc = "Hooks of findings that were started and that failed, and findings that were lost to them."
        yield Family("probingd_hooks", doc, ("outcome",), hooks, counter=True)
    yield from _of_status(readings.status)
    yield from _of_scrape(readings)


def _of_part(part: Part, rows: Sequence[_Row]) -> Iterator[Family]:
    for metric in part.metrics:
        values: dict[_Key, float] = {}
        for row in rows:
            # A sum of integers is a Decimal.
            if (found := row.get(metric.column)) is None or not math.isfinite(value := float(found)):
                continue
            key = tuple(_label(row.get(column)) for column in part.labels.values())
            values[key] = max(value * metric.scale, values.get(key, -math.inf))
        if values:
            yield Family(metric.name, metric.doc, tuple(part.labels), values)


def _of_status(status: Mapping[str, Any]) -> Iterator[Family]:
    now = status.get("state", "lost")
    states: dict[_Key, float] = {(name,): float(now == name) for name in _STATES}
    yield Family("probingd_state", "1 for the state that the daemon is in.", ("state",), states)
    for key, name, doc, scale in _SINGLE:
        if isinstance(value := status.get(key), int):
            yield _single(name, doc, value * scale)
    losses: dict[_Key, float] = {
        (_label(loss.get("source")), _label(loss.get("stage"))): float(loss.get("reported") or 0)
        for loss in list(status.get("losses", ()))[:MOST_SERIES]
    }
    if losses:
        doc = "Gaps reported in probing.losses, by the source that lost rows and the stage that they were lost in."
        yield Family("probingd_losses", doc, ("source", "stage"), losses, counter=True)
    yield from _of_sources(list(status.get("sources", ()))[:MAX_SOURCES])


def _of_sources(sources: Sequence[_Row]) -> Iterator[Family]:
    named: dict[_Key, _Row] = {(_label(source.get("name")),): source for source in sources}
    if not named:
        return
    label = ("source",)
    running = {key: float(source.get("state") == "running") for key, source in named.items()}
    yield Family("probingd_source_running", "1 while the source runs as it should.", label, running)
    states: dict[_Key, float] = {
        (*key, state): float(state == _state(source)) for key, source in named.items() for state in _SOURCE_STATES
    }
    yield Family("probingd_source_state", "1 for the state that the source is in.", ("source", "state"), states)
    rows = {key: float(source.get("rows") or 0) for key, source in named.items()}
    yield Family("probingd_source_rows", "Rows that the source has made.", label, rows, counter=True)
    lost = {key: float(source.get("lost") or 0) for key, source in named.items()}
    yield Family("probingd_source_lost_rows", "Rows that the source has lost.", label, lost, counter=True)


def _state(source: _Row) -> str:
    state = str(source.get("state"))
    return state if state in _SOURCE_STATES else "other"


def _of_scrape(readings: Readings) -> Iterator[Family]:
    yield _single("probingd_scrape_duration_seconds", "Time that the reading of this page took.", readings.seconds)
    good = readings.rows.keys() - readings.failed.keys()
    read: dict[_Key, float] = {(p.name,): float(p.name in good) for p in PARTS}
    yield Family("probingd_scrape_success", "1 where the part of the page was read.", ("part",), read)
    cut: dict[_Key, float] = {(p.name,): float(len(readings.rows.get(p.name, ())) > MOST_SERIES) for p in PARTS}
    yield Family("probingd_scrape_truncated", "1 where the part has more series than are shown.", ("part",), cut)


def _single(name: str, doc: str, value: float) -> Family:
    return Family(name, doc, (), {(): float(value)})


def _label(value: object) -> str:
    """Returns the value of a label: printable, of bounded length, and encodable."""
    return "" if value is None else escape(str(value), MAX_LABEL)
