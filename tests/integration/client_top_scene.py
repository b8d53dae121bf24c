"""Two nodes with a stuck, a slow and a plain job, whose rows are always new; and ``top`` in a tmux of its own."""

from __future__ import annotations

import math
import os
import shlex
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

from client_fake_node import FakeNode, thread, variable
from waiting import until

from probing.api.proto.probing.v1 import node_pb2 as pb
from probing.api.tables import TABLES

SECOND = 1_000_000_000
GB = 1_000_000_000
SENTENCE = "rank 2 has not called all_reduce seq 50 of default_pg, for which ranks 0-1,3 wait; it reads a batch"
SLOW = "rank 1 of bert computes 1.8 times as long as the others"
Row = dict[str, Any]
# job, rank, node, pid, device
RANKS = (
    ("llm-7b", 0, "alpha", 1000, 0), ("llm-7b", 1, "alpha", 1001, 1), ("llm-7b", 2, "beta", 1002, 0),
    ("llm-7b", 3, "beta", 1003, 1), ("bert", 0, "alpha", 2000, 2), ("bert", 1, "beta", 2001, 2),
    ("resnet", 0, "alpha", 3000, 3),
)  # fmt: skip
_WORLD = {"llm-7b": 4, "bert": 2, "resnet": 1}
_TRAIN = "/home/user/train.py"
_TORCH = "/usr/lib/python3/dist-packages/torch/distributed/distributed_c10d.py"


class Scene:
    """``ranks`` may be changed while it is watched; ``tables`` that are taken out are unknown to the nodes."""

    def __init__(self, directory: Path, *, without: tuple[str, ...] = ()) -> None:
        self.ranks = list(RANKS)
        self.findings = True
        self._directory = directory
        self._without = without
        self._begun = time.time()
        self._lock = threading.Lock()
        self.nodes = {name: self._node(name) for name in ("alpha", "beta")}
        self.first.peers = [pb.Peer(node=n.name, address=n.address, state="healthy") for n in self.nodes.values()]

    def __enter__(self) -> Scene:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for node in self.nodes.values():
            node.stop()

    @property
    def first(self) -> FakeNode:
        return self.nodes["alpha"]

    def leave(self, name: str) -> None:
        """Ends a node."""
        self.nodes.pop(name).stop()

    def come_back(self, name: str) -> None:
        self.nodes[name] = self._node(name)

    def _node(self, name: str) -> FakeNode:
        node = FakeNode(self._directory, name)
        node.replace(
            "probing.table_docs",
            [
                {"node": name, "ts": 0, "table_schema": t.split(".")[0], "table_name": t.split(".")[1], "live": "no"}
                for t in TABLES
                if t not in self._without
            ],
        )
        for table in self._without:
            with node.database(table) as cursor:
                cursor.execute(f"DROP TABLE {table}")
        node.meanwhile = lambda: self._renew(node)
        self._renew(node)
        return node

    def _renew(self, node: FakeNode) -> None:
        with self._lock:
            own = [rank for rank in self.ranks if rank[2] == node.name]
            node.threads = [self._thread(*rank) for rank in own]
            node.values = []
            now = time.time()
            for table, rows in self._rows(node.name, own, now).items():
                if table not in self._without:
                    node.replace(table, rows)

    def _rows(self, node: str, own: list[Any], now: float) -> dict[str, list[Row]]:
        ns, step = int(now * SECOND), int((now - self._begun) * 4) + 1000
        tables: dict[str, list[Row]] = {
            name: []
            for name in (
                "process.processes",
                "comm.progress",
                "comm.inflight",
                "train.steps",
                "process.memory",
                "cpu.utilization",
                "gpu.utilization",
                "gpu.processes",
                "comm.ops",
                "python.variables",
            )
        }
        for job, rank, _, pid, device in own:
            who = {"node": node, "ts": ns, "job": job, "run": "r1", "pid": pid, "start_ns": pid * SECOND, "rank": rank}
            stuck, world = job == "llm-7b", _WORLD[job]
            tables["process.processes"].append(
                {
                    **who,
                    "local_rank": rank,
                    "world_size": world,
                    "ppid": 1,
                    "uid": 0,
                    "role": "trainer",
                    "state": "running",
                    "python": "3.11.2",
                    "command": f"python train.py --job {job} --lr 0.01",
                }
            )
            done = 50 if stuck else 50 + int(now - self._begun) * 12
            late = 90_000_000 if job == "bert" and rank == 1 else rank * 1000
            # The same on both nodes, which are asked a moment apart.
            whole = int(now) * SECOND
            called = int(self._begun) * SECOND - 35 * SECOND + late if stuck else whole - 100_000_000 + late
            if world > 1:
                tables["comm.progress"].append(
                    {
                        **who,
                        "world_size": world,
                        "comm": "default_pg",
                        "comm_name": "default_pg",
                        "comm_rank": rank,
                        "comm_size": world,
                        "seq": done,
                        "op": "all_reduce",
                        "calls": done,
                        "last_call": called,
                    }
                )
                tables["comm.ops"] += [_operation(who, world, done - i, called - i * 90_000_000) for i in range(12)]
            if stuck and rank != 2:
                tables["comm.inflight"].append(
                    {
                        **who,
                        "comm": "default_pg",
                        "comm_name": "default_pg",
                        "comm_rank": rank,
                        "comm_size": world,
                        "op": "all_reduce",
                        "seq": 50,
                        "state": "started",
                        "age_ns": 35 * SECOND + rank,
                    }
                )
            if not stuck:
                began = ns - SECOND // 4
                tables["train.steps"].append(
                    {**who, "ts": began, "step": step, "t_start": began, "t_end": ns, "duration_ns": SECOND // 4}
                )
            tables["process.memory"].append({**who, "role": "trainer", "rss_bytes": 12 * GB})
            for back in range(60):
                tables["cpu.utilization"].append(_cpu(who, ns - back * SECOND, now - back, stuck))
                tables["gpu.utilization"].append(_gpu(node, ns - back * SECOND, now - back, device, stuck, rank))
            tables["gpu.processes"].append(
                {
                    **who,
                    "role": "trainer",
                    "backend": "cuda",
                    "device_id": device,
                    "uuid": f"GPU-{node}-{device}",
                    "source": "driver",
                    "kind": "compute",
                    "used_bytes": 58 * GB,
                    "sm_pct": 90.0,
                }
            )
            tables["python.variables"].append(
                {**who, "tid": pid, "func": "main", "name": "loss", "type": "float", "value": "0.125"}
            )
        tables["diagnosis.findings"] = [_finding(node, ns, *found) for found in _FINDINGS] if self.findings else []
        return tables

    def _thread(self, job: str, rank: int, node: str, pid: int, device: int) -> pb.Thread:
        inner = ("read_batch", _TRAIN, 31) if (job, rank) == ("llm-7b", 2) else ("all_reduce", _TORCH, 2810)
        if job == "resnet":
            inner = ("forward", "/home/user/model.py", 12)
        made = thread(rank, pid, pid, "MainThread", inner, ("step", _TRAIN, 60), ("main", _TRAIN, 88))
        made.job = job
        for frame in made.frames:
            frame.locals.append(variable(rank, "batch", "Tensor", "<Tensor [32, 128]>").variable)
        return made


_FINDINGS = (
    ("llm-7b", "f1", "not_joined", "error", SENTENCE, "2", "0,1,3"),
    ("bert", "f2", "slow_rank", "warning", SLOW, "1", "0"),
)


def _finding(
    node: str, ns: int, job: str, name: str, verdict: str, severity: str, sentence: str, ranks: str, victims: str
) -> Row:
    return {
        "node": node,
        "ts": ns - 30 * SECOND,
        "job": job,
        "run": "r1",
        "finding_id": name,
        "verdict": verdict,
        "severity": severity,
        "state": "open",
        "confidence": 0.95,
        "sentence": sentence,
        "ranks": ranks,
        "victims": victims,
        "opened": ns - 30 * SECOND,
    }


def _operation(who: Row, world: int, seq: int, at: int) -> Row:
    return {
        **who,
        "ts": at,
        "tid": who["pid"],
        "comm": "default_pg",
        "comm_name": "default_pg",
        "comm_size": world,
        "comm_rank": who["rank"],
        "backend": "gloo",
        "seq": seq,
        "op": "all_reduce",
        "bytes": 4_000_000,
        "state": "done",
        "t_call": at,
        "duration_ns": 2_100_000,
        "busbw_gbps": 2.85,
    }


def _cpu(who: Row, ns: int, at: float, stuck: bool) -> Row:
    used = 100.0 if stuck else 140.0 + 60.0 * math.sin(at / 3 + who["rank"])
    return {
        **who,
        "ts": ns,
        "role": "trainer",
        "scope": "process",
        "platform": "linux",
        "comm": "python",
        "wall_ns": SECOND,
        "delta_total_ns": int(used * 1e7),
        "cpu_total_pct": used,
        "rss_kb": 12_000_000,
        "thread_count": 31,
        "run_delay_ns": 5_000_000,
        "state": "running",
    }


def _gpu(node: str, ns: int, at: float, device: int, stuck: bool, rank: int) -> Row:
    used = 100.0 if stuck else 75.0 + 20.0 * math.sin(at / 4 + rank)
    return {
        "node": node,
        "ts": ns,
        "backend": "cuda",
        "device_id": device,
        "uuid": f"GPU-{node}-{device}",
        "name": "NVIDIA H100 80GB HBM3",
        "total_bytes": 80 * GB,
        "used_bytes": 61 * GB + device * GB,
        "gpu_util_pct": used,
        "temperature_c": 58.0 + device + used / 10,
        "power_w": 140.0 if stuck else 400.0 + used,
        "power_limit_w": 700.0,
        "sm_clock_mhz": 1980,
        "clock_event_reasons": "sw_power_cap" if device == 2 else "",
    }


class Terminal:
    """A command in a tmux server of its own, ``columns`` by ``lines``."""

    def __init__(self, command: list[str], columns: int, lines: int, environment: dict[str, str] | None = None) -> None:
        # A server of its own: one that is being left takes no new session.
        self._tmux = ["tmux", "-L", f"top-{uuid.uuid4()}", "-f", "/dev/null"]
        words = {"LC_ALL": "C.UTF-8", "TERM": "screen-256color", **(environment or {})}
        exports = " ".join(f"{name}={shlex.quote(value)}" for name, value in words.items())
        shell = f"export {exports}; {shlex.join(command)}; echo ended with $?; stty -a | grep -c ' icanon'; exec cat"
        size = ["-x", str(columns), "-y", str(lines)]
        subprocess.run([*self._tmux, "new-session", "-d", *size, "sh", "-c", shell], check=True)

    def close(self) -> None:
        subprocess.run([*self._tmux, "kill-server"], check=False, capture_output=True)

    def press(self, *keys: str) -> None:
        subprocess.run([*self._tmux, "send-keys", *keys], check=True)

    def resize(self, columns: int, lines: int) -> None:
        subprocess.run([*self._tmux, "resize-window", "-x", str(columns), "-y", str(lines)], check=True)

    def screen(self, *, colours: bool = False) -> str:
        words = [*self._tmux, "capture-pane", "-p", *(["-e"] if colours else [])]
        return subprocess.run(words, check=True, capture_output=True, text=True).stdout

    def shows(self, *parts: str) -> str:
        """Waits until all ``parts`` are on the screen, and returns it."""

        def found() -> str:
            shown = self.screen()
            return shown if all(part in shown for part in parts) else ""

        return until(found, poll_s=0.1, what=lambda: f"{parts} in\n{self.screen()}")

    def lacks(self, *parts: str) -> str:
        """Waits until none of ``parts`` is on the screen, and returns it."""

        def found() -> str:
            shown = self.screen()
            return shown if not any(part in shown for part in parts) else ""

        return until(found, poll_s=0.1, what=lambda: f"no {parts} in\n{self.screen()}")


@contextmanager
def top(address: str, columns: int, lines: int, *words: str) -> Iterator[Terminal]:
    """``top`` of the node at ``address`` on a terminal."""
    program = "import sys; from probing.client.main import main; sys.exit(main())"
    terminal = Terminal([sys.executable, "-c", program, "-t", address, "top", *words], columns, lines)
    try:
        yield terminal
    finally:
        terminal.close()


def main() -> None:
    """Serves the scene in a directory until it is interrupted: to look at ``top`` by hand."""
    os.environ["PYTEST_CURRENT_TEST"] = "scene by_hand"
    with Scene(Path(sys.argv[1])) as scene:
        print(scene.first.address, flush=True)
        threading.Event().wait()


if __name__ == "__main__":
    main()
