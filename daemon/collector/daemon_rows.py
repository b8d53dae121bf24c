"""Makes the rows that the daemon records about itself (store, cost, versions), the rows of findings that the service
sends, and the status of the collector.
"""

from __future__ import annotations

import contextlib
import os
import platform
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pyarrow as pa

from probing.api.errors import UsageError
from probing.daemon.arrow import batch_of
from probing.daemon.bpf.library import library
from probing.daemon.clock import Clock
from probing.daemon.ipc import Header
from probing.daemon.row_check import checked_row
from probing.daemon.source import Sink
from probing.daemon.source_state import SourceState
from probing.daemon.store.status import StateStatus
from probing.daemon.supervisor.health import RESTARTED

__all__ = (
    "CostMeter",
    "FindingRows",
    "Status",
    "store_batch",
    "summary_of",
    "version_batch",
)


def store_batch(node: str, now_ns: int, status: StateStatus) -> pa.RecordBatch:
    """Returns rows of probing.store: a row for each table that has segments, and a row for the log. ``now_ns``: UTC."""
    log = {"kind": "log", "files": status["parts"], "bytes": status["log_bytes"]}
    segments = [
        {
            "kind": "segments",
            "table_name": name,
            "files": table["segments"],
            "bytes": table["bytes"],
            "rows": table["rows"],
            "oldest": table["ts_min"],
        }
        for name, table in sorted(status["tables"].items())
    ]
    return batch_of("probing.store", [{"node": node, "ts": now_ns, **row} for row in (log, *segments)])


_TABLE = "diagnosis.findings"
_OWN = frozenset({"node", "ts"})
_MAX_ROWS = 256


class FindingRows:
    def __init__(self, node: str, sink: Sink, clock: Clock) -> None:
        self._node = node
        self._sink = sink
        self._clock = clock

    def put(self, rows: Any) -> int:
        """Stores ``rows``, dicts of values by column name. Returns their number. Raises UsageError if they are not rows
        of ``diagnosis.findings``.
        """
        if not isinstance(rows, list) or len(rows) > _MAX_ROWS:
            raise UsageError(f"findings must be a list of at most {_MAX_ROWS} rows")
        own = {"node": self._node, "ts": self._clock.pair().real_ns}
        self._sink.put(_TABLE, batch_of(_TABLE, [checked_row(_TABLE, row, _OWN) | own for row in rows]))
        return len(rows)


_PACKAGES = ("probingd", "duckdb", "grpcio", "protobuf", "pyarrow", "sqlglot", "numpy")
_MAX_TEXT = 200


def version_batch(node: str, now_ns: int) -> pa.RecordBatch:
    """Returns the rows of probing.versions; ``now_ns``: UTC."""
    rows = [{"node": node, "ts": now_ns, "name": name, "version": text} for name, text in _versions().items()]
    return batch_of("probing.versions", rows)


@lru_cache(maxsize=1)
def _versions() -> dict[str, str | None]:
    kernel = os.uname()
    return {
        **{name: _package(name) for name in _PACKAGES},
        "kernel": kernel.release,
        "machine": kernel.machine,
        "distribution": _distribution(),
        "python": platform.python_version(),
        "libbpf": str(library()),
    }


def _package(name: str) -> str | None:
    # Imported here, because the module takes 1.7 MB and few queries need it.
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _distribution() -> str | None:
    """Returns the name of the distribution from os-release(5); in a container it is the distribution of the image."""
    try:
        return platform.freedesktop_os_release().get("PRETTY_NAME", "")[:_MAX_TEXT] or None
    except OSError:
        return None


INTERVAL_NS = 10_000_000_000
# The estimated CPU time of a hit of a cheap probe, ns (docs/benchmarks.md). probing.cost multiplies the number of hits
# by this time.
HIT_NS = 1000
# The estimated CPU time of a sample of about 30 frames, including its clock tick, ns (docs/benchmarks.md).
SAMPLE_NS = 10_000
_NAMES = {
    "probing.daemon.collector": "collector",
    "probing.daemon.confined.reader": "reader",
    "probing.daemon.confined.parser": "parser",
    "probing.daemon.service": "service",
    "probing.daemon.confined.sql_worker": "worker",
}


class _Usage(NamedTuple):
    name: str
    cpu_ns: int
    rss_bytes: int


class CostMeter:
    """Puts rows of probing.cost every ten seconds. ``tick`` may be called more often."""

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
    """Returns the usage of this process and of its siblings under the supervisor; without a supervisor only of this
    process.
    """
    pids = {os.getpid()}
    parent = os.getppid()
    # The kernel's list of children is used, because psutil would read all processes of the node to find the children,
    # which takes 11 us for each process.
    with contextlib.suppress(OSError):
        pids |= {int(p) for p in Path(f"/proc/{parent}/task/{parent}/children").read_text().split()}
    found = {}
    for pid in pids:
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(pid)
            name = next((_NAMES[word] for word in process.cmdline() if word in _NAMES), None)
            if name:
                spent = process.cpu_times()
                found[pid] = _Usage(name, round((spent.user + spent.system) * 1e9), process.memory_info().rss)
    return found


# The drain counts as hanging if it finishes no step for this time, s. It usually finishes several steps a second.
STILL_S = 3.0
_MAX_REASON = 300


class Status:
    """The state of the collector: ``starting`` until ``ready`` is set.

    ``paused`` returns why all probes are paused, or an empty string. ``drain`` returns the seconds since the last step
    of the drain, and the bytes that wait in the rings. ``waiting`` returns the number of rows that wait for the log,
    ``losses`` returns the number of reported losses by source and stage.
    """

    def __init__(
        self,
        started_ns: int,
        boot_id: str,
        *,
        paused: Callable[[], str] = str,
        store: Callable[[], Mapping[str, Any]] = dict,
        sources: Callable[[], list[SourceState]] = list,
        processes: Callable[[], int] = int,
        failure: Callable[[], str | None] = lambda: None,
        drain: Callable[[], tuple[float, int]] = lambda: (0.0, 0),
        waiting: Callable[[], int] = int,
        losses: Callable[[], Mapping[tuple[str, str], int]] = dict,
    ) -> None:
        self._started_ns = started_ns
        self._boot_id = boot_id
        self._restarted = os.environ.get(RESTARTED, "")
        self.ready = False
        self.paused = paused
        self.store = store
        self.sources = sources
        self.processes = processes
        self.failure = failure
        self.drain = drain
        self.waiting = waiting
        self.losses = losses

    def to_dict(self) -> Header:
        store = self.store()
        sources = self.sources()
        paused = self.paused()
        reasons = [s.reason for s in sources if s.state == "degraded"]
        if store.get("state") == "degraded":
            reasons.append(str(store.get("reason")))
        if failure := self.failure():
            reasons.append(failure)
        age, backlog = self.drain()
        if self.ready and age > STILL_S:
            reasons.append(f"the rings have not been drained for {age:.0f} s, {backlog} bytes wait in them")
        state = self._state(bool(paused), bool(reasons))
        if self._restarted:
            reasons.append(f"the collector was started again: {self._restarted}")
        return {
            "state": state,
            "reason": "; ".join(dict.fromkeys([paused, *reasons] if paused else reasons)),
            "started_ns": self._started_ns,
            "boot_id": self._boot_id,
            "sources": [s._asdict() for s in sources],
            "store_bytes": int(store.get("bytes", 0)),
            "store_segments": int(store.get("segments", 0)),
            "processes": self.processes(),
            "drain_age_ms": int(age * 1000),
            "drain_backlog_bytes": backlog,
            "waiting_rows": self.waiting(),
            "losses": [
                {"source": source, "stage": stage, "reported": count}
                for (source, stage), count in list(self.losses().items())
            ],
        }

    def _state(self, paused: bool, degraded: bool) -> str:
        if not self.ready:
            return "starting"
        if paused:
            return "paused"
        return "degraded" if degraded else "running"


def summary_of(status: Mapping[str, Any]) -> str:
    """Returns a line for `systemctl status`. ``status``: the result of ``Status.to_dict``."""
    if status["state"] == "running":
        count = status["processes"]
        return f"collecting from {count} process{'' if count == 1 else 'es'}"
    reason = " ".join(status["reason"].split())
    return f"{status['state']}: {reason if len(reason) <= _MAX_REASON else f'{reason[: _MAX_REASON - 1]}…'}"
