"""The source of the gpu tables: polls the NVML process, which calls NVIDIA's driver, and makes rows of its answers."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from probing.api.tables.gpu import EVENTS, LINKS, PROCESSES, UTILIZATION
from probing.api.tables.schema import Row
from probing.daemon.arrow import batch_of
from probing.daemon.clock import Clock, ClockPair
from probing.daemon.config import GpuConfig
from probing.daemon.context import Context
from probing.daemon.gpu.nvml.fleet import Fleet
from probing.daemon.gpu.nvml.rows import (
    Counters,
    Limiter,
    changes_of,
    driver_event,
    link_changes,
    link_row,
    utilization_row,
)
from probing.daemon.gpu.nvml.session import Content, Failure, NvmlSession, Reading
from probing.daemon.gpu.nvml.users import Users
from probing.daemon.processes.discovery import Discovery
from probing.daemon.source import Identity, Loss, Sink, Source
from probing.daemon.source_state import SourceState, Totals, first_of

__all__ = ("NO_GPU", "NvmlSource", "why_absent")

NO_GPU = "no NVIDIA GPU is on this node"
MAX_DEVICES = 4_096
_VENDOR = "0x10de"
# The PCI class of display controllers: VGA and 3D.
_CLASS = "0x03"

# The intervals at which error counters and links between devices are read, s.
SLOW_S, PAIRS_S = 10.0, 60.0
# Lost GPUs are tried again after LOST_S; each further pause is twice as long, up to MOST_LOST_S.
LOST_S, MOST_LOST_S = 30.0, 480.0
# The share of the interval for which a poll waits for its answer.
WAIT_SHARE = 0.8
# The maximum number of driver events that are taken from an answer: as many as the NVML process keeps.
MAX_EVENTS = 4_096
# The exceptions that Arrow raises for a value that does not fit its column.
_UNFIT = (ArithmeticError, TypeError, ValueError)
_log = logging.getLogger(__name__)


class NvmlSource(Source):
    """The source of NVIDIA's GPUs. ``states`` and gpu.events show when the driver is absent, hangs, is lost or comes
    back.
    """

    name = "nvml"
    table = UTILIZATION.name

    def __init__(
        self, session: NvmlSession, watched: Discovery, sink: Sink, clock: Clock, node: str, config: GpuConfig
    ) -> None:
        self._session, self._sink, self._clock, self._node = session, sink, clock, node
        self._config = config
        self._users = Users(watched)
        self._fleet = Fleet()
        self._counters = Counters()
        self._limiter = Limiter()
        self._due = {"slow": 0.0, "links": 0.0, "pairs": 0.0, "lost": 0.0}
        self._lost_s = LOST_S
        self._before: dict[str, Row] = {}
        self._links: dict[tuple[Any, ...], Row] = {}
        self._failure: Failure | None = None
        self._problems: Sequence[str] = ()
        self._events: list[Row] = []

    @classmethod
    def make(cls, context: Context) -> Source:
        config = context.config.gpu
        if not config.enabled:
            return _Off()
        absent = str if config.library else lambda: why_absent(Path(config.sysfs))
        session = NvmlSession(f"{context.config.runtime_dir}/nvml.sock", absent)
        return cls(session, context.processes, context.sink, context.clock, context.node, config)

    @property
    def tick_s(self) -> Callable[[], float] | None:
        return lambda: self._config.interval_s

    @property
    def live_tables(self) -> Mapping[str, Callable[[ClockPair], pa.RecordBatch]]:
        return {"gpu.devices": lambda pair: _batch("gpu.devices", self._fleet.rows(self._node, pair.real_ns))}

    @property
    def observed_tables(self) -> Mapping[str, Callable[[pa.RecordBatch, ClockPair], None]]:
        return {"comm.communicators": lambda batch, _: self._users.note(batch)}

    def process_exited(self, process: Identity) -> None:
        self._users.forget(process.pid, process.start_ns)

    def process_replaced(self, pid: int, start_ns: int) -> None:
        self._users.forget(pid, start_ns)

    def stop(self) -> None:
        self._session.close()

    def tick(self) -> None:
        now = time.monotonic()
        wanted = {name: now >= self._due[name] for name in ("slow", "links", "pairs")}
        found = self._session.poll(self._config.interval_s * WAIT_SHARE, **wanted)
        if isinstance(found, Failure):
            self._failed(found)
        elif found is not None:
            self._take(found, now)
        self._put_events(now)

    def states(self, totals: Totals) -> list[SourceState]:
        failure, lost = self._failure, self._fleet.lost
        if failure is not None and failure.text == NO_GPU:
            return [totals.of(self.name, self.table, detail=NO_GPU)]
        reasons = [failure.text] if failure is not None else []
        reasons += [f"GPU {number}: {reason}" for number, reason in sorted(lost.items())]
        state = "degraded" if reasons else ""
        detail = first_of(self._problems) if self._problems else self._fleet.detail
        return [totals.of(self.name, self.table, state=state, reason=first_of(reasons), detail=detail)]

    def _failed(self, failure: Failure) -> None:
        if failure.kind == "changed":
            return
        before, self._failure = self._failure, failure
        self._counters.forget()
        self._before.clear()
        self._links.clear()
        self._note_driver_events(failure.events)
        if failure.kind == "hung":
            gpu = self._fleet.gpu_row(failure.device)
            milliseconds = int(failure.seconds * 1000)
            self._add({**gpu, "event": "call_hung", "value": milliseconds, "detail": failure.text})
        if before is None or (before.kind, before.call) != (failure.kind, failure.call):
            if failure.text != NO_GPU:
                _log.warning("GPUs cannot be read: %s", failure.text)
            if before is None and self._fleet.known and failure.kind != "hung":
                self._add({"event": "driver_lost", "detail": failure.text})

    def _take(self, found: Reading, now: float) -> None:
        """Makes rows from an answer. A malformed answer drops the devices and ends the process."""
        try:
            self._took(found, now)
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as e:
            _log.debug("the answer of the NVML process is malformed", exc_info=e)
            self._fleet = Fleet()
            self._session.reject()
            self._failed(Failure("ended", f"the answer of the process that asks the driver is malformed: {e!r:.80}"))

    def _took(self, found: Reading, now: float) -> None:
        content, pair = found.content, self._clock.pair()
        if self._failure is not None:
            if self._fleet.known:
                self._add({"event": "driver_back", "detail": f"the driver answers again, after: {self._failure.text}"})
                _log.info("GPUs can be read again")
            self._failure = None
        for name, every_s in (("slow", SLOW_S), ("links", self._config.links_interval_s), ("pairs", PAIRS_S)):
            if name in found.asked:
                self._due[name] = now + every_s
        if found.fresh:
            self._before.clear()
        uuids = self._fleet.uuids
        changes = self._fleet.take(content)
        if self._fleet.uuids != uuids:
            # Another device may have the key of an earlier device now.
            self._counters.forget()
            self._links.clear()
        if found.fresh:
            # Devices that cannot become rows raise an error now, not later in a query.
            _batch("gpu.devices", self._fleet.rows(self._node, pair.real_ns))
        self._note_lost(changes, now)
        self._problems = [problem[:200] for problem in content.get("problems", ())]
        self._put_values(content, pair)
        self._put_links(content.get("links", ()), content.get("values", {}), pair)
        events = content.get("events", ())
        self._note_driver_events(events)
        if dropped := content.get("events_dropped", 0) + max(0, len(events) - MAX_EVENTS):
            reason = "the driver reported more events than are kept between two readings"
            self._sink.lost(Loss(self.name, EVENTS.name, "read", reason, pair.real_ns, pair.real_ns, dropped))

    def _note_lost(self, changes: Mapping[int, str | None], now: float) -> None:
        for number, reason in changes.items():
            event = {"event": "gpu_back", "detail": "the GPU answers again"}
            if reason is not None:
                event = {"event": "gpu_lost", "detail": reason}
                self._lost_s = LOST_S
                self._due["lost"] = now + LOST_S
            self._add({**self._fleet.gpu_row(str(number)), **event})
        if self._fleet.lost and now >= self._due["lost"]:
            # The process keeps the GPU open, which prevents a reset, and does not see the GPU come back. So a new
            # process is started.
            self._lost_s = min(2 * self._lost_s, MOST_LOST_S)
            self._due["lost"] = now + self._lost_s
            self._session.again()

    def _put_values(self, content: Content, pair: ClockPair) -> None:
        common = {"node": self._node, "ts": pair.real_ns, "backend": self._fleet.backend}
        values, listed = content.get("values", {}), content.get("processes", {})
        rows = []
        for key, of_device in values.items():
            if (facts := self._fleet.devices.get(key)) is None:
                continue
            row = utilization_row(key, facts, of_device, self._counters, pair.mono_ns)
            users = listed.get(key)
            rows.append({**row, **common, "processes": None if users is None else len(users)})
            for change in changes_of(self._before.get(key, {}), of_device) if key in self._before else ():
                self._add({**self._fleet.gpu_row(key), **change})
        self._before = dict(values)
        if rows:
            self._sink.put(UTILIZATION.name, _batch(UTILIZATION.name, rows))
        if used := list(self._users.rows(self._fleet.devices, listed, common)):
            self._sink.put(PROCESSES.name, _batch(PROCESSES.name, used))

    def _put_links(self, links: Sequence[Row], values: Mapping[str, Row], pair: ClockPair) -> None:
        common = {"node": self._node, "ts": pair.real_ns, "backend": self._fleet.backend}
        rows = []
        for link in links:
            device = str(link.get("device"))
            if (facts := self._fleet.devices.get(device)) is None:
                continue
            row = link_row(link, facts, values.get(device) or {}, self._counters, pair.mono_ns)
            rows.append({**row, **common})
            if link.get("kind") == "nvlink":
                key = (device, link.get("link"))
                if (before := self._links.get(key)) is not None:
                    for change in link_changes(before, link):
                        self._add({**self._fleet.gpu_row(device), **change})
                # While the state cannot be read, the last known state counts.
                self._links[key] = {**link, "state": link.get("state") or (before or {}).get("state")}
            elif link.get("kind") == "pcie":
                self._fleet.add_pcie(device, link)
        if rows:
            self._sink.put(LINKS.name, _batch(LINKS.name, rows))

    def _note_driver_events(self, events: Sequence[Row]) -> None:
        for event in events[:MAX_EVENTS]:
            try:
                row = driver_event(event)
            except (ArithmeticError, LookupError, TypeError, ValueError):
                continue
            self._add({**self._fleet.gpu_row(str(event.get("device") or "")), **row})

    def _add(self, row: Row) -> None:
        now_ns = self._clock.pair().real_ns
        self._events.append({"node": self._node, "ts": now_ns, "backend": self._fleet.backend, **row})

    def _put_events(self, now: float) -> None:
        events, self._events = self._events, []
        rows = []
        for event in events:
            suppressed = self._limiter.passes((event["event"], event.get("device_id")), now)
            if suppressed is not None:
                rows.append({**event, "suppressed": suppressed})
        if rows:
            self._sink.put(EVENTS.name, _batch(EVENTS.name, rows))
        if count := self._limiter.forgotten(now):
            ts = self._clock.pair().real_ns
            reason = "more events of a kind came in a minute than are stored, and no later event reports their number"
            self._sink.lost(Loss(self.name, EVENTS.name, "read", reason, ts, ts, count))


def _batch(table: str, rows: Sequence[Row]) -> pa.RecordBatch:
    """Returns rows as ``batch_of`` does, with NULL for each value that does not fit its column. A driver may report any
    number for a faulty GPU, and this must not cost the rows of the other GPUs.
    """
    try:
        return batch_of(table, rows)
    except _UNFIT:
        return batch_of(table, [{name: _fitting(table, name, value) for name, value in row.items()} for row in rows])


def _fitting(table: str, name: str, value: Any) -> Any:
    try:
        batch_of(table, [{name: value}])
    except _UNFIT:
        return None
    return value


class _Off(Source):
    """Takes the place of the source if gpu.enabled is false."""

    name = "nvml"

    def states(self, totals: Totals) -> list[SourceState]:  # noqa: ARG002
        return [SourceState(self.name, "stopped", "gpu.enabled is false")]

    @property
    def live_tables(self) -> Mapping[str, Callable[[ClockPair], pa.RecordBatch]]:
        return {"gpu.devices": lambda _: batch_of("gpu.devices", [])}


def why_absent(sysfs: Path, dev: Path = Path("/dev"), proc: Path = Path("/proc")) -> str:
    """Returns why no NVML process is started: NO_GPU, or that the driver of the GPUs is not loaded. Empty if files show
    that the driver is loaded."""
    if (dev / "nvidiactl").exists() or (proc / "driver/nvidia/version").exists():
        return ""
    devices = sysfs / "bus/pci/devices"
    try:
        names = sorted(os.listdir(devices))[:MAX_DEVICES]  # noqa: PTH208
    except OSError:
        return NO_GPU
    if any(_is_gpu(devices / name) for name in names):
        return "NVIDIA GPUs are there, but their driver is not loaded"
    return NO_GPU


def _is_gpu(folder: Path) -> bool:
    try:
        return _read(folder / "vendor") == _VENDOR and _read(folder / "class").startswith(_CLASS)
    except OSError:
        return False


def _read(path: Path) -> str:
    with path.open("rb") as file:
        return file.read(64).decode("ascii", "replace").strip()
