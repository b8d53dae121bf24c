"""Schedules the enrolment of processes with the sampler's programs.

A process is visited when it is identified, soon after a sample of an unknown thread, and from time to time, because
threads come and go.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

from probing.api.errors import InternalError, ProbingError, ProcessGone
from probing.daemon.fairness import FairExecutor
from probing.daemon.python_stack.sampling.enrolment import Enrolled, Enrolment, Rates
from probing.daemon.python_stack.sampling.processes import KnownProcesses
from probing.daemon.source import Identity, ProcessKey

__all__ = ("SampledWatch", "Settings")

Settings = Callable[[Identity], tuple[int, bool]]
"""Returns the fields of ``Rates`` for a process."""
# The first and the longest pause before a process with unknown threads is visited again, s.
SOON_S, MAX_SOON_S = 0.1, 1.0
REST_S, MAX_REST_S = 5.0, 60.0
RETRY_S, MAX_RETRY_S = 0.2, 60.0
# Scans of the threads of a process may take at most 1/_SCAN_SHARE of a reader's time.
_SCAN_SHARE = 20
_WORKERS = 2
_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Watched:
    """A process to sample. ``due``: the time.monotonic() of the next visit; ``unresolved``: the time of the last sample
    of an unknown thread. ``rest``, ``soon`` and ``retry`` are durations, s.
    """

    identity: Identity
    due: float
    rest: float = REST_S
    soon: float = SOON_S
    retry: float = RETRY_S
    unresolved: float = 0.0
    busy: bool = False
    refused: ProbingError | None = None
    enrolled: Enrolled = field(default_factory=Enrolled)


class SampledWatch:
    """Decides when processes are visited. The owners of processes take turns. Thread-safe. Methods for
    events of processes never wait.

    ``pause_s``: seconds from ``begin`` to the first visit.
    """

    def __init__(self, enrolment: Enrolment, known: KnownProcesses, settings: Settings, pause_s: float = 0.0) -> None:
        self._pause_s, self._begun = pause_s, not pause_s
        self._enrolment = enrolment
        self._known = known
        self._settings = settings
        # Guards the following attributes, and wakes the scheduling thread. Its holder must not take the maps' lock.
        self._changed = threading.Condition()
        self._watched: dict[ProcessKey, _Watched] = {}
        # Processes whose earlier program may still be in the maps.
        self._renewed: set[ProcessKey] = set()
        self._running = False
        self._workers: FairExecutor | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Starts sampling. Raises ProbingError when the maps cannot be changed."""
        self._enrolment.start()
        self._workers = FairExecutor(_WORKERS, "python-threads")
        self._running = True
        self._thread = threading.Thread(target=self._run, args=(self._workers,), name="python-samples", daemon=True)
        self._thread.start()

    def begin(self) -> None:
        with self._changed:
            self._begun = True
            self._changed.notify_all()

    def stop(self) -> None:
        """Stops sampling. A later ``start`` samples the same processes again."""
        with self._changed:
            self._running = False
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()
        if self._workers is not None:
            self._workers.stop()
        self._enrolment.stop()
        with self._changed:
            for watched in self._watched.values():
                watched.busy, watched.due = False, 0.0
                watched.enrolled.reset()

    @property
    def sampled(self) -> int:
        """Returns the number of processes that are sampled now."""
        with self._changed:
            return sum(watched.enrolled.added for watched in self._watched.values())

    @property
    def reason(self) -> str:
        """Why processes that should be sampled are not sampled, each reason with its pids; empty if all are sampled."""
        by_reason: defaultdict[str, list[int]] = defaultdict(list)
        with self._changed:
            for (pid, _), watched in self._watched.items():
                if watched.refused is not None:
                    by_reason[watched.refused.message.replace(f"process {pid}", "a process")].append(pid)
        return "; ".join(f"{reason}: pid {', '.join(map(str, sorted(pids)))}" for reason, pids in by_reason.items())

    def watch(self, identity: Identity) -> None:
        """Notes that a process is to be sampled: it is new, or its identity changed."""
        key = identity.key
        self._known.started(key)
        with self._changed:
            watched = self._watched.setdefault(key, _Watched(identity, 0.0))
            watched.identity, watched.due = identity, time.monotonic()
            self._changed.notify_all()

    def renew(self, key: ProcessKey) -> None:
        """Notes that a process runs another program now. Its new identity may arrive before or after this call."""
        with self._changed:
            watched = self._watched.get(key)
            if watched is None:
                return
            self._watched[key] = _Watched(watched.identity, time.monotonic())
            self._renewed.add(key)
            self._changed.notify_all()
        self._known.ended(key)
        self._known.started(key)

    def leave(self, key: ProcessKey) -> None:
        """Notes that a process ended, or that its role is no longer sampled."""
        with self._changed:
            if self._watched.pop(key, None) is None:
                return
            self._changed.notify_all()
        self._known.ended(key)

    def settings_changed(self) -> None:
        """Reads the settings of all processes again."""
        with self._changed:
            for watched in self._watched.values():
                watched.due = time.monotonic()
            self._changed.notify_all()

    def unresolved(self, keys: set[ProcessKey]) -> None:
        """Notes that the programs sampled threads that are in no map. Their processes are visited soon."""
        with self._changed:
            for key in keys & self._watched.keys():
                watched, now = self._watched[key], time.monotonic()
                if now - watched.unresolved > REST_S:
                    watched.soon = SOON_S
                watched.unresolved = now
                # A process with thousands of threads that come and go must not keep a reader busy.
                pause = max(watched.soon, min(_SCAN_SHARE * watched.enrolled.scan_s, REST_S))
                soon = max(now, watched.enrolled.scanned + pause)
                if soon < watched.due:
                    watched.due, watched.soon = soon, min(2 * watched.soon, MAX_SOON_S)
            self._changed.notify_all()

    def _run(self, workers: FairExecutor) -> None:
        gone: set[ProcessKey] = set()
        present: set[ProcessKey] = set()
        with self._changed:
            self._changed.wait_for(lambda: self._begun or not self._running)
            self._changed.wait_for(lambda: not self._running, self._pause_s)
        while True:
            with self._changed:
                if not self._running:
                    return
                gone, present = (present - self._watched.keys()) | self._renewed, set(self._watched)
                self._renewed = set()
                now = time.monotonic()
                due = [(k, w) for k, w in self._watched.items() if w.due <= now and not w.busy]
                for _, watched in due:
                    watched.busy = True
                if not due and not gone:
                    times = [w.due for w in self._watched.values() if not w.busy]
                    self._changed.wait(max(0.0, min(times) - now) if times else None)
                    continue
            if gone:
                for key in gone:
                    self._enrolment.remove(key)
                self._set_clock()
            for key, watched in due:
                workers.submit(watched.identity.owner, self._visit, key, watched)

    def _visit(self, key: ProcessKey, watched: _Watched) -> None:
        began = time.monotonic()
        error: ProbingError | None = None
        try:
            rates = Rates(*self._settings(watched.identity))
            self._known.find(key).identity = watched.identity
            changed = self._enrolment.bring_up(key, watched.enrolled, rates, lambda: self._watched.get(key) is watched)
            # A thread off the CPU gets its entry only after the clock is set, so that its return to the CPU is seen.
            self._set_clock()
            changed = self._enrolment.adopt(key, watched.enrolled) or changed
        except ProbingError as e:
            error, changed = e, False
        except Exception as e:  # an error with one process must not end the sampling of all others
            _log.exception("process %d cannot be sampled", key[0])
            error, changed = InternalError(f"a process cannot be sampled: {type(e).__name__}"), False
        with self._changed:
            watched.busy, watched.refused = False, None if isinstance(error, ProcessGone) else error
            watched.enrolled.scanned = now = time.monotonic()
            watched.rest = REST_S if changed else min(2 * watched.rest, MAX_REST_S)
            watched.retry = RETRY_S if error is None else min(2 * watched.retry, MAX_RETRY_S)
            if watched.due <= began:
                watched.due = now + (watched.rest if error is None else watched.retry)
            left = key not in self._watched
            self._changed.notify_all()
        if left:
            self._enrolment.remove(key)
        self._set_clock()

    def _set_clock(self) -> None:
        with self._changed:
            enrolled = [watched.enrolled for watched in self._watched.values()]
        self._enrolment.set_clock(enrolled)
