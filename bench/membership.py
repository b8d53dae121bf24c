"""The gossip of nodes: simulated nodes with real messages, compressed as by gRPC.

All nodes start at once, and each knows three seeds. Then a node fails. Bytes are the bytes that a node sends, with the
headers of HTTP/2, TCP and IP. ``--nodes`` for other numbers of nodes. ``--settled 10000``: nodes that know each other
already and share their tables in memory; then a node joins, and another fails.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from functools import lru_cache
from pathlib import Path

from shared_tables import SharedTable, common
from statistics_of_blocks import table

from probing.daemon.cluster.messages import Message
from probing.daemon.cluster.record import Claim, Update
from probing.daemon.service.gossip import packed

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
from gossip_network import Network, Node, key_of_name, record

SEEDS = 3


@lru_cache(maxsize=64)
def _serialized(message: Message) -> bytes:
    return packed(message).SerializeToString()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--nodes", type=int, nargs="*", default=[10, 100, 1000])
    parser.add_argument("--settled", type=int, nargs="*", default=[])
    options = parser.parse_args()
    if options.settled:
        print(table([_settled(count) for count in options.settled]))
    else:
        print(table([_measured(count) for count in options.nodes]))


def _measured(count: int) -> dict[str, object]:
    begun = time.monotonic()
    network = Network(count, measure=_serialized)
    rng = random.Random(7)
    addresses = _addresses(count)
    nodes = [
        network.start(record(f"gn{i:05}", address, i + 1), addresses[:SEEDS], at=rng.random())
        for i, address in enumerate(addresses)
    ]
    complete = lambda: all(len(n.machine.view.table.entries) == count - 1 for n in nodes)  # noqa: E731
    assert network.run(60, complete)
    converged = network.now
    network.run(15)
    steady = [_rate(n, network.now - 10, network.now) for n in nodes]
    dead = nodes[count // 2]
    dead.up, stopped = False, network.now
    others = [n for n in nodes if n is not dead]
    first = _when(network, others, dead, any, Claim.SUSPECT) - stopped
    all_failed = _when(network, others, dead, all, Claim.FAILED) - stopped
    while_converging = [_rate(n, 0, converged) for n in nodes]
    peak = max(max(n.sent.values()) for n in nodes)
    return {
        "nodes": count,
        "all know all, s": f"{converged:.1f}",
        "a node meanwhile, kB/s, mean": f"{sum(while_converging) / count / 1e3:.1f}",
        "most of a node": f"{max(while_converging) / 1e3:.1f}",
        "most in a second": f"{peak / 1e3:.1f}",
        "steady, kB/s, mean": f"{sum(steady) / count / 1e3:.2f}",
        "first suspects a dead one, s": f"{first:.1f}",
        "all know it failed, s": f"{all_failed:.1f}",
        "largest message, B": network.largest,
        "took, s": f"{time.monotonic() - begun:.0f}",
    }


def _settled(count: int) -> dict[str, object]:
    begun = time.monotonic()
    network = Network(count, measure=_serialized)
    addresses = _addresses(count)
    unsigned = [record(f"gn{i:05}", address, i + 1) for i, address in enumerate(addresses)]
    records = [key_of_name(one.name).signed(one) for one in unsigned]
    base = common([Update.of(one) for one in records])
    rng = random.Random(7)
    nodes = [network.start(one, at=rng.random()) for one in records]
    for node in nodes:
        view = node.machine.view
        view.table = SharedTable(view.table.own, base)
        view.rumors.drop(node.name)
    network.run(6)
    steady = [_rate(node, 2, 5) for node in nodes]
    new = network.start(record("new", "10.99.0.1:7077", count + 9), addresses[:SEEDS])
    joined = network.now
    assert network.run(60, lambda: all("new" in n.machine.view.table.entries for n in nodes))
    known = network.now - joined
    dead = nodes[count // 2]
    dead.up, stopped = False, network.now
    others = [n for n in nodes if n is not dead]
    first = _when(network, others, dead, any, Claim.SUSPECT) - stopped
    all_failed = _when(network, others, dead, all, Claim.FAILED) - stopped
    assert network.run(120, lambda: len(new.machine.view.table.entries) >= count)
    return {
        "nodes": count,
        "steady, kB/s, mean": f"{sum(steady) / count / 1e3:.2f}",
        "most of a node": f"{max(steady) / 1e3:.2f}",
        "all know a new one, s": f"{known:.1f}",
        "the new one knows all, s": f"{network.now - joined:.1f}",
        "first suspects a dead one, s": f"{first:.1f}",
        "all know it failed, s": f"{all_failed:.1f}",
        "largest message, B": network.largest,
        "took, s": f"{time.monotonic() - begun:.0f}",
    }


def _addresses(count: int) -> list[str]:
    return [f"10.{i // 65536}.{i // 256 % 256}.{i % 256}:7077" for i in range(count)]


def _rate(node: Node, begin: float, end: float) -> float:
    seconds = range(int(begin), int(end) + 1)
    return sum(node.sent[s] for s in seconds) / max(len(seconds), 1)


def _when(network: Network, nodes: list[Node], dead: Node, which: object, claim: Claim) -> float:
    def holds() -> bool:
        return which(n.machine.view.table.entries[dead.name].update.claim >= claim for n in nodes)  # type: ignore[operator]

    assert network.run(60, holds)
    return network.now


if __name__ == "__main__":
    main()
