"""Writes the page in Prometheus' text format 0.0.4 by its own library, with the lengths of requests as histograms.

The library is imported where it is used: a daemon without a page does without it in memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from probing.daemon.service.metrics.page import NUMBERS, Family, Readings, families
from probing.daemon.service.metrics.parts import PARTS, Part

__all__ = ("RequestTimes", "metric_names", "page_text")

# The methods that answer with the rows of a query.
_QUERIES = ("Query", "DoGet")
_BUCKETS = (0.001, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)


class RequestTimes:
    """The lengths of the calls and queries that this node has answered. Safe for many threads."""

    def __init__(self) -> None:
        import prometheus_client
        from prometheus_client import CollectorRegistry, Histogram

        # It has no types.
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
        """Counts a call of ``method``, one of the names that our services have, that took ``seconds``; ``outcome`` is
        ok, failed or cancelled."""
        self._calls.labels(method, outcome).observe(seconds)
        if method in _QUERIES:
            self._queries.labels(outcome).observe(seconds)


def page_text(readings: Readings, times: RequestTimes) -> bytes:
    """Returns the text of the page."""
    from prometheus_client import generate_latest

    found: Any = _Collected(readings, times)
    return generate_latest(found)


def metric_names() -> frozenset[str]:
    """Returns the names of all samples that a page can have, without labels."""
    times = RequestTimes()
    times.call("Query", 0.0, "ok")
    losses = [{"source": "x", "stage": "ring"}]
    status = {"state": "running", "sources": [{"name": "x"}], "losses": losses, **dict.fromkeys(NUMBERS, 1)}
    rows = {part.name: [_example(part)] for part in PARTS}
    found = _Collected(Readings("0", "n", rows, {}, status, refused={"x": 1}, calls={"x": 1}, hooks={"x": 1}), times)
    return frozenset(sample.name for family in found.collect() for sample in family.samples)


class _Collected:
    """What ``generate_latest`` reads, as a registry has it."""

    def __init__(self, readings: Readings, times: RequestTimes) -> None:
        self._readings = readings
        self._times = times

    def collect(self) -> Iterator[Any]:
        yield from map(_metric, families(self._readings))
        yield from self._times.registry.collect()


def _metric(family: Family) -> Any:
    from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily

    kind = CounterMetricFamily if family.counter else GaugeMetricFamily
    made = kind(family.name, family.doc, labels=family.labels)
    for key, value in family.values.items():
        made.add_metric(key, value)
    return made


def _example(part: Part) -> dict[str, Any]:
    return {**dict.fromkeys(part.labels.values(), "x"), **{metric.column: 1 for metric in part.metrics}}
