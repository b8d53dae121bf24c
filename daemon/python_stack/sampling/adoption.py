"""Adopts threads off the CPU that have no entry in ``python_off``: reads their stacks and makes the entries.

Such a thread left the CPU before its process was sampled (as in a rank that already hangs), or was not chosen when it
left. The programs see only switches after the entry was made. So each thread is checked again after its entry was made,
and a thread that ran meanwhile loses its entry.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from probing.api.errors import ProbingError
from probing.daemon.processes.reader_pool import ReaderPool
from probing.daemon.python_stack.sampling.off_cpu.stacks import MAX_BLOCKED, OffCpuThread, unpack_blocked
from probing.daemon.python_stack.sampling.processes import Sampled
from probing.daemon.python_stack.sampling.programs import SamplingPrograms
from probing.daemon.python_stack.walk.locate import RuntimeInfo

__all__ = ("Adopted", "Adoption", "ReadChecks")

ReadChecks = Callable[[Sampled, Sequence[int]], Mapping[int, int]]
"""(process, addresses of code objects) -> their checks, as far as they can be read. Raises ProbingError."""
_ASK_S = 1.0
_Threads = Mapping[int, tuple[int, int]]
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Adopted:
    """The outcome of ``Adoption.visit``. ``left``: threads off the CPU for which no map entry could be made, tid ->
    (pause generation, switches, seen_ns).

    ``no_room``: the number of threads without room in the map.
    """

    left: dict[int, tuple[int, int, int]] = field(default_factory=dict)
    no_room: int = 0


class Adoption:
    """Makes entries for threads off the CPU. Thread-safe; the lock ``maps`` is held while maps change."""

    def __init__(
        self, kernel: SamplingPrograms, maps: threading.Lock, readers: ReaderPool, read_checks: ReadChecks
    ) -> None:
        self._kernel = kernel
        self._maps = maps
        self._readers = readers
        self._read_checks = read_checks

    def visit(self, process: Sampled, runtime: RuntimeInfo, threads: _Threads, before: Adopted) -> Adopted:
        """Makes entries for all threads that are off the CPU, and returns the outcome. ``threads``: tid -> (state,
        thread_id).

        ``before`` is the outcome of the last visit. Threads that fail now are tried again at the next visit.
        """
        of_python = [tid for tid, (state, _) in threads.items() if state]
        with self._maps:
            generation, lacking = self._kernel.lacking(process.key[1], of_python)
        left: dict[int, tuple[int, int, int]] = {}
        no_room, room = 0, self._kernel.room[1] - (len(of_python) - len(lacking))
        try:
            for start in range(0, len(lacking), MAX_BLOCKED):
                if room <= 0:
                    no_room += len(lacking) - start
                    break
                some = [(tid, *threads[tid]) for tid in lacking[start : start + MAX_BLOCKED]]
                blocked = [_since(a, generation, before) for a in self._ask(process, runtime, some, frames=True)]
                adopted, more = self._adopt(process, runtime, generation, blocked[:room], threads)
                no_room += more + len(blocked[room:])
                room -= len(adopted)
                left |= {a.tid: (generation, a.switches, a.seen_ns) for a in blocked if a.tid not in adopted}
        except ProbingError as e:
            _log.debug("threads of process %d off the CPU cannot be read: %s", process.key[0], e.message)
            return Adopted(before.left | left, no_room)
        return Adopted(left, no_room)

    def _adopt(
        self, process: Sampled, runtime: RuntimeInfo, generation: int, blocked: list[OffCpuThread], threads: _Threads
    ) -> tuple[set[int], int]:
        """Returns the tids for which entries were made, and the number of threads without room."""
        addresses = list(dict.fromkeys(code for thread in blocked for code, _ in thread.frames))
        checks = self._read_checks(process, addresses) if addresses else {}
        checked = [thread for thread in blocked if all(code in checks for code, _ in thread.frames)]
        with self._maps:
            made, no_room = self._kernel.adopt(*process.key, generation, checked, checks)
        if not made:
            return set(), no_room
        still: dict[int, int] = {}
        try:
            asked = [(thread.tid, *threads[thread.tid]) for thread in made]
            still = {thread.tid: thread.switches for thread in self._ask(process, runtime, asked, frames=False)}
        finally:
            with self._maps:
                for thread in made:
                    if still.get(thread.tid) != thread.switches:
                        self._kernel.disown(thread.tid, thread.switches)
        return {thread.tid for thread in made}, no_room

    def _ask(
        self, process: Sampled, runtime: RuntimeInfo, threads: list[tuple[int, int, int]], *, frames: bool
    ) -> list[OffCpuThread]:
        pid, start_ns = process.key
        answer = self._readers.call(
            "blocked",
            pid=pid,
            start_ns=start_ns,
            timeout=2 * _ASK_S,
            runtime=runtime.to_dict(),
            threads=threads,
            frames=frames,
            timeout_ms=int(_ASK_S * 1000),
        )
        return unpack_blocked(answer)


def _since(thread: OffCpuThread, generation: int, before: Adopted) -> OffCpuThread:
    """Returns ``thread``, with the time of the earlier visit if it has not switched since that visit."""
    seen = before.left.get(thread.tid)
    if seen is None or seen[:2] != (generation, thread.switches):
        return thread
    return thread._replace(seen_ns=min(thread.seen_ns, seen[2]))
