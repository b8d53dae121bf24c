"""Notifies systemd of readiness, health and stopping (sd_notify(3)); does nothing without systemd."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Sequence

__all__ = ("Status", "notify", "watchdog_interval")

# systemd reads at most PIPE_BUF bytes.
_MAX_BYTES = 4000


def notify(state: str, fds: Sequence[int] = ()) -> None:
    """Sends ``state`` (``READY=1``, ``WATCHDOG=1``, ``STOPPING=1``...) to ``NOTIFY_SOCKET``, if there is one.

    ``fds``: the descriptors of FDSTORE=1.
    """
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address:
        return
    if address.startswith("@"):
        address = "\0" + address[1:]
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock:
        sock.setblocking(False)
        try:
            sock.connect(address)
            data = state.encode()[:_MAX_BYTES].decode(errors="ignore").encode()
            socket.send_fds(sock, [data], list(fds)) if fds else sock.send(data)
        except OSError:
            # Not sent again: the next notification follows.
            return


class Status:
    """The line that `systemctl status` shows, by ``summary``; without systemd nothing is asked."""

    def __init__(self, summary: Callable[[], str]) -> None:
        self._summary = summary
        self._sent = ""

    def ready(self) -> None:
        """Reports that the start is over."""
        notify("READY=1")
        self.tick()

    def tick(self) -> None:
        """Sends the line where it changed."""
        if os.environ.get("NOTIFY_SOCKET") and (text := self._summary()) != self._sent:
            notify(f"STATUS={text}")
            self._sent = text


def watchdog_interval() -> float | None:
    """Returns the seconds between two reports, half of WATCHDOG_USEC; None without a watchdog."""
    microseconds = os.environ.get("WATCHDOG_USEC", "")
    if not microseconds.isdigit() or os.environ.get("WATCHDOG_PID", str(os.getpid())) != str(os.getpid()):
        return None
    return int(microseconds) / 2e6
