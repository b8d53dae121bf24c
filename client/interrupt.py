"""Ctrl-C: it breaks into no gRPC code, and the process ends within a second of it, whatever hangs."""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from queue import Empty, SimpleQueue
from types import FrameType
from typing import NoReturn, TypeVar

__all__ = ("CODE", "closed", "code_if_pressed", "leave", "leaving_by_it", "sheltered", "unwatch", "watch")

CODE = 130
_CLOSE_S = 0.5
# How long a command may take to end what is under way: settings that it takes back, streams, the screen.
_PATIENCE_S = 0.8
_T = TypeVar("_T")


class _Leaving:
    """Whether Ctrl-C was pressed, and how the process then ends: its exit code, what puts the terminal in order."""

    pressed = False
    code = CODE
    restore = b""


def watch() -> None:
    """From now on the process ends at the second Ctrl-C, and ``_PATIENCE_S`` after the first at the latest."""
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        # Started in the background: Ctrl-C is for others.
        return
    # The byte comes from the C handler: also while the main thread executes no Python.
    ours, theirs = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(theirs, warn_on_full_buffer=False)
    signal.signal(signal.SIGINT, _press)
    sys.unraisablehook = _unraisable
    threading.Thread(target=_watch, args=(ours,), name="interrupt", daemon=True).start()


def _press(number: int, frame: FrameType | None) -> None:
    _Leaving.pressed = True
    signal.default_int_handler(number, frame)


def _unraisable(lost: sys.UnraisableHookArgs) -> None:
    """An interrupt that a callback or a destructor swallowed: the process ends all the same, without a word."""
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


def unwatch() -> None:
    """Ctrl-C is for the command alone again, as in a shell that goes on after it."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.set_wakeup_fd(-1)


def code_if_pressed() -> int | None:
    """The exit code where Ctrl-C was pressed. Libraries make other errors of its KeyboardInterrupt."""
    return _Leaving.code if _Leaving.pressed else None


def leave(code: int) -> NoReturn:
    """Ends the process with ``code``, or that of Ctrl-C if it was pressed.

    Waits for no thread, and no destructor of a connection.
    """
    # The watcher still hears of it, should nobody take what is flushed.
    signal.signal(signal.SIGINT, lambda _number, _frame: None)
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(_Leaving.code if _Leaving.pressed else code)


@contextmanager
def leaving_by_it(restore: bytes = b"") -> Iterator[None]:
    """Ctrl-C is the way to leave what is done here: no failure. ``restore`` puts the terminal in order."""
    _Leaving.code, _Leaving.restore = 0, restore
    try:
        yield
    except KeyboardInterrupt:
        # It may have come before whoever changed the terminal was ready to do so.
        _put_back()
    finally:
        _Leaving.restore = b""


def sheltered(work: Callable[[], _T]) -> _T:
    """What ``work`` returns or raises, carried out in another thread than the main one.

    KeyboardInterrupt comes to the main thread between any two instructions. In gRPC's code it leaves a lock held, or a
    call that nobody drains, and closing the channel then waits for ever. Here it ends the wait alone.
    """
    if threading.current_thread() is not threading.main_thread():
        return work()
    return _started(work).get()()


def closed(work: Callable[[], object]) -> bool:
    """Whether ``work`` ended within ``_CLOSE_S``; it goes on alone if not."""
    with suppress(Empty):
        _started(work).get(timeout=_CLOSE_S)
        return True
    return False


def _started(work: Callable[[], _T]) -> SimpleQueue[Callable[[], _T]]:
    """Where the outcome of ``work`` comes: call it for what ``work`` returned or raised."""
    # Written in C: an interrupt leaves none of its locks held.
    outcome: SimpleQueue[Callable[[], _T]] = SimpleQueue()

    def carry_out() -> None:
        try:
            result = work()
        except BaseException as e:
            error = e

            def failed() -> _T:
                raise error

            outcome.put(failed)
        else:
            outcome.put(lambda: result)

    threading.Thread(target=carry_out, name="call", daemon=True).start()
    return outcome
