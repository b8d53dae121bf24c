"""Gathers the facts of a job from all nodes with its ranks: cheap facts from all nodes, stacks only from nodes of
suspects and of one victim.

All nodes are asked at once for facts that are cheap to read, within a second. The rules then name suspects, and only
the nodes of the suspects, and the node of one victim, are asked for stacks and conditions.

A peer's facts count only for its own ranks. Facts of the whole job, such as its size and the time after which it counts
as stalled, come from this node: a peer that sends other values could hide a stall.
"""

from __future__ import annotations

import time
from collections.abc import Hashable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace

from probing.api.errors import NotFound, PeerError, ProbingError
from probing.daemon.diagnose.coordination.peers import PeerFacts, answers
from probing.daemon.diagnose.coordination.proofs import Proofs
from probing.daemon.diagnose.gather.gatherer import Gatherer
from probing.diagnosis.facts import MAX_RANKS as MAX_WORLD
from probing.diagnosis.facts import Facts, Missing, NodeFacts, Phase, Rank
from probing.diagnosis.facts_file import from_json
from probing.diagnosis.ladder import RULES, Rule, diagnose
from probing.diagnosis.merge import merge
from probing.diagnosis.waits import MAX_PHASE_S

__all__ = ("MAX_RANKS", "JobFacts", "facts_of")

MAX_RANKS = 1024
"""The maximum number of ranks, and of other processes, in the facts of a node."""
# The maximum difference between the times of a peer's facts and of this node's facts, ns. They differ because the peer
# reads its clock later, before it answers, and because the measured offset may be wrong.
_APART_NS = 30_000_000_000
_MAX_MISSING = 64
_MAX_TEXT = 300
# A peer's usual gap counts up to this multiple of the usual gap on this node.
_GAPS = 4


def facts_of(node: str, answer: PeerFacts, own: Facts) -> Facts:
    """Returns the facts in ``answer`` of ``node``, with the offset of its clock. ``own``: this node's facts of the same
    run.

    Raises NotFound if the node has no ranks of the run; FormatError or PeerError for facts of another run, owner or
    node.
    """
    for part in answer.parts:
        facts = from_json(part)
        if (facts.job, facts.run) == (own.job, own.run):
            _check(node, facts, own)
            return _about_itself(node, facts, answer, own)
    raise NotFound(f"it knows no run {own.run!r} of job {own.job!r}")


def _check(node: str, facts: Facts, own: Facts) -> None:
    spoken = {one.node for part in (facts.nodes, facts.ranks, facts.processes) for one in part}
    if spoken != {node} or len(facts.nodes) != 1:
        raise PeerError(f"its facts are about other nodes than {node}", hint="give every daemon its own name")
    if max(len(facts.ranks), len(facts.processes)) > MAX_RANKS:
        raise PeerError(f"its facts are of more than {MAX_RANKS} processes")
    # Facts of an older version lack the owner.
    if None not in (facts.owner, own.owner) and facts.owner != own.owner:
        raise PeerError(f"the job belongs to uid {facts.owner} there, and to uid {own.owner} here")


def _about_itself(node: str, facts: Facts, answer: PeerFacts, own: Facts) -> Facts:
    known = {rank.rank for rank in own.ranks}
    size = MAX_WORLD if own.world_size is None else own.world_size
    shifted = _shifted(facts.nodes[0], answer)
    if abs(shifted.taken_ns - shifted.clock_offset_ns - own.taken_ns) > _APART_NS:
        raise PeerError("the time of its facts differs too much from the time of the request")
    gap = facts.usual_gap_ns
    if gap is not None and own.usual_gap_ns is not None:
        gap = min(gap, _GAPS * own.usual_gap_ns)
    return replace(
        facts,
        world_size=facts.world_size if own.world_size is None else own.world_size,
        stall_s=own.stall_s,
        taken_ns=own.taken_ns,
        nodes=(shifted,),
        ranks=tuple(rank for rank in facts.ranks if rank.rank not in known and 0 <= rank.rank < size),
        missing=tuple(_missing(node, facts.missing, [rank for rank in facts.ranks if rank.rank in known])),
        usual_gap_ns=gap,
        phase=_phase(facts, answer, own),
        step_history=() if own.step_history else facts.step_history,
    )


def _phase(facts: Facts, answer: PeerFacts, own: Facts) -> Phase | None:
    """Returns the phase that a node reports for one of its ranks, on this node's clock.

    None if the phase begins in the future, or if the ranks of this node have stood still for longer than the limit of
    the phase. So a node that sets the phase again and again delays a finding by this limit at most.
    """
    phase = facts.phase
    if phase is None or phase.rank not in {rank.rank for rank in facts.ranks} - {rank.rank for rank in own.ranks}:
        return None
    since = phase.since_ns - answer.clock_offset_ns
    advanced = max((node.advanced_ns or node.watching_since_ns or 0 for node in own.nodes), default=0)
    if since > own.taken_ns + _APART_NS or own.taken_ns - advanced >= min(phase.limit_s, MAX_PHASE_S) * 1e9:
        return None
    return replace(phase, name=phase.name[:_MAX_TEXT], since_ns=since)


def _missing(node: str, missing: Sequence[Missing], taken: Sequence[Rank]) -> list[Missing]:
    """Returns the gaps in its facts that a node reports, and a gap for each of ``taken``: ranks in the node's facts
    that are also on this node.
    """
    # This node itself knows which nodes do not answer.
    own = [replace(one, text=one.text[:_MAX_TEXT], node=node) for one in missing if one.kind not in ("node", "claim")]
    texts = (f"rank {rank.rank} is on this node, and node {node} has a process of it, too" for rank in taken)
    return own[:_MAX_MISSING] + [Missing("rank", text, node=node) for text in texts][:_MAX_MISSING]


def _shifted(node: NodeFacts, answer: PeerFacts) -> NodeFacts:
    return replace(node, clock_offset_ns=answer.clock_offset_ns, clock_error_ns=answer.clock_error_ns)


# The timeout for cheap facts, s: a fixed part for the slowest node, plus a part for each node, because this node has to
# receive all answers.
SHALLOW_S, EACH_S = 1.0, 0.002
# The maximum number of nodes whose stacks are read: the nodes of culprits, and the node of one victim.
MAX_DEEP = 4
MAX_NODES = 1024
# The maximum number of nodes with an unproven claim that the facts name.
MAX_CLAIMS = 8
_MARGIN_S = 0.2


class JobFacts:
    """Gathers the facts of jobs, from all nodes of each job. Thread-safe."""

    def __init__(self, node: str, local: Gatherer, peers: Proofs, rules: Sequence[Rule] = RULES) -> None:
        self._node = node
        self._local = local
        self._peers = peers
        self._rules = rules

    def read_ahead(self, job: str, *, timeout: float) -> None:
        """Reads the conditions of this node's processes, so that the next facts show what changed since. Raises
        ProbingError.
        """
        self._local.read_ahead(job, timeout=timeout)

    def standing(self, job: str, run: str, *, timeout: float) -> Hashable:
        """Returns where the ranks of a run stand in their code, for a comparison with an earlier answer.

        None for a run of several nodes, or if a part cannot be read.
        """
        return None if self._peers.holders(job, run) else self._local.standing(job, timeout=timeout)

    def facts(self, job: str, *, run: str, deep: bool, timeout: float) -> list[Facts]:
        """Returns the facts of a run from all nodes that hold its ranks; ``missing`` names nodes that did not answer.

        ``deep`` adds stacks and conditions of suspects. ``timeout`` in seconds. Raises ProbingError if this node has
        ranks of the job and cannot read their facts.
        """
        holders = self._peers.holders(job, run)
        claims = tuple(
            Missing(
                "claim", f"node {node} claims to take part, but nothing shows that it has ranks of the job", node=node
            )
            for node in self._peers.unproven(job, run)[:MAX_CLAIMS]
        )
        if not holders:
            alone = self._local.facts(job, run=run, deep=deep, timeout=timeout)
            return [replace(one, missing=(*one.missing, *claims)) if one.run == run else one for one in alone]
        deadline = time.monotonic() + timeout
        silent = {one.node: "it is listed as failed: its daemon does not answer" for one in holders if one.failed}
        asked = [one.node for one in holders if not one.failed]
        if len(asked) > MAX_NODES:
            silent |= dict.fromkeys(asked[MAX_NODES:], f"it was not asked: the job has more than {MAX_NODES} nodes")
        asked = asked[:MAX_NODES]
        soon = min(SHALLOW_S + EACH_S * len(asked), timeout)
        calls = self._begin(asked, job, run, deep=False, timeout=soon)
        # This node's facts are read while the other nodes answer.
        read = [one for one in self._local.facts(job, run=run, deep=deep, timeout=timeout) if one.run == run]
        if not read:
            raise NotFound(f"no run {run!r} of job {job!r} is known")
        own = replace(read[0], missing=(*read[0].missing, *claims))
        found = _facts_in(calls, soon, silent, own)
        if deep and found:
            self._deepen(found, merge([own, *found.values()], silent), own, deadline)
        return [merge([own, *found.values()], silent)]

    def _deepen(self, found: dict[str, Facts], facts: Facts, own: Facts, deadline: float) -> None:
        """Replaces the facts of suspect nodes by deep facts, if a node sends them before the deadline."""
        left = deadline - time.monotonic() - _MARGIN_S
        nodes = [node for node in self._suspects(facts) if node in found][:MAX_DEEP]
        if left <= 0 or not nodes:
            return
        failed: dict[str, str] = {}
        calls = self._begin(nodes, facts.job, facts.run, deep=True, timeout=left)
        found |= _facts_in(calls, left, failed, own)
        for node, why in failed.items():
            lacking = Missing("stacks", f"the stacks of node {node} could not be read: {why}", node=node)
            found[node] = replace(found[node], missing=(*found[node].missing, lacking))

    def _suspects(self, facts: Facts) -> list[str]:
        """Returns the other nodes whose stacks matter, the most important first."""
        where = {rank.rank: rank.node for rank in facts.ranks}
        findings = diagnose(facts, self._rules).findings
        culprits = [culprit.node for finding in findings for culprit in finding.culprits]
        victims = [where[rank] for finding in findings for rank in finding.victims if rank in where]
        own = {self._node}
        # One victim is enough; if this node has a victim, no other node is asked for one.
        witness = [] if own & set(victims) else victims[:1]
        # Without a suspect, ranks that wait in no operation come first: they may do something else.
        idle = [rank.node for rank in facts.ranks if not rank.open and rank.exit is None]
        chosen = [*culprits[: MAX_DEEP - 1], *witness] if culprits else [*idle, *(rank.node for rank in facts.ranks)]
        return [node for node in dict.fromkeys(chosen) if node not in own]

    def _begin(
        self, nodes: Iterable[str], job: str, run: str, *, deep: bool, timeout: float
    ) -> Mapping[str, Future[PeerFacts]]:
        return {node: self._peers.facts(node, job, run=run, deep=deep, timeout=timeout) for node in nodes}


def _facts_in(
    calls: Mapping[str, Future[PeerFacts]], timeout: float, silent: dict[str, str], own: Facts
) -> dict[str, Facts]:
    """Returns the facts of the nodes that answer in time; adds the other nodes and their reasons to ``silent``.
    ``own``: this node's facts.
    """
    found: dict[str, Facts] = {}
    for node, answer in answers(calls, timeout).items():
        try:
            if isinstance(answer, ProbingError):
                raise answer
            found[node] = facts_of(node, answer, own)
        except ProbingError as e:
            silent[node] = e.message
    return found
