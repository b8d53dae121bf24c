"""Network namespaces for nodes of a cluster on one machine, each with an address of its own on a common bridge."""

from __future__ import annotations

import itertools
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

from network_namespaces import run

__all__ = ("HUB", "NodeSpace", "node_namespaces")

_numbers = itertools.count()
_NET = "10.78.0"
HUB = f"{_NET}.254"


@dataclass
class NodeSpace:
    """The namespace of one node. Its interface is ``eth0``; ``plug`` is the other end, on the bridge in ``hub``."""

    name: str
    hub: str
    plug: str
    address: str
    words: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        # Not ``ip netns exec``: that gives a sysfs of its own.
        self.words = ("nsenter", f"--net=/run/netns/{self.name}")

    def cut(self) -> None:
        """From now on no packet comes or goes."""
        run("ip", "-n", self.hub, "link", "set", self.plug, "down")

    def join(self) -> None:
        run("ip", "-n", self.hub, "link", "set", self.plug, "up")

    def move(self, last: int) -> None:
        """Gives the node another address."""
        run("ip", "-n", self.name, "address", "flush", "dev", "eth0", "scope", "global")
        self.address = f"{_NET}.{last}"
        run("ip", "-n", self.name, "address", "add", f"{self.address}/24", "dev", "eth0")


@contextmanager
def node_namespaces(count: int) -> Iterator[list[NodeSpace]]:
    """The nodes have the addresses 10.78.0.1, 10.78.0.2, ...; the bridge is ``HUB`` in a namespace of its own."""
    base = f"probing-n{os.getpid()}-{next(_numbers)}"
    hub = f"{base}-hub"
    nodes = [NodeSpace(f"{base}-{at}", hub, f"p{at}", f"{_NET}.{at + 1}") for at in range(count)]
    try:
        run("ip", "netns", "add", hub)
        run("ip", "-n", hub, "link", "add", "br0", "type", "bridge")
        run("ip", "-n", hub, "link", "set", "br0", "up")
        run("ip", "-n", hub, "address", "add", f"{HUB}/24", "dev", "br0")
        for node in nodes:
            run("ip", "netns", "add", node.name)
            run("ip", "-n", hub, "link", "add", node.plug, "type", "veth", "peer", "name", "eth0", "netns", node.name)
            run("ip", "-n", hub, "link", "set", node.plug, "master", "br0", "up")
            run("ip", "-n", node.name, "address", "add", f"{node.address}/24", "dev", "eth0")
            run("ip", "-n", node.name, "link", "set", "lo", "up")
            run("ip", "-n", node.name, "link", "set", "eth0", "up")
        yield nodes
    finally:
        for name in (*(node.name for node in nodes), hub):
            with suppress(subprocess.CalledProcessError):
                run("ip", "netns", "delete", name)
