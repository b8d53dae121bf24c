"""How a process of the daemon says that it is alive, and why it cannot go on.

Under the supervisor it writes to an inherited pipe (``PROBINGD_ERROR_FD``): now and then an empty line while it starts
and ANSWERS once it answers; and the error that ends it as one line of JSON, which the supervisor prints. Alone it
prints ``error:`` and ``hint:`` itself.
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
    """Tell the supervisor, or the terminal where there is none, that ``error`` ends this process."""
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
    """A sign of life for the supervisor, if there is one."""
    fd = os.environ.get(ERROR_FD, "")
    if fd.isdigit():
        # One that reads no more has ended, and this process with it.
        with suppress(OSError):
            os.write(int(fd), ANSWERS + b"\n" if answers else b"\n")


def parse(line: bytes) -> ProbingError | None:
    """The error of a line that ``report`` wrote; None when it is none."""
    try:
        fields = json.loads(line)
        return error_from(str(fields["kind"]), str(fields["message"]), str(fields["hint"]))
    except (ValueError, KeyError, TypeError):
        return None


def print_error(error: ProbingError) -> None:
    """``error:`` and ``hint:``, a line each, on stderr."""
    text = f"error: {_line(error.message)}\n"
    if error.hint:
        text += f"hint: {_line(error.hint)}\n"
    sys.stderr.write(text)
    sys.stderr.flush()


def guard(main: Callable[[], int]) -> int:
    """Run ``main``; a ProbingError is reported and becomes its exit code, and so does a lack of descriptors."""
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
