"""What the network sources cost each second: 16 RDMA ports, the interfaces, the TCP connections of 64 processes.

The collector's part and that of its reader, beside `ss -ti` and beside reading the same files as node_exporter does
(open, read, close). The ports are files on a memory file system: firmware takes its own time on real ones.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from running import cpu_ns
from statistics_of_blocks import table

from probing.api.rdma_counters import COUNTERS, HW_COUNTERS, PACKETS
from probing.daemon.clock import SystemClock
from probing.daemon.net.interfaces.source import InterfaceSource
from probing.daemon.net.rdma.source import RdmaPorts
from probing.daemon.net.tcp.source import TcpSource
from probing.daemon.processes.reader_pool import ReaderPool
from probing.daemon.source import Identity, Loss

PORTS = 16
READER = """
import sys
from pathlib import Path
from probing.daemon.net.rdma import reading
reading.node_sysfs = lambda *_: Path(sys.argv[1])
from probing.daemon.confined.reader import main
main()
"""
PROCESS = """
import signal, socket, sys
kept = [socket.create_connection(("127.0.0.1", int(sys.argv[1]))) for _ in range(int(sys.argv[2]))]
print("ready", flush=True)
for line in sys.stdin:
    for connection in kept:
        connection.send(b"x" * 1009)
"""


class Node:
    """Files of ports, processes with connections that send each second, and a reader."""

    def __init__(self, processes: int, connections: int) -> None:
        self.root = Path(tempfile.mkdtemp(prefix="probingd-bench-", dir="/dev/shm"))
        self.files = [file for port in range(PORTS) for file in _port(self.root / "class" / f"mlx5_{port}")]
        self.listener = socket.create_server(("127.0.0.1", 0), backlog=4096)
        self.taken: list[socket.socket] = []
        threading.Thread(target=self._take, daemon=True).start()
        words = [sys.executable, "-S", "-c", PROCESS, str(self.listener.getsockname()[1]), str(connections)]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.processes = [subprocess.Popen(words, **pipes) for _ in range(processes)]
        for process in self.processes:
            assert process.stdout is not None
            process.stdout.readline()
        self.who = [
            Identity(p.pid, _start_ns(p.pid), "job", "run", "trainer", rank) for rank, p in enumerate(self.processes)
        ]
        self.readers: list[subprocess.Popen[bytes]] = []
        self.server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.server.bind(str(self.root / "reader.sock"))
        self.server.listen(4)
        threading.Thread(target=self._serve, daemon=True).start()
        self.pool = ReaderPool(str(self.root / "reader.sock"), 1)
        self.rows = 0

    def _take(self) -> None:
        while True:
            self.taken.append(self.listener.accept()[0])

    def _serve(self) -> None:
        while True:
            client, _ = self.server.accept()
            with client:
                words = [sys.executable, "-c", READER, str(self.root / "class")]
                self.readers.append(subprocess.Popen(words, stdin=client))

    def send(self) -> None:
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.write("\n")
            process.stdin.flush()

    def close(self) -> None:
        for process in (*self.processes, *self.readers):
            process.send_signal(signal.SIGKILL)
            process.wait()
        subprocess.run(["rm", "-r", self.root], check=True)

    # What the sources ask for.
    def live(self) -> list[Identity]:
        return self.who

    def identity(self, pid: int, start_ns: int) -> Identity | None:
        del pid, start_ns
        return None

    def call(self, *_: object, **__: object) -> dict[str, Any]:
        return {}

    def put(self, _: str, batch: Any) -> None:
        self.rows += batch.num_rows

    def lost(self, loss: Loss) -> None:
        raise SystemExit(f"rows were lost: {loss}")


def _port(path: Path) -> list[Path]:
    counters = {"counters": ("port_xmit_data", "port_rcv_data", *PACKETS, *COUNTERS), "hw_counters": HW_COUNTERS}
    files = [path / "ports/1" / folder / name for folder, names in counters.items() for name in names]
    for number, file in enumerate(files):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{number * 10**9}\n")
    for name, text in (("state", "4: ACTIVE"), ("phys_state", "5: LinkUp"), ("rate", "400 Gb/sec (4X NDR)")):
        (path / "ports/1" / name).write_text(text)
    return files


def _start_ns(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]) * 10_000_000


def like_node_exporter(files: list[Path]) -> None:
    for file in files:
        with file.open() as opened:
            int(opened.read())


def _each(node: Node, seconds: int, steps: dict[str, Callable[[], object]]) -> dict[str, float]:
    """CPU of each step, ms a second: of this thread, of the readers and of children."""
    spent = dict.fromkeys(steps, 0.0)
    for _ in range(seconds):
        begin = time.monotonic()
        node.send()
        for name, step in steps.items():
            before, readers, children = time.thread_time_ns(), cpu_ns([p.pid for p in node.readers]), os.times()
            step()
            after, used = os.times(), cpu_ns([p.pid for p in node.readers]) - readers
            child = after.children_user + after.children_system - children.children_user - children.children_system
            spent[name] += (time.thread_time_ns() - before + used) / 1e6 + child * 1e3
        time.sleep(max(0.0, begin + 1 - time.monotonic()))
    return {name: ms / seconds for name, ms in spent.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=int, default=30)
    parser.add_argument("--processes", type=int, default=64)
    parser.add_argument("--connections", type=int, default=16)
    options = parser.parse_args()
    node = Node(options.processes, options.connections)
    clock = SystemClock()
    tcp = TcpSource(node.pool, node, node, clock, "bench", 1.0, on=True)
    ports = RdmaPorts(node.pool, node, clock, "bench", 1.0)
    interfaces = InterfaceSource(node.pool, node, node, dict, node, clock, "bench", 1.0)  # type: ignore[arg-type]
    ss = ["ss", "-tiHn", "state", "established"]
    steps: dict[str, Callable[[], object]] = {
        f"net.tcp and net.paths, {options.processes} processes with {options.connections} connections": tcp.tick,
        f"rdma.ports, {PORTS} ports": ports.tick,
        "net.interfaces": interfaces.tick,
        "`ss -ti`, text not parsed": lambda: subprocess.run(ss, check=True, capture_output=True),
        f"{len(node.files)} files of ports, opened and closed": lambda: like_node_exporter(node.files),
    }
    try:
        _each(node, 3, steps)
        node.rows = 0
        found = _each(node, options.seconds, steps)
    finally:
        tcp.stop()
        node.close()
    rows = [{"each second": n, "CPU, ms": f"{ms:.2f}", "% of a core": f"{ms / 10:.2f}"} for n, ms in found.items()]
    print(table(rows))
    print(f"rows a second: {node.rows / options.seconds:.0f}")


if __name__ == "__main__":
    main()
