"""Reads code objects right after the first sample that names them, while they exist. Until they are read, the sample is
held in the ring.

The kernel wakes the decoder only for a stack that it has not reported before. A record may be drained once all its code
has been read or given up, or after a second: ``ready`` returns the position up to which records may be drained.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy.typing as npt

from probing.daemon.bpf.ring import Ring
from probing.daemon.fairness import Turns
from probing.daemon.python_stack.sampling.codes import CodeKey
from probing.daemon.python_stack.sampling.processes import Sampled
from probing.daemon.python_stack.sampling.rows import UNRESOLVED, code_keys
from probing.daemon.source import ProcessKey

__all__ = ("Decoder",)

# How long a record is held for its code to be read, s. Records are held longer just after a start, because their
# process may not be identified yet.
HOLD_S = 1.0
START_HOLD_S = 10.0
RETRY_S = 0.1
# How long code is fetched before the ring is examined again, s. This limits the time by which processes that do not
# answer delay other processes.
FETCHES_S = 0.5
# The pause before code that could not be read in time is requested again, s.
GIVEN_UP_S = 30.0
_PEEK_BYTES = 1 << 20
_MAX_SEEN = 65_536
_log = logging.getLogger(__name__)
Missing = dict[ProcessKey, list[CodeKey]]


class _Pending(NamedTuple):
    """Records up to position ``end``, whose code has been awaited since ``since`` (time.monotonic())."""

    end: int
    since: float


class Decoder:
    """Reads the code of samples. ``ready`` is for the thread that drains the ring. The decoder's thread reads the code.

    ``find`` returns the state of a process. ``fetch`` reads code or gives it up; ``fetch`` is called again for code
    that it neither read nor gave up. ``unresolved`` gets the processes with samples of unknown threads.
    """

    def __init__(
        self,
        ring: Ring,
        find: Callable[[ProcessKey], Sampled],
        fetch: Callable[[Sampled, list[CodeKey]], None],
        unresolved: Callable[[set[ProcessKey]], None],
    ) -> None:
        self._ring = ring
        self._find = find
        self._fetch = fetch
        self._unresolved = unresolved
        self._position = ring.position
        self._pending: _Pending | None = None
        self._turns: Turns[int | None] = Turns()
        self._seen: set[tuple[int, int, int]] = set()
        self._looking = threading.Lock()
        self._nudge = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._stopped = False
        self._began = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="decoder", daemon=True)

    def start(self) -> None:
        """Starts the thread, which first decodes the records that the ring already holds."""
        self._thread.start()

    def stop(self) -> None:
        self._stopped = True
        self._wake()
        if self._thread.ident is not None:
            self._thread.join()
        with self._looking:
            os.close(self._nudge)

    def ready(self) -> int:
        """Returns the ring position up to which records may be drained. Never waits."""
        if self._looking.acquire(blocking=False):
            try:
                if not self._stopped and self._look():
                    self._wake()
            finally:
                self._looking.release()
        pending = self._pending
        if pending is not None and self._is_late(pending):
            # Late records are drained although some of their code was not read; SampleRows counts that as missing.
            self._position = max(self._position, pending.end)
            self._pending = None
        return max(self._position, self._ring.position)

    def _is_late(self, pending: _Pending) -> bool:
        now = time.monotonic()
        full = self._ring.backlog * 2 > self._ring.size
        starting = now - self._began < START_HOLD_S and not full
        return now - pending.since > (START_HOLD_S if starting else HOLD_S)

    def _run(self) -> None:
        poll = select.epoll()
        # Edge-triggered: the ring stays readable until it is drained.
        poll.register(self._ring.fileno(), select.EPOLLIN | select.EPOLLET)
        poll.register(self._nudge, select.EPOLLIN)
        wait: float | None = 0.0
        with contextlib.closing(poll):
            while not self._stopped:
                poll.poll(wait)
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(self._nudge)
                try:
                    wait = RETRY_S if self._decode() else None
                except Exception:  # an error with one record must not end all decoding: the record is drained undecoded
                    _log.exception("samples cannot be decoded")
                    wait = HOLD_S

    def _wake(self) -> None:
        os.eventfd_write(self._nudge, 1)

    def _decode(self) -> bool:
        """Fetches missing code for FETCHES_S; the owners of processes take turns. Returns whether some code is to be
        fetched later or again.
        """
        with self._looking:
            missing = self._look()
        if not missing:
            return False
        until = time.monotonic() + FETCHES_S
        asked: set[ProcessKey] = set()
        while missing and (not asked or time.monotonic() <= until):
            key = min(missing, key=lambda key: self._turns.of(self._owner(key)))
            self._turns.took(self._owner(key))
            self._fetch(self._find(key), missing.pop(key))
            asked.add(key)
        with self._looking:
            left = self._look()
            pending = self._pending
            if left and pending is not None and self._is_late(pending):
                for key in asked & left.keys():
                    self._find(key).codes.give_up(left[key], time.monotonic() + GIVEN_UP_S)
                # For code that was not requested yet, the wait begins again.
                self._pending = None
                left = self._look()
        return bool(left)

    def _owner(self, key: ProcessKey) -> int | None:
        return self._find(key).owner

    def _look(self) -> Missing:
        """Moves on past records whose code has been read. Returns the code that the next records lack."""
        while True:
            self._position = max(self._position, self._ring.position)
            records, end = self._peek()
            if end == self._position:
                self._pending = None
                return {}
            missing = self._missing(records)
            if missing:
                if self._pending is None:
                    self._pending = _Pending(end, time.monotonic())
                return missing
            self._position, self._pending = end, None

    def _peek(self) -> tuple[npt.NDArray[Any], int]:
        peeked = self._ring.peek(self._position, _PEEK_BYTES)
        return peeked.records, peeked.position

    def _missing(self, records: npt.NDArray[Any]) -> Missing:
        if len(self._seen) > _MAX_SEEN:
            self._seen.clear()
        missing: dict[ProcessKey, dict[CodeKey, None]] = {}
        unresolved: set[ProcessKey] = set()
        looked: set[tuple[int, int, int]] = set()
        columns = (records[name].tolist() for name in ("tgid", "start_ns", "hash", "kind"))
        for index, (pid, start_ns, hashed, kind) in enumerate(zip(*columns, strict=True)):
            stack = (pid, start_ns, hashed)
            if kind == UNRESOLVED:
                unresolved.add(ProcessKey(pid, start_ns))
            elif stack not in self._seen and stack not in looked:
                looked.add(stack)
                key, codes = ProcessKey(pid, start_ns), code_keys(records[index])
                process = self._find(key)
                if lacking := process.codes.missing(codes, time.monotonic()):
                    missing.setdefault(key, {}).update(dict.fromkeys(lacking))
                elif all(process.codes.get(code) for code in codes):
                    self._seen.add(stack)
        if unresolved:
            self._unresolved(unresolved)
        return {key: list(codes) for key, codes in missing.items()}
