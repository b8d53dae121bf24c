"""The BPF programs of the sampler: their maps, the clock that triggers them, and the scheduler's tracepoint."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Mapping, Sequence

from probing.api.errors import ProbingError, UnsupportedTarget
from probing.daemon.bpf.cpu_clock import CpuClock, known_to_freeze, running_release
from probing.daemon.bpf.probe_slots import SLOTS
from probing.daemon.bpf.ring import Ring, checked_ring_size
from probing.daemon.bpf.session import Session
from probing.daemon.python_stack.sampling.kernel_maps import SampledProcesses
from probing.daemon.python_stack.sampling.off_cpu.kernel_entries import OffCpuEntries
from probing.daemon.python_stack.sampling.off_cpu.stacks import OffCpuThread
from probing.daemon.python_stack.walk.layouts import Layout
from probing.daemon.python_stack.walk.locate import RuntimeInfo

__all__ = ("FULL_SHARE", "OBJECTS", "REST_S", "RING", "SHARES", "SamplingPrograms", "refusal", "ring_size")

OBJECTS = ("python", "python_off")
RING = "python_samples"
# The bytes of the ring for each CPU, and the minimum and the maximum bytes of the ring.
_CPU_BYTES, _MIN_BYTES, _MAX_BYTES = 256 << 10, 2 << 20, 32 << 20
# The ring is drained when 1/FULL_SHARE of it is full. Samples are large, so this is a second of samples on a busy node.
FULL_SHARE = 4
# The maximum time for which samples wait in the ring, s. Making the rows of four seconds at once costs little more than
# making the rows of one second.
REST_S = 4.0
# The slots have these names in bpf/python_walk.bpf.h.
(_SAMPLES,) = SLOTS.reserve("SAMPLES_SLOT", 254)
(_AWAY,) = SLOTS.reserve("AWAY_SLOT", 255)
SHARES = {
    _SAMPLES: "this process used up its share of the ring of samples",
    _AWAY: "this process used up its share of the entries for threads off the CPU",
}
_ON_CPU, _SWITCH, _FLUSH = "python_on_cpu", "python_switch", "python_off_flush"


def refusal(session: Session, risk_freeze: bool) -> ProbingError | None:
    """Returns why stacks cannot be sampled here; None when they can."""
    if OBJECTS[0] in session.refused:
        return session.refused[OBJECTS[0]]
    reason = known_to_freeze(running_release())
    if reason is None or risk_freeze:
        return None
    return UnsupportedTarget(reason, hint="boot another kernel, or set sampling.risk_freeze at your own risk")


def ring_size(configured: int) -> int:
    """Returns the size of the ring of samples, in bytes. If ``configured`` is 0, the size follows from the number of
    CPUs. Raises ConfigError.
    """
    if configured:
        return checked_ring_size("sampling.ring_bytes", configured)
    # Room for 128 samples of each CPU: a second at 99 Hz, and some samples of threads that leave the CPU.
    size = (os.cpu_count() or 1) * _CPU_BYTES
    return min(max(1 << (size - 1).bit_length(), _MIN_BYTES), _MAX_BYTES)


class SamplingPrograms:
    """The programs, their maps and their ring. Not thread-safe, except ``flush`` and ``refresh``.

    ``clock_refused``: why the clock does not tick; empty when it does.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._processes = SampledProcesses(session)
        # The clock is made when the first rate is set, because making it loads its program.
        self._clock: CpuClock | None = None
        self._away = None if self.off_cpu_refused else OffCpuEntries(session)
        self._hz = 0
        self._setting = threading.Lock()
        self.clock_refused = ""
        self.off_cpu = False

    @property
    def ring(self) -> Ring:
        return self._session.rings[RING]

    @property
    def room(self) -> tuple[int, int]:
        """The maximum numbers of threads, and of entries for threads off the CPU, that one process may have."""
        return self._processes.room, 0 if self._away is None else self._away.room

    @property
    def off_cpu_refused(self) -> str:
        """Why time off the CPU cannot be sampled here; empty when it can."""
        error = self._session.refused.get(OBJECTS[1])
        return "" if error is None else f"time off the CPU is not sampled: {error.message}"

    def add(
        self,
        pid: int,
        start_ns: int,
        layout: Layout,
        runtime: RuntimeInfo,
        gil: int,
        rate: int,
        off_rate: int,
        owner: int,
    ) -> None:
        self._processes.add(pid, start_ns, layout, runtime.runtime, gil, rate, off_rate, owner)

    def set_rate(self, pid: int, start_ns: int, rate: int, off_rate: int) -> None:
        self._processes.set_rate(pid, start_ns, rate, off_rate)

    def set_threads(self, pid: int, start_ns: int, threads: Mapping[int, tuple[int, int]]) -> int:
        """Sets the threads of a process. Returns the number of threads for which there was no room."""
        return self._processes.set_threads(pid, start_ns, threads)

    def remove(self, pid: int, start_ns: int) -> None:
        self._processes.remove(pid, start_ns)

    def clear(self) -> None:
        self._processes.clear()

    def lacking(self, start_ns: int, tids: Iterable[int]) -> tuple[int, list[int]]:
        """Returns the pause generation, and the tids without an entry in ``python_off``."""
        generation = None if self._away is None or not self.off_cpu else self._away.generation
        if self._away is None or generation is None:
            return 0, []
        return generation, self._away.lacking(start_ns, tids)

    def adopt(
        self, pid: int, start_ns: int, generation: int, threads: Sequence[OffCpuThread], checks: Mapping[int, int]
    ) -> tuple[list[OffCpuThread], int]:
        """Gives each thread an entry of the map. Returns the threads with an entry, and the number of threads for which
        there was no room."""
        # If the scheduler's program is detached meanwhile, the map is emptied when it is attached again.
        return ([], 0) if self._away is None else self._away.put(pid, start_ns, generation, threads, checks)

    def disown(self, tid: int, switches: int) -> None:
        """Deletes the entry of ``tid`` that was made at this count of context ``switches``."""
        if self._away is not None:
            self._away.drop(tid, switches)

    def refresh(self) -> None:
        """Starts sampling on CPUs that came online. Never waits."""
        if self._setting.acquire(blocking=False):
            try:
                self._tick()
            except ProbingError as e:
                self.clock_refused = e.message
            finally:
                self._setting.release()

    def set_clock(self, hz: int, off_cpu: bool) -> None:
        """Samples on the CPU at ``hz`` (0: not at all), and off the CPU if ``off_cpu``. Raises AttachError,
        PrivilegeError.
        """
        with self._setting:
            self._hz = hz
            self._tick()
        follow = off_cpu and self._follows()
        if follow and not self.off_cpu:
            # Threads may have run unseen since the program was detached.
            if self._away is not None:
                self._away.clear()
            self._session.attach_tracepoint(_SWITCH)
        elif self.off_cpu and not follow:
            self._session.detach(self._session.links[_SWITCH])
        self.off_cpu = follow

    def flush(self) -> None:
        """Makes the programs report the threads that are off the CPU, with their time off the CPU until now."""
        if self.off_cpu:
            self._session.run_program(_FLUSH, bytes(8))

    def _follows(self) -> bool:
        """Loads the programs that follow threads off the CPU. Returns whether they can be followed."""
        if self._away is not None:
            self._session.load_late(OBJECTS[1])
            if self.off_cpu_refused:
                self._away = None
        return self._away is not None

    def _tick(self) -> None:
        if self._clock is None:
            if not self._hz:
                return
            self._clock = CpuClock(self._session.program(_ON_CPU))
        if self._clock.hz != self._hz:
            self._clock.set(self._hz)
        else:
            self._clock.refresh()
        self.clock_refused = ""

    def close(self) -> None:
        self.set_clock(0, False)
        if self._clock is not None:
            self._clock.close()
