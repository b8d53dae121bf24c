"""Hundreds of random kills at full load, each followed by a check: ``python tests/soak/kills.py store --rounds 500``.

``store``: writers of a numbered stream are killed at random instants: between records, in sealing, merging and in
their start. After each kill (after some, only a second one) the store has all that was acknowledged, once, and takes
a row more. ``collector``: the real daemon as root, and processes that call NCCL (the doubles of tests/doubles) as
quickly as they can; its collector is killed while they do. After each kill the rows in the log and the reported
losses add up to the calls, exactly while no other job calls NCCL, and no call has two rows; with ``--whole`` (a ring
that holds what comes while nobody drains it) each call has its row. On stdout is a summary in JSON; the first check
that does not hold ends the run with an error and keeps the directory.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import grpc

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "integration"))

import nccl_ingest as ingest
from doubles.doubles import DoubleJob, Doubles, build
from process_tree import arguments, family
from running import BenchDaemon, node_channel
from store_child import Writers, check, kill_once

from probing.api.proto.probing.v1 import node_pb2
from probing.daemon.store.verify.examine import verify_directory

# A store is read whole after each kill, so it is begun anew now and then.
ROUNDS_A_STORE = 25
PATIENCE_S = 60.0
SLICE = 250_000
LOSSES = "SELECT * FROM probing.losses WHERE source = 'collectives' ORDER BY ts"


@contextlib.contextmanager
def folder(name: str) -> Iterator[Path]:
    """A directory that is removed after a successful run."""
    # Not below one that only its owner may enter: the daemon's processes open the library.
    path = Path(tempfile.mkdtemp(prefix=f"probingd-soak-{name}-"))
    path.chmod(0o755)
    try:
        yield path
    except BaseException:
        print(f"kept: {path}", file=sys.stderr)
        raise
    shutil.rmtree(path)


def distribution(values: Sequence[float]) -> dict[str, float]:
    """Of milliseconds."""
    if len(values) < 2:
        return {}
    cuts = statistics.quantiles(values, n=100, method="inclusive")
    named = {"median": cuts[49], "p90": cuts[89], "p99": cuts[98], "max": max(values)}
    return {name: round(value, 1) for name, value in named.items()}


def kill_writers(rounds: int, records: int, seed: int) -> dict[str, Any]:
    chance = random.Random(seed)
    opened: list[float] = []
    rows = doubly = 0
    with folder("store") as base:
        writers = Writers(base)
        for first in range(0, rounds, ROUNDS_A_STORE):
            root = base / f"state-{first}"
            there = 0
            for _ in range(min(ROUNDS_A_STORE, rounds - first)):
                acknowledged = max(there, kill_once(writers, root, chance, records))
                if chance.random() < 0.3:
                    # Nobody mends in between: a start finds what a start that was killed left.
                    acknowledged = max(acknowledged, kill_once(writers, root, chance, records))
                    doubly += 1
                if writers.opened_ns:
                    opened.append(writers.opened_ns / 1e6)
                there = check(root, acknowledged)
            problems = verify_directory(root)
            assert problems == [], problems
            rows += there
            shutil.rmtree(root)
        writers.close()
    return {"kills": rounds + doubly, "rows": rows, "open_ms": distribution(opened), "seed": seed}


class Collector:
    """The collector of a daemon, which is killed, and the next one waited for."""

    def __init__(self, daemon: BenchDaemon) -> None:
        self._daemon = daemon
        self._last = "not asked"

    @property
    def pids(self) -> list[int]:
        assert self._daemon.process is not None
        pids = family(self._daemon.process.pid)
        return [pid for pid in pids if "probing.daemon.collector" in arguments(pid)]

    def kill(self) -> float:
        """Seconds from the kill until the daemon reports that it runs again, with another collector."""
        (before,) = self.pids
        begin = time.monotonic()
        self._last = "not asked"
        os.kill(before, signal.SIGKILL)
        with node_channel(self._daemon) as stub:
            while self.pids in ([before], []) or not self._runs(stub):
                if time.monotonic() - begin > PATIENCE_S:
                    log = self._daemon.log.read_text()[-4000:]
                    raise TimeoutError(f"not back in {PATIENCE_S:.0f} s; Status: {self._last}; the log:\n{log}")
                time.sleep(0.01)
        return time.monotonic() - begin

    def _runs(self, stub: Any) -> bool:
        try:
            status = stub.Status(node_pb2.StatusRequest(), timeout=5)
        except grpc.RpcError as e:
            self._last = f"{e.code().name}: {e.details()}"
            return False
        self._last = f"{status.state}: {status.reason}"
        return bool(status.state == "running")


def doubled(daemon: BenchDaemon, pids: Sequence[int]) -> int:
    """Calls that have more than one row."""
    own = f"FROM comm.ops WHERE pid IN ({', '.join(map(str, pids))})"
    last = ingest.asked(daemon, f"SELECT coalesce(max(seq), 0)::BIGINT AS n {own}")
    found = 0
    # A query may not take the memory that millions of groups need.
    for first in range(0, last + 1, SLICE):
        keys = f"SELECT pid, comm, seq {own} AND seq >= {first} AND seq < {first + SLICE}"
        found += ingest.asked(daemon, f"SELECT count(*) AS n FROM ({keys} GROUP BY ALL HAVING count(*) > 1)")
    return found


def kill_collectors(
    seconds: float, rounds: int, rate: int, processes: int, ring_bytes: int, seed: int, *, whole: bool
) -> dict[str, Any]:
    with folder("collector") as base:
        (base / "doubles").mkdir()
        doubles = build(base / "doubles")
        daemon = BenchDaemon()
        limits = f"[probes]\nhit_budget = 100000000\nring_bytes = {ring_bytes}\n"
        daemon.config.write_text(daemon.config.read_text() + limits)
        jobs = [started(doubles, base / str(number)) for number in range(processes)]
        try:
            daemon.start()
            done = kill_under_load(daemon, jobs, seconds, rounds, rate // processes, random.Random(seed))
            assert not (whole and done["lost"]), f"the rings lost {done['lost']} calls"
            return done
        finally:
            for job in jobs:
                job.close()
            daemon.close()


def started(doubles: Doubles, place: Path) -> DoubleJob:
    job = DoubleJob(doubles, place, 1)
    job.do("init world config")
    return job


def kill_under_load(
    daemon: BenchDaemon, jobs: Sequence[DoubleJob], seconds: float, rounds: int, rate: int, chance: random.Random
) -> dict[str, Any]:
    pids = [job.ranks[0].pid for job in jobs]
    ingest.wait_until_probed(daemon, list(jobs), pids)
    # What was called before all probes were there is no loss of a ring.
    calls = ingest.rows_of(daemon, pids) + ingest.lost_of(daemon)
    collector, back, kills, rows, lost, exact = Collector(daemon), list[float](), 0, 0, 0, True
    end = time.monotonic() + seconds
    while kills < rounds and time.monotonic() < end:
        for job in jobs:
            job.tell(f"burst {2 * rate} {rate}")
        # The instant of the kill.
        time.sleep(chance.uniform(0, 1.5))
        back.append(collector.kill() * 1e3)
        kills += 1
        for job in jobs:
            job.hear()
        calls += 2 * rate * len(jobs)
        rows, lost = ingest.settled(daemon, pids, calls)
        others = ingest.rows_of_others(daemon, pids)
        exact = exact and not others
        # What the ring lost may be theirs: then only rows missing without a reported loss count.
        if rows > calls or rows + lost < calls or (exact and rows + lost > calls):
            print(daemon.ctl("-f", "json", "query", LOSSES), file=sys.stderr)
            raise AssertionError(f"{rows} rows, {lost} lost, {calls} calls, {others} of others, after {kills} kills")
    twice = doubled(daemon, pids)
    assert twice == 0, f"{twice} calls have more than one row"
    # ``exact``: no other job made calls, so that the losses are those of these.
    counted = {"kills": kills, "calls": calls, "rows": rows, "lost": lost, "exact": exact}
    return {**counted, "back_ms": distribution(back)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("store", "collector"))
    parser.add_argument("--rounds", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--records", type=int, default=200, help="store: records of a writer at most")
    parser.add_argument("--seconds", type=float, default=3600, help="collector: no new round after them")
    parser.add_argument("--rate", type=int, default=100_000, help="collector: calls a second of all processes")
    parser.add_argument("--processes", type=int, default=2, help="collector: how many call")
    parser.add_argument("--whole", action="store_true", help="collector: no call may be lost")
    parser.add_argument("--ring-bytes", type=int, default=16 << 20, help="collector: 300 bytes of it take a call")
    options = parser.parse_args()
    begin = time.monotonic()
    if options.what == "store":
        done = kill_writers(options.rounds, options.records, options.seed)
    else:
        done = kill_collectors(
            options.seconds,
            options.rounds,
            options.rate,
            options.processes,
            options.ring_bytes,
            options.seed,
            whole=options.whole,
        )
    print(json.dumps({"what": options.what, **done, "wall_s": round(time.monotonic() - begin)}))


if __name__ == "__main__":
    main()
