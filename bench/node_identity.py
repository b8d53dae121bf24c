"""What it costs to prove a node: a ping and its answer with and without keys, a signed record, and a TLS handshake.

All in turn in one process, so that the ratios hold on a busy machine as well.
"""

from __future__ import annotations

import argparse
import ssl
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from statistics_of_blocks import ratio_of_blocks, table

from probing.daemon.cluster.keys import NodeKey, is_signed
from probing.daemon.cluster.machine import Machine
from probing.daemon.cluster.record import Record
from probing.daemon.service.gossip_wire import message_of, packed

ROOT = Path(__file__).resolve().parent.parent
CALLS = 200


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--blocks", type=int, default=20)
    blocks = parser.parse_args().blocks
    key = NodeKey.new()
    records = iter(range(10**9))

    def signed() -> None:
        key.signed(_record("a", next(records)))

    def checked() -> None:
        assert is_signed(key.signed(_record("a", next(records))))

    with tempfile.TemporaryDirectory() as directory:
        handshake = _handshake(Path(directory))
        work = {
            "ping and answer without keys": _ping(with_keys=False),
            "ping and answer with keys": _ping(with_keys=True),
            "a record signed": signed,
            "a record signed and checked": checked,
            "a TLS handshake of two nodes": handshake,
        }
        times: dict[str, list[float]] = {name: [] for name in work}
        for _ in range(blocks):
            for name, do in work.items():
                times[name].append(_microseconds(do))
    base = times["ping and answer without keys"]
    print(
        table(
            [
                {
                    "what": name,
                    "us, median": f"{sorted(taken)[len(taken) // 2]:.0f}",
                    "to a ping without keys": f"{ratio_of_blocks(taken, base).ratio:.2f}",
                }
                for name, taken in times.items()
            ]
        )
    )


def _record(name: str, number: int = 0) -> Record:
    return Record(name, "10.0.0.1:7077", 1_800_000_000 + number, 1, (("rack", "r1"),), (), "0.1.0", "2.0.0")


def _ping(*, with_keys: bool) -> Callable[[], None]:
    """Returns what two nodes do for one ping: both messages are packed and read."""
    keys = (NodeKey.new(), NodeKey.new()) if with_keys else (None, None)
    asking, asked = (Machine(_record(name), key=key) for name, key in zip("ab", keys, strict=True))
    asking.view.vouched(asked.view.own, "10.0.0.1:7077", 0.0)

    def ping() -> None:
        call = asking._ping("b", 1.0)
        answer = asked.answer(message_of(packed(call.message)), 1.0)
        asking.answered(call, message_of(packed(answer)), 1.0, 1)

    return ping


def _handshake(directory: Path) -> Callable[[], None]:
    script = ROOT / "packaging" / "test-ca.sh"
    subprocess.run([script, directory, "ca", "nodes"], check=True)
    subprocess.run([script, directory, "node", "nodes", "a", "127.0.0.1"], check=True)
    server, client = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    for context in (server, client):
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.load_cert_chain(directory / "a.pem", directory / "a.key")
        context.load_verify_locations(directory / "nodes.pem")
        context.verify_mode = ssl.CERT_REQUIRED

    def handshake() -> None:
        there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
        ends = [
            client.wrap_bio(back, there, server_hostname="a"),
            server.wrap_bio(there, back, server_side=True),
        ]
        while ends:
            for end in list(ends):
                try:
                    end.do_handshake()
                    ends.remove(end)
                except ssl.SSLWantReadError:
                    pass

    return handshake


def _microseconds(do: Callable[[], None]) -> float:
    begun = time.perf_counter_ns()
    for _ in range(CALLS):
        do()
    return (time.perf_counter_ns() - begun) / CALLS / 1e3


if __name__ == "__main__":
    main()
