"""Watches jobs: checks each second whether they advance, diagnoses jobs that do not, and stores the findings.

A job is diagnosed when it stalls, when a rank fails, and now and then while it advances: three jobs at a time, each for
a few seconds at most. Jobs that are slow to read come last, so that no job waits for another user's job. One node of a
job diagnoses the job, and gives its findings to the other nodes.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from probing.api.errors import NotFound, ProbingError
from probing.api.text import escape, plural, utc_second
from probing.daemon.clock import until_next
from probing.daemon.config import DiagnoseConfig
from probing.daemon.diagnose.coordination.coordinator import Coordinator
from probing.daemon.diagnose.coordination.job_facts import JobFacts
from probing.daemon.diagnose.findings_store import FindingsStore, Outbox
from probing.daemon.diagnose.gate import JobNow, jobs_of
from probing.daemon.diagnose.lifecycle import JobFindings, LookResult
from probing.daemon.diagnose.problems import Problems
from probing.daemon.diagnose.schedule import Look, Schedule
from probing.daemon.fairness import Turns
from probing.daemon.source_state import SourceState, first_of
from probing.diagnosis.facts import Facts
from probing.diagnosis.ladder import RULES, Rule, diagnose

__all__ = ("Clocks", "JobWatch", "in_thread")

POLL_S = 1.0
START_POLL_S = 0.2
GATHER_S = 5.0
READ_AHEAD_S = 2.0
MAX_JOBS = 64
# The maximum number of concurrent looks. A look takes a second or more, and mostly waits.
MAX_LOOKS = 3
# A job that appears within this time after the start, s, counts as older than the watch: it may have stalled before.
START_S = 5.0
# A job counts as ended after this many consecutive polls without the job. One poll is not enough, because a new
# collector knows no processes at first.
MAX_ABSENT = 30
RESTORE_TRIES = 4
# The maximum number of rows of other nodes that wait for the next poll.
MAX_TAKEN = 256
# The columns that are kept of a closed finding. They show that its hook has started.
_NAMES = ("finding_id", "found_by", "verdict")
# The maximum number of owners whose jobs ``status`` counts separately.
_MOST_OWNERS = 3
_log = logging.getLogger(__name__)
_Key = tuple[str, str]
_T = TypeVar("_T")


def in_thread(call: Callable[[], _T], /) -> Future[_T]:
    """Runs ``call`` in a daemon thread, which does not keep the process alive. Returns the future of its result."""
    outcome: Future[_T] = Future()

    def run() -> None:
        try:
            outcome.set_result(call())
        except BaseException as e:
            outcome.set_exception(e)

    threading.Thread(target=run, name="look", daemon=True).start()
    return outcome


@dataclass(frozen=True, slots=True)
class Clocks:
    """The clocks of the watch. ``mono``: s; ``utc``: ns."""

    mono: Callable[[], float] = time.monotonic
    utc: Callable[[], int] = time.time_ns


@dataclass(slots=True)
class _Watched:
    """A watched run. ``since_ns``: when the watch first saw the run, UTC ns. ``absent``: the number of consecutive
    polls without the job. ``standing``: where its ranks stood at the last look at a stall; None: not read."""

    schedule: Schedule
    findings: JobFindings
    since_ns: int
    absent: int = 0
    standing: Hashable = None


@dataclass(frozen=True, slots=True, eq=False)
class _Looking:
    """A look in progress. ``facts`` are gathered in another thread; None if no rank has moved."""

    one: _Watched
    look: Look
    deep: bool
    began: float
    facts: Future[list[Facts] | None]


class JobWatch:
    """Watches the jobs of this node. ``step`` does the due work; ``start`` calls it in a thread until ``stop``.
    ``hook`` gets the rows of new findings and must not block. ``state`` and ``take`` are thread-safe."""

    def __init__(
        self,
        node: str,
        config: DiagnoseConfig,
        store: FindingsStore,
        jobs: JobFacts,
        hook: Callable[[Mapping[str, Any]], None],
        cluster: Coordinator,
        *,
        rules: Sequence[Rule] = RULES,
        clocks: Clocks = Clocks(),
        run: Callable[[Callable[[], Any]], Future[Any]] = in_thread,
    ) -> None:
        self._node = node
        self._config = config
        self._store = store
        self._jobs = jobs
        self._cluster = cluster
        self._rules = rules
        self._groups = {verdict.id: verdict.group for rule in rules for verdict in rule.VERDICTS}
        self._clocks = clocks
        self._run_beside = run
        self._looking: list[_Looking] = []
        self._turns: Turns[int | None] = Turns()
        self._watched: dict[_Key, _Watched] = {}
        # The number of living jobs that are not watched, by owner.
        self._left_out: Counter[int | None] = Counter()
        self._started: float | None = None
        self._tries = RESTORE_TRIES
        # Rows of findings that an earlier daemon stored, for jobs that this daemon has not seen yet.
        self._restored: dict[_Key, list[Mapping[str, Any]]] = {}
        # The columns _NAMES of restored findings whose jobs were not seen in the first seconds. The hooks of these
        # findings have started, so they must not start again.
        self._closed: dict[_Key, list[Mapping[str, Any]]] = {}
        self._taken: deque[Mapping[str, Any]] = deque(maxlen=MAX_TAKEN)
        self._problems = Problems(clocks.utc)
        self._unread_jobs = Problems(clocks.utc)
        self._outbox = Outbox(node, store, hook, cluster.share, self._problems)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="diagnose", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(GATHER_S)

    def state(self) -> SourceState:
        """Returns the row of the watch in ``status``."""
        watched = list(self._watched.values())
        found = sum(one.findings.open for one in watched)
        problems = [*self._problems, *_not_looked_at(self._unread_jobs)]
        if self._left_out:
            whose = ", ".join(f"{count} of uid {owner}" for owner, count in self._left_out.most_common(_MOST_OWNERS))
            problems.append(f"{self._left_out.total()} jobs are not watched, {whose}: more than {MAX_JOBS} run")
        detail = f"{plural(len(watched), 'job')}, {plural(found, 'open finding')}"
        return SourceState(
            "diagnose",
            "degraded" if problems else "running",
            first_of(problems),
            self._outbox.stored,
            self._outbox.lost,
            detail,
        )

    def watches(self, job: str, run: str) -> bool:
        """Returns whether ranks of this run are, or lately were, on this node."""
        return (job, run) in self._watched

    def owner_of(self, job: str, run: str) -> Hashable:
        """Returns the uid of the user to whom a run belongs; if the uid is unknown, the name of the job."""
        one = self._watched.get((job, run))
        return job if one is None or one.schedule.job.owner is None else one.schedule.job.owner

    def take(self, row: Mapping[str, Any]) -> None:
        """Stores a row of ``diagnosis.findings`` from the node that diagnoses the job. If this node has to go on with
        the diagnosis, it does not start the hook for this finding again."""
        self._taken.append(row)

    def step(self) -> float:
        """Polls, ends looks, and begins the look that is due. Returns the time until the next step can be due, s."""
        with self._problems.noted("progress of jobs"):
            jobs = jobs_of(self._store.progress())
            self._restore()
            self._poll(jobs)
        self._take()
        self._end_looks()
        now = self._clocks.mono()
        due = self._due(now) if len(self._looking) < MAX_LOOKS else None
        pause = START_POLL_S if self._is_early(now) else POLL_S
        if due is None or due[0] > now:
            return pause if due is None else min(pause, due[0] - now)
        self._begin_look(*due[1:])
        self._end_looks()
        return 0.0

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                pause = self.step()
            except Exception:
                _log.exception("the watch of jobs failed")
                pause = POLL_S
            pause = min(pause, until_next(POLL_S))
            if self._looking and pause:
                wait([one.facts for one in self._looking], pause, FIRST_COMPLETED)
            else:
                self._stop.wait(pause)

    def _restore(self) -> None:
        """Reads the findings of an earlier daemon once, so that hooks do not get them again. Raises ProbingError."""
        if not self._tries:
            return
        try:
            rows = self._store.findings()
        except ProbingError:
            self._tries -= 1
            raise
        self._tries = 0
        for row in rows:
            self._restored.setdefault((str(row["job"]), str(row["run"])), []).append(row)

    def _poll(self, jobs: Iterable[JobNow]) -> None:
        now, utc = self._clocks.mono(), self._clocks.utc()
        if self._started is None:
            self._started = now
        found = {job.key: job for job in jobs}
        for key, job in found.items():
            one = self._watched.get(key)
            if one is not None:
                one.absent = 0
                if one.schedule.update(job, now) and self._leads(one):
                    self._outbox.put(one.findings.advanced(utc))
            elif (job.living or self._died_unseen(job, now)) and self._make_room(job, utc):
                self._watched[key] = self._new(job, now)
        for key, one in list(self._watched.items()):
            one.absent += key not in found
            if one.absent >= MAX_ABSENT:
                self._drop(key, utc)
            elif one.schedule.over and self._leads(one):
                self._outbox.put(one.findings.ended(utc))
        self._cluster.hold({key: one.schedule.job.living > 0 for key, one in self._watched.items()})
        left_out = [job.owner for key, job in found.items() if job.living and key not in self._watched]
        self._left_out = Counter(left_out)
        if now > self._started + 2 * START_S:
            # The jobs that are left in ``_restored`` ended while no daemon ran, or are found late.
            for key, rows in list(self._restored.items()):
                self._outbox.put(self._findings_of(key).ended(utc))
                self._closed[key] = [{name: row.get(name) for name in _NAMES} | {"state": "closed"} for row in rows]

    def _is_early(self, now: float) -> bool:
        """Returns whether the watch is in its first seconds."""
        return self._started is None or now <= self._started + START_S

    def _died_unseen(self, job: JobNow, now: float) -> bool:
        """Returns whether ranks failed shortly before the watch began, or began again, while no watch followed
        the job.
        """
        return job.failed > 0 and self._is_early(now) and job.key not in self._restored

    def _make_room(self, job: JobNow, utc: int) -> bool:
        """Returns whether ``job`` can be watched. If MAX_JOBS jobs are watched already, one of them is dropped for it:
        preferably a job that is over; else a single process that calls no collective, if ``job`` is not such a process;
        else a job of the owner with the most jobs, preferably the newest without open findings. The last is done only
        if this owner still has at least as many jobs as the owner of ``job`` afterwards.
        """
        if len(self._watched) < MAX_JOBS:
            return True
        owners = Counter(one.schedule.job.owner for one in self._watched.values())
        most = owners.most_common(1)[0][0]
        # Jobs of the owner with the most jobs come first.
        watched = sorted(self._watched.items(), key=lambda item: item[1].schedule.job.owner != most)
        dropped = [key for key, one in watched if one.schedule.over]
        dropped = dropped or [key for key, one in watched if one.schedule.job.alone and not job.alone]
        if not dropped and owners[job.owner] + 1 < owners[most]:
            of_most = [(key, one) for key, one in watched if one.schedule.job.owner == most]
            dropped = [key for key, one in of_most if not one.findings.open][-1:] or [of_most[-1][0]]
        for key in dropped[:1]:
            self._drop(key, utc)
        return len(self._watched) < MAX_JOBS

    def _drop(self, key: _Key, utc: int) -> None:
        one = self._watched.pop(key)
        if self._leads(one):
            self._outbox.put(one.findings.ended(utc))
        self._unread_jobs.forget(_about(key[0]))

    def _new(self, job: JobNow, now: float) -> _Watched:
        stall_s, review_s = self._config.stall_s, self._config.review_s
        schedule = Schedule(
            job,
            now,
            stall_s=stall_s,
            review_s=review_s,
            late=self._is_early(now),
            phase_limits=self._config.phase_limits,
        )
        return _Watched(schedule, self._findings_of(job.key), self._clocks.utc())

    def _findings_of(self, key: _Key) -> JobFindings:
        """Returns the findings of a job, including those of an earlier daemon."""
        findings = JobFindings(*key, self._node)
        for row in (*self._restored.pop(key, ()), *self._closed.pop(key, ())):
            findings.restore(row, self._groups.get(str(row["verdict"]), ""))
        return findings

    def _due(self, now: float) -> tuple[float, _Watched, Look] | None:
        begun = [id(looking.one) for looking in self._looking]
        looking = Counter(looking.one.schedule.job.owner for looking in self._looking)
        # If several owners have jobs, one owner gets at most MAX_LOOKS - 1 of the concurrent looks.
        shared = len({one.schedule.job.owner for one in self._watched.values()}) > 1
        full = {owner for owner, count in looking.items() if shared and count >= MAX_LOOKS - 1}
        waiting = [one for one in self._watched.values() if id(one) not in begun and one.schedule.job.owner not in full]
        every = [(*due, one) for one in waiting if (due := one.schedule.due()) is not None]
        looks = [look for look in every if look[0] > now or self._leads(look[2])]
        if not looks:
            return None

        def order(look: tuple[float, Look, _Watched]) -> tuple[bool, bool, int, bool, bool, float]:
            """Returns the sort key of a look. Looks that are due come first. Among them reviews come last; then owners
            take turns; then slow jobs come last; then first looks come before later looks."""
            at, what, one = look
            if at > now:
                return True, False, 0, False, False, at
            schedule = one.schedule
            return (
                False,
                what.why == "review",
                self._turns.of(schedule.job.owner),
                schedule.slow,
                schedule.looked_at,
                at,
            )

        at, look, one = min(looks, key=order)
        return at, one, look

    def _begin_look(self, one: _Watched, look: Look) -> None:
        began = self._clocks.mono()
        self._turns.took(one.schedule.job.owner)
        job, findings = one.schedule.job, one.findings
        deep = look.deep or findings.needs_deep or findings.doubtful
        notes, may_compare = one.schedule.notes_standing(look), one.schedule.may_compare(look, began)

        def gather() -> list[Facts] | None:
            if notes:
                before, one.standing = one.standing, self._jobs.standing(job.job, job.run, timeout=GATHER_S)
                if may_compare and before is not None and one.standing == before:
                    return None
            return self._jobs.facts(job.job, run=job.run, deep=deep, timeout=GATHER_S)

        self._looking.append(_Looking(one, look, deep, began, self._run_beside(gather)))

    def _end_looks(self) -> None:
        """Judges the facts of the looks that have ended, and stores their findings."""
        ended = [looking for looking in self._looking if looking.facts.done()]
        self._looking = [looking for looking in self._looking if looking not in ended]
        for looking in ended:
            self._end_look(looking)
        self._outbox.flush()

    def _end_look(self, looking: _Looking) -> None:
        one, deep = looking.one, looking.deep
        job, findings = one.schedule.job, one.findings
        if self._watched.get(job.key) is not one:
            return
        # NotFound: a job that has just ended is perhaps no longer known.
        ripens_ns: int | None = None
        compared = False
        with self._unread_jobs.noted(_about(job.job)), suppress(NotFound):
            gathered = looking.facts.result()
            compared = gathered is None
            for facts in gathered or ():
                if facts.run == job.run:
                    ripens_ns = self._judge(one, deep, facts)
            if findings.doubtful and not deep:
                # The look that confirms the finding compares the processes with their present conditions.
                self._run_beside(partial(self._jobs.read_ahead, job.job, timeout=READ_AHEAD_S))
        now = self._clocks.mono()
        took = now - looking.began
        one.schedule.looked(
            looking.look,
            now,
            took,
            doubtful=findings.doubtful,
            found=findings.open > 0,
            explained=findings.explained,
            settled=findings.settled,
            ripens_s=None if ripens_ns is None else ripens_ns / 1e9,
            compared=compared,
        )

    def _judge(self, one: _Watched, deep: bool, facts: Facts) -> int | None:
        """Runs the rules and queues their findings in the outbox. Returns ``Diagnosis.ripens_ns``."""
        schedule = one.schedule
        schedule.known_to_advance(max((node.advanced_ns or 0 for node in facts.nodes), default=0) or None)
        job = schedule.job
        runs = [other for other in self._watched.values() if other.schedule.job.job == job.job]
        later = max((other.since_ns for other in runs if other.schedule.job.living), default=None)
        diagnosis = diagnose(facts, self._rules, later_run_ns=later)
        stalled = schedule.stalled and bool(job.living)
        unread = any(missing.kind in ("history", "rule") for missing in diagnosis.missing)
        beside = self._cluster.is_beside(job.job, job.run, living=job.living > 0)
        silent = frozenset(missing.node for missing in diagnosis.missing if missing.kind == "node" and missing.node)
        look = LookResult(diagnosis.findings, stalled, deep, self._clocks.utc(), unread, beside, silent)
        self._outbox.put(one.findings.follow(look))
        return diagnosis.ripens_ns

    def _leads(self, one: _Watched) -> bool:
        job = one.schedule.job
        return self._cluster.leads(job.job, job.run, living=job.living > 0)

    def _take(self) -> None:
        while self._taken:
            row = self._taken.popleft()
            key = str(row["job"]), str(row["run"])
            one, group = self._watched.get(key), self._groups.get(str(row["verdict"]), "")
            if one is not None and one.findings.restore(row, group):
                self._outbox.keep(row)


def _not_looked_at(jobs: Problems) -> list[str]:
    """Returns one text for all jobs whose last looks failed: a busy node may have many such jobs."""
    failed = jobs.failed()
    if not failed:
        return []
    what = f"{failed[0].what} was" if len(failed) == 1 else f"{len(failed)} jobs were"
    since = utc_second(failed[0].since_ns)
    return [f"{what} not looked at since {since}: {failed[0].why}"]


def _about(job: str) -> str:
    return f"job {escape(job)}"
