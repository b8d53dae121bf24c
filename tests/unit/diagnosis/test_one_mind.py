"""For random facts, the daemon's rows and hooks, ``diagnose``, ``nccl``, ``ps`` and ``top`` name the same ranks."""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, TypeVar, cast

import pyarrow as pa
from client_top_rows import fetched
from diagnosis_cases import NOW, ago
from hypothesis import given, settings
from hypothesis import strategies as st
from long import examples
from simulated_jobs import Blindness, Call, Job, blinded, jobs, simulated

from probing.api.tables import TABLES
from probing.api.text import ranks_of
from probing.client.cluster import Cluster
from probing.client.commands import diagnose as diagnose_command
from probing.client.commands import nccl, ps, top
from probing.client.diagnosis.page import flat, people
from probing.client.render.rows import Row, rows_of
from probing.client.times import interval
from probing.client.top.model import Model
from probing.daemon.arrow import batch_of, ipc_bytes
from probing.daemon.config import DiagnoseConfig
from probing.daemon.diagnose.finding_row import finding_report
from probing.daemon.diagnose.watch import Clocks, JobWatch
from probing.diagnosis.case import Case
from probing.diagnosis.facts import Exit, Facts, Missing, Rank
from probing.diagnosis.facts_file import to_json

T = TypeVar("T")
SILENT = Missing("node", "node n9 did not answer: it is down", node="n9")
ENDS = ({"code": 1}, {"code": 0}, {"signal": 9}, {"signal": 15}, {"signal": 9, "oom": True})


@st.composite
def jobs_in_trouble(draw: st.DrawFn) -> list[Facts]:
    """Draws the runs of a job: one of which ranks are stuck or have ended, and perhaps a later one that goes on."""
    job = draw(jobs(stuck=2))
    blindness = Blindness(late=draw(st.booleans()), timeless=draw(st.booleans()))
    facts = replace(blinded(simulated(job).facts, blindness), missing=(SILENT,) * draw(st.integers(0, 1)))
    chosen = draw(st.sets(st.sampled_from(facts.ranks)) | st.just(set(facts.ranks)) | st.just(set()))
    ends = {rank.rank: draw(st.tuples(st.integers(2, 60), st.sampled_from(ENDS))) for rank in chosen}
    facts = replace(facts, ranks=tuple(_ended(rank, ends) for rank in facts.ranks))
    if not draw(st.booleans()):
        return [facts]
    later = simulated(Job([(0, 1)], [[], []])).facts
    started = tuple(replace(rank, pid=9000 + rank.rank, started_ns=ago(1)) for rank in later.ranks)
    return [facts, replace(later, run="later", ranks=started)]


def _ended(rank: Rank, ends: Mapping[int, tuple[int, Mapping[str, Any]]]) -> Rank:
    if rank.rank not in ends:
        return rank
    seconds, how = ends[rank.rank]
    # What a process was in when it ended is not in flight any more.
    lost = (replace(one, state="abandoned", t_done_ns=max(one.t_call_ns or 0, ago(seconds))) for one in rank.open)
    ended = {"state": "exited", "exit": Exit(ago(seconds), **how), "threads": ()}
    return replace(rank, open=(), done=(*rank.done, *lost), **ended)


@dataclass
class Daemon:
    """The watch of jobs over ``runs``, which stand still. ``rows`` is what it stored, and ``hooked`` what hooks got."""

    runs: Sequence[Facts]
    now: float = 0.0
    rows: list[Mapping[str, Any]] = field(default_factory=list)
    hooked: list[Mapping[str, Any]] = field(default_factory=list)

    def watch(self) -> Daemon:
        clocks = Clocks(lambda: self.now, lambda: NOW)
        watch = JobWatch("n0", DiagnoseConfig(), self, self, self.hooked.append, self, clocks=clocks, run=_done)
        while self.now < 60:
            self.now += max(watch.step(), 0.1)
        return self

    def progress(self) -> bytes:
        rows = [
            {
                **dict.fromkeys(("ended", "exit_code", "signal")),
                "node": "n0",
                "ts": NOW,
                "job": facts.job,
                "run": facts.run,
                "pid": rank.pid,
                "calls": 9,
                "start_ns": rank.start_ns,
                "rank": rank.rank,
                "comm": "0",
                "last_call": ago(30),
                **_end_columns(rank.exit),
            }
            for facts in self.runs
            for rank in facts.ranks
        ]
        return ipc_bytes(batch_of("comm.progress", rows))

    def facts(self, job: str, *, run: str, deep: bool, timeout: float) -> list[Facts]:
        return [facts for facts in self.runs if facts.run == run]

    def standing(self, job: str, run: str, *, timeout: float) -> Hashable:
        return None

    def read_ahead(self, job: str, *, timeout: float) -> None:
        pass

    def findings(self) -> Sequence[Mapping[str, Any]]:
        return ()

    def record(self, rows: Sequence[Mapping[str, Any]]) -> None:
        self.rows += rows

    def hold(self, runs: Mapping[tuple[str, str], bool]) -> None:
        pass

    def leads(self, job: str, run: str, *, living: bool) -> bool:
        return True

    def is_beside(self, job: str, run: str, *, living: bool) -> bool:
        return False

    def share(self, row: Mapping[str, Any]) -> None:
        pass

    @property
    def newest(self) -> list[Mapping[str, Any]]:
        """The newest row of each finding. Those of a run that has ended are closed."""
        return list({row["finding_id"]: {"node": "n0", "ts": NOW, **row} for row in self.rows}.values())


def _done(call: Callable[[], T], /) -> Future[T]:
    outcome: Future[T] = Future()
    outcome.set_result(call())
    return outcome


def _end_columns(end: Exit | None) -> dict[str, Any]:
    return {} if end is None else {"ended": end.ts_ns, "exit_code": end.code, "signal": end.signal}


class Node:
    """A cluster of which all nodes answer as one, by the rows that the daemon has of ``runs``."""

    many = strict = False
    absent = outcomes = ()
    timeout = 0.0

    def __init__(self, runs: Sequence[Facts], findings: Sequence[Mapping[str, Any]]) -> None:
        self._runs = runs
        stored = pa.Table.from_pylist([dict(row) for row in findings], schema=TABLES["diagnosis.findings"].logical)
        ranks = [(_who(facts, rank), facts, rank) for facts in runs for rank in facts.ranks]
        alive = [(who, facts, rank) for who, facts, rank in ranks if rank.exit is None]
        self.rows: dict[str, list[Row]] = {
            "live trainers": [{**who, "state": "running"} for who, _, _ in alive],
            "findings": [{**row, "row_age_ns": 0} for row in rows_of(stored)],
            "inflight": [
                {**who, **_comm(facts, one.comm), "op": one.op, "seq": one.seq, "age_ns": _age(facts, rank, one)}
                for who, facts, rank in alive
                for one in rank.open
            ],
            "called": [
                {**who, **_comm(facts, comm), "seq": _done_seq(rank, comm), "seen_ns": _seen(facts, rank)}
                | {"lives": rank.exit is None}
                for who, facts, rank in ranks
                for comm in [one.comm for one in rank.progress] or [None]
            ],
            "known": [
                {**_who(facts, rank), **_comm(facts, comm.comm), **dict.fromkeys(_KNOWN)}
                for facts in runs
                for rank in facts.ranks
                for comm in facts.communicators
                if any(member.rank == rank.rank for member in comm.members)
            ],
        }
        exits = [
            {**_who(facts, rank), "role": "trainer", "event": event, "recent": True, "ts": rank.exit.ts_ns}
            | {"exit_code": rank.exit.code, "signal": rank.exit.signal}
            for facts in runs
            for rank in facts.ranks
            if rank.exit is not None
            for event in ("exit", *(["oom_kill"] if rank.exit.oom else []))
        ]
        self.rows["exits"] = rows_of(_table(exits, ts=pa.timestamp("ns", "UTC")))

    def query(self, sql: str) -> pa.Table:
        assert "diagnosis.findings" in sql
        return _table(self.rows["findings"])

    def query_all(self, statements: Mapping[str, str], each: Sequence[str] = ()) -> dict[str, pa.Table]:
        return {name: _table(self.rows.get(name, [])) for name in statements}

    def answer_all(self, statements: Mapping[str, str]) -> dict[str, Any]:
        return {name: SimpleNamespace(table=table) for name, table in self.query_all(statements).items()}

    def facts(self, job: str) -> list[tuple[str, list[bytes]]]:
        return [("n0", [to_json(facts)]) for facts in self._runs]

    def of_nodes(self, names: object) -> Node:
        return self

    def addresses(self) -> tuple[str, ...]:
        return ()

    def ask(self, addresses: object, ask: object, seconds: float) -> SimpleNamespace:
        return SimpleNamespace(answered=())

    def stacks(self, job: str) -> SimpleNamespace:
        return SimpleNamespace(threads=(), failures=())

    def status(self) -> list[Any]:
        return []

    @property
    def clocks(self) -> SimpleNamespace:
        return SimpleNamespace(of=lambda node, now_ns: None)


_KNOWN = ("backend", "name", "state", "aborted", "async_error", "role", "role_why")


def _who(facts: Facts, rank: Rank) -> Row:
    own = {"job": facts.job, "run": facts.run, "node": rank.node, "pid": rank.pid, "start_ns": rank.start_ns}
    return {**own, "rank": rank.rank, "world_size": facts.world_size}


def _comm(facts: Facts, name: str | None) -> Row:
    known = next((comm for comm in facts.communicators if comm.comm == name), None)
    return {"comm": name, "size": known.size if known else None}


def _age(facts: Facts, rank: Rank, one: Any) -> int:
    return Case(facts).now(rank.rank) - int(one.t_call_ns)


def _seen(facts: Facts, rank: Rank) -> int | None:
    return None if rank.seen_from_ns is None else Case(facts).now(rank.rank) - rank.seen_from_ns


def _done_seq(rank: Rank, comm: str | None) -> int | None:
    return max((one.seq for one in rank.done if one.comm == comm and one.seq is not None), default=None)


def _table(rows: Sequence[Mapping[str, Any]], **types: pa.DataType) -> pa.Table:
    table = pa.Table.from_pylist([dict(row) for row in rows])
    for name, kind in types.items():
        if name in table.column_names:
            table = table.set_column(table.column_names.index(name), name, table[name].cast(kind))
    return table


Named = set[tuple[str, str, tuple[int, ...], float]]


def by_rows(rows: Iterable[Mapping[str, Any]]) -> Named:
    """Run, verdict, ranks and confidence of rows of diagnosis.findings."""
    return {(r["run"], r["verdict"], _numbers(r["ranks"]), r["confidence"]) for r in rows}


def by_objects(found: Iterable[Mapping[str, Any]]) -> Named:
    """The same of what ``diagnose -f json`` prints, and hooks get, without notes."""
    return {
        (one["run"], one["verdict"], tuple(culprit["rank"] for culprit in one["culprits"]), one["confidence"])
        for one in found
        if one["severity"] in ("error", "warning")
    }


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(","))) if text else ()


@settings(max_examples=examples(200), deadline=None)
@given(jobs_in_trouble())
def test_all_name_the_same_ranks_with_the_same_confidence(runs: list[Facts]) -> None:
    daemon = Daemon(runs).watch()
    living = {facts.run for facts in runs if any(rank.exit is None for rank in facts.ranks)}
    cluster = cast("Cluster", Node(runs, daemon.newest))

    # diagnose: its JSON, its page
    found = diagnose_command._found(cluster, "job")
    said = by_objects(flat(found))
    page = people(found, None)
    for _, _, ranks, _ in said:
        assert not ranks or any(f"{ranks_of([rank])} " in page for rank in ranks) or ranks_of(ranks) in page

    # the daemon: rows, hooks
    assert by_rows(daemon.newest) == said
    assert by_objects(map(finding_report, daemon.hooked)) == said
    opened = {one for one in said if one[0] in living}
    assert by_rows(row for row in daemon.newest if row["state"] == "open") == opened

    # nccl, ps, top
    communicators, pending = nccl.collect(cluster, "job", None, interval("5m", None))
    frame = top.collect(cluster, "job", 10.0)
    assert {f for own in communicators for f in by_rows(own["findings"])} <= opened
    assert by_rows(row for rows in ps._asked(cluster, "")[1].values() for row in rows) == opened
    assert {f for state in frame.runs.values() for f in by_rows(state["findings"])} == opened
    _check_deaths(said, frame.runs, communicators)
    _check_screen(cluster, said, opened)

    # who is in flight, and who is not
    for facts in runs:
        judged = {(one.comm, one.seq, one.op): one for one in Case(facts).in_flight}
        for one in pending.get((facts.job, facts.run), ()):
            own = judged[one.comm, one.seq, one.op]
            assert one.waiters == own.waiters
            assert one.awaited <= own.awaited
            late = any(rank.seen_from_ns is not None for rank in facts.ranks)
            assert late or one.awaited == own.awaited
    assert frame.pending.keys() == pending.keys()


def _check_deaths(said: Named, states: Mapping[Any, Row], communicators: Sequence[Row]) -> None:
    for (_, run), state in states.items():
        died = {rank for of, verdict, ranks, _ in said if (of, verdict) == (run, "rank_died") for rank in ranks}
        first = state["first_failure"]
        if died:
            assert first is None or first["rank"] in died
        for own in communicators:
            if own["run"] == run:
                assert own["first_failure"] == first


def _check_screen(cluster: Cluster, said: Named, opened: Named) -> None:
    rows = cast("Node", cluster).rows
    names = {"ranks": "live trainers", "inflight": "inflight", "findings": "findings", "ended": "exits"}
    asked = {question: [dict(row) for row in rows[name]] for question, name in names.items()}
    view = Model(10.0).update(fetched(0.0, **asked), {})
    for job in view.jobs:
        blamed = {row["rank"] for row in job.ranks if row["blame"] == "culprit"}
        named = {rank for run, _, ranks, _ in opened if run == job.run for rank in ranks}
        assert blamed == named & {row["rank"] for row in job.ranks}


def test_the_test_sees_findings_of_each_kind() -> None:
    """Otherwise all of them could agree on nothing."""
    stuck = simulated(Job([(0, 1, 2)], [[Call(0, "all_reduce")] * 3] * 3, {1: 1})).facts
    assert {verdict for _, verdict, _, _ in by_rows(Daemon([stuck]).watch().newest)} == {"not_joined"}
    died = replace(stuck, ranks=tuple(_ended(rank, {1: (20, {"signal": 9})}) for rank in stuck.ranks))
    row = Daemon([replace(died, missing=(SILENT,))]).watch().newest[0]
    assert (row["verdict"], row["confidence"], json.loads(row["missing"])[-1]) == ("rank_died", 0.8, SILENT.text)
