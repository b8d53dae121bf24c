"""Names the ranks that hold a job up, using only the dumps of PyTorch's flight recorder.

A rank waits in the first operation that has not completed on it, since its GPU executes operations in order. There it
waits for the members of the group that have not reached that operation: they have not called it, or an earlier
operation has not completed on them. A rank holds others up if they wait for it and it waits for no rank. If all its
operations have completed, its program is outside of collectives. If its first pending operation has completed on
another rank, its own GPU or driver is stuck.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice, takewhile

from probing.api.text import ranks_of
from probing.diagnosis.facts import Facts, Missing, Progress, Rank
from probing.diagnosis.flight_recorder.dump import DEFAULT, Group, RankDump, Record, contradictions
from probing.diagnosis.ladder import Diagnosis
from probing.diagnosis.rules.deadlock import DEADLOCK
from probing.diagnosis.rules.no_completion import NO_COMPLETION
from probing.diagnosis.rules.not_joined import NOT_JOINED
from probing.diagnosis.verdict import CANNOT_TELL, ERROR, Advice, Culprit, Finding, Verdict
from probing.diagnosis.wait_graph import Pending, WaitGraph
from probing.diagnosis.waits import Wait
from probing.diagnosis.words import clean, ranks_wait

__all__ = ("diagnose_dumps",)

_MOST_NAMED = 8
_SOURCE = "flight_recorder"


def diagnose_dumps(job: str, dumps: Sequence[RankDump], missing: Sequence[Missing] = ()) -> Diagnosis:
    """Returns the diagnosis of one job from the dumps of its ranks. ``missing``: files that could not be read."""
    unreadable = frozenset(gap.rank for gap in missing if gap.rank is not None) - {dump.rank for dump in dumps}
    whole = _whole(dumps, unreadable)
    gaps = list(missing)
    if not dumps:
        finding = _undecided("no dump can be read", ("what the ranks have called",))
        return Diagnosis(_facts(job, (), ()), (finding,), tuple(gaps))
    unlike = contradictions(whole)
    if unlike:
        gaps += [Missing("rank", text) for text in unlike]
        finding = _undecided("the dumps are not of one job at one moment", unlike)
        return Diagnosis(_facts(job, dumps, ()), (finding,), tuple(gaps))
    scene = _Scene({dump.rank: dump for dump in whole}, unreadable)
    if not scene.ends and not scene.graph.components():
        strict = _Scene(scene.dumps, unreadable, in_order=True)
        scene = strict if strict.ends else scene
    world = next((dump.world for dump in dumps if dump.world), ())
    absent = [rank for rank in world if rank not in scene.dumps and rank not in unreadable]
    if absent:
        gaps.append(Missing("history", f"no dump of {ranks_of(absent)}"))
    return Diagnosis(_facts(job, dumps, world), tuple(_findings(scene)), tuple(gaps))


def _whole(dumps: Sequence[RankDump], unreadable: frozenset[int]) -> list[RankDump]:
    """Returns ``dumps``, with gaps filled from the other dumps.

    A group without a list of ranks gets the ranks that called it, and the default group gets all ranks. If no
    record shows the group of a number in a rank's status, other ranks show the description of the group with this
    number, and the rank's only group with this description is taken.
    """
    called: dict[str, set[int]] = {}
    descriptions: dict[str, str] = {}
    for dump in dumps:
        descriptions.update({number: group.desc for number, group in dump.numbers.items()})
        for group in dump.called:
            called.setdefault(group.name, set()).add(dump.rank)
    every = tuple(sorted({*unreadable, *(dump.rank for dump in dumps)}))
    made: dict[tuple[str, str], Group] = {}

    def whole(group: Group) -> Group:
        if group.ranks:
            return group
        key = group.name, group.desc
        if key not in made:
            made[key] = replace(group, ranks=every if group.desc == DEFAULT else tuple(sorted(called[group.name])))
        return made[key]

    def named(dump: RankDump, number: str) -> Group | None:
        alike = [group for group in dump.groups if group.desc == descriptions.get(number)]
        return dump.numbers.get(number) or (alike[0] if len(alike) == 1 else None)

    found = []
    for dump in dumps:
        own = {whole(group): seq for group, seq in dump.called.items()}
        for number, seq in dump.status.items():
            if (known := named(dump, number)) is not None:
                own[whole(known)] = max(own.get(whole(known), seq), seq)
        records = tuple(replace(record, group=whole(record.group)) for record in dump.records)
        found.append(replace(dump, records=records, called=own))
    return found


@dataclass(frozen=True)
class _Scene:
    """The dumps of a job. ``unreadable``: ranks without a readable dump. ``in_order``: the GPU executes the operations
    of all groups in one order, and not separately for each group. Groups can overlap, so ``in_order`` is set only if
    the analysis finds neither a culprit nor a cycle without this assumption."""

    dumps: Mapping[int, RankDump]
    unreadable: frozenset[int] = frozenset()
    in_order: bool = False
    _found: dict[tuple[Group, int], frozenset[int]] = field(default_factory=dict)
    _ended: dict[tuple[Group, int], Sequence[int]] = field(default_factory=dict)

    @cached_property
    def pending(self) -> Mapping[int, Sequence[Record]]:
        """The operations that have not completed on each rank, in the rank's order."""
        return {rank: [one for one in dump.records if not one.completed] for rank, dump in self.dumps.items()}

    @cached_property
    def first(self) -> Mapping[int, Mapping[Group, int]]:
        """The first collective of each group that has not completed, by rank."""
        found: dict[int, dict[Group, int]] = {}
        for rank, records in self.pending.items():
            own = found.setdefault(rank, {})
            for one in records:
                if one.peer is None:
                    own[one.group] = min(own.get(one.group, one.seq), one.seq)
        return found

    @cached_property
    def graph(self) -> WaitGraph:
        """The wait-for graph. A rank waits in its first operation that a member has not reached. If members have
        reached all its operations, the rank waits in the first.
        """
        waiters: dict[tuple[Group, int, str, frozenset[int]], list[int]] = {}
        waits: dict[int, Wait] = {}
        for rank in sorted(self.pending):
            record, awaited = self._wait(rank)
            if record is not None:
                group, op = record.group, record.op
                waits[rank] = Wait(group.name, record.seq, op, record.created_ns, record.peer, (_SOURCE,))
                waiters.setdefault((group, record.seq, op, awaited), []).append(rank)
        return WaitGraph(
            waits,
            [
                Pending(group.name, seq, op, tuple(ranks), awaited)
                for (group, seq, op, awaited), ranks in waiters.items()
            ],
        )

    @cached_property
    def ends(self) -> list[int]:
        """The ranks for which others wait and that wait for no rank."""
        awaited = {rank for one in self.graph.operations for rank in one.awaited}
        return sorted(r for r in awaited if r not in self.graph.pending or not self.graph.pending[r].awaited)

    def _wait(self, rank: int) -> tuple[Record | None, frozenset[int]]:
        for record in self._front(rank):
            if awaited := self._awaited(rank, record):
                return record, awaited
        return next(iter(self.pending[rank]), None), frozenset()

    def _front(self, rank: int) -> list[Record]:
        """Returns the first operation that has not completed. It may begin a batch of sends and receives, which run
        together and are all returned.
        """
        pending = self.pending[rank]
        if not pending or pending[0].peer is None:
            return list(pending[:1])
        return list(takewhile(lambda one: one.peer is not None and one.group == pending[0].group, pending))

    def _awaited(self, rank: int, record: Record) -> frozenset[int]:
        if record.peer is None:
            return self._lacking(record)
        counterpart = "recv" if record.op == "send" else "send"
        front = self._front(record.peer) if record.peer in self.dumps else []
        met = any(one.peer == rank and one.op == counterpart and one.group == record.group for one in front)
        return frozenset(() if met else (record.peer,))

    def _lacking(self, record: Record) -> frozenset[int]:
        """Returns the members that have not reached a collective. The result is cached, because it is the same for all
        ranks that wait in the collective.
        """
        key = record.group, record.seq
        if key not in self._found:
            found = (member for member in record.group.ranks if not self._has_come(member, record))
            self._found[key] = frozenset(found)
        return self._found[key]

    def _has_come(self, rank: int, record: Record) -> bool:
        """Returns whether a collective has begun or ended on the GPU of ``rank``, as far as its own dump shows."""
        if rank not in self.dumps:
            return False
        first = self.first[rank].get(record.group)
        if self.in_order and first is not None:
            oldest = self.pending[rank][0]
            return record.seq < first or (oldest.group, oldest.seq) == (record.group, record.seq)
        return record.seq <= (first if first is not None else self.dumps[rank].called.get(record.group, -1))

    def completed_elsewhere(self, rank: int) -> Record | None:
        """Returns the first pending collective of ``rank`` if it has completed on another member of its group; else
        None.
        """
        record = next(iter(self.pending.get(rank, ())), None)
        if record is None or record.peer is not None:
            return None
        return record if any(member != rank for member in self._done(record)) else None

    def _done(self, record: Record) -> Sequence[int]:
        """Returns the first two ranks on which a collective has completed. The result is cached."""
        key = record.group, record.seq
        if key not in self._ended:
            members = (member for member in record.group.ranks if member in self.dumps)
            self._ended[key] = tuple(islice((member for member in members if self._has_done(member, record)), 2))
        return self._ended[key]

    def _has_done(self, rank: int, record: Record) -> bool:
        first = self.first[rank].get(record.group)
        called = self.dumps[rank].called.get(record.group, -1)
        return called >= record.seq and (first is None or first > record.seq)


def _findings(scene: _Scene) -> Iterable[Finding]:
    if scene.ends:
        seen = [rank for rank in scene.ends if rank not in scene.unreadable]
        yield _held_up(scene, seen) if seen else _may_hold_up(scene)
        return
    for component in scene.graph.components():
        yield _deadlock(scene, component)
        return
    if not any(scene.pending.values()):
        return
    for one in scene.graph.operations:
        yield _none_completes(scene, one)


def _may_hold_up(scene: _Scene) -> Finding:
    """Returns the finding about awaited ranks that may have joined, since their dumps could not be read."""
    victims = scene.graph.victims(scene.ends)
    waits = [_wait_text(scene, one) for one in scene.graph.awaiting(scene.ends)[:_MOST_NAMED]]
    whose = "its dump" if len(scene.ends) == 1 else "their dumps"
    sentence = f"{ranks_wait(victims)}, and {ranks_of(scene.ends)} may hold them up: {whose} cannot be read"
    return replace(
        _undecided(sentence, (f"the calls of {ranks_of(scene.ends)}",)), victims=victims, evidence=tuple(waits)
    )


def _held_up(scene: _Scene, ends: Sequence[int]) -> Finding:
    victims = scene.graph.victims(ends)
    stuck = [rank for rank in ends if scene.completed_elsewhere(rank) is not None]
    absent = [rank for rank in ends if rank not in scene.dumps]
    culprits = tuple(Culprit(rank, "", 0, _why(scene, rank), "unknown") for rank in ends)
    verb = "holds" if len(ends) == 1 else "hold"
    why = culprits[0].why if len(ends) == 1 else f"rank {ends[0]}: {culprits[0].why}"
    pending = scene.graph.awaiting(ends)
    return Finding(
        NO_COMPLETION if len(stuck) == len(ends) else NOT_JOINED,
        ERROR,
        0.5 if absent else 0.8,
        f"{ranks_of(ends)} {verb} up {len(victims)} rank{'s' if len(victims) != 1 else ''}: {why}",
        culprits,
        victims,
        min((t for r in victims if (t := scene.graph.waits[r].since_ns) is not None), default=None),
        "",
        tuple(_wait_text(scene, one) for one in pending[:_MOST_NAMED]),
        (f"no dump of {ranks_of(absent)}",) if absent else (),
        ("A dump in which the named ranks have called and completed the operations in which the others wait.",),
        (
            "Look at the stack of the named ranks, if they live, and at the end of their logs.",
            "On GPUs look at the kernel's log of their nodes for XIDs.",
        ),
        (),
        Advice("restart", "it does not go on by itself; if the same ranks hold it up again, leave their nodes out"),
    )


def _why(scene: _Scene, rank: int) -> str:
    if rank not in scene.dumps:
        return "it wrote no dump"
    record = scene.completed_elsewhere(rank)
    if record is not None:
        return f"{_text(record)} has completed on other ranks and not on it: its GPU or driver is stuck"
    if scene.pending[rank]:
        return f"it is in {_text(scene.pending[rank][0])}"
    return "all that it called has completed: it is outside of collectives"


def _text(record: Record) -> str:
    return f"{record.op} seq {record.seq} of {clean(record.group.desc or record.group.name)}"


def _wait_text(scene: _Scene, one: Pending) -> str:
    group = next(record.group for record in scene.pending[one.waiters[0]] if record.group.name == one.comm)
    call = f"{one.op} seq {one.seq} of {clean(group.desc or group.name)}"
    return f"{ranks_wait(one.waiters)} in {call} for {ranks_of(one.awaited)}"


def _deadlock(scene: _Scene, component: Sequence[int]) -> Finding:
    edges = scene.graph.cycle(component)
    lines = [_wait_text(scene, scene.graph.pending[edge.waiter]) for edge in edges[:_MOST_NAMED]]
    sentence = f"{ranks_of(component)} wait for each other"
    return _finding(DEADLOCK, 0.8, sentence, (), tuple(component), lines)


def _none_completes(scene: _Scene, one: Pending) -> Finding:
    record = scene.pending[one.waiters[0]][0]
    sentence = f"{ranks_wait(one.waiters)} in {_text(record)}, which all ranks have joined"
    return _finding(NO_COMPLETION, 0.6, sentence, (), one.waiters, [])


def _undecided(sentence: str, missing: tuple[str, ...]) -> Finding:
    return replace(_finding(CANNOT_TELL, 0.3, sentence, (), (), []), missing=missing)


def _finding(
    verdict: Verdict,
    confidence: float,
    sentence: str,
    culprits: tuple[Culprit, ...],
    victims: tuple[int, ...],
    evidence: Sequence[str],
) -> Finding:
    refuted, steps = (verdict.refuted_by,), verdict.next_steps
    return Finding(
        verdict, ERROR, confidence, sentence, culprits, victims, None, "", tuple(evidence), (), refuted, steps
    )


def _facts(job: str, dumps: Sequence[RankDump], world: Sequence[int]) -> Facts:
    ranks = tuple(_rank(dump) for dump in sorted(dumps, key=lambda dump: dump.rank))
    newest = max((r.created_ns or 0 for dump in dumps for r in dump.records), default=0)
    return Facts(job, "", len(world) or None, 10.0, newest, (), ranks)


def _rank(dump: RankDump) -> Rank:
    progress = tuple(Progress(group.name, seq, None, 0, None) for group, seq in dump.called.items())
    return Rank(dump.rank, "", 0, 0, world_size=len(dump.world) or None, progress=progress)
