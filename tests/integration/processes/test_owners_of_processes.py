"""Whose a process is, in real user namespaces, as a confined reader sees it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import Mock

import pytest
from processes_helpers import Listener, start_ns_of

from probing.daemon.collector.libraries.watch import LibraryWatch
from probing.daemon.processes.liveness import owner_now, real_user
from probing.daemon.processes.owners import owner_of
from probing.daemon.processes.reader_pool import ReaderPool

pytestmark = pytest.mark.skipif(os.getuid() != 0, reason="starts processes of other users")

ALICE, STRANGER, SUBORDINATE = 1000, 65534, 165_536
POD = "/kubepods/besteffort/pod11111111-2222-3333-4444-555555555555/" + "0" * 64
# Becomes a user, makes user namespaces within each other, and becomes a user of the innermost.
NAMESPACES = """
import ctypes, os, sys, time
creator, depth, inside = map(int, sys.argv[1:])
libc = ctypes.CDLL(None, use_errno=True)
os.setresuid(creator, creator, creator)
for _ in range(depth):
    if libc.unshare(0x10000000):
        sys.exit(os.strerror(ctypes.get_errno()))
    print("made", flush=True)
    sys.stdin.readline()
os.setresuid(inside, inside, inside)
print("ready", flush=True)
time.sleep(600)
"""


@contextmanager
def process(creator: int, uid_maps: list[str], inside: int) -> Iterator[int]:
    """Yields the pid of a process in a namespace of ``creator`` for each of ``uid_maps``, as the user ``inside``.

    ``inside`` -1 leaves it the user that it is.
    """
    command = [sys.executable, "-c", NAMESPACES, str(creator), str(len(uid_maps)), str(inside)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        try:
            for uid_map in uid_maps:
                assert child.stdout.readline() == "made\n"
                if uid_map:
                    Path(f"/proc/{child.pid}/uid_map").write_text(uid_map)
                    Path(f"/proc/{child.pid}/gid_map").write_text("0 0 1")
                child.stdin.write("\n")
                child.stdin.flush()
            assert child.stdout.readline() == "ready\n"
            yield child.pid
        finally:
            child.kill()


ROOTLESS = f"0 {ALICE} 1\n1 {SUBORDINATE} 65536"
CASES = {
    "a user": (ALICE, [], ALICE, ALICE),
    "root": (0, [], 0, 0),
    "a rootless container's root": (ALICE, [ROOTLESS], 0, ALICE),
    "a rootless container's user": (ALICE, [ROOTLESS], 7, ALICE),
    "a stranger who maps themselves to root": (STRANGER, [f"0 {STRANGER} 1"], 0, STRANGER),
    "a namespace within a user's": (STRANGER, [f"0 {STRANGER} 1", ""], -1, STRANGER),
    "a container of root with uids of its own": (0, [f"0 {SUBORDINATE} 65536"], 7, SUBORDINATE + 7),
    "a service of root with the host's uids": (0, ["0 0 4294967295"], ALICE, ALICE),
}


@pytest.mark.parametrize("case", CASES)
def test_the_owner_of_a_process(listener: Listener, case: str) -> None:
    creator, uid_maps, inside, owner = CASES[case]
    pool = ReaderPool(listener.path, size=1)
    try:
        with process(creator, uid_maps, inside) as pid:
            header = pool.call("identity", pid=pid, start_ns=start_ns_of(pid), timeout=20.0).header
            assert header["owner"] == owner
    finally:
        pool.close()


def test_a_rootless_container_has_the_places_of_one_user() -> None:
    """One user's container has 65,536 users: each of them would have a share of the looks, reads and probed files."""
    with process(ALICE, [ROOTLESS], 7) as one, process(ALICE, [ROOTLESS], 8) as other:
        assert (real_user(one), real_user(other)) == (SUBORDINATE + 6, SUBORDINATE + 7)
        assert (owner_now(one), owner_now(other)) == (ALICE, ALICE)
        watch = LibraryWatch(Mock(), Mock())
        for pid in (one, other):
            watch.seen(pid)
        turns = [watch._turns.take(0.0) for _ in range(2)]
        assert [turn.uid for turn in turns if turn] == [ALICE, ALICE]
    assert owner_now(one) is None


def test_a_pod_with_uids_of_its_own_is_whose_it_names() -> None:
    """Two pods of one job have other uids on the host: they are one owner's, as without user namespaces."""
    for first in (SUBORDINATE, 5 * SUBORDINATE):
        with process(0, [f"0 {first} 65536"], ALICE) as pid:

            def opened(name: str, pid: int = pid) -> int:
                return os.open(f"/proc/{pid}/{name}", os.O_RDONLY)

            assert owner_of(opened, first + ALICE, [POD]) == ALICE
            assert owner_of(opened, first + ALICE, ["/lxc.payload.web1"]) == first + ALICE
