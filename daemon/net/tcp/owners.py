"""Which process owns a socket, by the sockets that watched processes hold open.

A look at all descriptors of a process takes microseconds for each, so it is taken only when processes or sockets are
new, and not often.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from probing.api.errors import ProbingError
from probing.daemon.processes.readers import Readers
from probing.daemon.source import Identity, ProcessKey

__all__ = ("MAX_PROCESSES", "Owners")

MAX_PROCESSES = 1_024
TIMEOUT_S = 2.0
# A look is taken after so long in any case, and for new sockets not before.
AT_LEAST_S = 60.0
SOON_S = 5.0
# Looks may take this part of a core.
_SHARE = 1 / 400
# Of the processes that share a socket the first of these has it: data loaders inherit those of their trainer.
_ORDER = ("trainer", "launcher", "other", "data_loader")
_Integers = npt.NDArray[np.int64]


class Owners:
    """Not safe for two threads at once. ``processes`` are those of the last look, by their index in ``of``."""

    def __init__(self, readers: Readers) -> None:
        self._readers = readers
        self.processes: list[ProcessKey] = []
        self.namespaces: dict[int, ProcessKey] = {}
        """A process of each network namespace."""
        self._inodes: _Integers = np.zeros(0, np.int64)
        self._owners: _Integers = np.zeros(0, np.int64)
        self._looked = self._due = 0.0
        self._unknown = False
        self._error: ProbingError | None = None

    def refresh(self, watched: Sequence[Identity]) -> None:
        """Looks again where it is time. Raises ProbingError when the reader does not answer, or did not lately."""
        now = time.monotonic()
        if self._error is not None and now < self._due:
            raise self._error
        ordered = sorted(watched[:MAX_PROCESSES], key=_rank)
        keys = [who.key for who in ordered]
        new = keys != self.processes
        if not new and not (self._unknown and now >= self._due) and now < self._looked + AT_LEAST_S:
            return
        if new and now < self._due and set(keys) <= set(self.processes):
            return  # some have ended: their sockets are gone, too
        self._look(keys, now)

    def of(self, inodes: _Integers) -> _Integers:
        """Returns the index of each socket's process in ``processes``; -1 for one that is not of a watched process."""
        if not len(self._inodes):
            return np.full(len(inodes), -1, np.int64)
        place = np.minimum(np.searchsorted(self._inodes, inodes), len(self._inodes) - 1)
        return np.where(self._inodes[place] == inodes, self._owners[place], -1)

    def unknown(self, found: bool) -> None:
        """Reports whether there are new sockets that nobody was seen to hold."""
        self._unknown |= found

    def _look(self, keys: list[ProcessKey], now: float) -> None:
        self._due = now + SOON_S
        try:
            held, cpu_s = self._ask(keys) if keys else ([], 0.0)
            self._error = None
        except ProbingError as e:
            self._error = e
            raise
        # On a busy machine a look takes long and costs little.
        self._due = now + max(SOON_S, cpu_s / _SHARE)
        # A process that was not reached in time is looked at again, and one that ended is soon none any more.
        self._looked, self._unknown = now, None in held
        self.processes = keys
        namespaces: dict[int, ProcessKey] = {}
        owners: dict[int, int] = {}
        for index, (key, seen) in enumerate(zip(keys, held, strict=True)):
            if seen:
                namespaces.setdefault(seen[0], key)
                for inode in seen[1]:
                    owners.setdefault(inode, index)
        self.namespaces = namespaces
        self._inodes = np.array(sorted(owners), np.int64)
        self._owners = np.array([owners[inode] for inode in self._inodes.tolist()], np.int64)

    def _ask(self, keys: list[ProcessKey]) -> tuple[list[Any], float]:
        """Returns what ``held_sockets`` found, and the time on a CPU that it took, s."""
        timeout_ms = int(TIMEOUT_S * 500)
        targets = [list(key) for key in keys]
        answer = self._readers.call("sockets", timeout=TIMEOUT_S, targets=targets, timeout_ms=timeout_ms)
        held: list[Any] = json.loads(answer.payload)
        return held, float(answer.header.get("cpu_s") or 0.0)


def _rank(who: Identity) -> tuple[int, int, int]:
    return _ORDER.index(who.role) if who.role in _ORDER else len(_ORDER), who.start_ns, who.pid
