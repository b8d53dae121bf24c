"""What systemd is told: ready, alive, stopping (sd_notify(3)). Says nothing where there is no systemd."""

from __future__ import annotations

import os
import socket

__all__ = ("notify", "watchdog_interval")


def notify(state: str) -> None:
    """Send ``state`` (``READY=1``, ``WATCHDOG=1``, ``STOPPING=1``...) to ``NOTIFY_SOCKET``, if there is one."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address:
        return
    if address.startswith("@"):
        address = "\0" + address[1:]
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock:
        sock.setblocking(False)
        try:
            sock.sendto(state.encode(), address)
        except OSError:
            # A manager that does not listen loses this message; the next one follows.
            return


def watchdog_interval() -> float | None:
    """Seconds between two signs of life, half of what the manager allows; None when it asks for none."""
    microseconds = os.environ.get("WATCHDOG_USEC", "")
    if not microseconds.isdigit() or os.environ.get("WATCHDOG_PID", str(os.getpid())) != str(os.getpid()):
        return None
    return int(microseconds) / 2e6
