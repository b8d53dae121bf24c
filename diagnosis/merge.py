"""Merges the facts of several nodes about one run of a job."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from probing.api.text import names_owner, with_owner
from probing.diagnosis.facts import Communicator, Facts, Member, Missing, NodeFacts, Process, Rank
from probing.diagnosis.ranks import companions

__all__ = ("merge", "merge_runs")

_T = TypeVar("_T", bound=int)


def merge_runs(found: Iterable[Facts], silent: Mapping[str, str] | None = None) -> list[Facts]:
    """Returns the merged facts of each run, sorted by job and run.

    Facts of different owners belong to different jobs: the owner with the most ranks keeps the name. ``silent``: the
    nodes that did not answer, and why; each is added to ``missing`` of every run.
    """
    runs: dict[tuple[str, str], list[Facts]] = {}
    for facts in _by_owner(found):
        runs.setdefault((facts.job, facts.run), []).append(facts)
    return [merge(runs[key], silent) for key in sorted(runs)]


def _by_owner(found: Iterable[Facts]) -> Iterator[Facts]:
    """Yields the facts. If another owner has more ranks in a job of the same name, the owner is added to the name of
    the job.
    """
    parts = list(found)
    ranks: dict[str, Counter[int]] = defaultdict(Counter)
    for facts in parts:
        if facts.owner is not None:
            ranks[facts.job][facts.owner] += len(facts.ranks)
    for facts in parts:
        owners = ranks[facts.job]
        most = max(owners, key=lambda owner: (owners[owner], -owner), default=None)
        if facts.owner not in (None, most) and not names_owner(facts.job):
            facts = replace(facts, job=with_owner(facts.job, facts.owner or 0))
        yield facts


def merge(found: Sequence[Facts], silent: Mapping[str, str] | None = None) -> Facts:
    """Returns the facts of one run, merged from one or more nodes. ``silent``: see ``merge_runs``.

    If several processes claim a rank, living processes take precedence, then the process that shares communicators with
    more other ranks, then the newest process. ``missing`` names the conflict. Raises ValueError for facts of several
    runs or owners.
    """
    first = found[0]
    if len({facts.owner for facts in found} - {None}) > 1:
        raise ValueError("the facts belong to several owners")
    if any((facts.job, facts.run) != (first.job, first.run) for facts in found):
        raise ValueError("the facts belong to several runs")
    ranks, notes = _ranks([rank for facts in found for rank in facts.ranks])
    communicators, more = _communicators([one for facts in found for one in facts.communicators])
    unanswered = [
        Missing("node", f"node {node} did not answer: {why}", node=node) for node, why in sorted((silent or {}).items())
    ]
    missing = [one for facts in found for one in facts.missing]
    return replace(
        first,
        world_size=_highest(facts.world_size for facts in found),
        stall_s=max(facts.stall_s for facts in found),
        taken_ns=max(facts.taken_ns for facts in found),
        nodes=_nodes(node for facts in found for node in facts.nodes),
        ranks=ranks,
        communicators=communicators,
        processes=_processes(process for facts in found for process in facts.processes),
        missing=tuple(dict.fromkeys([*missing, *unanswered, *notes, *more])),
        usual_gap_ns=_highest(facts.usual_gap_ns for facts in found),
        owner=_highest(facts.owner for facts in found),
        phase=max(
            (facts.phase for facts in found if facts.phase is not None),
            key=lambda phase: phase.since_ns + phase.limit_s * 1e9,
            default=None,
        ),
        # All nodes record the same steps; the longest history has the most of them.
        step_history=max((facts.step_history for facts in found), key=len),
    )


def _highest(values: Iterable[_T | None]) -> _T | None:
    return max((value for value in values if value is not None), default=None)


def _nodes(nodes: Iterable[NodeFacts]) -> tuple[NodeFacts, ...]:
    newest: dict[str, NodeFacts] = {}
    for node in nodes:
        if node.node not in newest or newest[node.node].taken_ns < node.taken_ns:
            newest[node.node] = node
    return tuple(newest[name] for name in sorted(newest))


def _processes(processes: Iterable[Process]) -> tuple[Process, ...]:
    return tuple({(p.node, p.pid, p.start_ns): p for p in processes}.values())


def _ranks(ranks: Iterable[Rank]) -> tuple[tuple[Rank, ...], list[Missing]]:
    claims: dict[int, list[Rank]] = defaultdict(list)
    for rank in ranks:
        claims[rank.rank].append(rank)
    every = [rank for claiming in claims.values() for rank in claiming]
    shared: dict[int, int] = {}
    if len(claims) < len(every):
        counts = companions([(rank.rank, _comms(rank)) for rank in every])
        shared = {id(rank): count for rank, count in zip(every, counts, strict=True)}
    chosen, notes = [], []
    for number, claiming in sorted(claims.items()):
        *rest, best = sorted(claiming, key=lambda rank: (rank.exit is None, shared.get(id(rank), 0), *_age(rank)))
        chosen.append(best)
        for other in (other for other in rest if _process(other) != _process(best)):
            text = f"rank {number} is claimed by {_name(other)} and {_name(best)}; {_why(best, other, shared)}"
            notes.append(Missing("rank", text, number, best.node))
    return tuple(chosen), notes


def _why(best: Rank, other: Rank, shared: Mapping[int, int]) -> str:
    if (best.exit is None) == (other.exit is None) and shared[id(best)] > shared[id(other)]:
        count = shared[id(best)]
        return f"the second counts: it shares communicators with {count} other rank{'s' if count > 1 else ''}"
    return "the newer process counts" if _age(best) > _age(other) else "the living process counts"


def _comms(rank: Rank) -> set[str]:
    operations = {operation.comm for operation in (*rank.open, *rank.done)}
    return operations | {progress.comm for progress in rank.progress}


def _age(rank: Rank) -> tuple[int, int, bool]:
    # ``start_ns`` counts from the boot of a node, so it can only order processes of one node.
    return rank.started_ns or 0, rank.start_ns, bool(rank.threads)


def _process(rank: Rank) -> tuple[str, int, int]:
    return rank.node, rank.pid, rank.start_ns


def _name(rank: Rank) -> str:
    return f"pid {rank.pid} on node {rank.node}"


def _communicators(found: Iterable[Communicator]) -> tuple[tuple[Communicator, ...], list[Missing]]:
    parts: dict[str, list[Communicator]] = {}
    for one in found:
        parts.setdefault(one.comm, []).append(one)
    notes: list[Missing] = []
    return tuple(_united(parts[comm], notes) for comm in sorted(parts)), notes


def _united(parts: Sequence[Communicator], notes: list[Missing]) -> Communicator:
    best = min(parts, key=lambda one: one.witness != "probe")
    members: dict[int, Member] = {}
    for member in (member for one in parts for member in one.members):
        known = members.setdefault(member.comm_rank, member)
        if known.rank != member.rank:
            text = (
                f"ranks {known.rank} and {member.rank} both are member {member.comm_rank} of communicator {best.comm}"
            )
            notes.append(Missing("rank", text, member.rank))
    return replace(
        best,
        name=_first(one.name for one in parts),
        backend=_first(one.backend for one in parts),
        size=_highest(one.size for one in parts),
        members=tuple(members[number] for number in sorted(members)),
        role=_first(one.role for one in parts),
        async_error=_first(one.async_error for one in parts),
        aborted=_highest(one.aborted for one in parts),
        # A state other than active counts, whichever member has it.
        state=_first(one.state for one in parts if one.state != "active") or _first(one.state for one in parts),
    )


def _first(values: Iterable[str | None]) -> str | None:
    return next((value for value in values if value is not None), None)
