"""Takes the facts that a peer sends of a run: what it says of its own ranks, and nothing of others.

What is common to all ranks of a job, such as its size and the time after which it counts as stalled, is as this node
knows it: a peer that says otherwise could hide a stall.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from probing.api.errors import NotFound, PeerError
from probing.daemon.diagnose.coordination.peers import PeerFacts
from probing.diagnosis.facts import MAX_RANKS as MAX_WORLD
from probing.diagnosis.facts import Facts, Missing, NodeFacts, Rank
from probing.diagnosis.facts_file import from_json

__all__ = ("MAX_RANKS", "facts_of")

MAX_RANKS = 1024
"""The most ranks, and other processes, of a node."""
# A clock may be read so long after ours, within the time for an answer, and be measured wrongly, ns.
_APART_NS = 30_000_000_000
_MAX_MISSING = 64
_MAX_TEXT = 300
# A job of which ranks pause for long on one node alone pauses at most so many times as long as on this one.
_GAPS = 4


def facts_of(node: str, answer: PeerFacts, own: Facts) -> Facts:
    """Returns what the node ``node`` says of the run of ``own``, the facts of this node, with the offset of its clock.

    Raises FormatError and PeerError for anything but facts of this run, of the same owner and of that node's own ranks,
    and NotFound.
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
        raise PeerError(f"there the job is of uid {facts.owner}, and here of uid {own.owner}")


def _about_itself(node: str, facts: Facts, answer: PeerFacts, own: Facts) -> Facts:
    known = {rank.rank for rank in own.ranks}
    size = MAX_WORLD if own.world_size is None else own.world_size
    shifted = _shifted(facts.nodes[0], answer)
    if abs(shifted.taken_ns - shifted.clock_offset_ns - own.taken_ns) > _APART_NS:
        raise PeerError("its facts are of another time than it was asked at")
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
        step_history=() if own.step_history else facts.step_history,
    )


def _missing(node: str, missing: Sequence[Missing], taken: Sequence[Rank]) -> list[Missing]:
    """Returns the gaps that a node names in its own facts; ``taken``: its ranks that this node has itself."""
    # Which nodes do not answer is for this node to say.
    own = [replace(one, text=one.text[:_MAX_TEXT], node=node) for one in missing if one.kind not in ("node", "claim")]
    texts = (f"rank {rank.rank} is on this node, and node {node} has a process of it, too" for rank in taken)
    return own[:_MAX_MISSING] + [Missing("rank", text, node=node) for text in texts][:_MAX_MISSING]


def _shifted(node: NodeFacts, answer: PeerFacts) -> NodeFacts:
    return replace(node, clock_offset_ns=answer.clock_offset_ns, clock_error_ns=answer.clock_error_ns)
