"""Handles Ctrl-C, which ends the process within a second even if something hangs. Calls to nodes are ended by
client/wire/loop.py.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, NoReturn

__all__ = ("CODE", "code_if_pressed", "end_soon", "leave", "leaving_by_it", "unwatch", "watch")

CODE = 130
# Time that a command has after Ctrl-C to undo settings, close streams and restore the screen, s.
_PATIENCE_S = 0.8


class _Leaving:
    """How the process ends: whether Ctrl-C was pressed, the exit code, and the bytes and modes that restore the
    terminal.
    """

    pressed = False
    code = CODE
    restore = b""
    modes: list[Any] | None = None


def watch() -> None:
    """Makes the first Ctrl-C end the process after ``_PATIENCE_S``, and a second Ctrl-C end it at once."""
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        # The process was started in the background, where the shell ignores Ctrl-C.
        return
    # Python's C handler of signals writes a byte to the pipe even while the main thread runs no Python code.
    ours, theirs = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(theirs, warn_on_full_buffer=False)
    signal.signal(signal.SIGINT, _press)
    sys.unraisablehook = _unraisable
    threading.Thread(target=_watch, args=(ours,), name="interrupt", daemon=True).start()


def _press(number: int, frame: FrameType | None) -> None:
    _Leaving.pressed = True
    signal.default_int_handler(number, frame)


def _unraisable(lost: sys.UnraisableHookArgs) -> None:
    """Prints errors that nobody can catch. A Ctrl-C in a callback or a destructor is not printed, because the process
    ends anyway.
    """
    if lost.exc_type is not KeyboardInterrupt:
        sys.__unraisablehook__(lost)


def _watch(handle: int) -> None:
    deadline: float | None = None
    while True:
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        if not select.select([handle], [], [], left)[0]:
            break
        with suppress(BlockingIOError):
            for _ in filter(lambda number: number == signal.SIGINT, os.read(handle, 64)):
                if deadline is not None:
                    _end()
                deadline = time.monotonic() + _PATIENCE_S
    _end()


def _end() -> NoReturn:
    _put_back()
    os._exit(_Leaving.code)


def _put_back() -> None:
    with suppress(OSError):
        os.write(1, _Leaving.restore)
    if _Leaving.modes is not None:
        import termios

        with suppress(termios.error, OSError):
            termios.tcsetattr(0, termios.TCSANOW, _Leaving.modes)


def end_soon() -> None:
    """Ends the process after ``_PATIENCE_S`` if it still runs then, as after Ctrl-C."""
    timer = threading.Timer(_PATIENCE_S, _end)
    timer.daemon = True
    timer.start()


def unwatch() -> None:
    """Makes Ctrl-C only raise KeyboardInterrupt, after which the SQL shell goes on."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.set_wakeup_fd(-1)


def code_if_pressed() -> int | None:
    """Returns the exit code if Ctrl-C was pressed, even if a library turned the interrupt into another error; else
    None.
    """
    return _Leaving.code if _Leaving.pressed else None


def leave(code: int) -> NoReturn:
    """Ends the process with ``code``, or with the code of Ctrl-C if it was pressed.

    Does not wait for threads or for destructors of connections.
    """
    # Ctrl-C must still wake the watcher if the flush blocks.
    signal.signal(signal.SIGINT, lambda _number, _frame: None)
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(_Leaving.code if _Leaving.pressed else code)


@contextmanager
def leaving_by_it(restore: bytes = b"") -> Iterator[None]:
    """Returns a context manager in which Ctrl-C ends the command with exit code 0. Ctrl-C also writes ``restore`` to
    the terminal, and restores the terminal's modes.
    """
    _Leaving.code, _Leaving.restore = 0, restore
    if sys.stdin.isatty():
        import termios

        _Leaving.modes = termios.tcgetattr(0)
    try:
        yield
    except KeyboardInterrupt:
        # The terminal is restored here, because Ctrl-C may have interrupted the code that would have restored it.
        _put_back()
    finally:
        _Leaving.restore, _Leaving.modes = b"", None
