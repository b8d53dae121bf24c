"""How a process of the daemon says why it cannot go on.

Under the supervisor it writes the error as one JSON line to an inherited pipe (``PROBINGD_ERROR_FD``) and the
supervisor prints it; alone it prints ``error:`` and ``hint:`` itself.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable

from probing.api.errors import ProbingError, error_from

__all__ = ("ERROR_FD", "guard", "parse", "print_error", "report")

ERROR_FD = "PROBINGD_ERROR_FD"
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
    """Run ``main``; a ProbingError is reported and becomes its exit code."""
    try:
        return main()
    except ProbingError as e:
        report(e)
        return e.exit_code


def _line(text: str) -> str:
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())
