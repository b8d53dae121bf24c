"""Keeps the state of each sampled process, until some time after the process has ended."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict, defaultdict
from dataclasses import dataclass, field

from probing.daemon.python_stack.sampling.codes import KnownCodes
from probing.daemon.python_stack.stacks.requests import PythonStacks
from probing.daemon.python_stack.walk.layouts import Layout
from probing.daemon.python_stack.walk.locate import RuntimeInfo
from probing.daemon.source import Identity, ProcessKey

__all__ = ("NAME", "KnownProcesses", "Sampled")

NAME = "python_samples"
"""Name of the source, also in losses."""
# The maximum number of ended processes whose state is kept, and the seconds for which it is kept. The state is needed
# until the last samples of the process are drained.
MAX_ENDED, ENDED_S = 256, 300.0
# The maximum bytes of code of all processes together.
MAX_BYTES = 256 << 20


@dataclass(slots=True)
class Sampled:
    """A sampled process. ``rate``: samples a second on each CPU, 0 if unknown.

    ``stacks``: stack_id by (hash of the record, whether it was cut). ``names``: the names of threads, by tid.
    """

    key: ProcessKey
    identity: Identity | None = None
    runtime: RuntimeInfo | None = None
    layout: Layout | None = None
    rate: int = 0
    codes: KnownCodes = field(default_factory=KnownCodes)
    stacks: OrderedDict[tuple[int, bool], int] = field(default_factory=OrderedDict)
    names: dict[int, str] = field(default_factory=dict)

    @property
    def owner(self) -> int | None:
        return None if self.identity is None else self.identity.owner


class KnownProcesses:
    """The sampled processes. Thread-safe."""

    def __init__(self, runtimes: PythonStacks) -> None:
        self._runtimes = runtimes
        self._lock = threading.Lock()
        self._known: dict[ProcessKey, Sampled] = {}
        self._ended: OrderedDict[ProcessKey, float] = OrderedDict()

    def find(self, key: ProcessKey) -> Sampled:
        """Returns the state of a process. A process that was never passed to ``started`` is dropped later, like an
        ended process.
        """
        with self._lock:
            process = self._known.get(key)
            if process is None:
                process = self._known[key] = Sampled(key)
                self._end(key)
            return process

    def started(self, key: ProcessKey) -> None:
        """Notes that a process lives, so that its state is kept."""
        with self._lock:
            self._known.setdefault(key, Sampled(key))
            self._ended.pop(key, None)

    def ended(self, key: ProcessKey) -> None:
        """Notes that a process exited, or runs another program."""
        with self._lock:
            if (process := self._known.get(key)) is not None:
                process.runtime = None
                self._end(key)

    def prepared(self, process: Sampled, timeout: float) -> tuple[RuntimeInfo, Layout]:
        """Returns the CPython of the process, and its layout. If they are not known yet, they are searched for at most
        ``timeout`` s. Raises the errors of ``PythonStacks.prepare``.
        """
        runtime, layout = process.runtime, process.layout
        if runtime is None or layout is None:
            deadline = time.monotonic() + timeout
            runtime = self._runtimes.prepare(*process.key, timeout)
            layout = self._runtimes.layout(*process.key, max(0.001, deadline - time.monotonic()))
            process.runtime, process.layout = runtime, layout
        return runtime, layout

    def bound(self) -> None:
        """Drops code while the code of all processes takes more than MAX_BYTES.

        The user with the most code loses all code of one process: the ended process with the most code, or if no ended
        process has code, the live process with the most code. Code that is still needed is read again.
        """
        with self._lock:
            while True:
                sizes: defaultdict[int | None, int] = defaultdict(int)
                for process in self._known.values():
                    sizes[process.owner] += process.codes.bytes
                if sum(sizes.values()) <= MAX_BYTES:
                    return
                owner = max(sizes, key=sizes.__getitem__)
                theirs = [one for one in self._known.values() if one.owner == owner and one.codes.bytes]
                max(theirs, key=lambda one: (one.key in self._ended, one.codes.bytes)).codes.clear()

    def unprepare(self, process: Sampled) -> None:
        """Drops the CPython of a process that no longer runs it."""
        process.runtime = None
        self._runtimes.forget(*process.key)

    def _end(self, key: ProcessKey) -> None:
        now = time.monotonic()
        self._ended[key] = now
        self._ended.move_to_end(key)
        while self._ended:
            oldest, when = next(iter(self._ended.items()))
            if len(self._ended) <= MAX_ENDED and now - when < ENDED_S:
                break
            del self._ended[oldest]
            self._known.pop(oldest, None)
