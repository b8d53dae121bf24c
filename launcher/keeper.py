"""Ends fenced ranks when their lease is nearly over and no launcher runs: ``keeper.py DIRECTORY NODE PATH...``.

A launcher starts the keeper, which outlives the launcher. PATH is Python's import path. The keeper imports modules of
probingd only when ranks have to be ended, so that it stays small while it waits, which it does nearly always.
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
# The keeper holds the launcher's lock from _BEFORE_NS before the end of a lease until at most _AFTER_NS after the end.
# A launcher that starts meanwhile waits for the lock (``state.lock``).
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
    # If the directory is gone, it is unknown which ranks ran, so there is nothing to keep.
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
            # A launcher runs, and ends ranks itself when their lease is over.
            continue
        if not leases:
            return
        over = {lease for lease in leases if time.clock_gettime_ns(time.CLOCK_BOOTTIME) > lease[1] - _BEFORE_NS}
        if over:
            _end(directory, node, path, over)
            ended |= over


def _leases(directory: str) -> set[Lease]:
    """Returns the leases of this boot under which ranks run. A lease does not cover ranks of a newer generation."""
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
    """Does what a launcher does at the end of the leases ``over``. It trusts no key, so it starts no ranks."""
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
    """A context manager that tries to hold the lock of a file; yields whether this process holds it."""
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
