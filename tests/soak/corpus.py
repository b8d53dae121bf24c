"""The corpus of diagnosis with times: ``python tests/soak/corpus.py [--rounds 10] [--stall-s 10] [CASE ...]``

``--late N``: N times with a daemon that restarts during the stall of five jobs, and with one that starts after it. Then
each case runs ``--rounds`` times, and the healthy jobs run for ``--healthy`` minutes. It prints a table for
docs/benchmarks.md: how often the verdict and the culprits were right, and the time from the fault to the finding; of
the daemon that starts late, the time from its start.
``--save DIRECTORY`` keeps the facts of each run that was not right, for `probingctl diagnose --facts`.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "e2e"))

from diagnosis_corpus import (
    Case,
    Corpus,
    Outcome,
    await_fault,
    await_steps,
    fits,
    observe,
    problems,
    start,
    watching,
)
from diagnosis_faults import DEATHS, DIVERGENCES, HANGS, LATE, MEMORY, SLOW
from diagnosis_healthy import HEALTHY, QUIET, Healthy, HealthyJobs, complaints
from e2e_support import Daemon, remove

# How many start together, so that no start of a job disturbs the diagnosis of another; slow cases need the CPUs.
ROOMS: tuple[tuple[Sequence[Case], int], ...] = (
    ((*HANGS, *DIVERGENCES), 4),
    ((*DEATHS, *MEMORY), 4),
    ([case for case in SLOW if not case.alone], 2),
    ([case for case in SLOW if case.alone], 1),
)
OPTIONS = {"logs": {"enabled": True}, "host": {"memory_interval_s": 1}}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("cases", nargs="*")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--stall-s", type=float, default=10.0)
    parser.add_argument("--late", type=int, default=0, help="rounds")
    parser.add_argument("--healthy", type=float, default=0.0, help="minutes")
    parser.add_argument("--save", type=Path)
    parser.add_argument("--log", type=Path, help="keep the log of the daemon here")
    asked = parser.parse_args()
    wrong = 0
    with tempfile.TemporaryDirectory(prefix="probingd-corpus-") as base:
        Path(base).chmod(0o755)
        print("| case | right | seconds to the finding: median, longest |\n|---|---|---|")
        # Without the other daemon, which would diagnose the same jobs.
        if asked.late:
            wrong += late(Path(base), asked.stall_s, asked.late)
        daemon = watching(Daemon(Path(base), "n1"), asked.stall_s, **OPTIONS).start()
        try:
            for cases, at_once in ROOMS if asked.rounds else ():
                chosen = [case for case in cases if not asked.cases or case.name in asked.cases]
                wrong += run(daemon, chosen, at_once, asked.rounds, asked.save)
            if asked.healthy:
                for which in (HEALTHY, QUIET):
                    wrong += healthy(daemon, asked.healthy * 60, 1.5 * asked.stall_s, which)
        finally:
            if asked.log:
                asked.log.write_text(daemon.log.read_text())
            remove(daemon)
    sys.exit(1 if wrong else 0)


def run(daemon: Daemon, cases: Sequence[Case], at_once: int, rounds: int, save: Path | None) -> int:
    """Runs each case ``rounds`` times and prints a line for it; returns how often it was wrong."""
    outcomes: dict[str, list[Outcome]] = {case.name: [] for case in cases}
    for number in range(rounds):
        for first in range(0, len(cases), at_once):
            batch = cases[first : first + at_once]
            corpus = Corpus(daemon, len(batch), save=save, together=len(batch))
            corpus.submit(batch)
            for case in batch:
                outcomes[case.name].append(corpus.outcome(case))
                show(case, outcomes[case.name][-1], number)
            corpus.close()
    wrong = 0
    for case in cases:
        right = [outcome for outcome in outcomes[case.name] if not list(problems(case, outcome))]
        row(case.name, [outcome.seconds for outcome in right if outcome.seconds is not None], len(right), rounds)
        wrong += rounds - len(right)
    return wrong


def row(name: str, seconds: Sequence[float], right: int, of: int) -> None:
    times = f"{median(seconds):.1f}, {max(seconds):.1f}" if seconds else "-"
    print(f"| {name} | {right} of {of} | {times} |", flush=True)


def late(base: Path, stall_s: float, rounds: int) -> int:
    """Restarts a daemon while the jobs of LATE stand still, then starts another one; returns how often it was wrong."""
    cases = [case for case in HANGS if case.name in LATE]
    after_fault: list[float] = []
    after_start: list[float] = []
    for number in range(rounds):
        with contextlib.ExitStack() as stack:
            daemon = watching(Daemon(base, f"restarted{number}"), stall_s, **OPTIONS).start()
            stack.callback(remove, daemon)
            jobs = [(case, start(case, daemon.name, stack)) for case in cases]
            for case, ranks in jobs:
                await_steps(daemon, case, ranks)
            for _, ranks in jobs:
                ranks.go()
            for case, ranks in jobs:
                await_fault(case, ranks)
            daemon.stop()
            daemon.start()
            for case, ranks in jobs:
                outcome = observe(daemon, case, ranks)
                show(case, outcome, number)
                after_fault += [outcome.seconds] if outcome.seconds and not list(problems(case, outcome)) else []
            daemon.stop()
            other = watching(Daemon(base, f"late{number}"), stall_s, **OPTIONS)
            stack.callback(remove, other)
            began = time.time_ns()
            other.start()
            for case, ranks in jobs:
                outcome = observe(other, case, ranks)
                show(case, outcome, number)
                opened = [found["opened_ns"] for found in outcome.rows if fits(case, found)]
                after_start += [(opened[0] - began) / 1e9] if opened and not list(problems(case, outcome)) else []
    of = rounds * len(cases)
    row("the daemon restarts during the stall", after_fault, len(after_fault), of)
    row("the daemon starts after the stall", after_start, len(after_start), of)
    return 2 * of - len(after_fault) - len(after_start)


def show(case: Case, outcome: Outcome, number: int) -> None:
    """Says on stderr what was not right."""
    listed = list(problems(case, outcome))
    print(f"{number} {case.name}: {listed or 'right'}, {outcome.seconds} s", file=sys.stderr)
    for row in outcome.rows:
        print(f"  {row['state']} {row['verdict']} {row['ranks']!r}: {row['sentence']}", file=sys.stderr)
    if listed:
        print(outcome.shown, file=sys.stderr)


def healthy(daemon: Daemon, seconds: float, long_s: float, which: Sequence[Healthy]) -> int:
    jobs = HealthyJobs(daemon, long_s, which)
    jobs.run(seconds)
    own = {ranks.job for _, ranks in jobs.started}
    found = [row for row in complaints(daemon) if row["job"] in own]
    print(f"\n{len(jobs.started)} healthy jobs in {seconds / 60:g} minutes: {len(found)} findings")
    for row in found:
        print(f"{row['job']}: {row['verdict']} {row['ranks']!r}: {row['sentence']}")
    return len(found)


if __name__ == "__main__":
    main()
