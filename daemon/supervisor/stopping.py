"""Ends a process on SIGTERM or SIGINT."""

from __future__ import annotations

import signal
from collections.abc import Callable

__all__ = ("stop_on_signal",)

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


def stop_on_signal(stop: Callable[[], object]) -> None:
    """Calls ``stop`` at the first SIGTERM or SIGINT, in the main thread, and ignores both from then on.

    A process that is asked to stop twice stops cleanly: the interpreter restores the default action of signals with a
    handler, but not of ignored ones, before it has ended (CPython, ``_PySignal_Fini``), and so does an event loop.
    """

    def handler(*_: object) -> None:
        for number in _SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        stop()

    for number in _SIGNALS:
        signal.signal(number, handler)
