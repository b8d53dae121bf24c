"""Ctrl-C: ends the process within a second, whatever hangs. Calls to nodes end by client/wire/loop.py."""

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
# s that a command has to take back settings, close streams and restore the screen.
_PATIENCE_S = 0.8


class _Leaving:
    """Whether Ctrl-C was pressed, the exit code after it, and the bytes and modes that restore the terminal."""

    pressed = False
    code = CODE
    restore = b""
    modes: list[Any] | None = None


def watch() -> None:
    """From now on the second Ctrl-C ends the process, and so does the first, after ``_PATIENCE_S``."""
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        # Started in the background, where the shell has ignored Ctrl-C.
        return
    # The C handler writes the byte, even while the main thread runs no Python.
    ours, theirs = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(theirs, warn_on_full_buffer=False)
    signal.signal(signal.SIGINT, _press)
    sys.unraisablehook = _unraisable
    threading.Thread(target=_watch, args=(ours,), name="interrupt", daemon=True).start()


def _press(number: int, frame: FrameType | None) -> None:
    _Leaving.pressed = True
    signal.default_int_handler(number, frame)


def _unraisable(lost: sys.UnraisableHookArgs) -> None:
    """Reports nothing for an interrupt that a callback or a destructor swallowed: the process ends anyway."""
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
    """Ends the process after ``_PATIENCE_S``, unless it has ended by itself, as after Ctrl-C."""
    timer = threading.Timer(_PATIENCE_S, _end)
    timer.daemon = True
    timer.start()


def unwatch() -> None:
    """From now on Ctrl-C raises KeyboardInterrupt alone: the SQL shell goes on after it."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.set_wakeup_fd(-1)


def code_if_pressed() -> int | None:
    """Returns the exit code where Ctrl-C was pressed, also where a library has raised another error for it."""
    return _Leaving.code if _Leaving.pressed else None


def leave(code: int) -> NoReturn:
    """Ends the process with ``code``, or that of Ctrl-C if it was pressed.

    Does not wait for threads or for destructors of connections.
    """
    # Ctrl-C still wakes the watcher, should the flush block.
    signal.signal(signal.SIGINT, lambda _number, _frame: None)
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(_Leaving.code if _Leaving.pressed else code)


@contextmanager
def leaving_by_it(restore: bytes = b"") -> Iterator[None]:
    """A context that Ctrl-C leaves with exit code 0. ``restore`` is written to the terminal; its modes come back."""
    _Leaving.code, _Leaving.restore = 0, restore
    if sys.stdin.isatty():
        import termios

        _Leaving.modes = termios.tcgetattr(0)
    try:
        yield
    except KeyboardInterrupt:
        # It may have come before the code that changed the terminal could restore it.
        _put_back()
    finally:
        _Leaving.restore, _Leaving.modes = b"", None
