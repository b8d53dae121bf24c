"""The processes of a job, including ended processes, and the rank of each."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from probing.daemon.diagnose.gather.tables import Row
from probing.diagnosis.facts import Exit, Missing
from probing.diagnosis.ranks import companions

__all__ = ("JobProcess", "Key", "Ranked", "known_processes", "ranked", "with_events")


class Key(NamedTuple):
    """Identifies a process. ``start_ns``: its start in ns since boot."""

    pid: int
    start_ns: int

    @classmethod
    def of(cls, row: Row) -> Key:
        return cls(row["pid"], row["start_ns"])


@dataclass(frozen=True, slots=True)
class JobProcess:
    """A process of a job. Times are UTC. ``last_ns``: the time of its last event; None if it has no event. ``owner``:
    the uid of the user whose job it is."""

    key: Key
    run: str
    role: str
    rank: int | None = None
    local_rank: int | None = None
    node_rank: int | None = None
    world_size: int | None = None
    ppid: int | None = None
    container: str | None = None
    owner: int | None = None
    state: str | None = None
    started_ns: int | None = None
    exit: Exit | None = None
    last_ns: int | None = None

    @property
    def alive(self) -> bool:
        return self.exit is None and self.state not in (None, "exited")


@dataclass(frozen=True, slots=True)
class Ranked:
    """The processes of a run: ``ranks`` by number, ``others``: processes without a rank."""

    ranks: Mapping[int, JobProcess]
    others: Sequence[JobProcess]
    missing: Sequence[Missing]


def known_processes(rows: Iterable[Row], job: str, now_ns: int) -> dict[Key, JobProcess]:
    """Returns the processes of ``job`` from rows of process.processes."""
    # ``start_ns`` counts from the boot.
    booted_ns = now_ns - time.clock_gettime_ns(time.CLOCK_BOOTTIME)
    found = {}
    for row in rows:
        if row["job"] == job:
            ended = row["state"] == "exited"
            found[Key.of(row)] = JobProcess(
                Key.of(row),
                row["run"] or "",
                row["role"] or "other",
                row["rank"],
                row["local_rank"],
                row["node_rank"],
                row["world_size"],
                row["ppid"],
                row["container"],
                row["owner"],
                row["state"],
                started_ns=None if ended else booted_ns + row["start_ns"],
            )
    return found


def with_events(known: Mapping[Key, JobProcess], rows: Iterable[Row], progress: Iterable[Row]) -> dict[Key, JobProcess]:
    """Returns ``known`` with exits added, and with processes that ended. ``rows``: rows of ``statements.events``;
    ``progress``: rows of comm.progress, which show an exit earlier."""
    found = dict(known)
    for row in rows:
        key = Key.of(row)
        if key in found or row["role"]:
            found[key] = _with_event(found.get(key), key, row)
    for row in progress:
        one = found.get(Key.of(row))
        if one is not None and one.exit is None and row["ended"] is not None:
            end = Exit(row["ended"], row["exit_code"], row["signal"])
            found[one.key] = replace(one, exit=end, state="exited")
    return found


def _with_event(one: JobProcess | None, key: Key, row: Row) -> JobProcess:
    exit_ = None
    if row["ended_ns"] is not None:
        exit_ = Exit(row["ended_ns"], row["exit_code"], row["signal"], bool(row["oom"]))
    seen = {"started_ns": row["started_ns"], "exit": exit_, "last_ns": row["last_ns"]}
    if one is None:
        numbers: dict[str, Any] = {
            name: row[name] for name in ("rank", "local_rank", "node_rank", "world_size", "ppid")
        }
        # A process without a known exit ended while no daemon ran.
        return JobProcess(key, row["run"] or "", row["role"], **numbers, state="exited" if exit_ else None, **seen)
    state = "exited" if exit_ else one.state
    return replace(one, **{**seen, "started_ns": row["started_ns"] or one.started_ns}, state=state)


def ranked(processes: Iterable[JobProcess], places: Iterable[Row]) -> Ranked:
    """Returns the process of each rank. ``places``: rows with the comm_rank and comm_size of processes.

    A trainer without a known rank gets its rank in its largest communicator. If two processes claim one rank, a living
    process takes precedence over an ended process, then the process that shares communicators, parent or container with
    more other ranks, and then the newer process. While both processes live, both are kept.
    """
    rows = list(places)
    widest = _widest(rows)
    placed = [_placed(one, widest) if one.role == "trainer" else one for one in processes]
    trainers = [one for one in placed if one.role == "trainer" and one.rank is not None]
    others = [one for one in placed if one.role != "trainer" or one.rank is None]
    claims: dict[int, list[JobProcess]] = defaultdict(list)
    for one in trainers:
        claims[one.rank or 0].append(one)
    contested = len(claims) < len(trainers)
    shared = _companions(trainers, rows) if contested else {}
    ranks, missing = {}, []
    for rank, claiming in sorted(claims.items()):
        *rest, best = sorted(claiming, key=lambda one: (one.alive, shared.get(one.key, 0), *_age(one)))
        ranks[rank] = best
        for one in (one for one in rest if one.alive):
            others.append(one)
            missing.append(Missing("rank", _contested(best, one, shared), rank))
    return Ranked(ranks, others, missing)


def _contested(best: JobProcess, other: JobProcess, shared: Mapping[Key, int]) -> str:
    """Returns a text that says why ``best`` is taken for the rank that both ``best`` and ``other`` claim."""
    older, newer = sorted((best, other), key=_age)
    claim = f"pids {older.key.pid} and {newer.key.pid} both claim rank {best.rank}"
    if shared[best.key] > shared[other.key]:
        count = shared[best.key]
        ranks = f"{count} other rank{'s' if count > 1 else ''}"
        return f"{claim}; pid {best.key.pid} counts: it shares communicators, parent or container with {ranks}"
    return f"{claim}; the newer one counts"


def _companions(trainers: Sequence[JobProcess], rows: Sequence[Row]) -> dict[Key, int]:
    ties: dict[Key, set[Hashable]] = {one.key: {("parent", one.ppid), ("box", one.container)} for one in trainers}
    for row in rows:
        if row["comm"] is not None and Key.of(row) in ties:
            ties[Key.of(row)].add(("comm", row["comm"]))
    for own in ties.values():
        # An unknown parent, the parent with pid 1, and the absence of a container do not count as ties: unrelated
        # processes may share them, too.
        own -= {("parent", None), ("parent", 1), ("box", None)}
    return dict(zip(ties, companions([(one.rank, ties[one.key]) for one in trainers]), strict=True))


def _age(one: JobProcess) -> tuple[int, int]:
    return one.started_ns or 0, one.key.start_ns


def _widest(rows: Iterable[Row]) -> dict[Key, tuple[int, int]]:
    found: dict[Key, tuple[int, int]] = {}
    for row in rows:
        size, rank = row["comm_size"], row["comm_rank"]
        if size is not None and rank is not None and size > found.get(Key.of(row), (0, 0))[0]:
            found[Key.of(row)] = (size, rank)
    return found


def _placed(one: JobProcess, widest: Mapping[Key, tuple[int, int]]) -> JobProcess:
    size, rank = widest.get(one.key, (None, None))
    if one.rank is not None or rank is None:
        return one
    return replace(one, rank=rank, world_size=one.world_size or size)
