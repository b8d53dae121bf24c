"""Time to read the stacks of processes: this daemon, beside py-spy and pystack for the same processes.

The daemon is asked over an open channel; the other tools are started for one process after another, as a person would
start them. All take turns, in rounds, within one run.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from running import BIN, BenchDaemon, job, node_channel
from statistics_of_blocks import ratio_of_blocks, table

from probing.api.proto.probing.v1 import node_pb2, node_pb2_grpc

HERE = Path(__file__).resolve().parent
THREADS = 3
RANKS = """
import sys
sys.path.insert(0, sys.argv[2])
import torch.distributed as dist
dist.init_process_group("gloo")
dist.barrier()
from deep_python import wait
wait(sys.argv[1] + str(dist.get_rank()), 1)
"""
PY_SPY = ("py-spy", "dump", "--pid")
PYSTACK = ("pystack", "remote")
Action = Callable[[], object]


class Subject(NamedTuple):
    name: str
    pids: list[int]
    job: str


@contextlib.contextmanager
def subject(name: str, folder: Path, *argv: str | Path, ranks: int) -> Iterator[Subject]:
    """A job whose processes all wait."""
    marks = folder / name.replace(" ", "-")
    names = {"TORCHELASTIC_RUN_ID": marks.name}
    words = [str(a).replace("MARKS", str(marks)) for a in argv]
    with job(*words, ranks=ranks, env=names) as started:
        wanted = 1 if "wait" in words else ranks
        while len(list(folder.glob(f"{marks.name}*"))) < wanted:
            time.sleep(0.1)
        yield Subject(name, [p.pid for p in started], marks.name)


@contextlib.contextmanager
def subjects(folder: Path, ranks: int, many: int) -> Iterator[list[Subject]]:
    deep = HERE / "deep_python.py"
    few = str(THREADS)
    with (
        subject("1 process", folder, deep, "wait", "MARKS", few, ranks=1) as one,
        subject(f"{ranks} ranks of a gloo job", folder, "-c", RANKS, "MARKS", HERE, ranks=ranks) as job_of,
        subject(f"{many} processes", folder, deep, "wait", "MARKS", few, ranks=many) as crowd,
        subject("1 process, 160 threads", folder, deep, "wait", "MARKS", "159", ranks=1) as threads,
    ):
        yield [one, job_of, crowd, threads]


def rpc(stub: node_pb2_grpc.NodeStub, of: Subject) -> node_pb2.StacksReply:
    reply = stub.Stacks(node_pb2.StacksRequest(job=of.job, timeout_ms=5000), timeout=10)
    incomplete = [t for t in reply.threads if not t.complete]
    if reply.failures or incomplete:
        raise SystemExit(f"{of.name}: {len(reply.failures)} failures, {len(incomplete)} stacks are incomplete")
    return reply


def each(of: Subject, *argv: str) -> Action:
    """Returns an action that runs the command for one process after the other. A failure ends the benchmark."""

    def run() -> None:
        for pid in of.pids:
            subprocess.run([BIN / argv[0], *argv[1:], str(pid)], check=True, capture_output=True)

    return run


def timed(action: Action) -> float:
    begin = time.perf_counter()
    action()
    return (time.perf_counter() - begin) * 1000


def in_turn(actions: dict[str, Action], rounds: int) -> dict[str, list[float]]:
    """Returns the times of each action by name, ms."""
    chooser = random.Random(5)
    found: dict[str, list[float]] = {name: [] for name in actions}
    for _ in range(rounds):
        for name in chooser.sample(list(actions), len(actions)):
            found[name].append(timed(actions[name]))
    return found


def shown(name: str, what: str, values: list[float], theirs: list[float]) -> dict[str, object]:
    """Returns a row. ``theirs``: the daemon's own times in the same rounds."""
    spread = f"{statistics.median(values):.1f} ({min(values):.1f} to {max(values):.1f})"
    ratio = ratio_of_blocks(values, theirs)
    times = "1" if values is theirs else f"{ratio.ratio:.0f} [{ratio.low:.0f}, {ratio.high:.0f}]"
    return {"of": name, "asked": what, "ms, median (range)": spread, "times the daemon": times, "rounds": len(values)}


def compare(stub: node_pb2_grpc.NodeStub, of: Subject, rounds: int, pystack_rounds: int) -> list[dict[str, object]]:
    first = timed(lambda: rpc(stub, of))
    for _ in range(5):
        rpc(stub, of)
    threads = rpc(stub, of).threads
    frames = sum(len(t.frames) for t in threads)
    print(f"{of.name}: {len(threads)} threads, {frames} frames; the first answer took {first:.1f} ms", flush=True)
    ours = "this daemon, RPC on a warm channel"
    quick: dict[str, Action] = {
        ours: lambda: rpc(stub, of),
        "py-spy dump": each(of, *PY_SPY),
        "py-spy dump --nonblocking": each(of, "py-spy", "dump", "--nonblocking", "--pid"),
    }
    slow: dict[str, Action] = {
        ours: lambda: rpc(stub, of),
        "pystack remote --no-block": each(of, *PYSTACK, "--no-block"),
    }
    if len(of.pids) == 1:
        slow["py-spy dump --native"] = each(of, "py-spy", "dump", "--native", "--pid")
        slow["pystack remote --native"] = each(of, *PYSTACK, "--native")
    rows = []
    for actions, count in ((quick, rounds), (slow, pystack_rounds)):
        found = in_turn(actions, count)
        rows += [shown(of.name, n, found[n], found[ours]) for n in actions if n != ours or actions is quick]
    return rows


def commands(daemon: BenchDaemon, of: Subject, rounds: int) -> list[dict[str, object]]:
    """Returns the times of commands from exec to exit: interpreter, imports, the call and the printing."""
    asked = {
        "version": ["version"],
        "stacks": ["stacks", "--job", of.job],
        "stacks --native": ["stacks", "--native", "--job", of.job],
        "stacks --locals": ["stacks", "--locals", "--job", of.job],
        "vars": ["vars", "--job", of.job, "value", "there"],
    }

    def action(words: list[str]) -> Action:
        return lambda: daemon.ctl(*words)

    first = {name: timed(action(words)) for name, words in asked.items()}
    later = in_turn({name: action(words) for name, words in asked.items()}, rounds)
    return [
        {
            "probingctl": name,
            "of": of.name,
            "first, ms": f"{first[name]:.0f}",
            "later, ms": f"{statistics.median(later[name]):.0f} ({min(later[name]):.0f} to {max(later[name]):.0f})",
        }
        for name in asked
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--pystack-rounds", type=int, default=5)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--many", type=int, default=64)
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="probingd-bench-"))
    daemon = BenchDaemon()
    rows: list[dict[str, object]] = []
    with contextlib.ExitStack() as ends:
        ends.callback(daemon.close)
        found = ends.enter_context(subjects(folder, options.ranks, options.many))
        daemon.start()
        stub = ends.enter_context(node_channel(daemon))
        for of in found:
            few = len(of.pids) > options.ranks
            rounds = max(3, options.rounds // 5) if few else options.rounds
            rows += compare(stub, of, rounds, 2 if few else options.pystack_rounds)
        by_command = [row for of in (found[0], found[1]) for row in commands(daemon, of, options.rounds)]
    print(table(rows))
    print(table(by_command))


if __name__ == "__main__":
    main()
