"""Rows of ``comm.progress`` and findings made by hand, and a watch over jobs that are made up, in a time of its own."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeVar

from fakes import at_once

from probing.daemon.arrow import batch_of, ipc_bytes
from probing.daemon.config import DiagnoseConfig
from probing.daemon.diagnose.watch import Clocks, JobWatch
from probing.diagnosis.case import Case
from probing.diagnosis.facts import Facts, Missing, NodeFacts, Rank, Thread
from probing.diagnosis.verdict import ERROR, Culprit, Finding, StackOf, Verdict

SECOND = 1_000_000_000
START = 1_700_000_000 * SECOND
T = TypeVar("T")
MAIN = Thread(1, "MainThread", True, "S", None, (), moving=False)

__all__ = ("MAIN", "SECOND", "START", "Job", "Scene", "T", "finding", "progress_rows", "verdict")


def verdict(name: str, group: str = "hang") -> Verdict:
    return Verdict(name, group, name, "", "", "", "", ())


def finding(
    name: str = "not_joined", *ranks: int, group: str = "hang", severity: str = ERROR, **fields: Any
) -> Finding:
    culprits = tuple(Culprit(rank, "n1", 100 + rank, "sleeps", "sleeping") for rank in ranks)
    stacks = [StackOf(rank, "n1", 100 + rank, "culprit", MAIN) for rank in ranks]
    stacks = [*stacks, StackOf(0, "n1", 100, "victim", MAIN)]
    own = {"confidence": 0.9, "sentence": f"{name} of {ranks}", "culprits": culprits, "stacks": tuple(stacks), **fields}
    return Finding(verdict(name, group), severity, **own)


def progress_rows(*rows: Mapping[str, Any]) -> bytes:
    """``comm.progress`` as the collector sends it."""
    default = {"node": "n1", "ts": START, "job": "j", "run": "r", "start_ns": 7, "calls": 0}
    return ipc_bytes(batch_of("comm.progress", [{**default, **row} for row in rows]))


def _utc(seconds: float) -> int:
    return START + round(seconds * SECOND)


@dataclass
class Job:
    """A job whose ranks call an operation each ``step`` s until ``stops``. ``ends``: by rank, (time, signal).

    ``finds`` returns what a rule finds in it at a time.
    """

    name: str = "j"
    run: str = "r"
    ranks: int = 2
    begins: float = 0.0
    first: float = 0.0
    step: float = 0.1
    stops: float = 1e9
    resumes: float = 1e9
    gap: float | None = None
    ends: dict[int, tuple[float, int | None]] = field(default_factory=dict)
    finds: Callable[[float, bool], Sequence[Finding]] = lambda _now, _deep: ()
    takes: float = 1.2
    stands: Callable[[float], Hashable] = lambda _: None
    """Where its ranks stand; None: that cannot be read."""
    seen_from: float = 0.0
    """Operations before are not in ``comm.progress``, as when the daemon starts then."""
    clock_set: Callable[[float], float] = lambda _: 0.0
    owner: int = 0
    stored: bool = True
    """Whether the store has them, as after a restart of the daemon."""

    def shake(self, now: float) -> int:
        """Times that were made UTC at another moment differ by some ns, or more when the clock was set."""
        return round(now * 1e9) % 17 + round(self.clock_set(now) * SECOND)

    def newest(self, now: float) -> float | None:
        moving = now if now < self.stops or now >= self.resumes else self.stops
        if moving < self.begins + self.first:
            return None
        return moving - (moving - self.begins - self.first) % self.step

    def _calls(self, newest: float | None) -> int:
        return 0 if newest is None else 1 + round((newest - max(self.begins + self.first, self.seen_from)) / self.step)

    def rows(self, now: float) -> Iterator[dict[str, Any]]:
        newest = self.newest(now)
        if newest is not None and newest < self.seen_from:
            newest = None
        for rank in range(self.ranks if now >= self.begins else 0):
            ended, signal = self.ends.get(rank, (1e9, None))
            yield {
                "ts": _utc(now),
                "job": self.name,
                "run": self.run,
                "pid": 100 + rank,
                "rank": rank,
                "world_size": self.ranks,
                "owner": self.owner,
                "comm": None if newest is None else "c",
                "calls": self._calls(newest),
                "last_call": None if newest is None else _utc(newest) + self.shake(now),
                "last_done": None,
                "longest_gap_ns": None if self.gap is None else round(self.gap * SECOND),
                "ended": _utc(ended) if ended <= now else None,
                "signal": signal if ended <= now else None,
            }


class _Rule:
    VERDICTS = (verdict("not_joined"), verdict("slow_rank", "slow"), verdict("rank_died", "death"))

    def __init__(self, scene: Scene) -> None:
        self._scene = scene

    def find(self, case: Case) -> Iterator[Finding]:
        yield from self._scene.found(case.facts)


class Scene:
    """``looks``: (time, job, deep) of each look; ``rows``: what was stored; ``hooked``: what hooks got.

    ``leading``: whether this node diagnoses the jobs; ``beside``: another one does;
    ``shared``: what the other nodes got.
    """

    def __init__(self, *jobs: Job, before: Sequence[Mapping[str, Any]] = (), at: float = 0.0, **config: Any) -> None:
        self.now = at
        self.jobs = list(jobs)
        self.before = list(before)
        self.looks: list[tuple[float, str, bool]] = []
        self.read: list[tuple[float, str]] = []
        self.compared: list[tuple[float, str]] = []
        self.rows: list[dict[str, Any]] = []
        self.hooked: list[Mapping[str, Any]] = []
        self.fails: dict[str, Exception] = {}
        self.leading = True
        self.beside = False
        self.missing: tuple[Missing, ...] = ()
        self.held: dict[tuple[str, str], bool] = {}
        self.shared: list[Mapping[str, Any]] = []
        clocks = Clocks(lambda: self.now, lambda: _utc(self.now))
        self.watch = JobWatch(
            "n1",
            DiagnoseConfig(**config),
            self,
            self,
            self.hooked.append,
            self,
            rules=(_Rule(self),),
            clocks=clocks,
            run=self.begin,
        )

    def run(self, until: float) -> Scene:
        while self.now < until:
            pause = self.watch.step()
            self.now = min(self.now + max(pause, 0.001), until)
        return self

    def begin(self, call: Callable[[], T], /) -> Future[T]:
        """Ends a look in the moment in which it begins, after the time that it takes."""
        return at_once(call)

    def hold(self, runs: Mapping[tuple[str, str], bool]) -> None:
        self.held = dict(runs)

    def leads(self, job: str, run: str, *, living: bool) -> bool:
        return self.leading

    def is_beside(self, job: str, run: str, *, living: bool) -> bool:
        return self.beside

    def share(self, row: Mapping[str, Any]) -> None:
        self.shared.append(row)

    def progress(self) -> bytes:
        self._fail("progress")
        return progress_rows(*(row for job in self.jobs for row in job.rows(self.now)))

    def findings(self) -> Sequence[Mapping[str, Any]]:
        self._fail("findings")
        return self.before

    def record(self, rows: Sequence[Mapping[str, Any]]) -> None:
        self._fail("record")
        self.rows += [dict(row) for row in rows]

    def facts(self, job: str, *, run: str, deep: bool, timeout: float) -> list[Facts]:
        assert timeout <= 5
        one = next(j for j in self.jobs if (j.name, j.run) == (job, run))
        self.looks.append((round(self.now, 3), job, deep))
        self._fail("facts")
        self.now += one.takes if deep else 0.1
        newest = one.newest(self.now) if one.stored else None
        node = NodeFacts("n1", _utc(self.now), advanced_ns=None if newest is None else _utc(newest))
        rank = Rank(0, "n1", 100, 7)
        return [Facts(job, one.run, one.ranks, 10.0, _utc(self.now), (node,), (rank,), missing=self.missing)]

    def standing(self, job: str, run: str, *, timeout: float) -> Hashable:
        assert timeout <= 5
        one = next(j for j in self.jobs if (j.name, j.run) == (job, run))
        self.compared.append((round(self.now, 3), job))
        return one.stands(self.now)

    def read_ahead(self, job: str, *, timeout: float) -> None:
        assert timeout <= 2
        self.read.append((round(self.now, 3), job))

    def found(self, facts: Facts) -> Sequence[Finding]:
        one = next(job for job in self.jobs if (job.name, job.run) == (facts.job, facts.run))
        return one.finds(self.now, self.looks[-1][2])

    def states(self) -> list[tuple[str, str, float]]:
        """(verdict, state, when it opened or closed, in s) of the stored rows."""
        return [
            (row["verdict"], row["state"], round(((row["closed"] or row["opened"]) - START) / SECOND, 3))
            for row in self.rows
        ]

    def _fail(self, where: str) -> None:
        if where in self.fails:
            raise self.fails[where]
