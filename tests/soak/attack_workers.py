"""The whole corpus of attacks on workers with the limits of a real node: ``python tests/soak/attack_workers.py``.

Each attack that the gate lets through goes to a worker as printed, every other as it is, past the gate, while a store
is written. On stdout a summary in JSON; the exit status is 1 when a file was opened or made, resident memory (all of
the worker's, not only what the query added) passed 1.2 x the limit, a worker stayed after its deadline or died, or a
row that was collected is missing; each such attack is printed.
"""

from __future__ import annotations

import argparse
import collections
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "integration"))

from attack_support import Collection, Place, Victim
from attacks import BEHIND, EXPENSIVE, HARMLESS, REFUSED
from query_helpers import T0, operations

from probing.api.errors import QueryRejected
from probing.daemon.query.gate import check


def _attacks(place: Place) -> Iterator[str]:
    groups = [attacks for some in (REFUSED, EXPENSIVE) for attacks in some.values()]
    for attack in [*BEHIND, *HARMLESS, *(sql for attacks in groups for sql in attacks)]:
        sql = place.of(attack)
        try:
            yield check(sql, T0).sql
        except QueryRejected:
            yield sql


class _Run:
    """``longest``: seconds from a query that was given up to the end of its worker, at most."""

    def __init__(self, place: Place, memory: int, deadline: float) -> None:
        self._place, self._memory, self._deadline = place, memory, deadline
        self.victim = Victim(place, memory)
        self.answers: collections.Counter[str] = collections.Counter()
        self.failed, self.peak, self.longest = 0, 0, 0.0

    def attack(self, sql: str) -> None:
        begin = time.monotonic()
        how = self.victim.ask(sql, self._deadline)
        self.answers[how] += 1
        problem = "the worker died" if how == "gone" else self._problem()
        if how in ("deadline", "gone") or self.victim.last or problem:
            try:
                self.victim.close()
            except subprocess.TimeoutExpired:
                problem = problem or "the worker stayed"
            self.longest = max(self.longest, time.monotonic() - begin)
            self.victim = Victim(self._place, self._memory)
        if problem:
            self.failed += 1
            print(json.dumps({"attack": sql[:200], "problem": problem}), flush=True)

    def _problem(self) -> str:
        resident = self.victim.resident()
        self.peak = max(self.peak, resident)
        if events := self._place.events():
            return f"files: {events}"
        if opened := self.victim.opened():
            return f"open: {opened}"
        return f"{resident} bytes resident" if resident > self._memory * 12 // 10 else ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--memory", type=int, default=1024, help="MiB of a worker")
    parser.add_argument("--deadline", type=float, default=5.0, help="seconds of a query")
    parser.add_argument("--every", type=int, default=1, help="only every n-th attack")
    options = parser.parse_args()
    memory, begin = options.memory << 20, time.monotonic()
    with tempfile.TemporaryDirectory() as folder, Place(Path(folder), operations(1000)) as place:
        run = _Run(place, memory, options.deadline)
        with Collection(place.root / "store", operations(100)) as collection:
            for sql in list(_attacks(place))[:: options.every]:
                run.attack(sql)
            run.victim.close()
            lost, rows = collection.appended - collection.stored(), collection.appended
    summary = {
        "answers": dict(run.answers),
        "failed": run.failed,
        "peak_bytes": run.peak,
        "limit_bytes": memory,
        "rows": rows,
        "lost": lost,
        "longest_s": round(run.longest, 2),
        "deadline_s": options.deadline,
        "seconds": round(time.monotonic() - begin, 1),
    }
    print(json.dumps(summary))
    return 1 if run.failed or lost else 0


if __name__ == "__main__":
    sys.exit(main())
