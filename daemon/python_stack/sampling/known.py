"""What is known of the processes that are sampled, and for a while of those that were."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from typing import Protocol

from probing.daemon.python_stack.sampling.rows import Key, Sampled
from probing.daemon.python_stack.walk.layouts import Layout
from probing.daemon.python_stack.walk.locate import RuntimeInfo

__all__ = ("KnownProcesses", "Runtimes")

# Processes that ended are remembered until their last samples were drained.
MAX_ENDED, ENDED_S = 256, 300.0


class Runtimes(Protocol):
    """``source.PythonStacks``."""

    def prepare(self, pid: int, start_ns: int, timeout: float) -> RuntimeInfo: ...

    def layout(self, pid: int, start_ns: int, timeout: float) -> Layout: ...

    def forget(self, pid: int, start_ns: int) -> None: ...


class KnownProcesses:
    """Safe for any thread."""

    def __init__(self, runtimes: Runtimes) -> None:
        self._runtimes = runtimes
        self._lock = threading.Lock()
        self._known: dict[Key, Sampled] = {}
        self._ended: OrderedDict[Key, float] = OrderedDict()

    def find(self, key: Key) -> Sampled:
        """One that nobody has named with ``lives`` is forgotten like one that ended."""
        with self._lock:
            process = self._known.get(key)
            if process is None:
                process = self._known[key] = Sampled(key)
                self._end(key)
            return process

    def lives(self, key: Key) -> None:
        with self._lock:
            self._known.setdefault(key, Sampled(key))
            self._ended.pop(key, None)

    def left(self, key: Key) -> None:
        """It ended, or runs another program."""
        with self._lock:
            if (process := self._known.get(key)) is not None:
                process.runtime = None
                self._end(key)

    def prepared(self, process: Sampled, timeout: float) -> tuple[RuntimeInfo, Layout]:
        """Its CPython, looked for within ``timeout`` seconds where it is not known. Raises like ``Runtimes``."""
        runtime, layout = process.runtime, process.layout
        if runtime is None or layout is None:
            deadline = time.monotonic() + timeout
            runtime = self._runtimes.prepare(*process.key, timeout)
            layout = self._runtimes.layout(*process.key, max(0.001, deadline - time.monotonic()))
            process.runtime, process.layout = runtime, layout
        return runtime, layout

    def unprepare(self, process: Sampled) -> None:
        """What was found does not hold any more."""
        process.runtime = None
        self._runtimes.forget(*process.key)

    def _end(self, key: Key) -> None:
        now = time.monotonic()
        self._ended[key] = now
        self._ended.move_to_end(key)
        while self._ended:
            oldest, when = next(iter(self._ended.items()))
            if len(self._ended) <= MAX_ENDED and now - when < ENDED_S:
                break
            del self._ended[oldest]
            self._known.pop(oldest, None)
