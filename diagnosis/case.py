"""A case: facts, and values that several rules derive from them, each computed once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import cached_property

from probing.diagnosis.activity.activity import Activity, activity_of
from probing.diagnosis.clocks import ClockOffset, clock_offsets
from probing.diagnosis.cold_caches import ALONE, WARM_UP, busy_ranks
from probing.diagnosis.disagreements import Disagreement, disagreements, ended_badly
from probing.diagnosis.fabrics import FabricFault, fabric_faults
from probing.diagnosis.facts import Communicator, Facts, Process, Rank, Witness
from probing.diagnosis.joins import Joins, with_file_locks
from probing.diagnosis.sample_difference import Work, work_of
from probing.diagnosis.sequences import Sequence, mixed_comms, sequences_of, world_of
from probing.diagnosis.symptoms.all import symptoms_of
from probing.diagnosis.symptoms.symptom import Symptom
from probing.diagnosis.training_threads import with_training_threads
from probing.diagnosis.verdict import ERROR, Culprit, Finding, StackOf
from probing.diagnosis.wait_graph import Pending, WaitGraph
from probing.diagnosis.waits import INIT, Wait, gate_ns, main_thread, patience_ns, quiet_ns, usual_gate_ns, wait_of
from probing.diagnosis.words import clean, who

__all__ = ("Case",)

_MOST_STACKS = 3


class Case:
    """The facts of a job by rank and communicator. ``found``: the findings of earlier rules."""

    def __init__(self, facts: Facts) -> None:
        self.facts = with_training_threads(facts)
        self.found: list[Finding] = []
        self._activities: dict[int, Activity] = {}
        self._quiet: dict[int, int | None] = {}
        self._works: dict[int, Work] = {}
        self._nodes = {node.node: node for node in facts.nodes}
        self._of_nodes: dict[str, Facts] = {}

    @cached_property
    def ranks(self) -> Mapping[int, Rank]:
        return {rank.rank: rank for rank in self.facts.ranks}

    def on_node(self, node: str) -> Facts:
        """Returns the facts with only the ranks and processes of ``node``."""
        if node not in self._of_nodes:
            own, facts = self._nodes.get(node), self.facts
            ranks, processes = self._by_node[0].get(node, ()), self._by_node[1].get(node, ())
            nodes = (own,) if own is not None else ()
            self._of_nodes[node] = replace(facts, nodes=nodes, ranks=tuple(ranks), processes=tuple(processes))
        return self._of_nodes[node]

    @cached_property
    def _by_node(self) -> tuple[Mapping[str, list[Rank]], Mapping[str, list[Process]]]:
        ranks: dict[str, list[Rank]] = {}
        processes: dict[str, list[Process]] = {}
        for rank in self.facts.ranks:
            ranks.setdefault(rank.node, []).append(rank)
        for process in self.facts.processes:
            processes.setdefault(process.node, []).append(process)
        return ranks, processes

    @property
    def many_nodes(self) -> bool:
        """Whether the ranks are on several nodes."""
        return len(self._by_node[0]) > 1

    @property
    def world(self) -> range:
        """The ranks of the job according to its world size; empty if the world size is unknown."""
        return world_of(self.facts)

    @cached_property
    def communicators(self) -> Mapping[str, Communicator]:
        return {communicator.comm: communicator for communicator in self.facts.communicators}

    @cached_property
    def clocks(self) -> Mapping[str, ClockOffset]:
        return clock_offsets(self.facts)

    @cached_property
    def waits(self) -> Mapping[int, Wait]:
        """The ranks that wait in an operation."""
        found = {rank.rank: wait_of(rank, self.facts) for rank in self.facts.ranks}
        return {rank: wait for rank, wait in found.items() if wait is not None}

    @cached_property
    def gate_ns(self) -> int:
        """The time after which a wait is a stall, ns: ``stall_s``, or more if the job is usually quiet for longer."""
        return gate_ns(self.facts)

    @cached_property
    def usual_gate_ns(self) -> int:
        """The time after which a wait would be a stall if no rank were in a phase, ns. Data count as recent up to a
        multiple of this age.
        """
        return usual_gate_ns(self.facts)

    @cached_property
    def patience_ns(self) -> int:
        """The time after which a rank that makes progress elsewhere counts as holding the job up."""
        return patience_ns(self.facts)

    @cached_property
    def may_hang(self) -> bool:
        """Whether the job may hang: for the time of a stall, an operation has been in flight, a rank has waited, or the
        whole job has been quiet. This is cheaper to compute than ``graph``.
        """
        if any(
            o.t_call_ns is not None and self.now(rank.rank) - o.t_call_ns >= self.gate_ns
            for rank in self.facts.ranks
            for o in rank.open
        ):
            return True
        if any(self._waits_quietly(rank, wait) for rank, wait in self.waits.items()):
            return True
        quiet = (self.quiet_ns(rank.rank) for rank in self.facts.ranks if rank.exit is None)
        return all(one is None or one >= self.gate_ns for one in quiet) and self.stalled_ns is not None

    def _waits_quietly(self, rank: int, wait: Wait) -> bool:
        # A stack can show a wait for which no operation was recorded. If the awaited rank wakes up now and then, the
        # job as a whole is not quiet, although this rank hangs.
        if not wait.firm or wait.since_ns is None or wait.op == INIT:
            return False
        return min(self.wait_ns(rank) or 0, self.quiet_ns(rank) or 0) >= self.gate_ns

    @cached_property
    def stalled_ns(self) -> int | None:
        """The time since any living rank last began or ended an operation or step, ns; None if unknown."""
        living = [quiet for r in self.facts.ranks if r.exit is None and (quiet := self.quiet_ns(r.rank)) is not None]
        return min(living, default=None)

    def quiet_ns(self, rank: int) -> int | None:
        """Returns the time since ``rank`` last began or ended an operation or step, ns; None if unknown."""
        if rank not in self._quiet:
            own = self.ranks[rank]
            node = self._nodes.get(own.node)
            self._quiet[rank] = quiet_ns(own, self.now(rank), node.watching_since_ns if node is not None else None)
        return self._quiet[rank]

    def now(self, rank: int) -> int:
        """Returns the moment of the facts on the clock of the rank's node."""
        node = self._nodes.get(self.ranks[rank].node)
        return node.taken_ns if node is not None else self.facts.taken_ns

    def wait_ns(self, rank: int) -> int | None:
        """Returns the time for which ``rank`` has waited, ns; None if it does not wait, or if the time is unknown."""
        wait = self.waits.get(rank)
        if wait is None:
            return None
        if wait.since_ns is not None:
            return max(0, self.now(rank) - wait.since_ns)
        # The rank has begun no other operation for this long, but the wait itself may have begun just now.
        quiet = self.quiet_ns(rank)
        return quiet if quiet is not None and quiet >= self.patience_ns else None

    @property
    def ripens_ns(self) -> int | None:
        """The time until a wait that is still too short, or the standstill of the whole job, has become a stall, ns.

        None if none of them is still too short, or if the age of no wait is known.
        """
        ages = [self.wait_ns(rank) for rank, wait in self.waits.items() if wait.firm and wait.since_ns is not None]
        ages += [self.stalled_ns] if ages else []
        return min((self.gate_ns - age for age in ages if age is not None and age < self.gate_ns), default=None)

    @cached_property
    def sequences(self) -> Mapping[str, Sequence]:
        """The collectives of each communicator."""
        return sequences_of(self.facts)

    @cached_property
    def graph(self) -> WaitGraph:
        """The wait-for graph of the waits that last at least for the time of a stall."""
        if not self.may_hang:
            return WaitGraph({})
        if not any((self.wait_ns(rank) or 0) >= self.gate_ns for rank in self.waits):
            return WaitGraph({})
        old = {rank: wait for rank, wait in self.waits.items() if self._is_old(rank, wait)}
        return with_file_locks(self._joins.graph(old), self.facts.ranks)

    @cached_property
    def in_flight(self) -> list[Pending]:
        """The operations in flight, including short ones, and the ranks that have not joined the collectives among
        them.
        """
        return self._joins.in_flight()

    @cached_property
    def _joins(self) -> Joins:
        return Joins(self.ranks, self.waits, self.sequences, self.world, self.now)

    def _is_old(self, rank: int, wait: Wait) -> bool:
        if wait.firm and wait.since_ns is not None:
            return (self.wait_ns(rank) or 0) >= self.gate_ns
        # A rank that begins other operations does not wait for the end of an asynchronous operation. If no times are
        # known, the rank counts as waiting, so that it is not blamed.
        quiet, age = self.quiet_ns(rank), self.wait_ns(rank)
        return (quiet is None or quiet >= self.gate_ns) and (age is None or age >= self.gate_ns)

    @cached_property
    def _mixed(self) -> frozenset[str]:
        return mixed_comms(self.facts.ranks)

    def number(self, rank: int, comm: str, seq: int | None) -> int | None:
        """Returns the number that the collective ``seq`` of ``rank`` has on all ranks; None if it is unknown."""
        return self.sequences[comm].number(rank, seq) if comm in self._mixed else seq

    @cached_property
    def disagreements(self) -> list[Disagreement]:
        """The collectives that hang or have failed, and whose calls differ between ranks."""
        bad = ended_badly(self.facts.ranks)
        return disagreements(self.graph, self.sequences, bad) if bad or self.graph.waits else []

    def work(self, rank: int) -> Work:
        """Returns the work of ``rank``, as its samples show it."""
        if rank not in self._works:
            self._works[rank] = work_of(self.ranks[rank].samples)
        return self._works[rank]

    @cached_property
    def symptoms(self) -> list[Symptom]:
        """The symptoms of the nodes' hardware. Events from before the job count only if the part does not work."""
        begun = min((rank.started_ns for rank in self.facts.ranks if rank.started_ns is not None), default=0)
        found = [symptom for node in self.facts.nodes for symptom in symptoms_of(node)]
        return [one for one in found if one.fails or one.last_ns is None or one.last_ns >= begun]

    @cached_property
    def reports(self) -> Mapping[tuple[str, str], list[tuple[Rank, Witness]]]:
        """The reports of witnesses, with their ranks, by source and communicator."""
        found: dict[tuple[str, str], list[tuple[Rank, Witness]]] = {}
        for rank in self.facts.ranks:
            for one in rank.witnesses:
                found.setdefault((one.source, one.comm), []).append((rank, one))
        return found

    @cached_property
    def fabric_faults(self) -> list[FabricFault]:
        """Errors that several GPUs of an NVLink fabric reported at the same time."""
        return fabric_faults(self.facts.nodes, self.clocks)

    def symptoms_of_rank(self, rank: int) -> list[Symptom]:
        """Returns the symptoms of the parts that ``rank`` uses."""
        return self._symptoms_by_rank.get(rank, [])

    @cached_property
    def _symptoms_by_rank(self) -> Mapping[int, list[Symptom]]:
        found: dict[int, list[Symptom]] = {}
        for symptom in self.symptoms:
            for rank in dict.fromkeys(symptom.ranks):
                found.setdefault(rank, []).append(symptom)
        return found

    @cached_property
    def _busy(self) -> list[int]:
        return busy_ranks(self.ranks, self.waits)

    def activity(self, rank: int) -> Activity:
        if rank not in self._activities:
            found = activity_of(self.ranks[rank], self.on_node(self.ranks[rank].node))
            if found.kind == "compiling" and len(self.ranks) > 1 and {*self._busy} <= {rank}:
                found = replace(found, why=f"{found.why}{ALONE}", next_steps=(*found.next_steps, *WARM_UP))
            self._activities[rank] = found
        return self._activities[rank]

    def time(self, rank: int, ns: int) -> int:
        """Converts a time on the clock of the rank's node to the common clock, ns."""
        clock = self.clocks.get(self.ranks[rank].node)
        return ns - clock.offset_ns if clock else ns

    def who(self, ranks: Iterable[int]) -> str:
        """Returns a text such as "rank 1 (node b, pid 4711)", or "ranks 1-3" for several."""
        return who([self.ranks[rank] for rank in ranks])

    def comm_name(self, comm: str) -> str:
        """Returns the name of a communicator, or "communicator 3" if it has none."""
        known = self.communicators.get(comm)
        return clean(known.name if known and known.name else f"communicator {comm}")

    def culprit(self, rank: int) -> Culprit:
        """Returns ``rank`` as a culprit, with its activity."""
        own, does = self.ranks[rank], self.activity(rank)
        return Culprit(rank, own.node, own.pid, does.why, does.kind)

    @property
    def explained(self) -> frozenset[int]:
        """The ranks that errors of earlier rules name, as culprits or victims."""
        errors = [finding for finding in self.found if finding.severity == ERROR]
        return frozenset(rank for f in errors for rank in (*(c.rank for c in f.culprits), *f.victims))

    def stacks(self, culprits: Iterable[int], victims: Iterable[int]) -> tuple[StackOf, ...]:
        """Returns the stacks of the main threads of the first culprits, and of the first victim that has a stack."""
        chosen = [(rank, "culprit") for rank in list(culprits)[:_MOST_STACKS]]
        chosen += [(rank, "victim") for rank in victims if rank in self.ranks and main_thread(self.ranks[rank])][:1]
        found = []
        for number, role in chosen:
            rank = self.ranks.get(number)
            main = main_thread(rank) if rank is not None else None
            if rank is not None and main is not None:
                found.append(StackOf(number, rank.node, rank.pid, role, main))
        return tuple(found)

    @property
    def found_error(self) -> bool:
        """Whether an earlier rule reported an error."""
        return any(finding.severity == ERROR for finding in self.found)
