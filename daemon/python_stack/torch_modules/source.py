"""The source of ``python.torch_modules``: samples which torch module each trainer runs, and counts the samples."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from probing.api.errors import (
    CorruptTarget,
    InternalError,
    NotPython,
    PrivilegeError,
    ProbingError,
    ProcessGone,
    TargetTimeout,
    UnsupportedTarget,
)
from probing.api.tables.schema import Row
from probing.api.typed import typed
from probing.daemon.arrow import batch_of
from probing.daemon.clock import Clock, ClockPair
from probing.daemon.context import Context
from probing.daemon.processes.discovery import Discovery
from probing.daemon.processes.reader_pool import GRACE_S, PATIENCE_S, ReaderPool, seconds_left
from probing.daemon.python_stack.stacks.requests import PythonStacks
from probing.daemon.python_stack.torch_modules.naming import TorchModule
from probing.daemon.python_stack.visits import TIMEOUT_S, TrainerVisits
from probing.daemon.source import Identity, Loss, Sink

__all__ = ("TorchModules",)

TABLE = "python.torch_modules"
WINDOW_NS = 10_000_000_000
# The maximum number of pairs (module, stage) that get a row of their own in a window of a process. The samples of all
# other pairs are counted together for each stage.
MAX_MODULES = 512
# The share by which the pause between samples varies. Training steps often last a round time, so samples at equal
# intervals would always find the same module.
JITTER = 0.5
# The pause between two rounds while no trainer is sampled, s; a changed setting and a new trainer end it.
IDLE_S = 10.0
# The pause after a process that cannot be sampled, such as one that runs no CPython, s.
UNREADABLE_S = 60.0
_Key = tuple[TorchModule | None, str]


@dataclass(frozen=True, slots=True)
class _Sample:
    """A reader's answer (``look.look``). ``modules``: outermost first."""

    stage: Literal["forward", "backward", "other"]
    modules: tuple[TorchModule, ...]


@dataclass(slots=True)
class _Window:
    """The samples of a process since ``begin_ns``, CLOCK_MONOTONIC, by module and stage.

    ``innermost``: the number of samples in which a module was the innermost module on the stack. ``running``: the
    number of samples in which the module was anywhere on the stack. ``missed``: the number of samples that could not be
    taken; ``why``: the last reason.
    """

    begin_ns: int
    innermost: Counter[_Key] = field(default_factory=Counter)
    running: Counter[_Key] = field(default_factory=Counter)
    missed: int = 0
    why: str = ""

    def add(self, sample: _Sample) -> None:
        stack: tuple[TorchModule | None, ...] = sample.modules or (None,)
        self.innermost[stack[-1], sample.stage] += 1
        self.running.update((module, sample.stage) for module in set(stack))

    def rows(self, end_ns: int) -> list[Row]:
        """Returns a row for each of the modules that ran most, and one for all other samples of each stage."""
        samples = self.innermost.total()
        most = [key for key, _ in self.running.most_common() if key[0] is not None][:MAX_MODULES]
        others: Counter[str] = Counter()
        for key in self.innermost.keys() - most:
            others[key[1]] += self.innermost[key]
        counts = [(*key, self.innermost[key], self.running[key]) for key in most]
        counts += [(None, stage, count, count) for stage, count in others.items()]
        times = {"window_ns": end_ns - self.begin_ns, "interval_ns": (end_ns - self.begin_ns) // max(1, samples)}
        return [
            {
                **times,
                **({} if module is None else {"model": module.model, "module": module.path, "class": module.kind}),
                "stage": stage,
                "samples": count,
                "samples_below": below,
            }
            for module, stage, count, below in counts
        ]

    @property
    def dropped(self) -> int:
        """The number of modules without a row of their own."""
        return max(0, sum(module is not None for module, _ in self.running) - MAX_MODULES)


@dataclass(slots=True)
class _Sampled:
    """The state of a process. ``window``: None before its first sample. ``unreadable``: why the process is not sampled
    until ``rests_until``, a time of time.monotonic().
    """

    window: _Window | None = None
    unreadable: ProbingError | None = None
    rests_until: float = 0.0


class TorchModules(TrainerVisits[_Sampled]):
    """Samples torch modules. ``enabled`` returns whether to sample a process. ``interval_s`` returns the mean time
    between two samples of a process, s.
    """

    name = "torch_modules"
    table = TABLE

    def __init__(
        self,
        readers: ReaderPool,
        runtimes: PythonStacks,
        sink: Sink,
        enabled: Callable[[Identity], bool],
        processes: Discovery,
        clock: Clock,
        node: str,
        *,
        interval_s: Callable[[], float] = lambda: 1.0,
    ) -> None:
        super().__init__(processes, self._pause_s, aligned=False)
        self._readers = readers
        self._runtimes = runtimes
        self._sink = sink
        self._enabled = enabled
        self._clock = clock
        self._node = node
        self._interval_s = interval_s
        # Guards windows: a sample is added in a thread of the pool, a window is closed in any thread.
        self._lock = threading.Lock()

    @classmethod
    def make(cls, context: Context) -> TorchModules:
        value = context.settings.value
        return cls(
            context.readers,
            context.find(PythonStacks),
            context.sink,
            lambda who: bool(value("sampling.torch_modules", who)),
            context.processes,
            context.clock,
            context.node,
            interval_s=lambda: float(value("sampling.torch_modules_interval_s")),
        )

    def wanted(self, who: Identity) -> bool:
        return self._enabled(who)

    def new_state(self) -> _Sampled:
        return _Sampled()

    def process_identified(self, process: Identity) -> None:
        if process.role == "trainer" and self._enabled(process):
            self._worker.wake()

    def finish(self) -> None:
        """Ends the visits, and puts the rows of all open windows."""
        self._worker.stop()
        for visited in list(self._visited.values()):
            self.left(visited.who, visited.state)

    def left(self, who: Identity, state: _Sampled) -> None:
        self._close(who, state, self._clock.pair())

    def visit(self, who: Identity, state: _Sampled) -> None:
        """Takes a sample of a process. If the process's window is over, first puts its rows. Raises ProbingError."""
        pair = self._clock.pair()
        if state.window is not None and pair.mono_ns - state.window.begin_ns >= WINDOW_NS:
            self._close(who, state, pair)
        if state.unreadable is not None and time.monotonic() < state.rests_until:
            raise state.unreadable.with_traceback(None)
        if state.window is None:
            state.window = _Window(pair.mono_ns)
        window = state.window
        try:
            sample = self._sample(who)
        except ProcessGone:
            return
        except (NotPython, UnsupportedTarget, PrivilegeError) as e:
            state.unreadable, state.rests_until = e, time.monotonic() + UNREADABLE_S
            raise
        except (CorruptTarget, InternalError, TargetTimeout) as e:
            with self._lock:
                window.missed, window.why = window.missed + 1, e.message
            # A stack that changes too fast is counted as missed, which probing.losses shows. It is not an error of the
            # visit.
            if not isinstance(e, CorruptTarget):
                raise
        else:
            with self._lock:
                window.add(sample)

    def _pause_s(self) -> float:
        """Returns the pause until the next round, s."""
        return self._interval_s() * random.uniform(1 - JITTER, 1 + JITTER) if self._visited else IDLE_S  # noqa: S311

    def _sample(self, who: Identity) -> _Sample:
        deadline = time.monotonic() + TIMEOUT_S
        runtime = self._runtimes.prepare(who.pid, who.start_ns, seconds_left(deadline))
        seconds = seconds_left(deadline)
        answer = self._readers.call(
            "modules",
            pid=who.pid,
            start_ns=who.start_ns,
            timeout=seconds + GRACE_S,
            patience=PATIENCE_S,
            runtime=runtime.to_dict(),
            tid=who.trains,
            timeout_ms=max(1, int(seconds * 1000)),
        )
        try:
            return typed(_Sample, answer.header)
        except ValueError as e:
            raise InternalError(f"a reader's answer about modules cannot be used: {e}") from e

    def _close(self, who: Identity, state: _Sampled, pair: ClockPair) -> None:
        """Ends the sampling window of a process at the time ``pair``, and passes its rows and losses to the sink."""
        with self._lock:
            window, state.window = state.window, None
            rows = window.rows(pair.mono_ns) if window is not None else []
        if window is None:
            return
        begin, end = window.begin_ns + pair.mono_to_utc_ns, pair.real_ns
        if rows:
            common = who.row(self._node, begin)
            self._sink.put(TABLE, batch_of(TABLE, [{**common, **row} for row in rows]))
        many = f"more than {MAX_MODULES} modules ran"
        for reason, count in ((window.why, window.missed), (many, window.dropped)):
            if count:
                self._sink.lost(Loss(self.name, TABLE, "read", reason, begin, end, count, who.pid))
