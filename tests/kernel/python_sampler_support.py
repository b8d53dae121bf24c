"""What the tests of the sampler's programs share: a target that is walked from user space, and its samples."""

from __future__ import annotations

import struct
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from probing.daemon.bpf.cpu_clock import CpuClock
from probing.daemon.bpf.session import Session
from probing.daemon.processes.memory import ProcessMemory
from probing.daemon.python_stack.sampling.kernel_maps import SampledProcesses
from probing.daemon.python_stack.walk.capture import Known, capture
from probing.daemon.python_stack.walk.codes import Code
from probing.daemon.python_stack.walk.layouts import Layout, layout_of
from probing.daemon.python_stack.walk.locate import RuntimeInfo
from probing.daemon.python_stack.walk.threads import match_threads, read_start_ns, read_threads
from probing.daemon.python_stack.walk.walker import Limits, RawFrame, RawThread

sys.path.insert(0, str(Path(__file__).parents[1] / "integration"))

from python_stack_helpers import INTERPRETERS, child, each_interpreter, runtime_of

__all__ = ("INTERPRETERS", "Sampling", "Target", "check_of", "cpu_seconds", "each_interpreter", "started")

ON_CPU, OFF_CPU, UNRESOLVED = 1, 2, 3
_MASK = (1 << 64) - 1


@dataclass
class Target:
    """A Python process, and how its threads looked when they were walked."""

    process: Any
    start_ns: int
    runtime: RuntimeInfo
    layout: Layout
    memory: ProcessMemory
    threads: dict[int, tuple[RawThread, dict[int, Code]]]

    @property
    def pid(self) -> int:
        return int(self.process.pid)

    def tids(self) -> dict[int, tuple[int, int]]:
        return {tid: (thread.address, thread.thread_id) for tid, (thread, _) in self.threads.items()}

    def named(self, func: str) -> int:
        """The tid of the thread that runs this function."""
        found = self.threads.items()
        [tid] = [t for t, (thread, codes) in found if func in {codes[f.code].func for f in thread.frames}]
        return tid

    def word(self, address: int) -> int:
        data = self.memory.read_many([(address, 8)])[0]
        assert data is not None
        return int(struct.unpack("<Q", data)[0])

    def frames(self, sample: Any, codes: dict[int, Code]) -> list[tuple[str, int | None]]:
        """(function, line) of a sample, as the lines of a walk are decoded."""
        found = []
        for frame in sample["frames"][: sample["depth"]]:
            code = codes[int(frame["code"])]
            instr = int(frame["offset"])
            if self.layout.code_adaptive is not None:
                instr += code.address + self.layout.code_adaptive
            elif self.layout.instr == "lasti_units":
                instr //= 2
            found.append((code.func, code.line(self.layout, RawFrame(0, code.address, instr))))
        return found


@contextmanager
def started(python: str, text: str, *args: str | Path) -> Iterator[Target]:
    """A process that runs ``text`` with ``args``, which prints "ready" when its threads are where they should be."""
    with child(python, "-u", "-c", text, *map(str, args)) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        runtime = runtime_of(process.pid)
        memory = ProcessMemory(process.pid)
        head = memory.read_many([(runtime.runtime, 1024)])[0]
        assert head is not None
        layout = layout_of(runtime.version, head)
        deadline = time.monotonic() + 30
        found = capture(memory, runtime.runtime, layout, deadline, Known(), Limits(threads=4096, stacks=4096))
        tids = match_threads([thread for thread, _ in found.threads], read_threads(process.pid))
        threads = {tid: entry for tid, entry in zip(tids, found.threads, strict=True) if tid is not None}
        yield Target(process, read_start_ns(process.pid), runtime, layout, memory, threads)


def check_of(target: Target, code: int) -> int:
    """The checksum of a code object, from the target's memory, as python.bpf.h defines it."""
    layout = target.layout
    mixed = target.word(code + layout.code_filename) * 0x9E3779B97F4A7C15
    mixed ^= target.word(code + layout.code_name) * 0xC2B2AE3D27D4EB4F
    mixed ^= target.word(code + layout.code_linetable) * 0x165667B19E3779F9
    mixed ^= (target.word(code + layout.code_firstlineno) & 0xFFFF_FFFF) * 0x27D4EB2F165667C5
    mixed ^= target.word(target.word(code + layout.code_short_name) + 24) * 0xFF51AFD7ED558CCD
    mixed &= _MASK
    return mixed >> 32 ^ mixed & 0xFFFF_FFFF


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / 100


class Sampling:
    """A session with the sampler's objects, its clock, and the samples of all targets so far."""

    def __init__(self, session: Session, until: Callable[..., Any]) -> None:
        self.session = session
        self.processes = SampledProcesses(session)
        self.clock = CpuClock(session.programs["python_on_cpu"])
        self._until = until
        self._parts: list[np.ndarray[Any, Any]] = []

    def close(self) -> None:
        self.clock.close()
        self.processes.clear()

    def add(self, target: Target, *, rate: int = 999, off_rate: int = 0, start_ns: int = 0, gil: int = 0) -> None:
        start_ns = start_ns or target.start_ns
        self.processes.add(target.pid, start_ns, target.layout, target.runtime.runtime, gil, rate, off_rate)
        self.processes.set_threads(target.pid, start_ns, target.tids())

    def tick(self, hz: int = 999) -> None:
        """Let the clock run."""
        self.clock.set(hz)

    def samples(self, target: Target) -> np.ndarray[Any, Any]:
        """All samples of the target so far."""
        ring = self.session.rings["python_samples"]
        drained = ring.drain()
        ring.commit(drained.position)
        self._parts.append(drained.records)
        every = np.concatenate(self._parts)
        return every[every["tgid"] == target.pid]

    def wait(self, target: Target, count: int, kind: int = ON_CPU, tid: int = 0) -> np.ndarray[Any, Any]:
        """At least ``count`` samples of that kind, and of that thread."""

        def enough() -> list[np.ndarray[Any, Any]]:
            found = self.samples(target)
            found = found[(found["kind"] == kind) & ((found["tid"] == tid) | (tid == 0))]
            # An array has no truth value.
            return [found] if len(found) >= count else []

        return self._until(enough)[0]  # type: ignore[no-any-return]

    def burn(self, target: Target, seconds: float = 0.2) -> None:
        """Wait until the target has used so much CPU."""
        before = cpu_seconds(target.pid)
        self._until(lambda: cpu_seconds(target.pid) >= before + seconds)
