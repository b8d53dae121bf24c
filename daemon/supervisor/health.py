"""Reports the health of a process, and the error that ends it, to the supervisor and systemd; ends the process on
SIGTERM or SIGINT.
"""

from __future__ import annotations

import errno
import faulthandler
import json
import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from probing.api.errors import PrivilegeError, ProbingError, error_from
from probing.daemon.supervisor.journal import line_of, print_error
from probing.daemon.supervisor.notify import notify, watchdog_interval

__all__ = (
    "ANSWERS",
    "ERROR_FD",
    "MAX_LINE",
    "RESTARTED",
    "Watch",
    "alive",
    "fields_of",
    "guard",
    "parse",
    "report",
    "result_of",
    "stop_on_signal",
)

ERROR_FD = "PROBINGD_ERROR_FD"
ANSWERS = b"answers"
# Variable with the reason why the previous process ended.
RESTARTED = "PROBINGD_RESTARTED"
# A write of at most PIPE_BUF bytes to a pipe is never torn.
MAX_LINE = 4096


def report(error: ProbingError, more: str = "") -> None:
    """Reports the error that ends this process to the supervisor. Without a supervisor, reports the error and ``more``
    to stderr and systemd.
    """
    fd = os.environ.get(ERROR_FD, "")
    if fd.isdigit():
        with suppress(OSError):
            os.write(int(fd), json.dumps(fields_of(error)).encode()[: MAX_LINE - 1] + b"\n")
            return
    print_error(error, more)
    notify(f"STATUS={line_of(error)}{more}")


def fields_of(error: ProbingError) -> dict[str, object]:
    """Returns the fields of ``error`` that ``parse`` reads, as JSON of at most MAX_LINE bytes."""
    return {"kind": error.kind, "message": error.message[:800], "hint": error.hint[:400]}


def alive(*, answers: bool) -> None:
    """Tells the supervisor, if there is one, that this process is alive."""
    fd = os.environ.get(ERROR_FD, "")
    if fd.isdigit():
        # If the pipe is closed, the supervisor has ended, and this process ends with it.
        with suppress(OSError):
            os.write(int(fd), ANSWERS + b"\n" if answers else b"\n")


def parse(line: bytes) -> ProbingError | None:
    """Returns the error of a line of ``report``; None for any other line."""
    try:
        fields = json.loads(line)
        return error_from(str(fields["kind"]), str(fields["message"]), str(fields["hint"]))
    except (ValueError, KeyError, TypeError):
        return None


def result_of(main: Callable[[], int]) -> int | ProbingError:
    """Returns the result of ``main``, or the ProbingError that it raised; a lack of descriptors becomes a
    ProbingError.
    """
    try:
        return main()
    except ProbingError as e:
        return e
    except OSError as e:
        if e.errno not in (errno.EMFILE, errno.ENFILE):
            raise
        hint = "allow more open files: LimitNOFILE= in a unit, `ulimit -n` in a shell"
        error = PrivilegeError(f"no descriptor is left: {e.strerror}", hint=hint)
        error.__cause__ = e
        return error


def guard(main: Callable[[], int]) -> int:
    """Runs ``main``; reports the error that it raises, and returns its exit code."""
    result = result_of(main)
    if isinstance(result, int):
        return result
    report(result)
    return result.exit_code


# The timeout of a start, s: it recovers the log, loads programs and discovers processes.
_START_S = 120.0
# The number of requests within ``hang_s``.
PARTS = 5
# The pause between two requests before the first answer, s; short, since the start waits for that answer.
SOON_S = 0.05
STOP_S = 5.0
# The pause between two requests if neither the supervisor nor systemd watches, s.
ALONE_S = 5.0
_log = logging.getLogger(__name__)


class Watch:
    """Watches this process from inside. ``well(seconds)`` returns whether the process answers within ``seconds``, and
    made progress.

    ``hang_s``: seconds without a report after which the supervisor acts; 0: only systemd watches. The main thread calls
    ``step`` in each round of its loop; before the first call the process counts as starting.
    """

    def __init__(self, hang_s: float, well: Callable[[float], bool]) -> None:
        self._interval = watchdog_interval()
        self._hang_s = hang_s or 2 * (self._interval or 0.0)
        self._well = well
        self._begun = time.monotonic()
        self._stepped: float | None = None
        self._started = threading.Event()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)

    def start(self) -> None:
        faulthandler.enable()
        self._thread.start()

    def stop(self) -> None:
        """Ends the requests. The last request must have been answered or closed before."""
        self._ended.set()
        self._started.set()
        self._thread.join(STOP_S)

    def step(self) -> None:
        self._stepped = time.monotonic()
        self._started.set()

    def _run(self) -> None:
        interval = min(self._hang_s / PARTS, self._interval or self._hang_s) or ALONE_S
        while not self._started.wait(interval):
            # A start that takes too long is a hang.
            if time.monotonic() < self._begun + _START_S:
                _report(answers=False)
        answered = False
        while not self._ended.is_set() and (self._hang_s or not answered):
            if self._is_well():
                answered = True
                _report(answers=True)
            self._ended.wait(interval if answered else SOON_S)

    def _is_well(self) -> bool:
        seconds = self._hang_s / 2 or ALONE_S
        if self._hang_s and time.monotonic() > (self._stepped or 0.0) + self._hang_s:
            return False
        try:
            return self._well(seconds)
        except (ProbingError, OSError) as e:
            _log.warning("no sign of life: %s", e)
            return False


def _report(*, answers: bool) -> None:
    alive(answers=answers)
    notify("WATCHDOG=1")


_SIGNALS = (signal.SIGTERM, signal.SIGINT)


def stop_on_signal(stop: Callable[[], object]) -> None:
    """Calls ``stop`` at the first SIGTERM or SIGINT, in the main thread, and ignores both from then on.

    A second signal cannot kill a process that stops: when the interpreter or an event loop ends, it restores the
    default action of signals that have a handler, but not of ignored signals (CPython, ``_PySignal_Fini``).
    """

    def handler(*_: object) -> None:
        for number in _SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        stop()

    for number in _SIGNALS:
        signal.signal(number, handler)
