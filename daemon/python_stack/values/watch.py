"""Polls watched variables of trainers: makes a row when a variable changed, and a row for each new step."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from probing.api.errors import ProbingError
from probing.api.tables.schema import Row
from probing.daemon.arrow import batch_of
from probing.daemon.clock import Clock
from probing.daemon.context import Context
from probing.daemon.processes.discovery import Discovery
from probing.daemon.python_stack.values.heap import CHANGED
from probing.daemon.python_stack.values.names import parse_name
from probing.daemon.python_stack.values.requests import Values
from probing.daemon.source import Identity, ProcessKey, Sink, Source
from probing.daemon.source_state import SourceState, Totals
from probing.daemon.stack_wire import NamedVariable
from probing.daemon.worker import Worker

__all__ = ("VariableWatch",)

INTERVAL_S = 1.0
PARALLEL = 4
# The time for reading a process, s; if it takes longer, it is tried again at the next poll.
TIMEOUT_S = 1.0
STEPS = ("step", "global_step", "iteration", "iter", "it")
LOSSES = ("loss", "train_loss")
_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Reported:
    """The last values reported for a process. ``reading``: the read in progress, if there is one."""

    values: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    step: int | None = None
    reason: str = ""
    reading: Future[None] | None = None


class VariableWatch(Source):
    """Watches variables. ``wanted`` returns the names to watch in a process, ``interval_s`` the pause between two
    polls, s.

    Each process is read separately, ``PARALLEL`` at once: a process that does not answer delays the others only if no
    thread is left, and then at most by a timeout.
    """

    name = "variables"
    table = "python.variables"

    def __init__(
        self,
        values: Values,
        sink: Sink,
        wanted: Callable[[Identity], tuple[str, ...]],
        processes: Discovery,
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
        self._reported: dict[ProcessKey, _Reported] = {}
        self._pool = ThreadPoolExecutor(PARALLEL, thread_name_prefix="watch")
        self._worker = Worker("variables", self.look, interval_s, patience_s=TIMEOUT_S + INTERVAL_S)

    @classmethod
    def make(cls, context: Context) -> VariableWatch:
        settings = context.settings

        def wanted(process: Identity) -> tuple[str, ...]:
            names: tuple[str, ...] = settings.value("variables.watch", process)
            return names

        return cls(
            context.find(Values),
            context.sink,
            wanted,
            context.processes,
            context.clock,
            context.node,
            interval_s=lambda: float(settings.value("variables.interval_s")),
        )

    def start(self) -> None:
        self._worker.start()

    def stop(self) -> None:
        """Stops polling; reads in progress end at their own deadlines."""
        self._worker.stop()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def settings_changed(self) -> bool:
        """Polls at once, since other variables may be watched now. Returns False."""
        self._worker.wake()
        return False

    def states(self, totals: Totals) -> list[SourceState]:
        return [totals.of(self.name, self.table, reason=self.reason)]

    @property
    def reason(self) -> str:
        """Why a watched process could not be read at the last try; empty when no read failed."""
        return next((reported.reason for reported in list(self._reported.values()) if reported.reason), "")

    def look(self) -> list[Future[None]]:
        """Starts to read all watched variables, except of processes that are still being read."""
        live = {who.key: who for who in self._processes.live() if who.role == "trainer"}
        for key in self._reported.keys() - live.keys():
            del self._reported[key]
        begun = []
        for key, who in live.items():
            names = self._wanted(who)
            reported = self._reported.setdefault(key, _Reported())
            if not names:
                reported.values.clear()
                reported.reason = ""
            elif reported.reading is None or reported.reading.done():
                reported.reading = self._pool.submit(self._read, who, reported, names)
                begun.append(reported.reading)
        return begun

    def _read(self, who: Identity, reported: _Reported, names: tuple[str, ...]) -> None:
        try:
            read = self._values.of_process(who.pid, who.start_ns, names, time.monotonic() + TIMEOUT_S)
        except ProbingError as e:
            if reported.reason != e.message:
                _log.warning("cannot read variables of process %d: %s", who.pid, e.message)
            reported.reason = e.message
            return
        reported.reason = ""
        ts = self._clock.pair().real_ns
        common = {**who._asdict(), "node": self._node, "ts": ts}
        chosen = _one_each(read, who.trains)
        step = _step(chosen)
        self._put_values(common, reported, chosen, step)
        if step is not None and step != reported.step:
            reported.step = step
            row = {**common, "step": step, "loss": _number(chosen, LOSSES)}
            self._sink.put("python.training_metrics", batch_of("python.training_metrics", [row]))

    def _put_values(self, common: Row, reported: _Reported, chosen: dict[str, NamedVariable], step: int | None) -> None:
        rows = []
        for name, value in chosen.items():
            # The number is compared as text, as nan differs from itself.
            now = (value["type"], value["value"], value["reason"], repr(value["number"]))
            if value["reason"] == CHANGED or reported.values.get(name) == now:
                continue
            reported.values[name] = now
            shown = {**value, "reason": value["reason"] or None}
            rows.append({**common, **shown, "step": step, "micro_step": step})
        if rows:
            self._sink.put("python.variables", batch_of("python.variables", rows))


def _one_each(read: list[NamedVariable], trains: int) -> dict[str, NamedVariable]:
    """Returns a row for each name: from the thread ``trains``, or else from the first thread with a value."""
    chosen: dict[str, NamedVariable] = {}
    for value in sorted(read, key=lambda value: value["tid"] != trains):
        if value["name"] not in chosen or chosen[value["name"]]["value"] is None:
            chosen[value["name"]] = value
    return chosen


def _step(values: dict[str, NamedVariable]) -> int | None:
    number = _number(values, STEPS)
    # The column is an int64, and steps are whole numbers.
    return int(number) if number is not None and abs(number) < 1 << 53 and number == int(number) else None


def _number(values: dict[str, NamedVariable], last: tuple[str, ...]) -> float | None:
    """Returns the number of the first variable whose last part is one of ``last``."""
    for name, value in values.items():
        parsed = parse_name(name)
        if (parsed.parts[-1] if parsed.parts else parsed.first) in last and value["number"] is not None:
            return float(value["number"])
    return None
