"""The save step: what a group's ranks, or a command, do before an automatic restart ends the ranks."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence

from probing.launcher.allowed import SIGUSR1
from probing.launcher.children import Child
from probing.launcher.held import Held
from probing.launcher.processes import Handle
from probing.launcher.spawn import spawn

__all__ = ("Saves",)

_SECOND_NS = 1_000_000_000


class Saves:
    """The save steps that run, by group."""

    def __init__(self) -> None:
        self._commands: dict[str, Handle] = {}

    def fds(self) -> list[int]:
        """Returns descriptors that are readable when a command has ended."""
        return [handle.fileno() for handle in self._commands.values()]

    def begin(self, held: Held, children: Sequence[Child], unix_ns: int) -> int:
        """Begins the save step of a group; returns the time that it may take, in ns. ``children``: the ranks here."""
        spec, ranks = held.spec, sorted(children, key=lambda child: child.run.rank)
        held.history.saved = held.history.generation
        if spec is None or not ranks:
            return 0
        if spec.save == SIGUSR1:
            for child in ranks:
                child.handle.send(signal.SIGUSR1)
        elif not self._start(held, ranks, unix_ns):
            return 0
        return round(spec.save_s * _SECOND_NS)

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
