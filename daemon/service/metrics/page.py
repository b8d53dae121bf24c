"""Makes the families of /metrics from the readings of a scrape, and writes them in Prometheus' text format 0.0.4."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import prometheus_client
from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily

from probing.api.tables.schema import Row
from probing.api.text import escape
from probing.daemon.service.metrics.parts import MOST_SERIES, PARTS, Part

__all__ = (
    "Readings",
    "RequestTimes",
    "metric_names",
    "page_text",
)

# The maximum length of a label's value, characters. Values that are equal after truncation share a series, which has
# the largest of their numbers.
MAX_LABEL = 128
MAX_SOURCES = 256
_STATES = ("running", "paused", "degraded", "starting", "lost")
# The state "other" stands for states that this version does not know.
_SOURCE_STATES = ("running", "degraded", "paused", "stopped", "other")
_SINGLE = (
    ("processes", "probingd_processes", "Processes that are watched.", 1.0),
    ("store_bytes", "probingd_store_bytes", "Bytes of the state directory.", 1.0),
    ("store_segments", "probingd_store_segments", "Segments of the store.", 1.0),
    ("drain_backlog_bytes", "probingd_ring_backlog_bytes", "Bytes that wait in the rings of the kernel.", 1.0),
    ("drain_age_ms", "probingd_drain_age_seconds", "Time since the rings were last drained.", 1e-3),
    ("waiting_rows", "probingd_waiting_rows", "Rows that wait to be written to the log.", 1.0),
)
# Keys of the status that become metrics with one value.
_NUMBERS = tuple(key for key, *_ in _SINGLE)
_Row = Mapping[str, Any]
_Key = tuple[str, ...]


@dataclass(frozen=True)
class Readings:
    """The readings of one scrape. ``failed``: why a part has no rows. ``status``: the collector's status,
    with the state ``lost`` if the collector does not answer. ``seconds``: how long the scrape took. ``refused``:
    refused connections and calls, by reason. ``calls``: calls in progress, by kind. ``hooks``: hooks of findings, by
    outcome."""

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
class _Family:
    """The series of one name: numbers by the values of ``labels``. A counter's name ends in ``_total`` on the page."""

    name: str
    doc: str
    labels: tuple[str, ...]
    values: Mapping[_Key, float]
    counter: bool = False


def _families(readings: Readings) -> Iterator[_Family]:
    """Yields each family of the page once. Families of parts that were not read are missing, and
    probingd_scrape_success says so.
    """
    for part in PARTS:
        yield from _of_part(part, readings.rows.get(part.name, ())[:MOST_SERIES])
    who = {"version": readings.version, "node": readings.node}
    values = {tuple(map(_label, who.values())): 1.0}
    yield _Family("probingd_build_info", "1; the version of the daemon, and its node.", tuple(who), values)
    yield _single("probingd_queries_running", "Queries that run now.", readings.running_queries)
    yield _single("probingd_queries_waiting", "Queries that wait for other queries to end.", readings.waiting_queries)
    calls: dict[_Key, float] = {(_label(kind),): float(count) for kind, count in readings.calls.items()}
    if calls:
        yield _Family("probingd_calls_running", "Calls of clients and nodes under way.", ("kind",), calls)
    refused: dict[_Key, float] = {(_label(reason),): float(count) for reason, count in readings.refused.items()}
    if refused:
        yield _Family(
            "probingd_refused", "Connections and calls that were refused.", ("reason",), refused, counter=True
        )
    hooks: dict[_Key, float] = {(_label(outcome),): float(count) for outcome, count in readings.hooks.items()}
    if hooks:
        doc = "Hooks that were started or failed; findings that were lost to a full queue or a hook that kept failing."
        yield _Family("probingd_hooks", doc, ("outcome",), hooks, counter=True)
    yield from _of_status(readings.status)
    yield from _of_scrape(readings)


def _of_part(part: Part, rows: Sequence[_Row]) -> Iterator[_Family]:
    for metric in part.metrics:
        values: dict[_Key, float] = {}
        for row in rows:
            # A sum of integers is a Decimal.
            if (found := row.get(metric.column)) is None or not math.isfinite(value := float(found)):
                continue
            key = tuple(_label(row.get(column)) for column in part.labels.values())
            values[key] = max(value * metric.scale, values.get(key, -math.inf))
        if values:
            yield _Family(metric.name, metric.doc, tuple(part.labels), values)


def _of_status(status: Mapping[str, Any]) -> Iterator[_Family]:
    now = status.get("state", "lost")
    states: dict[_Key, float] = {(name,): float(now == name) for name in _STATES}
    yield _Family("probingd_state", "1 for the state that the daemon is in.", ("state",), states)
    for key, name, doc, scale in _SINGLE:
        if isinstance(value := status.get(key), int):
            yield _single(name, doc, value * scale)
    losses: dict[_Key, float] = {
        (_label(loss.get("source")), _label(loss.get("stage"))): float(loss.get("reported") or 0)
        for loss in list(status.get("losses", ()))[:MOST_SERIES]
    }
    if losses:
        doc = "Gaps reported in probing.losses, by the source and the stage that lost rows."
        yield _Family("probingd_losses", doc, ("source", "stage"), losses, counter=True)
    yield from _of_sources(list(status.get("sources", ()))[:MAX_SOURCES])


def _of_sources(sources: Sequence[_Row]) -> Iterator[_Family]:
    named: dict[_Key, _Row] = {(_label(source.get("name")),): source for source in sources}
    if not named:
        return
    label = ("source",)
    running = {key: float(source.get("state") == "running") for key, source in named.items()}
    yield _Family("probingd_source_running", "1 while the source runs as it should.", label, running)
    states: dict[_Key, float] = {
        (*key, state): float(state == _state(source)) for key, source in named.items() for state in _SOURCE_STATES
    }
    yield _Family("probingd_source_state", "1 for the state that the source is in.", ("source", "state"), states)
    rows = {key: float(source.get("rows") or 0) for key, source in named.items()}
    yield _Family("probingd_source_rows", "Rows that the source has made.", label, rows, counter=True)
    lost = {key: float(source.get("lost") or 0) for key, source in named.items()}
    yield _Family("probingd_source_lost_rows", "Rows that the source has lost.", label, lost, counter=True)


def _state(source: _Row) -> str:
    state = str(source.get("state"))
    return state if state in _SOURCE_STATES else "other"


def _of_scrape(readings: Readings) -> Iterator[_Family]:
    yield _single("probingd_scrape_duration_seconds", "Time that the reading of this page took.", readings.seconds)
    good = readings.rows.keys() - readings.failed.keys()
    read: dict[_Key, float] = {(p.name,): float(p.name in good) for p in PARTS}
    yield _Family("probingd_scrape_success", "1 if the part of the page was read.", ("part",), read)
    cut: dict[_Key, float] = {(p.name,): float(len(readings.rows.get(p.name, ())) > MOST_SERIES) for p in PARTS}
    yield _Family("probingd_scrape_truncated", "1 if the part has more series than are shown.", ("part",), cut)


def _single(name: str, doc: str, value: float) -> _Family:
    return _Family(name, doc, (), {(): float(value)})


def _label(value: object) -> str:
    """Returns the value of a label: printable, limited in length, and encodable."""
    return "" if value is None else escape(str(value), MAX_LABEL)


# The methods that answer with the rows of a query.
_QUERIES = ("Query", "DoGet")
_BUCKETS = (0.001, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)


class RequestTimes:
    """The durations of the calls and queries that this node has answered. Thread-safe."""

    def __init__(self) -> None:
        # This attribute of prometheus_client has no type.
        without_times: Any = prometheus_client.disable_created_metrics
        without_times()
        self.registry = CollectorRegistry()
        self._queries = Histogram(
            "probingd_query_duration_seconds",
            "Time from a query to the end of its answer.",
            ("outcome",),
            buckets=_BUCKETS,
            registry=self.registry,
        )
        self._calls = Histogram(
            "probingd_request_duration_seconds",
            "Time from a call to the end of its answer.",
            ("method", "outcome"),
            buckets=_BUCKETS,
            registry=self.registry,
        )

    def call(self, method: str, seconds: float, outcome: str) -> None:
        """Counts a call of ``method``, a method of our services, that took ``seconds``; ``outcome`` is ok, failed or
        cancelled."""
        self._calls.labels(method, outcome).observe(seconds)
        if method in _QUERIES:
            self._queries.labels(outcome).observe(seconds)


def page_text(readings: Readings, times: RequestTimes) -> bytes:
    """Returns the text of the page."""
    found: Any = _Collected(readings, times)
    return generate_latest(found)


def metric_names() -> frozenset[str]:
    """Returns the names of all samples that a page may have, without labels."""
    times = RequestTimes()
    times.call("Query", 0.0, "ok")
    losses = [{"source": "x", "stage": "ring"}]
    status = {"state": "running", "sources": [{"name": "x"}], "losses": losses, **dict.fromkeys(_NUMBERS, 1)}
    rows = {part.name: [_example(part)] for part in PARTS}
    found = _Collected(Readings("0", "n", rows, {}, status, refused={"x": 1}, calls={"x": 1}, hooks={"x": 1}), times)
    return frozenset(sample.name for family in found.collect() for sample in family.samples)


class _Collected:
    """The registry that ``generate_latest`` reads."""

    def __init__(self, readings: Readings, times: RequestTimes) -> None:
        self._readings = readings
        self._times = times

    def collect(self) -> Iterator[Any]:
        yield from map(_metric, _families(self._readings))
        yield from self._times.registry.collect()


def _metric(family: _Family) -> Any:
    kind = CounterMetricFamily if family.counter else GaugeMetricFamily
    made = kind(family.name, family.doc, labels=family.labels)
    for key, value in family.values.items():
        made.add_metric(key, value)
    return made


def _example(part: Part) -> Row:
    return {**dict.fromkeys(part.labels.values(), "x"), **{metric.column: 1 for metric in part.metrics}}
