"""The store's two threads: one syncs after appends, the other runs maintenance."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

import pyarrow as pa

from probing.api.errors import ProbingError, StoreError
from probing.daemon.clock import until_next
from probing.daemon.store.state import StoreState

__all__ = ("Background",)

_MAINTAIN_S = 1.0
_log = logging.getLogger(__name__)


class Background:
    """Calls ``sync`` at most every ``sync_interval_s`` while there are appends, and ``maintain`` each second.

    Does nothing before ``start``. Errors of ``maintain`` are put into the state's ``problems``.
    """

    def __init__(
        self, sync: Callable[[], None], maintain: Callable[[], None], sync_interval_s: float, state: StoreState
    ) -> None:
        self.sync_interval_s = sync_interval_s
        self._sync = sync
        self._maintain = maintain
        self._state = state
        self._stopped = threading.Event()
        self._unsynced = threading.Event()
        self._woken = threading.Event()
        self._threads: list[threading.Thread] = []

    def start(self) -> None:
        for name, target in (("store-sync", self._sync_loop), ("store-maintain", self._maintain_loop)):
            thread = threading.Thread(target=target, name=name, daemon=True)
            thread.start()
            self._threads.append(thread)

    def stop(self) -> None:
        """Ends both threads, and waits for them."""
        self._stopped.set()
        self._woken.set()
        self._unsynced.set()
        for thread in self._threads:
            thread.join()

    def appended(self) -> None:
        """Requests a sync of appended records."""
        self._unsynced.set()

    def wake(self) -> None:
        """Requests maintenance at once."""
        self._woken.set()

    def _sync_loop(self) -> None:
        while not self._stopped.is_set():
            # The first record is synced at once, then the thread pauses: no record waits longer than the interval.
            self._unsynced.wait()
            self._unsynced.clear()
            try:
                self._sync()
            except StoreError:
                # The status has the reason, and the next round tries again.
                self._unsynced.set()
            except Exception as e:  # an error of one round must not end the thread: no row would be synced any more
                self._failed("sync", e)
                self._unsynced.set()
            self._stopped.wait(self.sync_interval_s)

    def _maintain_loop(self) -> None:
        while not self._stopped.is_set():
            self._woken.wait(until_next(_MAINTAIN_S))
            self._woken.clear()
            if self._stopped.is_set():
                return
            try:
                self._maintain()
            except (OSError, ProbingError, pa.ArrowException) as e:
                self._state.problems["maintain"] = str(e)
            except Exception as e:  # an error of one round must not end the thread: nothing would be sealed or dropped
                self._failed("maintain", e)
            else:
                self._state.problems.pop("maintain", None)

    def _failed(self, what: str, error: Exception) -> None:
        """Puts ``error`` into the problems, and logs it unless the previous round failed with the same error."""
        problem = f"{type(error).__name__}: {error}"
        if self._state.problems.get(what) != problem:
            _log.error("the store failed to %s", what, exc_info=error)
        self._state.problems[what] = problem
