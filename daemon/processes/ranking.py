"""Decides the rank of a trainer, from all evidence about the trainer and the other trainers of its run.

The evidence is tried in this order, and the first that names a rank counts: RANK and WORLD_SIZE in libc's ``environ``
now (``environment``), or at exec (``exec``); the communicator that spans the job (``communicator``); variables of Slurm
and MPI (``scheduler``), if they differ between all trainers, since spawned processes inherit them; the process's title
(``title``) and its arguments (``arguments``); the state of Python modules (``module``).

torch calls the group of the whole job ``default_pg``. NCCL's pairs for send and receive have this name as well, so the
largest group counts. A communicator with another name spans the job if its ranks are exactly the trainers of a run on
one node.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from typing import NamedTuple

from probing.daemon.processes.facts import Facts
from probing.daemon.processes.identity import MAX_WORLD, Ranks, ranks_of
from probing.daemon.processes.titles import Place, place_in_arguments, place_in_title, rank_in_grid
from probing.daemon.source import ProcessKey

__all__ = ("SOURCES", "Membership", "ModuleState", "Ranking", "SpanningCommunicators")

_DEFAULT_GROUP = "default_pg"
_MAX_OF_A_PROCESS = 64


class Membership(NamedTuple):
    """The ``rank`` of a process in a communicator of ``size`` ranks. ``comm``, ``name`` and ``backend`` are as in the
    columns of comm.communicators."""

    comm: str
    name: str | None
    backend: str | None
    rank: int
    size: int


class SpanningCommunicators:
    """Registers the communicators of processes. Not safe for two threads."""

    def __init__(self) -> None:
        self._of: dict[ProcessKey, dict[str, Membership]] = {}
        self._members: dict[str, dict[ProcessKey, Membership]] = defaultdict(dict)
        # Communicators in which one process has several ranks.
        self._several: dict[ProcessKey, set[str]] = {}

    def note(self, key: ProcessKey, membership: Membership) -> bool:
        """Registers a membership of a process; returns whether it is new."""
        known = self._of.get(key, {})
        sensible = 0 <= membership.rank < membership.size <= MAX_WORLD
        if not sensible or known.get(membership.comm) == membership:
            return False
        if membership.comm not in known and len(known) >= _MAX_OF_A_PROCESS:
            return False
        if membership.comm in self._several.get(key, ()):
            return False
        if membership.comm in known and known[membership.comm].rank != membership.rank:
            # A JAX process has a rank for each of its devices: none of them is the rank of the process.
            self._several.setdefault(key, set()).add(membership.comm)
            del known[membership.comm], self._members[membership.comm][key]
            return True
        self._of[key] = known
        known[membership.comm] = self._members[membership.comm][key] = membership
        return True

    def forget(self, key: ProcessKey) -> None:
        """Drops a process."""
        self._several.pop(key, None)
        for comm in self._of.pop(key, {}):
            self._members[comm].pop(key, None)
            if not self._members[comm]:
                del self._members[comm]

    def __bool__(self) -> bool:
        """Returns whether a membership is registered."""
        return bool(self._of)

    def ranks_of(self, key: ProcessKey, trainers: Collection[ProcessKey], *, one_node: bool) -> Ranks | None:
        """Returns rank and size of a process in its largest communicator that spans the job; None if there is none.

        ``trainers``: all trainers of its run on this node, also dead ones. ``one_node``: the job has no trainers on
        other nodes.
        """
        spanning = [own for own in self._of.get(key, {}).values() if self._spans(own, trainers, one_node)]
        # Among communicators of equal size, the first counts.
        best = max(spanning, key=lambda own: own.size, default=None)
        if best is not None:
            return Ranks(best.rank, best.size)
        return self._left_over(key, trainers) if one_node else None

    def _left_over(self, key: ProcessKey, trainers: Collection[ProcessKey]) -> Ranks | None:
        """Returns the only free rank of a communicator that has all trainers except ``key``; None if there is no such
        communicator.
        """
        for comm in {comm for other in trainers for comm in self._of.get(other, {})}:
            members = {other: own for other, own in self._members[comm].items() if other in trainers}
            taken, sizes = {own.rank for own in members.values()}, {own.size for own in members.values()}
            alone = key not in members and len(members) == len(taken) == len(trainers) - 1
            if alone and sizes == {len(trainers)}:
                return Ranks((set(range(len(trainers))) - taken).pop(), len(trainers))
        return None

    def _spans(self, own: Membership, trainers: Collection[ProcessKey], one_node: bool) -> bool:
        if own.size < len(trainers):
            return False
        members = {key: other.rank for key, other in self._members[own.comm].items() if key in trainers}
        if len(set(members.values())) < len(members):
            return False
        if own.name == _DEFAULT_GROUP and (own.backend == "gloo" or len(trainers) > 1):
            return True
        return one_node and own.size == len(members) == len(trainers)


SOURCES = ("environment", "exec", "communicator", "scheduler", "title", "arguments", "module")


class ModuleState(NamedTuple):
    """The rank that Python modules of a process contain. ``coordinator``: "HOST:PORT" where the job's ranks meet, or
    empty.
    """

    ranks: Ranks
    coordinator: str = ""


class Ranking:
    """The evidence for the ranks of processes. Not safe for two threads."""

    def __init__(self) -> None:
        self._communicators = SpanningCommunicators()
        self._modules: dict[ProcessKey, ModuleState] = {}

    def note_membership(self, key: ProcessKey, membership: Membership) -> bool:
        """Registers a communicator of a process. Returns whether it is new."""
        return self._communicators.note(key, membership)

    def note_module(self, key: ProcessKey, state: ModuleState) -> bool:
        """Registers the state of a process's modules. Returns whether it is new."""
        changed = self._modules.get(key) != state
        self._modules[key] = state
        return changed

    def forget(self, key: ProcessKey) -> None:
        """Drops the evidence about a process that ended or called exec."""
        self._communicators.forget(key)
        self._modules.pop(key, None)

    def ranks(self, facts: Facts, peers: Mapping[ProcessKey, Facts], *, one_node: bool) -> Ranks | None:
        """Returns the ranks of a trainer with their source; None if no evidence names them.

        ``peers``: all trainers of the run on this node, also dead ones; empty while the run is unknown. ``one_node``:
        the job has no trainers on other nodes.
        """
        named = ranks_of(facts.environ, facts.current)
        if named is not None and named.certain:
            return named
        seen = self._communicators.ranks_of(facts.key, peers, one_node=one_node)
        if named is not None and not _distinct(peers):
            named = None
        # If a Slurm step has several trainings, each training has communicators of its own.
        if seen is not None and (named is None or seen.world_size >= named.world_size):
            return seen._replace(source="communicator")
        if named is None and (place := _by_place(facts, peers, one_node)) is not None:
            return place
        state = self._modules.get(facts.key)
        return named or (state.ranks._replace(source="module") if state is not None else None)


def _distinct(peers: Mapping[ProcessKey, Facts]) -> bool:
    """Returns whether all trainers have different ranks in the scheduler's variables. Equal ranks are inherited from
    the process that the scheduler started.
    """
    ranks = [named.rank for facts in peers.values() if (named := ranks_of(facts.environ)) is not None]
    return len(ranks) == len(set(ranks)) == len(peers)


def _by_place(facts: Facts, peers: Mapping[ProcessKey, Facts], one_node: bool) -> Ranks | None:
    for source, place_of in _PLACES:
        own = place_of(facts.cmdline)
        if own is None or (own.kind == "local_rank" and not one_node):
            continue
        places = [place for peer in peers.values() if (place := place_of(peer.cmdline)) is not None]
        if (own.size is not None or len(places) == len(peers)) and (ranks := rank_in_grid(own, places)):
            return ranks._replace(source=source)
    return None


_PLACES: tuple[tuple[str, Callable[[tuple[str, ...]], Place | None]], ...] = (
    ("title", place_in_title),
    ("arguments", place_in_arguments),
)
