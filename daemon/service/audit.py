"""The audit log: callers, their calls and the outcomes, in a limited number of lines. All refusals are counted.

Each caller has a limit of lines for each scope, and refusals and reads share a limit of their own. With one limit for
all lines, a flood of calls could hide a change.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Any

from probing.api.errors import Overloaded, PrivilegeError, ProbingError
from probing.api.text import escape
from probing.daemon.query.caller import NOBODY, Caller, Scope

__all__ = ("Audit", "described")

# Within this time only the first refusal of each caller and reason is logged, s.
QUIET_S = 10.0
MAX_REMEMBERED = 1000
# Within this time only the first read of each caller and kind is logged, s.
READS_S = 60.0
# The maximum number of lines a second. The limit holds for the changes of each caller and scope, and for the refusals
# and reads of all callers together.
MAX_LINES = 20
MAX_WORD, MAX_LINE = 200, 4000
_log = logging.getLogger("probing.audit")


class Audit:
    """Writes ``probing.audit``. ``counts``: refused connections and calls since the start, by reason."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self.counts: Counter[str] = Counter()
        self._now = now
        # The time of the last line, and the number of refusals since that line, by caller and reason. The least
        # recently used entry comes first.
        self._lines: OrderedDict[tuple[str, str, str], tuple[float, int]] = OrderedDict()
        self._reads: OrderedDict[tuple[tuple[str, str, str], str], float] = OrderedDict()
        # The beginning of the current second, and the number of lines in this second, by caller and scope. The refusals
        # and reads of all callers are counted under an empty caller.
        self._seconds: OrderedDict[tuple[str, str], tuple[float, int]] = OrderedDict()

    def refused(self, caller: Caller, what: str, why: str, *, kind: str = "") -> None:
        """Counts a refusal under ``kind``; if ``kind`` is empty, under the text of ``why`` before its first colon. Logs
        the same refusal at most once within QUIET_S.
        """
        self.counts[kind or why.partition(":")[0]] += 1
        now = self._now()
        key = (str(caller), what, kind or why)
        since, count = self._lines.pop(key, (now - QUIET_S, 0))
        more = f" (and {count} times since the last line)" if count else ""
        if now - since >= QUIET_S and self._write(f"{what} asked by {caller}: refused: {why}{more}"):
            since, count = now, 0
        else:
            count += 1
        self._lines[key] = (since, count)
        while len(self._lines) > MAX_REMEMBERED:
            self._lines.popitem(last=False)

    def call(self, caller: Caller, what: str, scope: Scope, error: ProbingError | None) -> None:
        """Logs a call that has ended, and the error that ended it. Reads of local users and calls of other nodes, which
        are frequent, are not logged."""
        if isinstance(error, (PrivilegeError, Overloaded)):
            self.refused(caller, what, error.message, kind=error.kind)
        elif scope in (Scope.PROBE, Scope.LAUNCH, Scope.ADMIN):
            result = "done" if error is None else f"failed: {error.message}"
            self._write(f"{what} asked by {caller}: {result}", caller, scope)
        elif caller.listener != "unix" and scope is Scope.READ and self._due(caller, what):
            self._write(f"{what} asked by {caller}: {'done' if error is None else error.kind}")

    def _due(self, caller: Caller, what: str) -> bool:
        """Returns whether a caller's read is the first of its kind within READS_S."""
        key = (caller.key, what)
        due = self._now() - self._reads.get(key, -READS_S) >= READS_S
        if due:
            self._reads[key] = self._now()
            self._reads.move_to_end(key)
        while len(self._reads) > MAX_REMEMBERED:
            self._reads.popitem(last=False)
        return due

    def _write(self, line: str, caller: Caller = NOBODY, scope: Scope = Scope.READ) -> bool:
        """Writes a line, unless there are too many of its kind in this second. Returns whether it was written."""
        key, now = (f"{caller.listener}: {caller.holder}" if caller.who else "", scope.value), self._now()
        second, count = self._seconds.pop(key, (now, 0))
        if now - second >= 1.0:
            if count > MAX_LINES:
                of = f" of {key[0]}" if key[0] else ""
                _log.warning("%d lines%s were dropped: too many in a second", count - MAX_LINES, of)
            second, count = now, 0
        self._seconds[key] = (second, count + 1)
        while len(self._seconds) > MAX_REMEMBERED:
            self._seconds.popitem(last=False)
        if count < MAX_LINES:
            # The line contains texts of callers and of the collector, which could forge further lines if not escaped.
            _log.warning("%s", escape(line, MAX_LINE))
        return count < MAX_LINES


def described(method: str, request: Any) -> str:
    """Returns the text of a call for the log: the method, and what the request changes."""
    if method == "Pause":
        return "pause" if request.paused else "resume"
    if method == "Config" and (request.HasField("value") or request.reset):
        key, value, job = request.key[:MAX_WORD], request.value[:MAX_WORD], request.job[:MAX_WORD]
        change = f"config {key!r}={value!r} job {job!r} pid {request.pid} reset={request.reset}"
        return f"{change} yes=True" if request.yes else change
    if method == "Annotate":
        rank = f" rank {request.rank}" if request.HasField("rank") else ""
        labels = {key[:MAX_WORD]: value[:MAX_WORD] for key, value in sorted(request.labels.items())[:8]}
        return f"annotate {labels} job {request.job[:MAX_WORD]!r} pids {list(request.pids[:8])}{rank}"
    if method == "Eval":
        rank = f" rank {request.rank}" if request.HasField("rank") else ""
        return f"eval {request.code[:MAX_WORD]!r} job {request.job[:MAX_WORD]!r} pids {list(request.pids[:8])}{rank}"
    if method == "Group" and (change := request.WhichOneof("change")) is not None:
        order = f" {request.order[:MAX_WORD].decode('utf-8', 'replace')!r}" if change == "order" else ""
        return f"group {request.name[:MAX_WORD]!r} {change}{order}"
    return "launcher" if method == "Work" else method.lower()
