"""Time from the first mapping of a library until it has probes: alone, and beside processes of a hostile user.

The user has ``--processes`` that hold libraries (one in 50 maps and unmaps one without a pause), and files that every
source refuses. The daemon's CPU is the sum of all its processes.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from running import BenchDaemon, cpu_ns, family, node_channel
from statistics_of_blocks import table

from probing.api.proto.probing.v1 import node_pb2

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from doubles.doubles import build
from hostile import elf_files, mapping

LOOK_S = 0.01


@contextmanager
def ending(process: subprocess.Popen[Any]) -> Iterator[None]:
    yield
    process.kill()
    process.communicate()


def seconds_until_probed(daemon: BenchDaemon, library: Path, folder: Path) -> float:
    """Maps a copy of ``library`` and waits until the status names it."""
    folder.mkdir()
    copy = Path(shutil.copy(library, folder))
    with node_channel(daemon) as node:
        begin = time.monotonic()
        with ending(mapping.mapping([copy], user=None)):
            while not any(
                str(copy) in source.detail for source in node.Status(node_pb2.StatusRequest(), timeout=30).sources
            ):
                time.sleep(LOOK_S)
            return time.monotonic() - begin


def measure(daemon: BenchDaemon, library: Path, folder: Path, rounds: int) -> tuple[list[float], float]:
    """The seconds of each round, and the part of a core that the daemon took."""
    assert daemon.process is not None
    pids = family(daemon.process.pid)
    began, before = time.monotonic(), cpu_ns(pids)
    found = [seconds_until_probed(daemon, library, folder / str(number)) for number in range(rounds)]
    return found, (cpu_ns(pids) - before) / 1e9 / (time.monotonic() - began)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--processes", type=int, default=1500)
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="probingd-bench-"))
    folder.chmod(0o755)
    rows = []
    daemon = BenchDaemon()
    with ExitStack() as attacks:
        attacks.callback(shutil.rmtree, folder, ignore_errors=True)
        attacks.callback(daemon.close)
        library = build(folder).nccl
        daemon.start()
        for beside in ("nobody", "hostile processes"):
            if beside != "nobody":
                held = [elf_files.many_symbols(folder / f"libnccl.so.{number}") for number in range(5)]
                loops = max(1, options.processes // 50)
                attacks.enter_context(ending(mapping.mapping(held, copies=options.processes - loops)))
                attacks.enter_context(ending(mapping.mapping(held[:1], how="loop", copies=loops)))
            (where := folder / beside.replace(" ", "-")).mkdir()
            found, cpu = measure(daemon, library, where, options.rounds)
            rows.append(
                {
                    "beside": beside,
                    "median": f"{statistics.median(found):.2f} s",
                    "worst": f"{max(found):.2f} s",
                    "CPU of the daemon": f"{100 * cpu:.0f} % of a core",
                    "rounds": options.rounds,
                }
            )
    print(f"{options.processes} hostile processes, {os.cpu_count()} CPUs")
    print(table(rows))


if __name__ == "__main__":
    main()
