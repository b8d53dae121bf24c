"""Network namespaces that a pair of interfaces joins, with the traffic control that this kernel has."""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from processes_helpers import started
from waiting import until

__all__ = ("Pair", "Peer", "connected", "may_make_namespaces", "namespaces", "run", "ss")

_numbers = itertools.count()
_PEER = Path(__file__).parent / "tcp_peer.py"


@dataclass(frozen=True)
class Pair:
    """Namespace ``near`` has 10.77.0.1 on its interface, ``far`` 10.77.0.2."""

    near: str
    far: str

    def slow(self, rate: str) -> None:
        """Lets ``far`` send acknowledgments and ``near`` data at this rate, with a long queue."""
        run(
            "ip",
            "netns",
            "exec",
            self.near,
            "tc",
            "qdisc",
            "replace",
            "dev",
            "eth0",
            "root",
            "tbf",
            "rate",
            rate,
            "burst",
            "3000",
            "limit",
            "400000",
        )

    def drop_some(self, namespace: str, share: float) -> None:
        """From now on an end drops this share, 0 to 1, of the packets that arrive. Not every kernel has netem."""
        # Classic BPF: load #random, compare, return TC_ACT_SHOT or TC_ACT_OK. A packet that is dropped where it is sent
        # is not lost: TCP knows at once.
        program = f"4,32 0 0 4294963256,53 0 1 {round((1 - share) * 2**32)},6 0 0 2,6 0 0 0"
        tc = ("ip", "netns", "exec", namespace, "tc")
        run(*tc, "qdisc", "add", "dev", "eth0", "clsact")
        run(*tc, "filter", "add", "dev", "eth0", "ingress", "bpf", "da", "bytecode", program)

    def lose(self) -> None:
        """From now on what ``near`` sends is lost, without an error: ``far`` has another address."""
        run("ip", "-n", self.far, "address", "del", "10.77.0.2/24", "dev", "eth0")

    def mend(self) -> None:
        run("ip", "-n", self.far, "address", "add", "10.77.0.2/24", "dev", "eth0")


class Peer:
    """A process with one connection. It sends or takes bytes on request."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.process = process
        self.pid = process.pid
        self.port = int(process.line.split()[1])  # type: ignore[attr-defined]

    def send(self, count: int) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(b"%d\n" % count)
        self.process.stdin.flush()


def run(*words: str) -> str:
    return subprocess.run(words, check=True, capture_output=True, text=True).stdout


def ss(port: int, namespace: str = "") -> str:
    """What ``ss`` says of the connection from local ``port``."""
    inside = ("ip", "netns", "exec", namespace) if namespace else ()
    return run(*inside, "ss", "-tieOnH", "sport", "=", str(port))


def may_make_namespaces() -> bool:
    return os.geteuid() == 0 and subprocess.run(["ip", "netns", "list"], capture_output=True).returncode == 0


@contextmanager
def namespaces() -> Iterator[Pair]:
    name = f"probing-{os.getpid()}-{next(_numbers)}"
    pair = Pair(f"{name}-a", f"{name}-b")
    try:
        run("ip", "netns", "add", pair.near)
        run("ip", "netns", "add", pair.far)
        run("ip", "-n", pair.near, "link", "add", "eth0", "type", "veth", "peer", "name", "eth0", "netns", pair.far)
        for namespace, address in ((pair.near, "10.77.0.1/24"), (pair.far, "10.77.0.2/24")):
            run("ip", "-n", namespace, "address", "add", address, "dev", "eth0")
            run("ip", "-n", namespace, "link", "set", "lo", "up")
            run("ip", "-n", namespace, "link", "set", "eth0", "up")
        yield pair
    finally:
        for namespace in (pair.near, pair.far):
            with suppress(subprocess.CalledProcessError):
                run("ip", "netns", "delete", namespace)


@contextmanager
def connected(pair: Pair | None = None) -> Iterator[tuple[Peer, Peer]]:
    """(the process that connects, the process that accepts), on loopback or in the namespaces of ``pair``."""
    near, far = (("ip", "netns", "exec", pair.near), ("ip", "netns", "exec", pair.far)) if pair else ((), ())
    address = "10.77.0.2" if pair else "127.0.0.1"
    command = [sys.executable, str(_PEER), address]
    options = {"stdin": subprocess.PIPE}
    with started([*far, *command], until="listens", **options) as accepts:
        other = Peer(accepts)
        with started([*near, *command, str(other.port)], until="connected", **options) as connects:
            try:
                # A connection that is not accepted yet has no inode, so that nobody owns it.
                there = pair.far if pair else ""
                until(lambda: re.search(r"ino:[1-9]", ss(other.port, there)), what="the accepted end")
                yield Peer(connects), other
            finally:
                for process in (accepts, connects):
                    assert process.stdin is not None
                    process.stdin.close()


def acknowledged(port: int, count: int, namespace: str = "") -> str:
    """Waits until ``ss`` says that so many bytes were acknowledged, and returns what it says."""

    def text() -> str:
        found = ss(port, namespace)
        # The end that connected counts its SYN.
        return found if re.search(rf"bytes_acked:({count}|{count + 1}) ", found) else ""

    return until(text, what=f"{count} bytes acknowledged")
