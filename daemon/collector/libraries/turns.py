"""Chooses the process whose libraries are examined next. The examination of one process is called a look. Each process
is queued once, and the users take turns. A user whose looks find nothing too often has to pause (a rest).
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

__all__ = ("Turn", "Turns")

MAX_WAITING = 65_536
# The pause before a process is tried again after a failed look: 1, 2, 4 ... s.
FIRST_RETRY_S, LAST_RETRY_S = 1.0, 480.0
MAX_RETRIED = 4_096
MAX_REST_S = 60.0
# A token bucket for each user: a user has at most CREDIT credits, and gets CREDIT_A_SECOND more each second. Each look
# that finds nothing costs a credit. A user without credit rests for REST_FACTOR times the duration of the look.
CREDIT, CREDIT_A_SECOND = 100.0, 10.0
REST_FACTOR = 20
MAX_DEBTORS = 4_096
# The resolution of the times of retries, s.
TICK_S = 0.1


class Turn(NamedTuple):
    """A process to examine. ``fresh``: it has new mappings since the last look. ``may_attach`` is False while the user
    of the process rests."""

    pid: int
    uid: int
    fresh: bool
    may_attach: bool = True


@dataclass(slots=True)
class _User:
    """The queued processes of a user. ``fresh`` processes come before ``scanned`` processes. ``held`` processes wait
    until the user's rest is over.

    ``rests_until`` is on time.monotonic().
    """

    fresh: dict[int, None] = field(default_factory=dict)
    scanned: dict[int, None] = field(default_factory=dict)
    held: dict[int, None] = field(default_factory=dict)
    rests_until: float = 0.0


@dataclass(slots=True)
class _Retry:
    due: float
    span: float


class Turns:
    """The queue of processes. ``add`` and ``stop`` are thread-safe; only the thread that examines processes calls the
    other methods. ``uid_of`` returns the owner of a process, None for a process that ended.
    """

    def __init__(self, uid_of: Callable[[int], int | None]) -> None:
        self._uid_of = uid_of
        # Guards ``_added`` and ``stopped``.
        self._changed = threading.Condition()
        self._added: dict[int, bool] = {}
        self.stopped = False
        self._users: OrderedDict[int, _User] = OrderedDict()
        self._retries: dict[int, _Retry] = {}
        self._due_at: dict[int, float] = {}
        self._ticked = 0.0
        # By user: (credit left, the time at which this was the credit).
        self._credits: OrderedDict[int, tuple[float, float]] = OrderedDict()
        self.refused = 0
        """The number of processes that were dropped because the queue was full; a scan finds them again."""

    def add(self, pids: Iterable[int], *, fresh: bool) -> None:
        """Queues processes that are not queued yet."""
        with self._changed:
            for pid in pids:
                if pid in self._added or len(self._added) < MAX_WAITING:
                    self._added[pid] = self._added.get(pid, False) or fresh
                else:
                    self.refused += 1
            self._changed.notify_all()

    def stop(self) -> None:
        with self._changed:
            self.stopped = True
            self._changed.notify_all()

    def take(self, timeout: float) -> Turn | None:
        """Returns the turn of the next process; None after ``timeout`` seconds without a process, or after ``stop``."""
        deadline = time.monotonic() + timeout
        while not self.stopped:
            self._sort()
            now = time.monotonic()
            if (turn := self._next(now)) is not None:
                return turn
            if now >= deadline:
                return None
            with self._changed:
                if not self._added and not self.stopped:
                    self._changed.wait(max(0.0, min(deadline, self._due()) - now))
        return None

    def rest(self, uid: int, seconds: float) -> None:
        """Makes a user rest for ``seconds``: meanwhile only scans examine the user's processes, and no probes are
        attached for them.
        """
        user = self._users.setdefault(uid, _User())
        user.rests_until = max(user.rests_until, time.monotonic() + min(seconds, MAX_REST_S))

    def waste(self, uid: int, looks: int, seconds: float) -> None:
        """Charges a user for ``looks`` that found nothing and took ``seconds``."""
        now = time.monotonic()
        credit, since = self._credits.pop(uid, (CREDIT, now))
        credit = min(CREDIT, credit + (now - since) * CREDIT_A_SECOND) - looks
        self._credits[uid] = max(credit, 0.0), now
        if len(self._credits) > MAX_DEBTORS:
            self._credits.popitem(last=False)
        if credit < 0:
            self.rest(uid, REST_FACTOR * seconds)

    def hold(self, turn: Turn) -> None:
        """Queues a process again once the rest of its user is over."""
        self._users.setdefault(turn.uid, _User()).held[turn.pid] = None

    def again(self, pid: int) -> None:
        """Queues a process again after a pause, which doubles with each call until ``settled``."""
        retry = self._retries.get(pid)
        if retry is None and len(self._retries) >= MAX_RETRIED:
            self.refused += 1
            return
        span = FIRST_RETRY_S if retry is None else min(2 * retry.span, LAST_RETRY_S)
        self._retries[pid] = _Retry(time.monotonic() + span, span)

    def later(self, pid: int, seconds: float) -> None:
        """Queues a process again after ``seconds``."""
        if pid in self._due_at or len(self._due_at) < MAX_RETRIED:
            due = time.monotonic() + seconds
            self._due_at[pid] = min(due, self._due_at.get(pid, due))

    def settled(self, pid: int) -> None:
        """Ends the retries of a process that was examined, or that ended."""
        self._retries.pop(pid, None)

    def _sort(self) -> None:
        """Moves added processes, and processes whose pause is over, to the queue of their user."""
        with self._changed:
            added, self._added = self._added, {}
        now = time.monotonic()
        if now - self._ticked >= TICK_S:
            self._ticked = now
            for pid in self._due_now(now):
                added.setdefault(pid, False)
        for pid, fresh in added.items():
            uid = self._uid_of(pid)
            if uid is None:
                # The process has ended, so its user is unknown. The look at the process handles that.
                uid = 0
            user = self._users.setdefault(uid, _User())
            if fresh:
                user.scanned.pop(pid, None)
                user.fresh[pid] = None
            elif pid not in user.fresh:
                user.scanned[pid] = None

    def _due_now(self, now: float) -> list[int]:
        retried = [pid for pid, retry in self._retries.items() if retry.due <= now]
        for pid in retried:
            self._retries[pid].due = float("inf")
        later = [pid for pid, due in self._due_at.items() if due <= now]
        for pid in later:
            del self._due_at[pid]
        return retried + later

    def _next(self, now: float) -> Turn | None:
        for uid, user in list(self._users.items()):
            rests = user.rests_until > now
            if not rests:
                user.scanned |= user.held
                user.held = {}
            queue = user.scanned if rests or not user.fresh else user.fresh
            if queue:
                self._users.move_to_end(uid)
                pid = next(iter(queue))
                del queue[pid]
                return Turn(pid, uid, queue is user.fresh, not rests)
            if not rests and not user.fresh:
                del self._users[uid]
        return None

    def _due(self) -> float:
        """Returns the time at which the next waiting process is due, on time.monotonic()."""
        rests = (user.rests_until for user in self._users.values() if user.fresh or user.held)
        retries = (max(retry.due, self._ticked + TICK_S) for retry in self._retries.values())
        later = (max(due, self._ticked + TICK_S) for due in self._due_at.values())
        return min((*rests, *retries, *later), default=float("inf"))
