"""Reports health and the fatal error of a process to the supervisor.

The process writes to an inherited pipe (``PROBINGD_ERROR_FD``): empty lines while it starts, ANSWERS once it answers,
and the error that ends it as one line of JSON, which the supervisor prints. Without a supervisor it prints ``error:``
and ``hint:`` itself.
"""

from __future__ import annotations

import errno
import json
import os
import sys
from collections.abc import Callable
from contextlib import suppress

from probing.api.errors import PrivilegeError, ProbingError, error_from

__all__ = ("ANSWERS", "ERROR_FD", "RESTARTED", "alive", "guard", "parse", "print_error", "report")

ERROR_FD = "PROBINGD_ERROR_FD"
ANSWERS = b"answers"
# Why the process before this one ended.
RESTARTED = "PROBINGD_RESTARTED"
# A write of at most PIPE_BUF bytes to a pipe is whole or not there.
MAX_LINE = 4096


def report(error: ProbingError) -> None:
    """Reports the error that ends this process to the supervisor, or to the terminal without one."""
    fd = os.environ.get(ERROR_FD, "")
    if not fd.isdigit():
        print_error(error)
        return
    fields = {"kind": error.kind, "message": error.message[:800], "hint": error.hint[:400]}
    try:
        os.write(int(fd), json.dumps(fields).encode()[: MAX_LINE - 1] + b"\n")
    except OSError:
        print_error(error)


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


def print_error(error: ProbingError) -> None:
    """Prints ``error:`` and ``hint:`` to stderr, a line each."""
    text = f"error: {_line(error.message)}\n"
    if error.hint:
        text += f"hint: {_line(error.hint)}\n"
    sys.stderr.write(text)
    sys.stderr.flush()


def guard(main: Callable[[], int]) -> int:
    """Runs ``main``; reports a ProbingError, or a lack of descriptors, and returns its exit code."""
    try:
        return main()
    except ProbingError as e:
        error = e
    except OSError as e:
        if e.errno not in (errno.EMFILE, errno.ENFILE):
            raise
        hint = "allow more open files: LimitNOFILE= in a unit, `ulimit -n` in a shell"
        error = PrivilegeError(f"no descriptor is left: {e.strerror}", hint=hint)
    report(error)
    return error.exit_code


def _line(text: str) -> str:
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())
