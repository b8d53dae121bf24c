"""Finds the threads of a process that are off the CPU without the programs knowing where, and tells the programs.

Such a thread left before it was sampled (a rank that hangs already), or was not chosen when it left. Whether one that
was told of has run in between is asked once more behind that: the programs see only switches that come later.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from probing.api.errors import ProbingError
from probing.daemon.processes.readers import Readers
from probing.daemon.python_stack.sampling.blocked import MAX_BLOCKED, Away, unpack_blocked
from probing.daemon.python_stack.sampling.rows import Sampled
from probing.daemon.python_stack.walk.locate import RuntimeInfo

__all__ = ("Adopted", "Adoption", "AwayKernel", "ReadChecks")

ReadChecks = Callable[[Sampled, Sequence[int]], Mapping[int, int]]
"""(process, addresses of code objects) -> their checks, as far as they can be read. Raises ProbingError."""
_ASK_S = 1.0
_Threads = Mapping[int, tuple[int, int]]
_log = logging.getLogger(__name__)


class AwayKernel(Protocol):
    """What ``sampled_away.AwayThreads`` does, where the programs see switches."""

    @property
    def room(self) -> tuple[int, int]:
        """How many threads of a process can be known, and how many that are off the CPU."""

    def lacking(self, start_ns: int, tids: Iterable[int]) -> tuple[int, list[int]]:
        """The count of pauses, and those of the threads of which no program knows where they are."""

    def adopt(
        self, pid: int, start_ns: int, generation: int, threads: Sequence[Away], checks: Mapping[int, int]
    ) -> tuple[list[Away], int]:
        """The threads that are told of from now on, and for how many there was no room."""

    def disown(self, tid: int, switches: int) -> None: ...


@dataclass(frozen=True, slots=True)
class Adopted:
    """``left``: threads that were away but could not be adopted, tid -> (count of pauses, switches, when seen)."""

    left: dict[int, tuple[int, int, int]] = field(default_factory=dict)
    no_room: int = 0


class Adoption:
    """Safe for any thread; ``telling`` is held while the kernel is told."""

    def __init__(self, kernel: AwayKernel, telling: threading.Lock, readers: Readers, read_checks: ReadChecks) -> None:
        self._kernel = kernel
        self._telling = telling
        self._readers = readers
        self._read_checks = read_checks

    def visit(self, process: Sampled, runtime: RuntimeInfo, threads: _Threads, before: Adopted) -> Adopted:
        """Have the programs know of all threads that are away. ``threads``: tid -> (state, thread_id).

        ``before`` is what the last visit of the process gave. What cannot be done now is for the next visit.
        """
        of_python = [tid for tid, (state, _) in threads.items() if state]
        with self._telling:
            generation, lacking = self._kernel.lacking(process.key[1], of_python)
        left: dict[int, tuple[int, int, int]] = {}
        no_room, room = 0, self._kernel.room[1] - (len(of_python) - len(lacking))
        try:
            for start in range(0, len(lacking), MAX_BLOCKED):
                if room <= 0:
                    no_room += len(lacking) - start
                    break
                some = [(tid, *threads[tid]) for tid in lacking[start : start + MAX_BLOCKED]]
                found = [_since(a, generation, before) for a in self._ask(process, runtime, some, frames=True)]
                adopted, more = self._adopt(process, runtime, generation, found[:room], threads)
                no_room += more + len(found[room:])
                room -= len(adopted)
                left |= {a.tid: (generation, a.switches, a.seen_ns) for a in found if a.tid not in adopted}
        except ProbingError as e:
            _log.debug("threads of process %d that are away are not known: %s", process.key[0], e.message)
            return Adopted(before.left | left, no_room)
        return Adopted(left, no_room)

    def _adopt(
        self, process: Sampled, runtime: RuntimeInfo, generation: int, found: list[Away], threads: _Threads
    ) -> tuple[set[int], int]:
        """The threads that need no further care, and for how many there was no room."""
        addresses = list(dict.fromkeys(code for away in found for code, _ in away.frames))
        checks = self._read_checks(process, addresses) if addresses else {}
        known = [away for away in found if all(code in checks for code, _ in away.frames)]
        with self._telling:
            made, no_room = self._kernel.adopt(*process.key, generation, known, checks)
        if not made:
            return set(), no_room
        still: dict[int, int] = {}
        try:
            asked = [(away.tid, *threads[away.tid]) for away in made]
            still = {away.tid: away.switches for away in self._ask(process, runtime, asked, frames=False)}
        finally:
            with self._telling:
                for away in made:
                    if still.get(away.tid) != away.switches:
                        self._kernel.disown(away.tid, away.switches)
        return {away.tid for away in made}, no_room

    def _ask(
        self, process: Sampled, runtime: RuntimeInfo, threads: list[tuple[int, int, int]], *, frames: bool
    ) -> list[Away]:
        pid, start_ns = process.key
        answer = self._readers.call(
            "blocked", pid=pid, start_ns=start_ns, timeout=2 * _ASK_S,
            runtime=runtime.to_dict(), threads=threads, frames=frames, timeout_ms=int(_ASK_S * 1000),
        )  # fmt: skip
        return unpack_blocked(answer)


def _since(away: Away, generation: int, before: Adopted) -> Away:
    """It has been away since an earlier visit when it has not been on a CPU since."""
    seen = before.left.get(away.tid)
    if seen is None or seen[:2] != (generation, away.switches):
        return away
    return away._replace(seen_ns=min(away.seen_ns, seen[2]))
