"""The source of samples: which processes are sampled and how often, their threads, and their code while it is there.

The programs in the kernel do the sampling (bpf/python.bpf.c). This tells them what they need to know of each process,
again and again as threads come and go, and makes rows of what they saw.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import numpy.typing as npt
import pyarrow as pa

from probing.api.errors import CorruptTarget, InternalError, ProbingError, ProcessGone, TargetTimeout
from probing.daemon.clock import ClockPair
from probing.daemon.ipc import Message
from probing.daemon.python_stack.layouts import Layout
from probing.daemon.python_stack.locate import RuntimeInfo
from probing.daemon.python_stack.sampled_codes import MAX_ADDRESSES, CodeKey, unpack_codes
from probing.daemon.python_stack.sampled_decoder import Decoder, SampleRing
from probing.daemon.python_stack.sampled_stacks import NAME, Key, Sampled, SampleRows
from probing.daemon.source import Identity, Processes, Sink

__all__ = ("Kernel", "PythonSampler", "Settings")

ROLES = frozenset({"trainer", "data_loader"})
# Walks a second and thread at which it leaves the CPU.
OFF_RATE = 50
Settings = Callable[[Identity], tuple[int, bool]]
"""How a process is to be sampled: samples a second and CPU (0: not at all), and whether off the CPU too."""
PREPARE_S = 5.0
SCAN_S = 1.0
FETCH_S = 0.5
# How soon a process with unknown threads is scanned again, s, and how often any other.
SOON_S, MAX_SOON_S = 0.1, 1.0
REST_S, MAX_REST_S = 5.0, 20.0
RETRY_S, MAX_RETRY_S = 0.2, 60.0
# Processes that ended are remembered until their last samples were drained.
MAX_ENDED, ENDED_S = 256, 300.0
MAX_NAMES = 8_192
_WORKERS = 2
_log = logging.getLogger(__name__)


class Kernel(Protocol):
    """The programs, their maps and their ring. Not safe for two threads, but ``ring`` is for two readers."""

    @property
    def ring(self) -> SampleRing: ...

    def add(
        self, pid: int, start_ns: int, layout: Layout, runtime: RuntimeInfo, gil: int, rate: int, off_rate: int
    ) -> None: ...

    def set_rate(self, pid: int, start_ns: int, rate: int, off_rate: int) -> None: ...

    def set_threads(self, pid: int, start_ns: int, threads: Mapping[int, tuple[int, int]]) -> None: ...

    def remove(self, pid: int, start_ns: int) -> None: ...

    def clear(self) -> None: ...

    def set_clock(self, hz: int, off_cpu: bool) -> None:
        """Sample on CPU at ``hz``, 0 for not at all, and off the CPU or not."""


class Readers(Protocol):
    """``processes.pool.ReaderPool``."""

    def call(self, op: str, *, pid: int, start_ns: int, timeout: float, **args: Any) -> Message: ...


class Runtimes(Protocol):
    """``source.PythonStacks``."""

    def prepare(self, pid: int, start_ns: int, timeout: float) -> RuntimeInfo: ...

    def layout(self, pid: int, start_ns: int, timeout: float) -> Layout: ...

    def forget(self, pid: int, start_ns: int) -> None: ...


@dataclass(slots=True)
class _Watched:
    """A process to be sampled. Times are time.monotonic(); ``rest``, ``soon`` and ``retry`` are spans, s."""

    who: Identity
    due: float
    rest: float = REST_S
    soon: float = SOON_S
    retry: float = RETRY_S
    scanned: float = 0.0
    unresolved: float = 0.0
    wanted: tuple[int, bool] = (0, False)
    added: bool = False
    busy: bool = False
    refused: ProbingError | None = None
    threads: dict[int, tuple[int, int]] = field(default_factory=dict)


class PythonSampler:
    """A ``Source``, and a ``processes.announce.Listener``. Safe for any thread.

    ``assemble`` and ``ready`` are for the drain of the ring ``python_samples``.
    """

    name = NAME

    def __init__(
        self,
        kernel: Kernel,
        readers: Readers,
        runtimes: Runtimes,
        processes: Processes,
        sink: Sink,
        node: str,
        settings: Settings,
    ) -> None:
        self._kernel = kernel
        self._readers = readers
        self._runtimes = runtimes
        self._settings = settings
        self._rows = SampleRows(node, processes, self._find, sink)
        # Guards what follows, and wakes the thread that scans.
        self._changed = threading.Condition()
        self._watched: dict[Key, _Watched] = {}
        self._known: dict[Key, Sampled] = {}
        self._ended: OrderedDict[Key, float] = OrderedDict()
        self._clock = (0, False)
        self._running = False
        # One at a time tells the programs; never taken while ``_changed`` is held.
        self._telling = threading.Lock()
        self._decoder: Decoder | None = None
        self._workers: ThreadPoolExecutor | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Raises ProbingError when the programs cannot be told. What the ring holds already is decoded first."""
        with self._telling:
            self._kernel.clear()
        self._decoder = Decoder(self._kernel.ring, self._find, self._fetch, self._unresolved)
        self._workers = ThreadPoolExecutor(_WORKERS, thread_name_prefix="python-threads")
        self._running = True
        self._thread = threading.Thread(target=self._run, name="python-samples", daemon=True)
        self._decoder.start()
        self._thread.start()

    def stop(self) -> None:
        with self._changed:
            self._running = False
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._workers is not None:
            self._workers.shutdown(wait=True, cancel_futures=True)
            self._workers = None
        with self._telling:
            self._kernel.set_clock(0, False)
            self._kernel.clear()
            self._clock = (0, False)
        with self._changed:
            for watched in self._watched.values():
                watched.added, watched.busy, watched.due = False, False, 0.0
        if self._decoder is not None:
            self._decoder.stop()

    def assemble(self, records: npt.NDArray[Any], pair: ClockPair) -> dict[str, pa.RecordBatch]:
        """Records of the ring ``python_samples`` -> physical batches of ``python.samples`` and ``python.stacks``."""
        return self._rows.assemble(records, pair)

    def ready(self) -> int:
        """The position in the ring up to which it may be drained."""
        if self._decoder is None:
            return self._kernel.ring.position
        return self._decoder.ready()

    @property
    def sampled(self) -> int:
        """How many processes are sampled now."""
        with self._changed:
            return sum(watched.added for watched in self._watched.values())

    @property
    def reason(self) -> str:
        """Why processes that should be sampled are not, each reason with its processes; empty when all are."""
        by_reason: defaultdict[str, list[int]] = defaultdict(list)
        with self._changed:
            for (pid, _), watched in self._watched.items():
                if watched.refused is not None:
                    by_reason[watched.refused.message.replace(f"process {pid}", "a process")].append(pid)
        return "; ".join(f"{reason}: pid {', '.join(map(str, sorted(pids)))}" for reason, pids in by_reason.items())

    # What processes do, from discovery; nothing here waits.

    def process_identified(self, who: Identity) -> None:
        key = who.pid, who.start_ns
        with self._changed:
            watched = self._watched.get(key)
            if who.role not in ROLES:
                self._leave(key)
            elif watched is None:
                self._watched[key] = _Watched(who, time.monotonic())
                self._ended.pop(key, None)
            else:
                watched.who, watched.due = who, time.monotonic()
            self._changed.notify_all()

    def process_replaced(self, pid: int, start_ns: int) -> None:
        """It runs another program now, and is identified again."""
        with self._changed:
            self._leave((pid, start_ns))

    def process_exited(self, who: Identity) -> None:
        with self._changed:
            self._leave((who.pid, who.start_ns))

    def settings_changed(self) -> None:
        """Ask for the settings of all processes again."""
        with self._changed:
            for watched in self._watched.values():
                watched.due = time.monotonic()
            self._changed.notify_all()

    def _leave(self, key: Key) -> None:
        if self._watched.pop(key, None) is None:
            return
        self._end(key)
        if (process := self._known.get(key)) is not None:
            process.runtime = None
        self._changed.notify_all()

    # What is known of processes, dead ones for a while.

    def _find(self, key: Key) -> Sampled:
        with self._changed:
            process = self._known.get(key)
            if process is None:
                process = self._known[key] = Sampled(key)
                if key not in self._watched:
                    self._end(key)
            return process

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

    # The thread that scans.

    def _run(self) -> None:
        gone: set[Key] = set()
        present: set[Key] = set()
        while True:
            with self._changed:
                if not self._running:
                    return
                gone, present = present - self._watched.keys(), set(self._watched)
                now = time.monotonic()
                due = [(k, w) for k, w in self._watched.items() if w.due <= now and not w.busy]
                for _, watched in due:
                    watched.busy = True
                if not due and not gone:
                    times = [w.due for w in self._watched.values() if not w.busy]
                    self._changed.wait(max(0.0, min(times) - now) if times else None)
                    continue
            if gone:
                self._forget(gone)
            for key, watched in due:
                if self._workers is not None:
                    self._workers.submit(self._visit, key, watched)

    def _forget(self, gone: Iterable[Key]) -> None:
        for key in gone:
            self._tell(partial(self._kernel.remove, *key))
        self._set_clock()

    def _visit(self, key: Key, watched: _Watched) -> None:
        """Look at one process: its settings, its CPython, its threads."""
        began = time.monotonic()
        error: ProbingError | None = None
        try:
            changed = self._bring_up(key, watched)
        except ProbingError as e:
            error, changed = e, False
        except Exception as e:  # one process must not end the sampling of all others
            _log.exception("process %d cannot be sampled", key[0])
            error, changed = InternalError(f"a process cannot be sampled: {type(e).__name__}"), False
        with self._changed:
            watched.busy, watched.refused = False, None if isinstance(error, ProcessGone) else error
            watched.scanned = time.monotonic()
            watched.rest = REST_S if changed else min(2 * watched.rest, MAX_REST_S)
            watched.retry = RETRY_S if error is None else min(2 * watched.retry, MAX_RETRY_S)
            if watched.due <= began:
                watched.due = watched.scanned + (watched.rest if error is None else watched.retry)
            left = key not in self._watched
            self._changed.notify_all()
        if left:
            self._tell(partial(self._kernel.remove, *key))
        self._set_clock()

    def _bring_up(self, key: Key, watched: _Watched) -> bool:
        """Have the programs sample a process as it is wanted; whether anything of it was new."""
        process = self._find(key)
        watched.wanted = hz, off_cpu = self._settings(watched.who)
        process.who = watched.who
        if hz <= 0:
            if watched.added:
                self._tell(partial(self._kernel.remove, *key))
                watched.added, watched.threads = False, {}
            return False
        process.rate = hz
        runtime, layout = self._prepared(process, PREPARE_S)
        scan = self._scan(key, runtime)
        off_rate = OFF_RATE if off_cpu else 0
        threads = {int(tid): (int(state), int(thread_id)) for tid, state, thread_id, _ in scan["threads"]}
        names = {int(tid): str(name) for tid, _, _, name in scan["threads"]}
        # Samples of threads that ended since are on their way.
        process.names = {**process.names, **names} if len(process.names) < MAX_NAMES else names
        with self._telling:
            if self._watched.get(key) is not watched:
                return False
            if watched.added:
                self._kernel.set_rate(*key, hz, off_rate)
            else:
                self._kernel.add(*key, layout, runtime, int(scan["gil"]), hz, off_rate)
            if new := not watched.added or threads != watched.threads:
                self._kernel.set_threads(*key, threads)
        watched.added, watched.threads = True, threads
        return new

    def _scan(self, key: Key, runtime: RuntimeInfo) -> dict[str, Any]:
        try:
            return self._readers.call(
                "threads", pid=key[0], start_ns=key[1], timeout=2 * SCAN_S,
                runtime=runtime.to_dict(), timeout_ms=int(SCAN_S * 1000),
            ).header  # fmt: skip
        except CorruptTarget:
            # It may run another program by now.
            self._runtimes.forget(*key)
            self._find(key).runtime = None
            raise

    def _prepared(self, process: Sampled, timeout: float) -> tuple[RuntimeInfo, Layout]:
        if process.runtime is None or process.layout is None:
            deadline = time.monotonic() + timeout
            runtime = self._runtimes.prepare(*process.key, timeout)
            process.layout = self._runtimes.layout(*process.key, max(0.001, deadline - time.monotonic()))
            process.runtime = runtime
        return process.runtime, process.layout

    def _set_clock(self) -> None:
        with self._changed:
            wanted = [w.wanted for w in self._watched.values() if w.added]
        clock = (max((hz for hz, _ in wanted), default=0), any(hz > 0 and off for hz, off in wanted))

        def tell() -> None:
            if clock != self._clock:
                self._kernel.set_clock(*clock)
                self._clock = clock

        self._tell(tell)

    def _tell(self, what: Callable[[], object]) -> None:
        with self._telling:
            try:
                what()
            except ProbingError as e:
                _log.warning("the sampler's programs cannot be told: %s", e.message)

    # For the decoder, on its thread.

    def _unresolved(self, keys: set[Key]) -> None:
        with self._changed:
            for key in keys & self._watched.keys():
                watched, now = self._watched[key], time.monotonic()
                if now - watched.unresolved > REST_S:
                    watched.soon = SOON_S
                watched.unresolved = now
                soon = max(now, watched.scanned + watched.soon)
                if soon < watched.due:
                    watched.due, watched.soon = soon, min(2 * watched.soon, MAX_SOON_S)
            self._changed.notify_all()

    def _fetch(self, process: Sampled, codes: list[CodeKey]) -> None:
        """Read code objects; those that are not there any more are given up, the others of a slow process left."""
        pid, start_ns = process.key
        deadline = time.monotonic() + FETCH_S
        addresses = list(dict.fromkeys(address for address, _ in codes))
        try:
            runtime, _ = self._prepared(process, FETCH_S)
            while addresses:
                left = deadline - time.monotonic()
                if left <= 0:
                    return
                answer = self._readers.call(
                    "codes", pid=pid, start_ns=start_ns, timeout=left,
                    runtime=runtime.to_dict(), addresses=addresses[:MAX_ADDRESSES], timeout_ms=int(left * 500),
                )  # fmt: skip
                process.codes.learn(unpack_codes(answer))
                addresses = addresses[max(1, int(answer.header["asked"])) :]
        except (TargetTimeout, InternalError):
            return
        except ProbingError as e:
            _log.debug("code of process %d cannot be read: %s", pid, e.message)
            if isinstance(e, CorruptTarget):
                process.runtime = None
        process.codes.give_up(process.codes.missing(codes, time.monotonic()))
