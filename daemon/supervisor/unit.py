"""Ends the process of a systemd unit so that a restart follows only where it can help.

The exit status names the kind of the error. The units list the kinds that no restart repairs as
RestartPreventExitStatus=. The error itself is in ``PROBINGD_ERROR_FILE``, for ``ready``. The first failed start ends at
once; a failed start after another failed start waits before it ends, since systemd before 254 cannot increase its
delay.
"""

from __future__ import annotations

import errno
import gc
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from probing.api.errors import AttachError, ConfigError, FormatError, InternalError, PrivilegeError, ProbingError
from probing.daemon.supervisor.health import MAX_LINE, fields_of, parse, report, result_of

__all__ = ("ERROR_FILE", "LASTING", "RETRY_S", "left_error", "run", "status_of")

ERROR_FILE = "PROBINGD_ERROR_FILE"
# sysexits.h, whose names systemd knows: TEMPFAIL, DATAERR, UNAVAILABLE, CONFIG.
_TEMPFAIL, _DATAERR, _UNAVAILABLE, _CONFIG = 75, 65, 69, 78
LASTING = (_DATAERR, _UNAVAILABLE, _CONFIG)
# A process that ran longer than this, s, did not fail to start. The value is below the units' WatchdogSec.
RETRY_S = 20.0
_TRANSIENT = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN)
_Main = Callable[[], int]


def run(load: Callable[[], _Main]) -> int:
    """Runs the function that ``load`` imports; returns its result, or reports its error and returns the exit status."""
    begun = time.monotonic()
    left = _ErrorFile(os.environ.get(ERROR_FILE, ""))
    result = result_of(lambda: _run(load))
    if isinstance(result, int):
        return result
    status = status_of(result)
    waits = status not in LASTING and left.again and time.monotonic() < begun + RETRY_S
    left.write(result, lasts=status in LASTING or waits)
    report(result, f"; tried again every {RETRY_S:.0f} s" if waits else "")
    if waits:
        _wait(left)
    return status


def status_of(error: ProbingError) -> int:
    """Returns the exit status for a process that ``error`` ends."""
    cause = error.__cause__
    if isinstance(cause, OSError) and cause.errno in _TRANSIENT:
        return _TEMPFAIL
    if isinstance(error, ConfigError):
        return _CONFIG
    if isinstance(error, FormatError):
        return _DATAERR
    return _UNAVAILABLE if isinstance(error, (PrivilegeError, AttachError)) else _TEMPFAIL


def left_error(path: Path) -> ProbingError | None:
    """Returns the error in ``path`` if no restart repairs it, or if starts failed twice in a row; None otherwise."""
    try:
        with path.open("rb") as file:
            text = file.read(MAX_LINE)
        lasts = json.loads(text).get("lasts") is True
    except (OSError, ValueError, AttributeError):
        return None
    return parse(text) if lasts else None


class _ErrorFile:
    """The file for the error. It is opened before the process gives up the right to write files. ``again``: the
    previous start failed.
    """

    def __init__(self, path: str) -> None:
        self._fd: int | None = None
        self.again = False
        # Without the file ``ready`` only sees that the process is gone.
        with suppress(OSError):
            if path:
                self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o640)
                self.again = os.fstat(self._fd).st_size > 0
                self.clear()

    def write(self, error: ProbingError, *, lasts: bool) -> None:
        with suppress(OSError):
            if self._fd is not None:
                os.write(self._fd, json.dumps({**fields_of(error), "lasts": lasts}).encode()[:MAX_LINE])

    def clear(self) -> None:
        with suppress(OSError):
            if self._fd is not None:
                os.ftruncate(self._fd, 0)


def _run(load: Callable[[], _Main]) -> int:
    try:
        main = load()
    except Exception as e:  # an incomplete installation can fail in any way
        what = str(e) if isinstance(e, ImportError) else f"{type(e).__name__}: {e}"
        hint = "install probingd again for this host's Python"
        raise PrivilegeError(f"a library of probingd is missing or does not fit: {what}", hint=hint) from None
    # Imported modules are never freed, so the garbage collector need not visit them.
    gc.freeze()
    try:
        return main()
    except (ProbingError, OSError):
        raise
    except Exception as e:
        traceback.print_exc(file=sys.stderr)
        raise InternalError(f"{type(e).__name__}: {e}") from e


def _wait(left: _ErrorFile) -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    try:
        time.sleep(RETRY_S)
    except SystemExit:
        # An administrator stopped the unit: if the next start fails, it is not tried again, but fails at once.
        left.clear()
        raise
