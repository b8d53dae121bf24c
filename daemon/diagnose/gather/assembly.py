"""Makes the facts of one run from the rows and readings of its job. Their size is limited: the least important facts
are cut first.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import psutil

from probing.daemon.diagnose.gather.hardware import hardware_of
from probing.daemon.diagnose.gather.history import History
from probing.daemon.diagnose.gather.operations import Losses, Operations, communicators_of, operations_of
from probing.daemon.diagnose.gather.processes import JobProcess, Key, Ranked, ranked
from probing.daemon.diagnose.gather.statements import SECOND_NS
from probing.daemon.diagnose.gather.tables import Row, Rows
from probing.daemon.diagnose.gather.witnesses import add_witnesses
from probing.diagnosis.facts import (
    Condition,
    Endpoint,
    Exit,
    Facts,
    Helper,
    Missing,
    NodeFacts,
    Operation,
    Phase,
    Process,
    Rank,
    Thread,
    TimeOut,
)
from probing.diagnosis.facts_file import RANK_BYTES, size_of

__all__ = (
    "Gathered",
    "facts_of_run",
    "fitted",
)

_Cut = Callable[[Rank], Rank]


def fitted(rank: Rank) -> tuple[Rank, list[Missing]]:
    """Returns ``rank``, cut to at most RANK_BYTES of JSON, and a ``Missing`` for each kind of facts left out."""
    missing = []
    for kind, name, cut in _CUTS:
        if size_of(rank) <= RANK_BYTES:
            break
        smaller = cut(rank)
        if smaller != rank:
            text = f"{name} of rank {rank.rank} were left out: more than {RANK_BYTES} bytes"
            missing.append(Missing(kind, text, rank.rank, rank.node))
        rank = smaller
    return rank, missing


def _without_done(keep: int) -> _Cut:
    """Returns a cut that keeps the newest ``keep`` operations of each communicator."""

    def cut(rank: Rank) -> Rank:
        return replace(rank, done=_last(rank.done, keep))

    return cut


def _last(operations: Sequence[Operation], keep: int) -> tuple[Operation, ...]:
    left: dict[str, int] = {}
    kept = []
    for one in reversed(operations):
        left[one.comm] = left.get(one.comm, keep) - 1
        if left[one.comm] >= 0:
            kept.append(one)
    return tuple(reversed(kept))


def _shallow(frames: int, threads: int) -> _Cut:
    def shorter(own: Sequence[Thread]) -> tuple[Thread, ...]:
        return tuple(replace(one, frames=one.frames[:frames]) for one in own[:threads])

    def cut(rank: Rank) -> Rank:
        helpers = tuple(replace(one, threads=shorter(one.threads[:1])) for one in rank.helpers)
        return replace(rank, threads=shorter(rank.threads), helpers=helpers)

    return cut


def _few_samples(rank: Rank) -> Rank:
    return replace(rank, samples=rank.samples[:3], past_samples=rank.past_samples[:3])


def _few_helpers(rank: Rank) -> Rank:
    # The helpers that explain most come first: helpers that ended, then blocked helpers.
    order = sorted(rank.helpers, key=lambda one: (one.exit is None, one.state == "running", one.pid))
    return replace(rank, helpers=tuple(replace(one, threads=()) for one in order[:16]))


def _bare(rank: Rank) -> Rank:
    return replace(
        rank,
        open=rank.open[:8],
        progress=rank.progress[:64],
        logs=(),
        series=(),
        samples=(),
        past_samples=(),
        helpers=(),
        steps=(),
        witnesses=(),
        env=(),
        endpoints=(),
        time_outs=(),
        threads=rank.threads[:1],
        condition=None,
    )


_CUTS: Sequence[tuple[str, str, _Cut]] = (
    ("operations", "older operations", _without_done(32)),
    ("size", "some samples", _few_samples),
    ("operations", "older operations", _without_done(16)),
    ("stacks", "outer frames and some threads", _shallow(32, 8)),
    ("size", "some helper processes", _few_helpers),
    ("operations", "older operations", _without_done(4)),
    ("size", "values over time", lambda rank: replace(rank, series=rank.series[:2])),
    ("stacks", "outer frames and some threads", _shallow(16, 4)),
    ("operations", "older operations", lambda rank: replace(rank, done=rank.done[-64:], open=rank.open[:32])),
    ("size", "all but the main thread and open operations", _bare),
    ("stacks", "all stacks", lambda rank: replace(rank, threads=(), open=rank.open[:2], progress=rank.progress[:8])),
)


_MAX_HELPERS = 64
_MAX_STEPS = 64
_MAX_ENDPOINTS = 128
_FIRST = {"listens": 0, "closed": 1}
_MAX_PROCESSES = 1024
_ENV = frozenset(
    (
        "RANK",
        "LOCAL_RANK",
        "WORLD_SIZE",
        "LOCAL_WORLD_SIZE",
        "GROUP_RANK",
        "NODE_RANK",
        "MASTER_ADDR",
        "MASTER_PORT",
        "TORCHELASTIC_RESTART_COUNT",
        "TORCHELASTIC_RUN_ID",
        "NCCL_ASYNC_ERROR_HANDLING",
        "NCCL_BLOCKING_WAIT",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING",
        "TORCH_NCCL_BLOCKING_WAIT",
        "SLURM_PROCID",
        "SLURM_LOCALID",
        "SLURM_NTASKS",
    )
)


@dataclass(frozen=True, slots=True)
class Gathered:
    """The rows and readings of a job. ``live`` and ``devices``: rows by table. ``rows`` and ``hardware`` map the name
    of each statement, a key of ``statements()`` or ``hardware_statements()``, to its rows. ``phase_limits``: seconds by
    phase."""

    node: str
    job: str
    stall_s: float
    taken_ns: int
    watching_since_ns: int | None
    live: Rows
    rows: Rows
    history: Mapping[Key, History]
    threads: Mapping[Key, tuple[Thread, ...]]
    conditions: Mapping[Key, Condition]
    hardware: Rows
    devices: Rows
    missing: Sequence[Missing]
    time_outs: Mapping[Key, tuple[TimeOut, ...]]
    idle_cpus: tuple[int, ...] | None = None
    phase_limits: Mapping[str, float] = field(default_factory=dict)


def facts_of_run(gathered: Gathered, run: str, processes: Iterable[JobProcess]) -> Facts:
    """Returns the facts of one run. ``processes``: the processes of this run."""
    mine = {one.key: one for one in processes}
    live = {name: [row for row in rows if Key.of(row) in mine] for name, rows in gathered.live.items()}
    inflight, progress = live.get("comm.inflight", []), live.get("comm.progress", [])
    done = [row for row in gathered.rows.get("operations", ()) if Key.of(row) in mine]
    stored = [row for row in gathered.rows.get("communicators", ()) if Key.of(row) in mine]
    places = [*inflight, *progress, *done]
    who = ranked(mine.values(), [*places, *({**row, "comm_size": row["size"]} for row in stored)])
    operations = operations_of(inflight, done, progress)
    known = communicators_of({one.key: n for n, one in who.ranks.items()}, stored, places)
    losses = Losses(gathered.rows)
    said = (gathered.rows.get(name, ()) for name in ("RAS", "flight recorder", "errors of communicators"))
    ranks, communicators, unreached = add_witnesses(_ranks(gathered, who, operations, live, losses), known, *said)
    fit = [fitted(rank) for rank in ranks]
    cut = [one for _, left_out in fit for one in left_out]
    gaps = [row["longest_gap_ns"] for row in progress if row["longest_gap_ns"] is not None]
    history = gathered.rows.get("history of steps", ())
    advanced = [t for one in operations.values() if (t := one.advanced_ns) is not None]
    return Facts(
        gathered.job,
        run,
        max((one.world_size for one in who.ranks.values() if one.world_size is not None), default=None),
        gathered.stall_s,
        gathered.taken_ns,
        (_node(gathered, max(advanced, default=None), {one.key: number for number, one in who.ranks.items()}),),
        tuple(rank for rank, _ in fit),
        tuple(communicators),
        tuple(_process(gathered.node, one) for one in _listed(who.others, mine.values())),
        tuple(dict.fromkeys([*gathered.missing, *who.missing, *losses.missing(mine.values()), *unreached, *cut])),
        max(gaps, default=None),
        tuple((row["ended_ns"], row["duration_ns"]) for row in history if row["run"] == run),
        owner=next((one.owner for one in mine.values() if one.owner is not None), None),
        phase=_phase(gathered, progress),
    )


def _phase(gathered: Gathered, progress: Iterable[Row]) -> Phase | None:
    """Returns the phase that may last longest among the phases of living ranks."""
    phases = [
        Phase(row["phase"], row["rank"], row["phase_since"], gathered.phase_limits.get(row["phase"], 0.0))
        for row in progress
        if row.get("phase") and row["rank"] is not None and row["ended"] is None
    ]
    return max(phases, key=lambda phase: phase.since_ns + phase.limit_s * SECOND_NS, default=None)


def _node(gathered: Gathered, advanced_ns: int | None, ranks: Mapping[Key, int]) -> NodeFacts:
    memory = psutil.virtual_memory()
    return NodeFacts(
        gathered.node,
        gathered.taken_ns,
        gathered.watching_since_ns,
        advanced_ns,
        memory_total_bytes=memory.total,
        memory_available_bytes=memory.available,
        hardware=hardware_of(gathered.hardware, gathered.devices, ranks),
        idle_cpus=gathered.idle_cpus,
    )


def _ranks(
    gathered: Gathered, who: Ranked, operations: Mapping[Key, Operations], live: Rows, losses: Losses
) -> list[Rank]:
    attached = {Key.of(row): row["attached"] for row in live.get("comm.progress", ())}
    env: dict[Key, list[tuple[str, str]]] = defaultdict(list)
    for row in live.get("process.envs", ()):
        if row["name"] in _ENV:
            env[Key.of(row)].append((row["name"], (row["value"] or "")[:100]))
    endpoints = _endpoints(live.get("net.sockets", ()))
    helpers: dict[int, list[JobProcess]] = defaultdict(list)
    for one in who.others:
        helpers[one.ppid or 0].append(one)
    nothing = Operations((), (), ())
    return [
        replace(
            _rank(gathered, number, one, operations.get(one.key, nothing)),
            seen_from_ns=losses.seen_from(one, attached.get(one.key)),
            lost=losses.lost(one),
            helpers=tuple(_helper(gathered, helper) for helper in _chosen(helpers[one.key.pid], one)),
            env=tuple(sorted(env[one.key])),
            endpoints=endpoints.get(one.key, ()),
        )
        for number, one in who.ranks.items()
    ]


def _rank(gathered: Gathered, number: int, one: JobProcess, operations: Operations) -> Rank:
    past = gathered.history.get(one.key) or History()
    return Rank(
        number,
        gathered.node,
        one.key.pid,
        one.key.start_ns,
        _state(one),
        one.local_rank,
        one.node_rank,
        one.world_size,
        exit=one.exit,
        started_ns=one.started_ns,
        open=operations.open,
        done=operations.done,
        progress=operations.progress,
        threads=gathered.threads.get(one.key, ()),
        condition=gathered.conditions.get(one.key),
        samples=tuple(past.samples),
        past_samples=tuple(past.past_samples),
        steps=tuple(past.steps[-_MAX_STEPS:]),
        series=tuple(past.series),
        logs=tuple(past.logs),
        time_outs=gathered.time_outs.get(one.key, ()),
    )


def _endpoints(rows: Sequence[Row]) -> dict[Key, tuple[Endpoint, ...]]:
    """Returns the endpoints of each process: first listening addresses, then closed endpoints, then other open
    endpoints.

    Only the first _MAX_ENDPOINTS are kept. Closed endpoints come before open endpoints, because errors name them.
    """
    found: dict[Key, dict[tuple[str, int], Endpoint]] = defaultdict(dict)
    for row in sorted(rows, key=lambda row: _FIRST.get(row["state"], len(_FIRST))):
        place = row["local_address"], row["local_port"]
        known = found[Key.of(row)].get(place)
        # An open endpoint replaces a closed endpoint that an earlier use of the port left.
        if known is None or known.closed:
            found[Key.of(row)][place] = Endpoint(*place, row["state"] == "closed")
    return {key: tuple(own.values())[:_MAX_ENDPOINTS] for key, own in found.items()}


def _state(one: JobProcess) -> str:
    return "exited" if one.exit else one.state or "unknown"


def _chosen(helpers: Sequence[JobProcess], parent: JobProcess) -> list[JobProcess]:
    """Returns the helpers that run or failed, the failed helpers first.

    Helpers that started before ``parent`` are left out: their parent was an earlier process with the same pid.
    """
    own = [one for one in helpers if one.key.start_ns >= parent.key.start_ns and (one.alive or _failed(one.exit))]
    return sorted(own, key=lambda one: (one.exit is None, one.key.start_ns))[:_MAX_HELPERS]


def _failed(end: Exit | None) -> bool:
    return end is not None and (end.signal is not None or bool(end.code))


def _listed(others: Iterable[JobProcess], mine: Iterable[JobProcess]) -> list[JobProcess]:
    """Returns the processes that are not helpers of a trainer."""
    trainers = {one.key.pid for one in mine if one.role == "trainer"}
    listed = [one for one in others if one.role in ("trainer", "launcher") or one.ppid not in trainers]
    return listed[:_MAX_PROCESSES]


def _helper(gathered: Gathered, one: JobProcess) -> Helper:
    threads = gathered.threads.get(one.key, ())
    # A helper works only in its main thread, so its other stacks are left out.
    main = tuple(replace(thread, frames=thread.frames[:32]) for thread in threads if thread.main)
    return Helper(*one.key, one.role, _state(one), one.exit, main, gathered.conditions.get(one.key))


def _process(node: str, one: JobProcess) -> Process:
    return Process(node, *one.key, one.role, _state(one), one.exit)
