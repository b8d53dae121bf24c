"""Owns the NVML process, which calls the driver: starts it, polls it, gives it up when it hangs, and restarts it.

No call here waits longer than its caller allows, since the driver of a faulty GPU may take minutes or never answer.
"""

from __future__ import annotations

import logging
import os
import select
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypedDict

from probing.api.errors import ProbingError
from probing.api.tables.schema import Row
from probing.api.typed import typed, typed_json
from probing.daemon.ipc import Channel, ChannelClosed, Header, Message, connect

__all__ = ("Content", "Failure", "NvmlSession", "Reading")

# The timeouts of the first poll, which may start each GPU, and of later polls, s.
FIRST_S, POLL_S = 300.0, 30.0
# The retry backoff: the pauses before the next start after one, two, three and more consecutive failures, s.
RETRY_S = (1.0, 2.0, 5.0, 10.0, 20.0, 30.0, 60.0)
CONNECT_S = 1.0
RECEIVE_S = 5.0
MAX_PAYLOAD = 8 << 20
_log = logging.getLogger(__name__)


class Content(TypedDict, total=False):
    """The result of ``gpu.nvml.snapshot.Snapshots.poll``. ``values``, ``processes`` and ``lost`` are by device."""

    backend: str
    driver: Row
    devices: list[Row]
    lost: dict[str, str]
    values: dict[str, Row]
    processes: dict[str, list[Row] | None]
    links: list[Row]
    events: list[Row]
    events_dropped: int
    problems: list[str]


class _Hung(TypedDict):
    call: str
    device: str
    seconds: float


class _Failed(TypedDict):
    kind: str
    text: str


class _Header(TypedDict, total=False):
    hung: _Hung
    failed: _Failed
    events: list[Row]


class Reading(NamedTuple):
    """The answer to one poll.

    ``asked``: the requested parts; ``fresh``: this is the first answer of a new process.
    """

    content: Content
    asked: frozenset[str]
    fresh: bool


@dataclass(frozen=True, slots=True)
class Failure:
    """The reason why the driver cannot be read. ``kind``: absent, mismatch, denied, lost, changed, hung or ended.

    If ``kind`` is hung, ``call`` is the call that hangs, ``device`` its device, and ``seconds`` its duration so far.
    ``events``: events that came before the failure.
    """

    kind: str
    text: str
    call: str = ""
    device: str = ""
    seconds: float = 0.0
    events: Sequence[Row] = field(default_factory=tuple)


class NvmlSession:
    """Polls the NVML process. Belongs to one thread. ``absent`` returns why a start would be useless, or an empty
    text."""

    def __init__(
        self,
        path: str,
        absent: Callable[[], str] = str,
        *,
        retry_s: Sequence[float] = RETRY_S,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._path = path
        self._absent = absent
        self._retry_s = retry_s
        self._now = now
        self._channel: Channel | None = None
        # The pidfd of a process that hung: it becomes readable when the process ends.
        self._stuck: int | None = None
        self._pidfd: int | None = None
        self._waits_for = ""
        self._asked = self._due = 0.0
        self._failures = 0
        # Whether the last answer was a reading that nobody has rejected.
        self._accepted = False
        self._fresh = True
        self._parts: frozenset[str] = frozenset()

    def poll(self, wait_s: float, *, slow: bool, links: bool, pairs: bool) -> Reading | Failure | None:
        """Returns the answer of the process, or the failure; None if neither comes within ``wait_s`` seconds."""
        if self._accepted:
            self._failures, self._accepted = 0, False
        try:
            if self._channel is None and (nothing := self._start()):
                return nothing if isinstance(nothing, Failure) else None
            end = self._now() + wait_s
            if not self._waits_for:
                self._ask(slow, links, pairs)
            while (answer := self._answer(max(0.0, end - self._now()))) is not None:
                waited_for, self._waits_for = self._waits_for, ""
                if waited_for == "poll":
                    return self._read(answer)
                self._watch_end_of(int(answer.header.get("pid", 0)))
                self._ask(slow, links, pairs)
        except ChannelClosed:
            return self._ended()
        except (ProbingError, ValueError) as e:
            text = e.message if isinstance(e, ProbingError) else "its answer cannot be read"
            return self._fail(Failure("lost", f"the process that asks the driver: {text}"))
        return self._late()

    def again(self) -> None:
        """Ends the process. The next poll starts a new process, which may see GPUs that the old process has lost."""
        self._end()
        self._due = 0.0

    def reject(self) -> None:
        """Ends the process, since its last answer makes no sense. The next start waits as after any failure."""
        self._accepted = False
        self._fail(Failure("ended", "its answer makes no sense"))

    def close(self) -> None:
        self._end()
        for fd in (self._stuck, self._pidfd):
            if fd is not None:
                os.close(fd)
        self._stuck = self._pidfd = None

    def _start(self) -> Failure | bool:
        """Connects if a start is due. Returns the failure; False if connected; True if no start is due yet."""
        if self._now() < self._due or self._still_stuck():
            return True
        if reason := self._absent():
            return self._fail(Failure("absent", reason))
        self._channel = connect(self._path, CONNECT_S)
        self._fresh = True
        self._send({"op": "ping"}, "ping")
        return False

    def _still_stuck(self) -> bool:
        """Returns whether a process that hung still exists. If it does, a new process would hang, too."""
        if self._stuck is None:
            return False
        if not _is_readable(self._stuck, 0.0):
            return True
        os.close(self._stuck)
        self._stuck = None
        return False

    def _watch_end_of(self, pid: int) -> None:
        if self._pidfd is not None:
            os.close(self._pidfd)
            self._pidfd = None
        try:
            self._pidfd = os.pidfd_open(pid)
        except (OSError, ValueError, OverflowError) as e:
            _log.debug("pid %d cannot be watched: %s", pid, e)

    def _ask(self, slow: bool, links: bool, pairs: bool) -> None:
        wanted = {"slow": slow or self._fresh, "links": links or self._fresh, "pairs": pairs or self._fresh}
        self._parts = frozenset(name for name, value in wanted.items() if value)
        self._send({"op": "poll", **wanted}, "poll")

    def _send(self, header: Header, waits_for: str) -> None:
        assert self._channel is not None
        self._channel.send(header, timeout=CONNECT_S)
        self._waits_for, self._asked = waits_for, self._now()

    def _answer(self, wait_s: float) -> Message | None:
        assert self._channel is not None
        if not _is_readable(self._channel.fileno(), wait_s):
            return None
        answer = self._channel.receive(RECEIVE_S)
        answer.close_fds()
        return answer

    def _ended(self) -> Failure:
        """Returns why a process closed the connection: the failure in its last answer, or that the process ended."""
        try:
            last = self._answer(0.0) if self._channel is not None else None
            found = self._read(last) if last is not None else None
        except (ProbingError, ValueError):
            found = None
        if isinstance(found, Failure):
            return found
        return self._fail(Failure("ended", "the process that asks the driver has ended"))

    def _read(self, answer: Message) -> Reading | Failure:
        header = typed(_Header, answer.header)
        events = header.get("events", [])
        if hung := header.get("hung"):
            call, seconds = hung["call"][:100], hung["seconds"]
            text = f"{call} did not return within {seconds:.1f} s"
            return self._fail(Failure("hung", text, call, hung["device"][:16], seconds, events))
        if failed := header.get("failed"):
            return self._fail(Failure(failed["kind"], failed["text"][:300], events=events))
        if len(answer.payload) > MAX_PAYLOAD:
            raise ValueError("too large")
        content = typed_json(Content, answer.payload)
        self._accepted = True
        fresh, self._fresh = self._fresh, False
        return Reading(content, self._parts, fresh)

    def _late(self) -> Failure | None:
        seconds = self._now() - self._asked
        if self._channel is None or seconds <= (FIRST_S if self._fresh else POLL_S):
            return None
        return self._fail(Failure("hung", f"the driver has not answered for {seconds:.0f} s", seconds=seconds))

    def _fail(self, failure: Failure) -> Failure:
        if failure.kind == "hung":
            self._stuck, self._pidfd = self._pidfd, self._stuck
        self._end()
        changed = failure.kind == "changed"
        delay = 0.0 if changed else self._retry_s[min(self._failures, len(self._retry_s) - 1)]
        self._failures += not changed
        self._due = self._now() + delay
        return failure

    def _end(self) -> None:
        if self._channel is not None:
            self._channel.close()
        self._channel = None
        self._waits_for = ""


def _is_readable(fd: int, wait_s: float) -> bool:
    """Returns whether ``fd`` is readable, or its other end closed, within ``wait_s`` seconds."""
    # select(2) refuses descriptors above 1,023, and perf events take thousands before Linux 6.6.
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(wait_s * 1000))
