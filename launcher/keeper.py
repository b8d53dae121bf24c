"""Ends fenced ranks when their lease is nearly over and no launcher runs: ``keeper.py DIRECTORY NODE PATH...``.

A launcher starts it, and it outlives the launcher. PATH is what Python imports from: only where ranks have to be ended
is anything of ours imported, so that a process that nearly always waits stays small.
"""

from __future__ import annotations

import fcntl
import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

__all__ = ("main",)

_SECOND_NS = 1_000_000_000
# The keeper takes the launcher's place this long before the end of a lease, and keeps it at most this long after: the
# next launcher waits for that, see ``state.lock``.
_BEFORE_NS, _AFTER_NS = 2 * _SECOND_NS, _SECOND_NS
_MAX_STATE = 96 << 20

Lease = tuple[str, int, int]


def main() -> None:
    """Waits in a process of its own until no rank needs a keeper."""
    directory, node, *path = sys.argv[1:]
    if os.fork():
        return
    os.chdir("/")
    # Whoever started the launcher may have given it a lock or a pipe, which this process would keep for days.
    with os.scandir("/proc/self/fd") as entries:
        inherited = [fd for entry in entries if (fd := int(entry.name)) > 2]
    for fd in inherited:
        with suppress(OSError):
            os.close(fd)
    # If the directory is gone, nobody knows what ran.
    with suppress(OSError), _locked(f"{directory}/keeper.lock") as first:
        if first:
            _keep(directory, node, path)


def _keep(directory: str, node: str, path: list[str]) -> None:
    ended: set[Lease] = set()
    while True:
        time.sleep(1.0)
        with _locked(f"{directory}/lock") as alone:
            leases = _leases(directory) - ended if alone else None
        if leases is None:
            # The launcher keeps the leases itself.
            continue
        if not leases:
            return
        over = {lease for lease in leases if time.clock_gettime_ns(time.CLOCK_BOOTTIME) > lease[1] - _BEFORE_NS}
        if over:
            _end(directory, node, path, over)
            ended |= over


def _leases(directory: str) -> set[Lease]:
    """Returns the leases under which ranks run, of this boot. The lease of an older generation is not theirs."""
    try:
        with open(f"{directory}/launcher.json", "rb") as file, open("/proc/sys/kernel/random/boot_id") as boot:
            groups, here = json.loads(file.read(_MAX_STATE))["groups"], boot.read().strip()
        leases = set()
        for group in groups:
            boot_id, end_ns, generation = group["lease"] or ("", 0, 0)
            rank_lives = any(not run["ended_ns"] and run["generation"] <= generation for run in group["runs"])
            if boot_id == here and rank_lives:
                leases.add((boot_id, end_ns, generation))
        return leases
    except (OSError, ValueError, LookupError, TypeError):
        # The next launcher sets a damaged file aside.
        return set()


def _end(directory: str, node: str, path: list[str], over: set[Lease]) -> None:
    """Does what a launcher does at the end of leases; it trusts nobody, and so starts nothing."""
    sys.path[:] = path
    from pathlib import Path

    from probing.api.errors import ProbingError
    from probing.launcher.allowed import Rules
    from probing.launcher.launcher import Launcher

    with suppress(ProbingError):
        launcher = Launcher(node, (), Path(directory), Rules(frozenset(), os.getuid(), str(os.getuid())))
        until_ns = max(lease[1] for lease in over) + _AFTER_NS
        while over & _leases(directory) and time.clock_gettime_ns(time.CLOCK_BOOTTIME) < until_ns:
            launcher.step()
            launcher.wait(0.2)
        launcher.close()


@contextmanager
def _locked(path: str) -> Iterator[bool]:
    """Yields whether this process has got the lock of a file, which it keeps meanwhile."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield True
    except BlockingIOError:
        yield False
    finally:
        os.close(fd)


if __name__ == "__main__":
    main()
