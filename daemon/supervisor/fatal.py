"""Reports health and the fatal error of a process to the supervisor.

The process writes to an inherited pipe (``PROBINGD_ERROR_FD``): empty lines while it starts, ANSWERS once it answers,
and the error that ends it as one line of JSON, which the supervisor prints. Without a supervisor it prints ``error:``
and ``hint:`` itself, and sends them to systemd as its STATUS.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from contextlib import suppress

from probing.api.errors import PrivilegeError, ProbingError, error_from
from probing.daemon.supervisor.journal import line_of, print_error
from probing.daemon.supervisor.notify import notify

__all__ = (
    "ANSWERS",
    "ERROR_FD",
    "MAX_LINE",
    "RESTARTED",
    "alive",
    "fields_of",
    "guard",
    "parse",
    "report",
    "result_of",
)

ERROR_FD = "PROBINGD_ERROR_FD"
ANSWERS = b"answers"
# Why the process before this one ended.
RESTARTED = "PROBINGD_RESTARTED"
# A write of at most PIPE_BUF bytes to a pipe is whole or not there.
MAX_LINE = 4096


def report(error: ProbingError, more: str = "") -> None:
    """Reports the error that ends this process to the supervisor; without one to stderr and systemd, with ``more``."""
    fd = os.environ.get(ERROR_FD, "")
    if fd.isdigit():
        with suppress(OSError):
            os.write(int(fd), json.dumps(fields_of(error)).encode()[: MAX_LINE - 1] + b"\n")
            return
    print_error(error, more)
    notify(f"STATUS={line_of(error)}{more}")


def fields_of(error: ProbingError) -> dict[str, object]:
    """Returns what ``parse`` takes, as JSON, within MAX_LINE."""
    return {"kind": error.kind, "message": error.message[:800], "hint": error.hint[:400]}


def alive(*, answers: bool) -> None:
    """Reports to the supervisor, if there is one, that this process is alive."""
    fd = os.environ.get(ERROR_FD, "")
    if fd.isdigit():
        # A supervisor that closed the pipe has ended, and this process with it.
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
    """Returns what ``main`` returns, or the ProbingError that it raises; a lack of descriptors is one, too."""
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
