"""Finds the processes that train, and publishes the start, the identity and the exit of each process."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Container, Iterable, Mapping
from typing import TypedDict

import pyarrow as pa

from probing.api.errors import ProbingError
from probing.daemon.arrow import batch_of
from probing.daemon.clock import Clock, ClockPair
from probing.daemon.fairness import in_turn
from probing.daemon.processes.announce import Announcer
from probing.daemon.processes.identification import Identification
from probing.daemon.processes.lineage import Lineage
from probing.daemon.processes.ranking import Membership, ModuleState
from probing.daemon.processes.reader_pool import ReaderPool, payload_of
from probing.daemon.processes.registry import Process, Registry
from probing.daemon.processes.rows import RESTORED, env_rows, process_row, state_name, stored_processes
from probing.daemon.processes.target import MAX_TARGETS
from probing.daemon.source import Identity, ProcessKey, Sink, Source

__all__ = ("RESTORED", "Discovery", "backends_of")

TIMEOUT_S = 0.5
# Names of threads that show which collectives a process uses (torch/csrc/distributed/c10d, gloo/transport/tcp).
_THREADS = (("pt_gloo", "gloo"), ("gloo_tcp", "gloo"), ("pt_nccl", "nccl"), ("pt_ucc", "ucc"), ("pt_mpi", "mpi"))
_log = logging.getLogger(__name__)


class _State(TypedDict):
    state: str
    threads: list[str]


def _read_states(readers: ReaderPool, processes: list[Process]) -> dict[ProcessKey, tuple[str | None, list[str]]]:
    """Returns state and thread names of the first MAX_TARGETS processes, by key. The result is empty if the states
    cannot be read in time.
    """
    if not processes:
        return {}
    processes = processes[:MAX_TARGETS]
    targets = [list(process.key) for process in processes]
    try:
        states = payload_of(
            list[_State | None], readers.call("state", timeout=TIMEOUT_S, targets=targets, threads=True)
        )
    except ProbingError as e:
        _log.warning("the states of processes cannot be read: %s", e.message)
        return {}
    by_key: dict[ProcessKey, tuple[str | None, list[str]]] = {}
    for process, seen in zip(processes, states, strict=True):
        by_key[process.key] = (state_name(seen["state"]), seen["threads"]) if seen else ("exited", [])
    return by_key


def backends_of(threads: Iterable[str]) -> set[str]:
    """Returns the collective backends of threads with these names."""
    return {backend for name in threads for prefix, backend in _THREADS if name.startswith(prefix)}


def _no_version(_pid: int, _start_ns: int) -> str:
    return ""


def _no_module_state(_pid: int, _start_ns: int) -> ModuleState | None:
    return None


def _no_python(_pid: int, _start_ns: int, _tid: int) -> bool:
    return False


def _no_threads(_keys: Iterable[tuple[int, int]]) -> Mapping[tuple[int, int], int]:
    return {}


def _no_backends(_pid: int, _start_ns: int) -> Iterable[str]:
    return ()


class Discovery:
    """The source ``processes``, and the ``Processes`` that all other sources use. Thread-safe.

    The functions ``python_version``, ``module_state``, ``backends`` (pid, start_ns), ``runs_python`` (pid, start_ns,
    tid) and ``training_threads`` (of many processes) ask other sources and may raise ProbingError. If ``cgroup`` is not
    empty, only processes of this control group are watched. ``own``: pids to ignore. All processes are listed every
    ``rescan_s`` seconds. A process without an exit event may be missing from the list for ``grace_s`` seconds before it
    counts as ended.
    """

    name = "processes"

    def __init__(
        self,
        readers: ReaderPool,
        sink: Sink,
        clock: Clock,
        node: str,
        *,
        python_version: Callable[[int, int], str] = _no_version,
        module_state: Callable[[int, int], ModuleState | None] = _no_module_state,
        runs_python: Callable[[int, int, int], bool] = _no_python,
        training_threads: Callable[[Iterable[tuple[int, int]]], Mapping[tuple[int, int], int]] = _no_threads,
        backends: Callable[[int, int], Iterable[str]] = _no_backends,
        cgroup: str = "",
        own: Container[int] = (),
        rescan_s: float = 30.0,
        grace_s: float = 1.0,
    ) -> None:
        self._readers = readers
        self._boot_id = clock.boot_id
        self._node = node
        self._backends = backends
        announcer = Announcer(sink, clock, node)
        self.listeners: list[Source] = announcer.listeners
        self._registry = Registry(node, clock.boot_id)
        self._lineage = Lineage(self._registry.newest)
        # This lock is held for each use of the registry, except for a read of a single process.
        self._known = threading.Lock()
        self._identification = Identification(
            readers,
            sink,
            clock,
            announcer,
            self._registry,
            self._known,
            self._lineage,
            python_version=python_version,
            module_state=module_state,
            runs_python=runs_python,
            training_threads=training_threads,
            started_ns=clock.pair().boot_ns,
            backends=backends,
            cgroup=cgroup,
            own=own,
            rescan_s=rescan_s,
            grace_s=grace_s,
        )

    def start(self) -> None:
        """Starts the thread, which first scans all processes; ``scanned`` waits for the end of this scan."""
        self._identification.start()

    def stop(self) -> None:
        self._identification.stop()

    def scanned(self, timeout: float) -> bool:
        """Waits until all processes that ran at the start have been read. Returns False after ``timeout`` seconds."""
        return self._identification.scanned.wait(timeout)

    # The following methods queue events from the collector. Times are CLOCK_MONOTONIC ns.

    def on_exec(self, tgid: int, start_ns: int, ktime: int) -> None:
        self._lineage.replaced(tgid)
        self._identification.post("exec", tgid, start_ns, ktime)

    def on_fork(self, tgid: int, start_ns: int, ktime: int, ppid: int) -> None:
        self._lineage.forked(tgid, start_ns, ppid)
        self._identification.post("fork", tgid, start_ns, ktime, ppid)

    def on_exit(self, tgid: int, start_ns: int, ktime: int, status: int | None = None) -> None:
        """Queues the exit of a process. ``status``: the status that waitpid(2) returns, None if unknown."""
        self._identification.post("exit", tgid, start_ns, ktime, status)

    def on_oom(self, tgid: int, start_ns: int, ktime: int) -> None:
        """Queues the fact that the kernel kills a process for lack of memory. ``start_ns`` is 0 if unknown."""
        self._identification.post("oom", tgid, start_ns, ktime)

    def on_mapping(self, pid: int) -> None:
        """Queues the fact that a process mapped a library of interest."""
        self._identification.post("mapping", pid)

    def on_communicator(self, pid: int, start_ns: int, membership: Membership) -> None:
        """Queues a communicator of a process. If it spans the job, it gives the process a rank that the environment
        lacks.
        """
        self._identification.post("membership", (pid, start_ns), membership)

    def on_issuer(self, pid: int, start_ns: int, tid: int) -> None:
        """Queues the fact that thread ``tid`` calls most collectives of a process. If this thread runs Python, it is
        the thread that trains.
        """
        self._identification.post("issuer", ProcessKey(pid, start_ns), tid)

    def identity(self, pid: int, start_ns: int) -> Identity | None:
        """Returns the identity of a process, as ``source.Processes`` says; takes no lock.

        A process that ended before it was read has its parent's job and run.
        """
        key = ProcessKey(pid, start_ns)
        process = self._registry.get(key)
        return process.identity if process is not None else self._lineage.inherited(key)

    def expected(self, pid: int, start_ns: int) -> bool:
        """Returns whether the process is not identified yet and, as far as is known, has not ended. Takes no lock."""
        key = ProcessKey(pid, start_ns)
        return self._registry.get(key) is None and not self._lineage.has_ended(key)

    def live(self) -> list[Identity]:
        """Returns the identities of all live watched processes. Processes of different owners alternate, so that a
        source that can follow only the first N is fair to the owners. The oldest process of each owner comes first.
        """
        with self._known:
            found = [process.identity for process in self._registry.live()]
        return in_turn(sorted(found, key=lambda who: (who.start_ns, who.pid)), lambda who: who.owner)

    def environ(self, pid: int, start_ns: int) -> Mapping[str, str]:
        """Returns the allowed variables (``processes.environment``) of a watched process, empty for another process.
        Takes no lock.
        """
        process = self._registry.get(ProcessKey(pid, start_ns))
        return process.facts.environ if process is not None else {}

    def rows(self, pair: ClockPair) -> pa.RecordBatch:
        """Returns process.processes as of now; reads the states of the processes."""
        with self._known:
            shown = self._registry.shown()
        states = _read_states(self._readers, [process for process in shown if not process.ended])
        rows = []
        for process in shown:
            state, threads = states.get(process.key, ("exited" if process.ended else None, []))
            used = backends_of(threads) | (set() if process.ended else set(self._backends(*process.key)))
            if used - process.backends:
                process.backends = process.backends | used
                self._identification.post("backends", process.key, used)
            rows.append(process_row(self._node, pair.real_ns, process, state))
        return batch_of("process.processes", rows)

    def envs(self, pair: ClockPair) -> pa.RecordBatch:
        """Returns process.envs: the allowed variables of all live watched processes."""
        with self._known:
            live = self._registry.live()
        return batch_of("process.envs", [row for p in live for row in env_rows(self._node, pair.real_ns, p)])

    def restore(self, rows: pa.Table) -> int:
        """Adds the processes of this boot from ``rows``, stored rows of process.events with the columns RESTORED.
        Returns their number. Call it before ``start``.
        """
        count = 0
        with self._known:
            for detail, process, ended in stored_processes(rows, self._boot_id):
                self._registry.restore(detail, process, ended=ended)
                count += 1
        return count
