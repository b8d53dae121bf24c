"""Polls watched variables of trainers. Makes a row for each variable that changed, and a row for each new step."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from probing.api.tables.schema import Row
from probing.daemon.arrow import batch_of
from probing.daemon.clock import Clock
from probing.daemon.context import Context
from probing.daemon.processes.discovery import Discovery
from probing.daemon.python_stack.values.heap import CHANGED
from probing.daemon.python_stack.values.names import parse_name
from probing.daemon.python_stack.values.requests import Values
from probing.daemon.python_stack.visits import TIMEOUT_S, TrainerVisits
from probing.daemon.source import Identity, Sink
from probing.daemon.stack_wire import NamedVariable

__all__ = ("VariableWatch",)

INTERVAL_S = 1.0
STEPS = ("step", "global_step", "iteration", "iter", "it")
LOSSES = ("loss", "train_loss")


@dataclass(slots=True)
class _Reported:
    """The last values reported for a process."""

    values: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    step: int | None = None


class VariableWatch(TrainerVisits[_Reported]):
    """Watches variables. ``watched`` returns the names to watch in a process, ``interval_s`` the pause between two
    polls, s.
    """

    name = "variables"
    table = "python.variables"

    def __init__(
        self,
        values: Values,
        sink: Sink,
        watched: Callable[[Identity], tuple[str, ...]],
        processes: Discovery,
        clock: Clock,
        node: str,
        *,
        interval_s: Callable[[], float] = lambda: INTERVAL_S,
    ) -> None:
        super().__init__(processes, interval_s)
        self._values = values
        self._sink = sink
        self._watched = watched
        self._clock = clock
        self._node = node

    @classmethod
    def make(cls, context: Context) -> VariableWatch:
        settings = context.settings

        def watched(process: Identity) -> tuple[str, ...]:
            names: tuple[str, ...] = settings.value("variables.watch", process)
            return names

        return cls(
            context.find(Values),
            context.sink,
            watched,
            context.processes,
            context.clock,
            context.node,
            interval_s=lambda: float(settings.value("variables.interval_s")),
        )

    def wanted(self, who: Identity) -> bool:
        return bool(self._watched(who))

    def new_state(self) -> _Reported:
        return _Reported()

    def visit(self, who: Identity, state: _Reported) -> None:
        """Reads the watched variables of a process, and puts rows of the changed variables. Raises ProbingError."""
        names = self._watched(who)
        if not names:
            return  # since the round began, the names were removed from the setting
        read = self._values.of_process(who.pid, who.start_ns, names, time.monotonic() + TIMEOUT_S)
        ts = self._clock.pair().real_ns
        common = who.row(self._node, ts)
        chosen = _one_each(read, who.trains)
        step = _step(chosen)
        self._put_values(common, state, chosen, step)
        if step is not None and step != state.step:
            state.step = step
            row = {**common, "step": step, "loss": _number(chosen, LOSSES)}
            self._sink.put("python.training_metrics", batch_of("python.training_metrics", [row]))

    def _put_values(self, common: Row, reported: _Reported, chosen: dict[str, NamedVariable], step: int | None) -> None:
        rows = []
        for name, value in chosen.items():
            # The number is compared as text, because nan differs from itself.
            now = (value["type"], value["value"], value["reason"], repr(value["number"]))
            if value["reason"] == CHANGED or reported.values.get(name) == now:
                continue
            reported.values[name] = now
            shown = {**value, "reason": value["reason"] or None}
            rows.append({**common, **shown, "step": step, "micro_step": step})
        if rows:
            self._sink.put("python.variables", batch_of("python.variables", rows))


def _one_each(read: list[NamedVariable], trains: int) -> dict[str, NamedVariable]:
    """Returns a row for each name: the row of the thread ``trains``, or else of the first thread with a value."""
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
    """Returns the number of the first variable whose last name part is in ``last``; None without such a number."""
    for name, value in values.items():
        parsed = parse_name(name)
        if (parsed.parts[-1] if parsed.parts else parsed.first) in last and value["number"] is not None:
            return float(value["number"])
    return None
