"""Scores `diagnose` on NVRx's pool of faults: ``python tests/soak/nvrx_pool.py .../nvidia-resiliency-ext [FAULT ...]``

The pool, the code that injects the faults and the expected decisions are read from a checkout of the repository of
nvidia-resiliency-ext. Each experiment that needs no GPU runs with as many ranks as there, of gloo on this machine,
beside a daemon. Its scores are those of score_attribution.py, by fixed rules in place of a model that judges:

* rank_primary: `diagnose` names the injected rank alone; "partial": among others, or as a victim.
* rank_any: it mentions the rank at all.
* fault_described: the sentence or the evidence has the word of the fault.
* restart_correct: `restart` or `restart_without` where NVRx expects RESTART, `do_not_restart` where it expects STOP.

``--save DIRECTORY`` keeps the facts of runs that name another rank. Exits with 1 unless each rank_primary is true.
"""

from __future__ import annotations

import argparse
import ast
import os
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "e2e"))

from corpus import OPTIONS
from diagnosis_corpus import Case, Corpus, Outcome, watching
from e2e_support import Daemon, remove

SKILLS = Path("src/nvidia_resiliency_ext/skills/nvrx-attr")
INJECT = Path("src/nvidia_resiliency_ext/shared_utils/inject_fault.py")
GPUS_PER_NODE = 4
# Starts of 32 ranks take two CPUs a minute or two.
PATIENCE_S = 240.0
_EXPERIMENT = re.compile(r"\b([A-Z_]+):(\d+):(\d+):(\d+)\b")
_NEEDS_GPU = ("GPU_SLEEP", "GPU_ERROR")
_HANGS = ("LOCK_GIL", "SIGSTOP")
# What tells the fault from others.
_DESCRIBED = {
    "SIGKILL": "SIGKILL",
    "SEGFAULT": "SIGSEGV",
    "OS_ABORT": "SIGABRT",
    "LOCK_GIL": "holds the GIL",
    "WORKLOAD_EXC": "InjectedException",
    "ASYNC_EXC": "InjectedException",
    "SIGTERM": "SIGTERM",
    "SIGINT": "SIGINT",
    "SIGSTOP": "is stopped",
    "SIGNAL_EXC": "InjectedException",
}
_COLUMNS = ("rank_primary", "rank_any", "fault_described", "restart_correct")


@dataclass(frozen=True)
class Experiment:
    """An entry of the pool: ``fault`` on ``rank`` of a job on ``nodes`` nodes, after ``iteration`` steps."""

    fault: str
    rank: int
    iteration: int
    nodes: int

    @property
    def name(self) -> str:
        return f"{self.fault}:{self.rank}:{self.iteration}:{self.nodes}"

    @property
    def case(self) -> Case:
        verdict = "not_joined" if self.fault in _HANGS else "rank_died"
        return Case(
            self.name,
            "injected.py",
            self.nodes * GPUS_PER_NODE,
            verdict,
            frozenset({self.rank}),
            "NVRx injects it",
            words=(_DESCRIBED[self.fault],),
            stacks=frozenset(),
            patience_s=PATIENCE_S,
        )


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("repository", type=Path)
    parser.add_argument("faults", nargs="*")
    parser.add_argument("--stall-s", type=float, default=10.0)
    parser.add_argument("--save", type=Path)
    asked = parser.parse_intermixed_args()
    expected = decisions(asked.repository)
    pool = read_pool(asked.repository)
    left_out = Counter(one.fault for one in pool if one.fault in _NEEDS_GPU)
    chosen = [one for one in pool if one.fault not in _NEEDS_GPU and (not asked.faults or one.fault in asked.faults)]
    os.environ["NVRX_INJECT_FAULT"] = str((asked.repository / INJECT).resolve())
    print(f"| fault:rank:iteration:nodes | ranks | {' | '.join(_COLUMNS)} | advice, expected | seconds |")
    print("|" + "---|" * (len(_COLUMNS) + 4))
    scores: list[dict[str, str]] = []
    with tempfile.TemporaryDirectory(prefix="probingd-nvrx-") as base:
        Path(base).chmod(0o755)
        daemon = watching(Daemon(Path(base), "n1"), asked.stall_s, **OPTIONS).start()
        try:
            scores += [run(daemon, one, expected[one.fault], asked.save) for one in chosen]
        finally:
            remove(daemon)
    for column in _COLUMNS:
        print(f"{column}: {sum(score[column] == 'true' for score in scores)} of {len(scores)}", end="; ")
    print(f"left out, for want of a GPU: {', '.join(f'{count} {fault}' for fault, count in left_out.items())}")
    return 0 if scores and all(score["rank_primary"] == "true" for score in scores) else 1


def read_pool(repository: Path) -> list[Experiment]:
    """Returns the default pool, the first block of the skill's page that has experiments."""
    page = (repository / SKILLS / "fault-injection-loop" / "SKILL.md").read_text()
    for block in page.split("```"):
        if found := _EXPERIMENT.findall(block):
            return [Experiment(fault, int(rank), int(step), int(nodes)) for fault, rank, step, nodes in found]
    raise SystemExit("the page of the skill has no pool")


def decisions(repository: Path) -> Mapping[str, str]:
    """Returns by fault the expected decision, RESTART or STOP, from the table of the script that scores."""
    tree = ast.parse((repository / SKILLS / "scripts" / "score_attribution.py").read_text())
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "_RESTART_TABLE":
            table = ast.literal_eval(node.value)
            return {fault: decision.split()[0] for fault, (decision, _) in table.items()}
    raise SystemExit("the script has no table of decisions")


def run(daemon: Daemon, one: Experiment, decision: str, save: Path | None) -> dict[str, str]:
    """Runs an experiment, prints its line, and returns its scores."""
    corpus = Corpus(daemon, save=save)
    outcome = corpus.outcome(one.case)
    corpus.close()
    score = scored(one, outcome.answer, decision)
    action = outcome.answer.get("advice", {}).get("action", "none")
    seconds = "-" if outcome.seconds is None else f"{outcome.seconds:.1f}"
    cells = [one.name, str(one.nodes * GPUS_PER_NODE), *(score[c] for c in _COLUMNS), f"{action}, {decision}", seconds]
    print(f"| {' | '.join(cells)} |", flush=True)
    if set(score.values()) != {"true"}:
        explain(outcome)
    return score


def scored(one: Experiment, answer: Mapping[str, Any], decision: str) -> dict[str, str]:
    """Returns the scores of ``answer``, the JSON of `diagnose`, as score_attribution.py has them."""
    named: Sequence[int] = [culprit["rank"] for culprit in answer.get("culprits", ())]
    victim = one.rank in answer.get("victims", ())
    primary = "true" if named == [one.rank] else "partial" if one.rank in named or victim else "false"
    text = " ".join([answer.get("sentence", ""), *answer.get("evidence", ())])
    action = answer.get("advice", {}).get("action", "")
    right = ("restart", "restart_without") if decision == "RESTART" else ("do_not_restart",)
    return {
        "rank_primary": primary,
        "rank_any": str(primary != "false").lower(),
        "fault_described": str(_DESCRIBED[one.fault] in text).lower(),
        "restart_correct": str(action in right).lower(),
    }


def explain(outcome: Outcome) -> None:
    """Says on stderr what was found."""
    for row in outcome.rows:
        print(f"  {row['state']} {row['verdict']} {row['ranks']!r}: {row['sentence']}", file=sys.stderr)
    for line in outcome.answer.get("evidence", ()):
        print(f"    {line}", file=sys.stderr)
    print(f"    {outcome.answer.get('advice')}\n{outcome.shown[-2000:]}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
