"""Stops and restarts a running daemon from another process."""

from __future__ import annotations

import os
import select
import signal
import time
from pathlib import Path

from probing.api.errors import InternalError, NotFound, PrivilegeError, UsageError
from probing.daemon.bpf import pins
from probing.daemon.config import Config
from probing.daemon.supervisor.lock import owner_of

__all__ = ("cleanup", "restart", "stop")

STOP_S = 90.0


def stop(config: Config, *, keep_pins: bool = False) -> None:
    """Stops the daemon of ``config.socket`` and waits for its end. Raises NotFound when none runs."""
    _signal(config, signal.SIGUSR1 if keep_pins else signal.SIGTERM, wait_s=STOP_S)


def restart(config: Config) -> None:
    """Restarts its collector and service; pinned probes keep filling the rings."""
    _signal(config, signal.SIGHUP)


def cleanup(config: Config, *, everything: bool = False) -> int:
    """Removes the pins of ``config.instance``, or of all instances, and so their programs and links.

    Returns how many layouts of probes there were. Raises UsageError while a daemon uses them.
    """
    owner = owner_of(config)
    if owner is not None:
        raise UsageError(f"probingd, pid {owner}, uses the pins", hint="`probingd stop` removes them, too")
    return pins.cleanup(None if everything else config.instance, Path(config.probes.bpffs))


def _signal(config: Config, number: signal.Signals, wait_s: float = 0.0) -> None:
    pid = owner_of(config)
    if pid is None or pid <= 0:
        raise NotFound(f"no probingd runs for {config.socket}", hint="name the one you mean with --socket")
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        # The descriptor holds the process, so a reused pid is noticed here.
        if owner_of(config) != pid:
            return
        signal.pidfd_send_signal(process, number)
        deadline = time.monotonic() + wait_s
        if wait_s and not select.select([process], [], [], max(0.0, deadline - time.monotonic()))[0]:
            hint = "its log says what it waits for"
            raise InternalError(f"probingd, pid {pid}, did not end within {wait_s:.0f} s", hint=hint)
    except PermissionError as e:
        raise PrivilegeError(f"may not signal probingd, pid {pid}", hint="run this as root") from e
    finally:
        os.close(process)
