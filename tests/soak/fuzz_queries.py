"""Queries at random and mutated attacks, for minutes: ``python tests/soak/fuzz_queries.py [--minutes 5] [--seed 0]``.

Each goes through the gate (``query_grammar.check_gate`` says what must hold), and what the gate prints to a worker,
which must answer or be given up, stay within its memory, and open nothing. On stdout a summary in JSON; the first
query for which that does not hold is made small and raised.
"""

from __future__ import annotations

import argparse
import collections
import json
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "integration"))

from attack_support import Place, Victim
from hypothesis import HealthCheck, given, seed, settings
from query_grammar import check_gate, check_work, mutants, nests, queries
from query_helpers import operations

MEMORY = 256 << 20


class _Workers:
    """A worker, and the next one when it was given up or retired."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._victim = Victim(place, MEMORY)
        self.answers: collections.Counter[str] = collections.Counter()

    def run(self, sql: str) -> None:
        how = self._victim.ask(sql, 2.0)
        self.answers[how] += 1
        grown = self._victim.grown() if how != "gone" else 0
        opened = self._victim.opened() if how != "gone" else set()
        if how in ("deadline", "gone") or self._victim.last:
            self.close()
            self._victim = Victim(self._place, MEMORY)
        assert how != "gone"
        assert grown <= MEMORY * 12 // 10
        assert opened == set()
        assert self._place.events() == []

    def close(self) -> None:
        self._victim.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    end, number = time.monotonic() + options.minutes * 60, options.seed
    passed = asked = 0
    with tempfile.TemporaryDirectory() as folder, Place(Path(folder), operations(100)) as place:
        workers = _Workers(place)

        def attempt(sql: str) -> None:
            nonlocal passed, asked
            asked += 1
            check_work(sql)
            if (printed := check_gate(sql)) is not None:
                passed += 1
                workers.run(printed)

        often = settings(max_examples=100, deadline=None, database=None, suppress_health_check=list(HealthCheck))
        while time.monotonic() < end:
            for strategy in (queries(), mutants(), nests()):
                seed(number)(often(given(strategy)(attempt)))()
                number += 1
        workers.close()
    print(json.dumps({"queries": asked, "passed": passed, "answers": dict(workers.answers), "next_seed": number}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
