"""Measures the cost of the daemon: CPU and memory of its processes, and the time that jobs spend in the probes."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from probing.daemon.arrow import batch_of
from probing.daemon.clock import Clock
from probing.daemon.host.cpu.task_stat import parse_stat_line
from probing.daemon.source import Sink

__all__ = ("CostMeter",)

INTERVAL_NS = 10_000_000_000
# Time of a hit at a cheap probe point, ns (docs/benchmarks.md); probing.cost multiplies hits by it.
HIT_NS = 1000
# Time of a sample of some 30 frames, with its clock tick, ns (docs/benchmarks.md).
SAMPLE_NS = 10_000
_NAMES = {
    b"probing.daemon.collector": "collector",
    b"probing.daemon.confined.reader": "reader",
    b"probing.daemon.confined.parser": "parser",
    b"probing.daemon.service": "service",
    b"probing.daemon.confined.sql_worker": "worker",
}


class _Usage(NamedTuple):
    name: str
    cpu_ns: int
    rss_bytes: int


class CostMeter:
    """Puts rows of probing.cost every ten seconds; ``tick`` is called more often than that."""

    def __init__(
        self, node: str, clock: Clock, sink: Sink, hits: Callable[[], int], samples: Callable[[], int]
    ) -> None:
        self._node = node
        self._clock = clock
        self._sink = sink
        self._hits = hits
        self._samples = samples
        self._last_ns = clock.pair().mono_ns
        self._usage = _own_processes()
        self._last_hits = hits()
        self._last_samples = samples()

    def tick(self) -> None:
        pair = self._clock.pair()
        elapsed = pair.mono_ns - self._last_ns
        if elapsed < INTERVAL_NS:
            return
        usage, hits, samples = _own_processes(), self._hits(), self._samples()
        rows: list[dict[str, object]] = []
        for pid, now in usage.items():
            before = self._usage.get(pid)
            cpu = now.cpu_ns - (before.cpu_ns if before else 0)
            rows.append({"process": now.name, "pid": pid, "cpu_ns": cpu, "rss_bytes": now.rss_bytes})
        spent = (hits - self._last_hits) * HIT_NS + (samples - self._last_samples) * SAMPLE_NS
        rows.append({"process": "probes", "hits": hits - self._last_hits, "cpu_ns": spent})
        for row in rows:
            row.update(node=self._node, ts=pair.real_ns, cpu_pct=100.0 * float(str(row["cpu_ns"])) / elapsed)
        self._sink.put("probing.cost", batch_of("probing.cost", rows))
        self._last_ns, self._usage, self._last_hits, self._last_samples = pair.mono_ns, usage, hits, samples


def _own_processes() -> dict[int, _Usage]:
    """This process and its siblings under the supervisor, or alone when there is no supervisor."""
    pids = {os.getpid()}
    parent = os.getppid()
    with contextlib.suppress(OSError):
        pids |= {int(p) for p in Path(f"/proc/{parent}/task/{parent}/children").read_text().split()}
    found = {}
    for pid in pids:
        with contextlib.suppress(OSError):
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            name = next((_NAMES[word] for word in words if word in _NAMES), None)
            stat = parse_stat_line(Path(f"/proc/{pid}/stat").read_bytes())
            if name and stat:
                found[pid] = _Usage(name, stat.user_ns + stat.sys_ns, stat.rss_bytes)
    return found
