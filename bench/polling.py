"""What it costs to read 8 GPUs, 8 ranks, 64 other processes and 16 RDMA ports each second. Budget: 1 % of a core.

The sources with their real readers, rows made, without the store, beside what others do in the same seconds, in turn:
nvitop's snapshot of the GPUs (where it is installed), psutil asked for the same of the processes, and the files of the
ports opened, read and closed, as node_exporter does. GPUs are those of the double of NVML, ports are files in memory.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib.util
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import host_polling
import network
from gpu_polling import GPUS, Other, build_nvml, gpus, values
from running import cpu_ns
from statistics_of_blocks import table

from probing.daemon.clock import SystemClock
from probing.daemon.host.cpu.source import CpuSource
from probing.daemon.host.kernel_log.source import KernelLogSource
from probing.daemon.host.node.source import NodeSource
from probing.daemon.net.rdma.source import RdmaPorts

Step = tuple[Callable[[], object], Callable[[], list[int]]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=int, default=60)
    seconds = parser.parse_args().seconds
    with contextlib.ExitStack() as stack:
        ranks = stack.enter_context(host_polling.processes(GPUS, host_polling.THREADS))
        others = stack.enter_context(host_polling.processes(host_polling.OTHERS, 1))
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        library = build_nvml(folder)
        cards = stack.enter_context(closing(gpus(library, folder, values(ranks, others))))
        for rank, pid in enumerate(ranks):
            cards.watched.add(pid, rank)
        cards.fresh()
        ports = network.Node(0, 0)
        stack.callback(ports.close)
        steps = ours(cards, ranks, ports) | theirs(stack, library, ranks, others, ports)
        # As in the collector, which collects garbage every two minutes.
        gc.collect()
        gc.freeze()
        gc.disable()
        spent = measure(steps, seconds)
    whole = sum(spent[name] for name in spent if not name.startswith("others: "))
    rows = [
        {"each second": n, "CPU, ms": f"{ms:.2f}", "% of a core": f"{ms / 10:.2f}"}
        for n, ms in {"ours, in all": whole, **spent}.items()
    ]
    print(table(rows))


def ours(cards: object, ranks: list[int], ports: network.Node) -> dict[str, Step]:
    reader, sink, clock = host_polling.Reader(), host_polling.Counted(), SystemClock()
    common = (reader, host_polling.Watched(ranks), sink, clock, "bench")
    cpu, node = CpuSource(*common, 1.0), NodeSource(*common, 5.0)
    log = KernelLogSource("/dev/kmsg", sink, clock, "bench")
    rdma = RdmaPorts(ports.pool, ports, clock, "bench", 1.0)
    cards.source._sink = sink  # type: ignore[attr-defined]
    looks = iter(range(1 << 30))

    def host() -> None:
        cpu.tick()
        log.tick()
        if next(looks) % 5 == 0:
            node.tick()

    def of_cards() -> list[int]:
        return [process.pid for process in cards.listener.processes]  # type: ignore[attr-defined]

    return {
        "GPUs": (cards.tick, of_cards),  # type: ignore[attr-defined]
        "processes and host": (host, lambda: [reader.process.pid]),
        "ports": (rdma.tick, lambda: [process.pid for process in ports.readers]),
    }


def theirs(
    stack: contextlib.ExitStack, library: Path, ranks: list[int], others: list[int], ports: network.Node
) -> dict[str, Step]:
    found: dict[str, Step] = {}
    if importlib.util.find_spec("nvitop"):
        nvitop = Other(library)
        stack.callback(nvitop.close)
        found["others: nvitop"] = (nvitop.tick, lambda: [nvitop.process.pid])
    rival = host_polling.Psutil(ranks, others)
    found["others: psutil"] = (rival.look, list)
    found["others: files opened and closed"] = (lambda: network.like_node_exporter(ports.files), list)
    return found


def measure(steps: dict[str, Step], seconds: int) -> dict[str, float]:
    """Returns the CPU of each step, ms a second: of this thread and of the processes that work for it."""
    spent = dict.fromkeys(steps, 0.0)
    for second in range(-5, seconds):
        begin = time.monotonic()
        if second == 0:
            # What is loaded, opened or learned once is not measured.
            spent = dict.fromkeys(steps, 0.0)
        before = {name: cpu_ns(pids()) for name, (_, pids) in steps.items()}
        for name, (step, _) in steps.items():
            own = time.thread_time_ns()
            step()
            spent[name] += (time.thread_time_ns() - own) / 1e6
        time.sleep(max(0.0, begin + 1 - time.monotonic()))
        # With what they did after their answers.
        for name, (_, pids) in steps.items():
            spent[name] += (cpu_ns(pids()) - before[name]) / 1e6
    return {name: ms / seconds for name, ms in spent.items()}


if __name__ == "__main__":
    main()
