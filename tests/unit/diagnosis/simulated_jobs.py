"""A simulator of synchronous collectives: programs of ranks, faults, and the facts and the truth that they lead to."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import diagnosis_cases as cases
from hypothesis import strategies as st

from probing.diagnosis.facts import Facts, Missing, NodeFacts, Operation, Rank

__all__ = ("Call", "Job", "blinded", "jobs", "simulated")

OPS = ("all_reduce", "all_gather", "broadcast", "barrier")
STALLED_S = 30.0
TICK_S = 0.01


@dataclass(frozen=True)
class Call:
    """A collective that a rank calls. ``comm``: an index of ``Job.comms``."""

    comm: int
    op: str


@dataclass(frozen=True)
class Job:
    """``programs``: the calls of each rank. ``stuck``: by rank, before which of its calls it stops for ever."""

    comms: Sequence[tuple[int, ...]]
    programs: Sequence[Sequence[Call]]
    stuck: Mapping[int, int] = field(default_factory=dict)
    nodes: int = 2


@dataclass
class _State:
    at: int = 0
    joined: bool = False


@dataclass(frozen=True)
class Outcome:
    """What has happened when nothing moves any more. ``truth``: the stuck ranks that others wait for."""

    facts: Facts
    truth: frozenset[int]
    waiting: frozenset[int]


@st.composite
def jobs(draw: st.DrawFn, *, stuck: int = 1) -> Job:
    """Draws a job of up to nine ranks on a grid or with random groups, which runs in one order on all ranks."""
    rows, columns = draw(st.tuples(st.integers(1, 3), st.integers(1, 3)).filter(lambda s: s[0] * s[1] > 1))
    size = rows * columns
    comms = [tuple(range(size))]
    comms += [tuple(range(r * columns, (r + 1) * columns)) for r in range(rows) if columns > 1 and rows > 1]
    comms += [tuple(range(c, size, columns)) for c in range(columns) if rows > 1 and columns > 1]
    extra = st.lists(st.integers(0, size - 1), min_size=2, max_size=size, unique=True)
    comms += [tuple(sorted(c)) for c in draw(st.lists(extra, max_size=2))]
    step = draw(st.lists(st.tuples(st.integers(0, len(comms) - 1), st.sampled_from(OPS)), min_size=1, max_size=8))
    order = [Call(0, "barrier"), *(Call(*call) for call in step)] * 4
    programs = [[call for call in order if rank in comms[call.comm]] for rank in range(size)]
    chosen = draw(st.lists(st.integers(0, size - 1), min_size=min(stuck, size), max_size=stuck, unique=True))
    stops = {rank: draw(st.integers(0, len(programs[rank]) - 1)) for rank in chosen}
    return Job(comms, programs, stops, draw(st.integers(1, 3)))


def simulated(job: Job) -> Outcome:
    """Runs ``job`` until nothing moves. A collective ends when all members have joined it with one name."""
    size = len(job.programs)
    states = [_State() for _ in range(size)]
    counts = [dict.fromkeys(range(len(job.comms)), 0) for _ in range(size)]
    logs: list[list[tuple[Call, int, int, int | None]]] = [[] for _ in range(size)]
    now, moved = 0, True
    while moved:
        moved = False
        now += 1
        for rank in range(size):
            state = states[rank]
            if not state.joined and state.at < len(job.programs[rank]) and state.at != job.stuck.get(rank):
                call = job.programs[rank][state.at]
                counts[rank][call.comm] += 1
                logs[rank].append((call, counts[rank][call.comm], now, None))
                state.joined = moved = True
        now += 1
        for rank in range(size):
            if not states[rank].joined:
                continue
            call, seq, _, _ = logs[rank][-1]
            members = job.comms[call.comm]
            there = [m for m in members if states[m].joined and logs[m][-1][:2] == (call, seq)]
            if len(there) == len(members):
                for m in members:
                    own = logs[m][-1]
                    logs[m][-1] = (own[0], own[1], own[2], now)
                    states[m].joined = False
                    states[m].at += 1
                moved = True
    return _outcome(job, states, logs, now)


def _outcome(
    job: Job, states: Sequence[_State], logs: Sequence[Sequence[tuple[Call, int, int, int | None]]], end: int
) -> Outcome:
    found = []
    for rank, log in enumerate(logs):
        ops = []
        for call, seq, called, done in log[-256:]:
            ago = STALLED_S + (end - called) * TICK_S
            took = None if done is None else (done - called) * TICK_S
            ops.append(cases.op(seq, call.op, ago=ago, took=took, comm=str(call.comm)))
        waits = states[rank].joined
        since = cases.ago(STALLED_S + (end - log[-1][2]) * TICK_S) if waits else None
        outside = cases.elsewhere(f"work{rank} own.py:{rank + 1}")
        stack = cases.in_collective(log[-1][0].op, since_ns=since) if waits else outside
        found.append(cases.rank(rank, *ops, node=f"n{rank % job.nodes}", stack=stack))
    waiting = frozenset(rank for rank, state in enumerate(states) if state.joined)
    comms = [cases.comm(str(number), members) for number, members in enumerate(job.comms)]
    return Outcome(cases.facts(*found, comms=comms), _truth(job, states, logs, waiting), waiting)


def _truth(
    job: Job,
    states: Sequence[_State],
    logs: Sequence[Sequence[tuple[Call, int, int, int | None]]],
    waiting: frozenset[int],
) -> frozenset[int]:
    """The ranks outside of all operations that a waiting rank's operation lacks."""
    found = set()
    for rank in waiting:
        call, seq, _, _ = logs[rank][-1]
        for member in job.comms[call.comm]:
            if not any((c.comm, s) == (call.comm, seq) for c, s, _, _ in logs[member]) and member not in waiting:
                found.add(member)
    del states
    return frozenset(found)


@dataclass(frozen=True)
class Blindness:
    """``dropped``: the share of operations that are lost, by a seed. ``ahead_s``: the clock of one node. ``unseen``: a
    rank without facts. ``stackless``: ranks without stacks. ``late``: the daemon of one node came after the stall.
    ``timeless``: no stack shows since when it stands.
    """

    seed: int = 0
    dropped: float = 0.0
    ahead_s: float = 0.0
    unseen: int | None = None
    stackless: frozenset[int] = frozenset()
    late: bool = False
    timeless: bool = False


def blinded(facts: Facts, blindness: Blindness) -> Facts:
    """Returns what is left of ``facts``."""
    chance = random.Random(blindness.seed)
    ranks, missing = [], []
    for rank in facts.ranks:
        if rank.rank == blindness.unseen:
            missing.append(Missing("rank", f"rank {rank.rank} was not seen", rank.rank, rank.node))
            continue
        kept = [o for o in (*rank.done, *rank.open) if chance.random() >= blindness.dropped]
        left = _with(rank, kept, rank.rank in blindness.stackless)
        if blindness.late and rank.node == "n1":
            left = replace(left, open=(), done=(), progress=(), lost=0, seen_from_ns=cases.ago(STALLED_S - 3))
        if blindness.timeless:
            left = replace(left, threads=tuple(replace(thread, since_ns=None) for thread in left.threads))
        ranks.append(cases.shifted(left, blindness.ahead_s) if rank.node == "n1" else left)
    nodes = [_ahead(node, blindness) for node in facts.nodes]
    return replace(facts, ranks=tuple(ranks), nodes=tuple(nodes), missing=tuple(missing))


def _with(rank: Rank, kept: list[Operation], stackless: bool) -> Rank:
    lost = len(rank.done) + len(rank.open) - len(kept)
    return replace(
        rank,
        open=tuple(o for o in kept if o.t_done_ns is None),
        done=tuple(o for o in kept if o.t_done_ns is not None),
        progress=cases.progress(kept),
        lost=lost,
        threads=() if stackless else rank.threads,
    )


def _ahead(node: NodeFacts, blindness: Blindness) -> NodeFacts:
    if node.node != "n1":
        return node
    by = round(blindness.ahead_s * 1e9)
    watching = cases.ago(STALLED_S - 3) if blindness.late else node.watching_since_ns
    watching, advanced = (t if t is None else t + by for t in (watching, node.advanced_ns))
    return replace(node, taken_ns=node.taken_ns + by, watching_since_ns=watching, advanced_ns=advanced)
