"""The corpus of diagnosis: runs cases of real jobs beside a daemon and checks its findings.

A case passes when ``diagnosis.findings``, with no client running, has the expected verdict with exactly the expected
culprits, and ``probingctl diagnose`` gives the same answer.
"""

from __future__ import annotations

import contextlib
import json
import sys
import threading
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from diagnosis_jobs import FAULTS, Ranks, folder_of_job, place
from e2e_support import Daemon, remove
from long import long
from waiting import until

__all__ = (
    "Case",
    "Corpus",
    "Outcome",
    "await_fault",
    "await_steps",
    "cases_of",
    "check",
    "corpus_beside",
    "fits",
    "observe",
    "problems",
    "selected",
    "start",
    "watching",
)

# The daemon has 15 s with W = 10; the machine that runs the tests may be slow.
PATIENCE_S = 60.0
SETTLES_S = 15.0
STEPS = 20
# Faults of cases that start together.
APART_S = 2.0
_FINDINGS = (
    "SELECT verdict, severity, state, confidence, sentence, ranks, victims, culprits, evidence, missing, stacks, "
    "epoch_ns(opened) AS opened_ns FROM diagnosis.findings WHERE job = $$JOB$$ AND severity <> 'note' ORDER BY ts"
)


@dataclass(frozen=True)
class Case:
    """A job with a fault, and the expected ``verdict``, ``culprits`` and, where it is certain, their ``activity``.

    ``words``: texts in the sentence or the evidence. ``also``: other correct verdicts about the same culprits.
    ``stacks``: roles of the stacks that the finding must have. ``joins``: the ranks make steps before the fault.
    ``noted``: ranks that note when the fault began, if not the culprits. ``truth``: how it is known who is at fault.
    ``sockets``: the fault waits until the daemon knows whose the sockets of all ranks are.
    ``advice``: what to do with the job, where it is certain. ``patience_s``: how long the start and the
    finding may take. ``alone``: no other case runs meanwhile.
    """

    name: str
    script: str
    ranks: int
    verdict: str
    culprits: frozenset[int]
    truth: str
    activity: str = ""
    words: tuple[str, ...] = ()
    also: tuple[str, ...] = ()
    place: str = ""
    beside: tuple[str, ...] = ()
    alone: bool = False
    stacks: frozenset[str] = frozenset({"culprit", "victim"})
    joins: bool = True
    noted: frozenset[int] = frozenset()
    sockets: bool = False
    advice: str = ""
    patience_s: float = PATIENCE_S

    @property
    def listed(self) -> str:
        return ",".join(str(rank) for rank in sorted(self.culprits))


@dataclass(frozen=True)
class Outcome:
    """``rows``: those of diagnosis.findings, oldest first; ``row``: the newest one that fits the case.

    ``answer`` and ``code``: those of ``diagnose``. ``seconds``: from the fault to the finding. ``shown``: for messages.
    """

    rows: list[dict[str, Any]]
    row: dict[str, Any] | None
    answer: dict[str, Any]
    code: int
    seconds: float | None
    shown: str


def watching(daemon: Daemon, stall_s: float = 2.0, **options: Mapping[str, object]) -> Daemon:
    """Configures a daemon to diagnose jobs often; ``options``: other tables of its configuration."""
    tables = {"diagnose": {"stall_s": stall_s, "review_s": 3}, **options}
    with daemon.config.open("a") as config:
        for name, values in tables.items():
            config.write(f"[{name}]\n" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in values.items()))
    return daemon


def cases_of(cases: Iterable[Case], in_gate: Collection[str]) -> pytest.MarkDecorator:
    """Runs a test for each case; those that are not ``in_gate`` are marked ``long``."""
    return pytest.mark.parametrize(
        "case", [pytest.param(case, id=case.name, marks=() if case.name in in_gate else long) for case in cases]
    )


def selected(cases: Iterable[Case], request: pytest.FixtureRequest) -> list[Case]:
    """Returns those of ``cases`` that this run tests."""
    asked = {item.callspec.params.get("case") for item in request.session.items if hasattr(item, "callspec")}
    return [case for case in cases if case in asked]


class Corpus:
    """Runs cases beside ``daemon``, ``at_once`` at a time; one that takes a CPU, or needs a free one, runs alone.

    ``keep``: names of cases whose ranks go on, in ``kept``. ``save``: a directory for the facts of cases that fail.
    ``together``: so many start, and get their faults one after the other when the last of them has made steps.
    """

    def __init__(
        self,
        daemon: Daemon,
        at_once: int = 1,
        keep: Iterable[str] = (),
        save: Path | None = None,
        together: int = 0,
    ) -> None:
        self.daemon = daemon
        self._together = threading.Barrier(together) if together else None
        self._save = save
        self.kept: dict[str, Ranks] = {}
        self._keep = frozenset(keep)
        self._keeping = contextlib.ExitStack()
        self._at_once = at_once
        self._free = threading.Semaphore(at_once)
        # Two cases that want all places would wait for each other.
        self._entering = threading.Lock()
        self._pool = ThreadPoolExecutor(at_once)
        self._runs: dict[str, Future[Outcome]] = {}

    def submit(self, cases: Iterable[Case]) -> None:
        """Starts to run ``cases``, in this order."""
        for case in cases:
            self._runs[case.name] = self._pool.submit(self._run, case)

    def outcome(self, case: Case) -> Outcome:
        """Returns the outcome of ``case`` once it has run; runs it if it was not submitted."""
        if case.name not in self._runs:
            self.submit([case])
        return self._runs[case.name].result()

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)
        self._keeping.close()

    def _run(self, case: Case) -> Outcome:
        with contextlib.ExitStack() as room:
            with self._entering:
                for _ in range(self._at_once if case.alone else 1):
                    room.enter_context(self._free)
            return self._run_job(case)

    def _run_job(self, case: Case) -> Outcome:
        with contextlib.ExitStack() as stack:
            ranks = start(case, self.daemon.name, stack)
            await_steps(self.daemon, case, ranks)
            if self._together is not None:
                time.sleep(APART_S * self._together.wait(PATIENCE_S))
            ranks.go()
            await_fault(case, ranks)
            outcome = observe(self.daemon, case, ranks)
            if self._save is not None and list(problems(case, outcome)):
                self._save.mkdir(exist_ok=True)
                self.daemon.ctl("diagnose", "--job", ranks.job, "--save", str(self._save / case.name), check=None)
            if case.name in self._keep:
                self.kept[case.name] = ranks
                self._keeping.push(stack.pop_all())
        return outcome


@contextlib.contextmanager
def corpus_beside(
    daemon: Daemon, cases: Iterable[Case], at_once: int, keep: Iterable[str] = (), **options: Mapping[str, object]
) -> Iterator[Corpus]:
    """Starts ``daemon`` with ``watching`` and runs ``cases`` beside it; removes it at the end."""
    corpus = Corpus(watching(daemon, **options).start(), at_once, keep)
    corpus.submit(cases)
    yield corpus
    corpus.close()
    remove(daemon)


def start(case: Case, node: str, stack: contextlib.ExitStack) -> Ranks:
    """Starts the job; ``stack`` ends it."""
    folder = stack.enter_context(folder_of_job())
    ranks = Ranks(node, folder, case.script, case.name, case.ranks)
    ranks.engine = case.script == "engines.py"
    stack.callback(ranks.wait)
    before = stack.enter_context(place(case.place, folder))
    stack.callback(ranks.kill)
    ranks.start(before)
    if case.beside:
        name, *words = case.beside
        ranks.run([sys.executable, str(FAULTS / name), *words, str(folder)])
    return ranks


def await_steps(daemon: Daemon, case: Case, ranks: Ranks) -> None:
    """Waits until the daemon has seen all ranks and their first steps."""
    known = f"SELECT count(DISTINCT rank) AS n FROM process.processes WHERE job = '{ranks.job}' AND role = 'trainer'"
    calls = f"SELECT count(*) AS n FROM comm.ops WHERE job = '{ranks.job}'"
    owners = f"SELECT count(DISTINCT rank) AS n FROM net.sockets WHERE job = '{ranks.job}' AND state = 'open'"

    def seen() -> bool:
        if daemon.rows(known)[0]["n"] < case.ranks:
            return False
        if case.sockets and daemon.rows(owners)[0]["n"] < case.ranks:
            return False
        return not case.joins or bool(daemon.rows(calls)[0]["n"] >= case.ranks * STEPS)

    until(seen, case.patience_s, what=lambda: f"the steps of {case.name}:\n{ranks.output()}", poll_s=0.3)


def await_fault(case: Case, ranks: Ranks) -> None:
    expected = case.noted or case.culprits
    until(lambda: ranks.faults().keys() >= expected, what=lambda: f"the fault of {case.name}:\n{ranks.output()}")


def observe(daemon: Daemon, case: Case, ranks: Ranks) -> Outcome:
    """Waits for the finding, then asks ``diagnose`` until both are right, at most SETTLES_S: each look knows more."""
    # Another daemon than that of the start names the job after its own node.
    job = ranks.job_at(daemon.name)
    deadline = time.monotonic() + case.patience_s
    settled = 0.0
    while True:
        time.sleep(0.3)
        rows = daemon.rows(_FINDINGS.replace("$$JOB$$", f"'{job}'"))
        fitting = [row for row in rows if fits(case, row)]
        late = time.monotonic() > deadline
        if not (late or any(row["state"] == "open" for row in fitting)):
            continue
        settled = settled or time.monotonic() + SETTLES_S
        outcome = _outcome(daemon, job, ranks, rows, fitting)
        if late or time.monotonic() > settled or not list(problems(case, outcome)):
            return outcome
        # A look takes CPU time of its own, and some cases are about CPUs.
        time.sleep(2)


def _outcome(
    daemon: Daemon, job: str, ranks: Ranks, rows: list[dict[str, Any]], fitting: list[dict[str, Any]]
) -> Outcome:
    asked = daemon.ctl("-f", "json", "diagnose", "--job", job, check=None)
    answer = json.loads(asked.stdout) if asked.stdout.startswith(("{", "[")) else {}
    began = max(ranks.faults().values(), default=0)
    seconds = (fitting[0]["opened_ns"] - began) / 1e9 if fitting else None
    shown = f"{asked.stdout[-4000:]}\n{asked.stderr[-1000:]}\n{ranks.output()}"
    return Outcome(rows, fitting[-1] if fitting else None, answer, asked.returncode, seconds, shown)


def fits(case: Case, row: dict[str, Any]) -> bool:
    """Whether a finding has the expected verdict and culprits."""
    return bool(row["verdict"] == case.verdict and row["ranks"] == case.listed)


def check(case: Case, outcome: Outcome) -> None:
    """Fails with all findings where the outcome is not the expected one."""
    wrong = list(problems(case, outcome))
    brief = "\n".join(f"{r['state']} {r['verdict']} {r['ranks']!r}: {r['sentence']}" for r in outcome.rows)
    assert not wrong, f"{case.name} ({case.truth}): {wrong}\nfindings:\n{brief}\ndiagnose: {outcome.shown}"


def problems(case: Case, outcome: Outcome) -> Iterable[str]:
    """Returns a text for each difference between ``outcome`` and what ``case`` expects."""
    row, answer = outcome.row, outcome.answer
    right = {case.verdict, *case.also}
    wrong = [r for r in outcome.rows if r["verdict"] not in right or not _ranks(r) <= case.culprits]
    yield from sorted({f"names {r['verdict']} {r['ranks']!r}" for r in wrong})
    if row is None:
        yield f"no finding {case.verdict} {case.listed!r}"
        return
    culprits = json.loads(row["culprits"])
    if case.activity and {c["activity"] for c in culprits} != {case.activity}:
        yield f"activities {[c['activity'] for c in culprits]}, not {case.activity}"
    text = " ".join([row["sentence"], row["evidence"], *(c["why"] for c in culprits)])
    yield from (f"no word {word!r}" for word in case.words if word not in text)
    roles = {stack["role"] for stack in json.loads(row["stacks"])}
    if case.stacks - roles:
        yield f"stacks of {sorted(roles)} only"
    if outcome.code != 3:
        yield f"diagnose ended with {outcome.code}"
    if case.advice and answer.get("advice", {}).get("action") != case.advice:
        yield f"advises {answer.get('advice')}, not {case.advice}"
    if answer and (answer["verdict"], {c["rank"] for c in answer["culprits"]}) != (case.verdict, case.culprits):
        yield f"diagnose says {answer['verdict']} {[c['rank'] for c in answer['culprits']]}"


def _ranks(row: dict[str, Any]) -> set[int]:
    return {int(rank) for rank in row["ranks"].split(",") if rank}
