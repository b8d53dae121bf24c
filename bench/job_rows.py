"""The cost to a job of reporting spans, rows, events and metrics, beside the cost of alternatives.

``python bench/job_rows.py [--calls 20000] [--rounds 11]``. Each round makes each kind of call in turn. The table has
the median over the rounds, in ns and as a multiple of a reference: two calls of ``time.perf_counter_ns``. ``make
opentelemetry`` installs OpenTelemetry's SDK, which one line of the table needs.
"""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import probing

OPENTELEMETRY = Path(__file__).resolve().parents[1] / ".build" / "opentelemetry"
_Call = Callable[[int], None]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--calls", type=int, default=20_000)
    parser.add_argument("--rounds", type=int, default=11)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        kinds = {**ours(), **others(Path(folder))}
        times: dict[str, list[float]] = {name: [] for name in kinds}
        for _ in range(asked.rounds):
            for name, call in kinds.items():
                times[name].append(nanoseconds(call, asked.calls))
    reference = median(times["two calls of time.perf_counter_ns"])
    print(f"CPython {sys.version.split()[0]}, {asked.rounds} rounds of {asked.calls:,} calls")
    print("| call | ns, median | fastest, slowest round | of the reference |\n|---|---|---|---|")
    for name, found in sorted(times.items(), key=lambda item: median(item[1])):
        print(
            f"| {name} | {median(found):.0f} | {min(found):.0f}, {max(found):.0f} | {median(found) / reference:.1f} |"
        )


def nanoseconds(call: _Call, calls: int) -> float:
    """Returns the time of a call in ns, without the time of the loop."""
    begun = time.perf_counter_ns()
    for number in range(calls):
        call(number)
    took = time.perf_counter_ns() - begun
    begun = time.perf_counter_ns()
    for number in range(calls):
        _nothing(number)
    return (took - (time.perf_counter_ns() - begun)) / calls


def _nothing(number: int) -> None:
    del number


def ours() -> dict[str, _Call]:
    numbers = probing.ExternalTable("bench_numbers", ["step", "loss"])
    texts = probing.ExternalTable("bench_texts", ["step", "loss", "where"])

    def span(number: int) -> None:
        del number
        with probing.span("forward"):
            pass

    return {
        "`ExternalTable.append`, two numbers": lambda number: numbers.append([number, 0.5]),
        "`ExternalTable.append`, two numbers and a text": lambda number: texts.append([number, 0.5, "layer 7"]),
        "`probing.metric`": lambda _: probing.metric("loss", 0.25),
        "`probing.event`": lambda _: probing.event("batch"),
        "`probing.span`, begin and end": span,
    }


def others(folder: Path) -> dict[str, _Call]:
    def clock(number: int) -> None:
        del number
        time.perf_counter_ns()
        time.perf_counter_ns()

    log = logging.getLogger("bench")
    log.propagate = False
    log.setLevel(logging.INFO)
    log.addHandler(logging.FileHandler(folder / "log"))
    found: dict[str, _Call] = {
        "two calls of time.perf_counter_ns": clock,
        "`logging.info` to a file": lambda number: log.info("step %d loss %f", number, 0.5),
        "`logging.debug`, which is off": lambda number: log.debug("step %d loss %f", number, 0.5),
    }
    if OPENTELEMETRY.is_dir():
        found["a span of OpenTelemetry's SDK, exported in batches to nowhere"] = opentelemetry_span()
    else:
        print("without OpenTelemetry: `make opentelemetry` installs it", file=sys.stderr)
    return found


def opentelemetry_span() -> _Call:
    sys.path.append(str(OPENTELEMETRY))
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult

    class Nowhere(SpanExporter):
        def export(self, spans: object) -> SpanExportResult:
            del spans
            return SpanExportResult.SUCCESS

    provider = TracerProvider()
    provider.add_span_processor(BatchSpanProcessor(Nowhere()))
    tracer = provider.get_tracer("bench")

    def span(number: int) -> None:
        del number
        with tracer.start_as_current_span("forward"):
            pass

    return span


if __name__ == "__main__":
    main()
