"""Watched variables of trainers, read again and again: a row when one has changed, and one for each step seen."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from probing.api.errors import ProbingError
from probing.daemon.arrow import batch_of
from probing.daemon.clock import Clock
from probing.daemon.context import Context
from probing.daemon.python_stack.values.heap import CHANGED
from probing.daemon.python_stack.values.names import parse_name
from probing.daemon.python_stack.values.source import Values
from probing.daemon.source import Identity, Sink, Source
from probing.daemon.source_state import SourceState, Totals
from probing.daemon.worker import Worker

__all__ = ("VariableWatch",)

INTERVAL_S = 1.0
PARALLEL = 4
# A process that takes longer is tried again at the next reading.
TIMEOUT_S = 1.0
STEPS = ("step", "global_step", "iteration", "iter", "it")
LOSSES = ("loss", "train_loss")
_log = logging.getLogger(__name__)
_Key = tuple[int, int]


class _Values(Protocol):
    """``values.source.Values``."""

    def of_process(self, pid: int, start_ns: int, names: Sequence[str], deadline: float) -> list[dict[str, Any]]: ...


class _Trainers(Protocol):
    """``processes.discovery.Discovery``."""

    def live(self) -> list[Identity]: ...


@dataclass(slots=True)
class _Told:
    """What the last rows of a process said. ``reading`` is the reading that is under way, if any."""

    values: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    step: int | None = None
    reason: str = ""
    reading: Future[None] | None = None


class VariableWatch(Source):
    """``wanted`` returns the names that are watched in a process; ``interval_s`` how often, in seconds.

    Each process is read by itself, ``PARALLEL`` at once: one that does not answer delays the others by nothing while
    there are threads left, and by a timeout at most.
    """

    name = "variables"
    table = "python.variables"

    def __init__(
        self,
        values: _Values,
        sink: Sink,
        wanted: Callable[[Identity], tuple[str, ...]],
        processes: _Trainers,
        clock: Clock,
        node: str,
        *,
        interval_s: Callable[[], float] = lambda: INTERVAL_S,
    ) -> None:
        self._values = values
        self._sink = sink
        self._wanted = wanted
        self._processes = processes
        self._clock = clock
        self._node = node
        self._told: dict[_Key, _Told] = {}
        self._pool = ThreadPoolExecutor(PARALLEL, thread_name_prefix="watch")
        self._worker = Worker("variables", self.look, interval_s, patience_s=TIMEOUT_S + INTERVAL_S)

    @classmethod
    def make(cls, context: Context) -> VariableWatch:
        settings = context.settings

        def wanted(process: Identity) -> tuple[str, ...]:
            names: tuple[str, ...] = settings.value("variables.watch", process)
            return names

        return cls(
            context.find(Values), context.sink, wanted, context.processes, context.clock, context.node,
            interval_s=lambda: float(settings.value("variables.interval_s")),
        )  # fmt: skip

    def start(self) -> None:
        self._worker.start()

    def stop(self) -> None:
        """What is under way ends by its own deadline."""
        self._worker.stop()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def settings_changed(self) -> bool:
        """Read again at once: other variables may be watched."""
        self._worker.wake()
        return False

    def states(self, totals: Totals) -> list[SourceState]:
        return [totals.of(self.name, self.table, reason=self.reason)]

    @property
    def reason(self) -> str:
        """Why a watched process could not be read at the last try; empty when all could."""
        return next((told.reason for told in list(self._told.values()) if told.reason), "")

    def look(self) -> list[Future[None]]:
        """Begin to read all that is wanted, but for processes that are still being read."""
        live = {(who.pid, who.start_ns): who for who in self._processes.live() if who.role == "trainer"}
        for key in self._told.keys() - live.keys():
            del self._told[key]
        begun = []
        for key, who in live.items():
            names = self._wanted(who)
            told = self._told.setdefault(key, _Told())
            if not names:
                told.values.clear()
                told.reason = ""
            elif told.reading is None or told.reading.done():
                told.reading = self._pool.submit(self._read, who, told, names)
                begun.append(told.reading)
        return begun

    def _read(self, who: Identity, told: _Told, names: tuple[str, ...]) -> None:
        try:
            read = self._values.of_process(who.pid, who.start_ns, names, time.monotonic() + TIMEOUT_S)
        except ProbingError as e:
            if told.reason != e.message:
                _log.warning("variables of process %d are not read: %s", who.pid, e.message)
            told.reason = e.message
            return
        told.reason = ""
        ts = self._clock.pair().real_ns
        common = {**asdict(who), "node": self._node, "ts": ts}
        chosen = _one_each(read)
        step = _step(chosen)
        self._tell_values(common, told, chosen, step)
        if step is not None and step != told.step:
            told.step = step
            row = {**common, "step": step, "loss": _number(chosen, LOSSES)}
            self._sink.put("python.training_metrics", batch_of("python.training_metrics", [row]))

    def _tell_values(
        self, common: dict[str, Any], told: _Told, chosen: dict[str, dict[str, Any]], step: int | None
    ) -> None:
        rows = []
        for name, value in chosen.items():
            # As text: a number that is none (nan) differs from itself.
            now = (value["type"], value["value"], value["reason"], repr(value["number"]))
            if value["reason"] == CHANGED or told.values.get(name) == now:
                continue
            told.values[name] = now
            shown = {**value, "reason": value["reason"] or None}
            rows.append({**common, **shown, "step": step, "micro_step": step})
        if rows:
            self._sink.put("python.variables", batch_of("python.variables", rows))


def _one_each(read: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The answer for each name: the first thread's that has a value."""
    found: dict[str, dict[str, Any]] = {}
    for value in read:
        if value["name"] not in found or found[value["name"]]["value"] is None:
            found[value["name"]] = value
    return found


def _step(values: dict[str, dict[str, Any]]) -> int | None:
    number = _number(values, STEPS)
    # An int64 of the table, and no fraction: what it counts are steps.
    return int(number) if number is not None and abs(number) < 1 << 53 and number == int(number) else None


def _number(values: dict[str, dict[str, Any]], last: tuple[str, ...]) -> float | None:
    """The number of the first variable whose last part is one of ``last``."""
    for name, value in values.items():
        parsed = parse_name(name)
        if (parsed.parts[-1] if parsed.parts else parsed.first) in last and value["number"] is not None:
            return float(value["number"])
    return None
