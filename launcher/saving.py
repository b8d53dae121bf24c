"""The save step: what a group's ranks, or a command, do before an automatic restart ends the ranks."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence

from probing.launcher.allowed import SIGUSR1
from probing.launcher.children import Child
from probing.launcher.held import Held
from probing.launcher.processes import Clock, Handle
from probing.launcher.spawn import spawn

__all__ = ("Saves",)

_SECOND_NS = 1_000_000_000


class Saves:
    """The save steps that run, by group."""

    def __init__(self) -> None:
        self._commands: dict[str, Handle] = {}

    def fds(self) -> list[int]:
        """Returns descriptors that are readable when a command has ended."""
        return [handle.fileno() for handle in self._commands.values() if not handle.ended()]

    def begin(self, held: Held, children: Sequence[Child], clock: Clock) -> int:
        """Begins the save step of a group, if one is due; returns the time that it may take, in ns.

        ``children``: the ranks here.
        """
        spec, history, now_ns = held.spec, held.history, clock.boot_ns()
        ranks = sorted(children, key=lambda child: child.run.rank)
        if spec is None or not ranks or not held.saves():
            return 0
        if history.saving and history.saving[2] == history.generation:
            # An earlier launcher began this save step.
            return max(0, history.saving[1] - now_ns) if history.saving[0] == clock.boot_id else 0
        time_ns = round(spec.save_s * _SECOND_NS)
        history.saving = (clock.boot_id, now_ns + time_ns, history.generation)
        if spec.save == SIGUSR1:
            for child in ranks:
                child.handle.send(signal.SIGUSR1)
            return time_ns
        return time_ns if self._start(held, ranks, clock.unix_ns()) else 0

    def is_over(self, name: str, children: Sequence[Child]) -> bool:
        """Returns whether the save step of group ``name`` has nothing left to do. ``children``: the ranks here."""
        command = self._commands.get(name)
        return not children or (command is not None and command.ended())

    def forget(self, name: str) -> None:
        if (command := self._commands.pop(name, None)) is not None:
            command.close()

    def _start(self, held: Held, ranks: Sequence[Child], unix_ns: int) -> bool:
        plan = held.save_plan([child.run.pid for child in ranks], ranks[0].run, unix_ns, dict(os.environ))
        try:
            started = spawn(plan) if plan else None
        except (OSError, ValueError):
            return False
        if started is None:
            return False
        started.run()
        os.close(started.report)
        self.forget(held.history.name)
        self._commands[held.history.name] = started.handle
        return True
