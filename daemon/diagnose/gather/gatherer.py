"""Gathers the facts of jobs on this node: one snapshot of the tables, live tables, stacks and conditions."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from types import MappingProxyType

from probing.api.errors import NotFound, ProbingError, QueryTimeout
from probing.api.text import pause_text
from probing.daemon.diagnose.gather import hardware
from probing.daemon.diagnose.gather.assembly import Gathered, facts_of_run
from probing.daemon.diagnose.gather.conditions import (
    EarlierReadings,
    conditions_of,
    idle_cpus_of,
    read_conditions,
)
from probing.daemon.diagnose.gather.history import History, histories
from probing.daemon.diagnose.gather.processes import JobProcess, Key, known_processes, with_events
from probing.daemon.diagnose.gather.readings import ReadingResult, Readings, TimeOuts
from probing.daemon.diagnose.gather.stacks import lines_of, threads_of_processes
from probing.daemon.diagnose.gather.statements import DAY_NS, SECOND_NS, Window, events, failed_jobs, statements
from probing.daemon.diagnose.gather.tables import Collector, Row, Rows, live_rows, query_rows, seconds_left
from probing.daemon.query.engine import Engine
from probing.diagnosis.facts import Condition, Facts, Missing, NodeFacts, Thread

__all__ = ("Gatherer",)

_LIVE = ("process.processes", "comm.progress", "comm.inflight")
_DEEP = ("process.envs", "net.sockets")
_MAX_JOBS = 64
_PARALLEL = 4
# Jobs that failed within this time are listed with the jobs that run. This time also limits the span over which the
# last operations are read.
_LATELY_NS = 600 * SECOND_NS
# For a job that advances: samples within this time are compared with older samples.
_RECENT_NS = 30 * SECOND_NS
_LEAST_SPAN_NS = 20 * SECOND_NS


@dataclass(frozen=True, slots=True)
class _Request:
    """The values that all jobs of a request share. ``deadline``: time.monotonic(); ``taken_ns``: UTC; ``live`` and
    ``devices``: rows by table."""

    run: str
    deep: bool
    deadline: float
    taken_ns: int
    live: Rows
    devices: Rows
    missing: Sequence[Missing]


class Gatherer:
    """Gathers the facts of jobs on this node. Thread-safe. ``stall_s``: a job counts as stalled after this time without
    an operation, s. ``phase_limits``: how long each phase that a label can name may last, s. ``absences`` returns why
    ranks of a job do not run, as the launchers of its group report it.
    """

    def __init__(
        self,
        node: str,
        engine: Engine,
        collector: Collector,
        *,
        stall_s: float = 10.0,
        phase_limits: Mapping[str, float] = MappingProxyType({}),
        now_ns: Callable[[], int] = time.time_ns,
        absences: Callable[[str], Sequence[Missing]] = lambda _: (),
    ) -> None:
        self._node = node
        self._engine = engine
        self._collector = collector
        self._stall_s = stall_s
        self._phase_limits = phase_limits
        self._now_ns = now_ns
        self._absences = absences
        self._earlier = EarlierReadings()
        self._time_outs = TimeOuts(collector)

    def read_ahead(self, job: str, *, timeout: float) -> None:
        """Reads the conditions of a job's processes, so that facts of the next 90 s show what changed since now.

        ``timeout`` in seconds. Raises ProbingError.
        """
        self._earlier.keep(job, read_conditions(self._collector, job, timeout))

    def standing(self, job: str, *, timeout: float) -> Hashable:
        """Returns where the processes of a job stand: their operations in flight, and the Python lines of the threads
        that train. This call costs a tenth of a call of ``facts``. None if any of this cannot be read.

        ``timeout`` in seconds.
        """
        deadline = time.monotonic() + timeout
        live, missing = live_rows(self._collector, ("comm.inflight",), deadline)
        try:
            stacks, failures = self._collector.stacks([], job, seconds_left(deadline))
            lines = lines_of(stacks)
        except (ProbingError, KeyError, TypeError, ValueError):
            return None
        if missing or failures:
            return None
        waits = [row for row in live["comm.inflight"] if row["job"] == job]
        return frozenset((*Key.of(row), row["comm"], row["seq"], row["op"]) for row in waits), lines

    def facts(self, job: str = "", *, run: str = "", deep: bool = True, timeout: float) -> list[Facts]:
        """Returns the facts of each run of ``job``; without ``job``, of all jobs that run or failed lately.

        ``run``: only this run. ``deep`` adds stacks, conditions, logs and ended runs; it takes about a second.
        ``timeout`` in seconds. Facts that cannot be read are listed in ``missing``. Raises NotFound for an unknown job,
        QueryTimeout if the list of jobs cannot be read.
        """
        deadline = time.monotonic() + timeout
        # The time is taken before the facts are read, which takes seconds on a busy machine. With a later time, a job
        # that goes on would seem to have stopped.
        taken_ns = self._now_ns()
        live, missing = live_rows(self._collector, (*_LIVE, *(_DEEP if deep else ())), deadline)
        devices, lacking = live_rows(self._collector, hardware.LIVE, deadline)
        request = _Request(run, deep, deadline, taken_ns, live, devices, [*missing, *lacking])
        if job:
            return self._job(job, request)

        names, unlisted = self._jobs(live, deadline)
        unread = [gap for gap in missing if "process.processes" not in live] + unlisted
        if unread and not names:
            raise QueryTimeout(f"the list of jobs cannot be read: {unread[0].text}")
        request = replace(request, missing=(*request.missing, *unlisted))

        def of_one(name: str) -> list[Facts]:
            # NotFound: the job has ended by now, or only its launcher was seen.
            with suppress(NotFound):
                try:
                    return self._job(name, request)
                except QueryTimeout as e:
                    gaps = (*request.missing, Missing("history", e.message))
                    here = (NodeFacts(self._node, taken_ns),)
                    return [Facts(name, "", None, self._stall_s, taken_ns, here, (), missing=gaps)]
            return []

        # Gathering a job's facts is mostly waiting between the two readings of its processes, so several jobs are
        # gathered in parallel.
        with ThreadPoolExecutor(_PARALLEL, thread_name_prefix="facts") as pool:
            return [one for found in pool.map(of_one, names) for one in found]

    def hardware(self, *, timeout: float) -> Facts:
        """Returns the hardware of this node, in facts without a job and without ranks. ``timeout`` in seconds."""
        deadline, now = time.monotonic() + timeout, self._now_ns()
        devices, missing = live_rows(self._collector, hardware.LIVE, deadline)
        rows, lacking = query_rows(self._engine, hardware.hardware_statements("", now), deadline)
        parts = hardware.hardware_of(rows, devices, {})
        node = NodeFacts(self._node, now, self._watched(deadline)[0], hardware=parts)
        return Facts("", "", None, self._stall_s, now, (node,), (), missing=(*missing, *lacking))

    def _jobs(self, live: Rows, deadline: float) -> tuple[list[str], list[Missing]]:
        """Returns the jobs that run or failed lately; and missing facts if the failed jobs could not be read."""
        running = [row["job"] for row in live.get("process.processes", ()) if row["role"] == "trainer" and row["job"]]
        asked = {"failed jobs": failed_jobs(self._now_ns() - _LATELY_NS)}
        rows, missing = query_rows(self._engine, asked, deadline)
        failed = [row["job"] for row in rows.get("failed jobs", ())]
        return list(dict.fromkeys([*running, *failed]))[:_MAX_JOBS], missing

    def _job(self, job: str, request: _Request) -> list[Facts]:
        run, deadline = request.run, request.deadline
        live = {name: [row for row in rows if row["job"] == job] for name, rows in request.live.items()}
        known = known_processes(live.get("process.processes", ()), job, self._now_ns())
        alive = any(one.alive for one in known.values())
        # The readings are made while the statements run.
        readings = Readings(self._collector, job, _suspects(known, live), deadline) if request.deep and alive else None
        until = self._now_ns()
        if not any(one.role == "trainer" and one.alive and run in ("", one.run) for one in known.values()):
            rows, missing = query_rows(self._engine, {"events": events(job, until - DAY_NS)}, deadline)
            known = with_events(known, rows.get("events", ()), live.get("comm.progress", ()))
            until = min(max((_end(one) for one in known.values()), default=until) + SECOND_NS, until)
            if not known and (missing or "process.processes" not in request.live):
                reason = [*missing, *request.missing][0].text
                raise QueryTimeout(f"the processes of job {job!r} cannot be read: {reason}")
        if not known:
            raise NotFound(f"no job {job!r} is known", hint="`probingctl ps` lists jobs and processes")
        window = self._window(live, until)
        trainers = [one for one in known.values() if one.role == "trainer"]
        asked = statements(job, window, [one.key.pid for one in trainers], _leaders(trainers), deep=request.deep)
        rows, missing = query_rows(self._engine, asked, deadline)
        parts, lacking = query_rows(self._engine, hardware.hardware_statements(job, until), deadline)
        # If the events cannot be read, comm.progress still shows which processes ended in the last minutes.
        known = with_events(known, rows.get("events", ()), live.get("comm.progress", ()))
        history = histories(rows)
        read = readings.result() if readings else ReadingResult()
        conditions, waits, idle_cpus = self._conditions(job, window, read)
        threads = _threads(read, waits, history)
        watching_since, pauses = self._watched(deadline)
        gathered = Gathered(
            self._node,
            job,
            self._stall_s,
            request.taken_ns,
            watching_since,
            live,
            rows,
            history,
            threads,
            conditions,
            parts,
            request.devices,
            [*request.missing, *missing, *lacking, *read.missing, *(pauses if alive else ()), *self._absences(job)],
            self._time_outs.of_job(job, live.get("comm.inflight", ()), deadline) if window.still and readings else {},
            idle_cpus,
            self._phase_limits,
        )
        runs = _runs(known.values(), run, self._now_ns())
        if not runs:
            raise NotFound(f"no run {run!r} of job {job!r} is known", hint="leave out the run to get the newest run")
        return [facts_of_run(gathered, name, own) for name, own in runs.items()]

    def _watched(self, deadline: float) -> tuple[int | None, list[Missing]]:
        """Returns when the collector started, UTC ns, None if unknown; and a missing fact if its probes are paused."""
        try:
            status = self._collector.status(seconds_left(deadline))
            since, paused = int(status["started_ns"]), status.get("state") == "paused"
        except (ProbingError, KeyError, TypeError, ValueError):
            return None, []
        text = pause_text(self._node, str(status.get("reason", "")))
        return since, [Missing("pause", text, node=self._node)] if paused else []

    def _conditions(
        self, job: str, window: Window, read: ReadingResult
    ) -> tuple[dict[Key, Condition], dict[Key, Sequence[Row]], tuple[int, ...] | None]:
        """Returns the condition of each process, the waits of its threads, and the CPUs that were idle. Malformed
        answers become missing facts of ``read``."""
        if not read.conditions:
            return {}, {}, None
        try:
            # While a job advances, its conditions are compared with those of an earlier look: the two readings of one
            # look are a fraction of a second apart, so they say little about the last minute.
            pair = read.conditions if window.still else self._earlier.extend(job, read.conditions)
            waits = {Key.of(one): one.get("thread_waits") or () for one in pair[-1]["processes"]}
            first = pair[0] if len(pair) > 1 else None
            return conditions_of(first, pair[-1]), waits, idle_cpus_of(first, pair[-1])
        except (KeyError, TypeError, ValueError) as e:
            read.missing.append(Missing("condition", f"the conditions are malformed: {type(e).__name__}"))
            return {}, {}, None

    def _window(self, live: Rows, until: int) -> Window:
        """Returns the window of time to read. It begins early enough for the last 64 operations of the rank that is
        furthest behind.
        """
        newest: dict[Key, int] = {}
        for row in live.get("comm.progress", ()):
            times = [t for t in (row["last_call"], row["last_done"]) if t is not None]
            newest[Key.of(row)] = max([newest.get(Key.of(row), 0), *times])
        for row in live.get("comm.inflight", ()):
            newest[Key.of(row)] = max(newest.get(Key.of(row), 0), row["ts"])
        known = [at for at in newest.values() if at]
        gaps = [row["longest_gap_ns"] for row in live.get("comm.progress", ()) if row["longest_gap_ns"] is not None]
        span = min(max(64 * max(gaps), _LEAST_SPAN_NS), _LATELY_NS) if gaps else _LATELY_NS
        oldest = max(min([*known, until]), until - DAY_NS) - span
        advanced = max(known, default=None)
        still = advanced is None or until - advanced > self._stall_s * SECOND_NS
        recent = max(advanced, until - 3600 * SECOND_NS) if advanced is not None and still else until - _RECENT_NS
        return Window(until, oldest, recent, still)


def _suspects(known: Mapping[Key, JobProcess], live: Rows) -> list[int]:
    """Returns the pids of the job's trainers; trainers that wait in no operation come first."""
    waiting = {Key.of(row) for row in live.get("comm.inflight", ())}
    trainers = [key for key, one in known.items() if one.role == "trainer" and one.alive]
    return [key.pid for key in sorted(trainers, key=lambda key: (key in waiting, key))]


def _end(one: JobProcess) -> int:
    return one.exit.ts_ns if one.exit else one.last_ns or 0


def _leaders(trainers: Iterable[JobProcess]) -> list[int]:
    """Returns the pid of the lowest rank of each run."""
    first: dict[str, JobProcess] = {}
    for one in sorted(trainers, key=lambda one: (one.rank is None, one.rank or 0, one.key)):
        first.setdefault(one.run, one)
    return [one.key.pid for one in first.values()]


def _runs(known: Iterable[JobProcess], run: str, now_ns: int) -> dict[str, list[JobProcess]]:
    """Returns processes by run: those of ``run`` if it is given. Otherwise those of the runs that live or failed
    lately; if there is no such run, those of the run that ended last.
    """
    own: dict[str, list[JobProcess]] = {}
    for one in known:
        own.setdefault(one.run, []).append(one)
    trained = {name: ones for name, ones in own.items() if any(one.role == "trainer" for one in ones)}
    if run:
        return {name: ones for name, ones in own.items() if name == run}
    chosen = {name: ones for name, ones in trained.items() if any(_counts(one, now_ns) for one in ones)}
    if chosen or not own:
        return chosen
    last = max(trained or own, key=lambda name: max(_end(one) for one in own[name]))
    return {last: own[last]}


def _counts(one: JobProcess, now_ns: int) -> bool:
    failed = one.exit is not None and (one.exit.signal is not None or bool(one.exit.code))
    return one.role == "trainer" and (one.alive or (failed and _end(one) > now_ns - _LATELY_NS))


def _threads(
    read: ReadingResult, waits: Mapping[Key, Sequence[Row]], history: Mapping[Key, History]
) -> dict[Key, tuple[Thread, ...]]:
    """Returns the threads of each process; malformed stacks become missing facts of ``read``."""
    innermost = {key: one.innermost for key, one in history.items()}
    both = [*read.stacks, [], []]
    try:
        return threads_of_processes(both[0], both[1], read.native, waits, innermost)
    except (ProbingError, KeyError, TypeError, ValueError) as e:
        read.missing.append(Missing("stacks", f"the stacks are malformed: {type(e).__name__}"))
        return {}
