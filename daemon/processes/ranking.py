"""Decides the rank of a trainer, from all evidence about the trainer and the other trainers of its run.

The evidence is tried in this order, and the first evidence that names a rank counts:

* RANK and WORLD_SIZE in libc's ``environ`` now (``environment``), or at exec (``exec``).
* The communicator that spans the job (``communicator``).
* Variables of Slurm and MPI (``scheduler``), if all trainers have different ranks. Equal ranks were inherited.
* The process's title (``title``) and its arguments (``arguments``).
* The state of Python modules (``module``).

torch calls the group of the whole job ``default_pg``. NCCL's pairs for send and receive have this name as well, so the
largest group counts. A communicator with another name spans the job if its ranks are exactly the trainers of a run on
one node.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from functools import cached_property
from typing import NamedTuple

from probing.daemon.processes.facts import Facts
from probing.daemon.processes.identity import MAX_WORLD, Ranks, ranks_of
from probing.daemon.processes.titles import Grid, Place, grid_of, place_in_arguments, place_in_title
from probing.daemon.source import ProcessKey

__all__ = (
    "SOURCES",
    "Membership",
    "ModuleState",
    "Ranking",
    "RunCommunicators",
    "RunEvidence",
    "SpanningCommunicators",
)

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
    """Registers the communicators of processes. Not thread-safe."""

    def __init__(self) -> None:
        self._of: dict[ProcessKey, dict[str, Membership]] = {}
        # Communicators in which one process has several ranks.
        self._several: dict[ProcessKey, set[str]] = {}

    def note(self, key: ProcessKey, membership: Membership) -> bool:
        """Registers a membership of a process; returns whether it is new."""
        known = self._of.get(key, {})
        sensible = 0 <= membership.rank < membership.size <= MAX_WORLD
        if not sensible or known.get(membership.comm) == membership:
            return False
        several = self._several.get(key, set())
        if membership.comm in several:
            return False
        if membership.comm not in known and len(known) + len(several) >= _MAX_OF_A_PROCESS:
            return False
        if membership.comm in known and known[membership.comm].rank != membership.rank:
            # A JAX process has a rank for each of its devices. None of these is the rank of the process.
            self._several.setdefault(key, set()).add(membership.comm)
            del known[membership.comm]
            return True
        self._of[key] = known
        known[membership.comm] = membership
        return True

    def forget(self, key: ProcessKey) -> None:
        """Drops a process."""
        self._several.pop(key, None)
        self._of.pop(key, None)

    def __bool__(self) -> bool:
        """Returns whether a membership is registered."""
        return bool(self._of)

    def ranks_of(self, key: ProcessKey, trainers: Collection[ProcessKey], *, one_node: bool) -> Ranks | None:
        """Returns rank and size of a process in its largest communicator that spans the job; None without such a
        communicator.

        ``trainers``: all trainers of the run on this node, including dead trainers. ``one_node``: the job has no
        trainers on other nodes.
        """
        return self.of_run(trainers).ranks_of(key, one_node=one_node)

    def of_run(self, trainers: Collection[ProcessKey]) -> RunCommunicators:
        """Returns the communicators of a run. ``trainers``: as in ``ranks_of``."""
        return RunCommunicators(self._of, trainers)


class RunCommunicators:
    """The communicators of the trainers of a run, valid until another communicator is noted. Each communicator is
    examined once, however many trainers ask for their rank. ``of``: the memberships of each process.
    """

    def __init__(self, of: Mapping[ProcessKey, Mapping[str, Membership]], trainers: Collection[ProcessKey]) -> None:
        self._of = of
        self._count = len(trainers)
        self._members: dict[str, dict[ProcessKey, Membership]] = defaultdict(dict)
        for key in trainers:
            for comm, membership in of.get(key, {}).items():
                self._members[comm][key] = membership
        # Communicators in which two trainers of the run have the same rank. They do not span the job.
        self._doubled = {
            comm for comm, found in self._members.items() if len({own.rank for own in found.values()}) < len(found)
        }
        self._free = [free for comm in self._members if (free := self._left_over(comm)) is not None]

    def ranks_of(self, key: ProcessKey, *, one_node: bool) -> Ranks | None:
        """Returns the ranks of a process, see ``SpanningCommunicators.ranks_of``."""
        spanning = [own for own in self._of.get(key, {}).values() if self._spans(own, one_node)]
        # Among communicators of equal size, the first counts.
        best = max(spanning, key=lambda own: own.size, default=None)
        if best is not None:
            return Ranks(best.rank, best.size)
        return next((ranks for comm, ranks in self._free if key not in self._members[comm]), None) if one_node else None

    def _left_over(self, comm: str) -> tuple[str, Ranks] | None:
        """Returns ``comm`` and the ranks of the trainer outside of it, if all trainers but one belong to ``comm``; None
        for any other communicator.
        """
        found = self._members[comm]
        alone = comm not in self._doubled and len(found) == self._count - 1
        if not alone or {own.size for own in found.values()} != {self._count}:
            return None
        free = set(range(self._count)) - {own.rank for own in found.values()}
        return comm, Ranks(free.pop(), self._count)

    def _spans(self, own: Membership, one_node: bool) -> bool:
        if own.size < self._count or own.comm in self._doubled:
            return False
        if own.name == _DEFAULT_GROUP and (own.backend == "gloo" or self._count > 1):
            return True
        return one_node and own.size == len(self._members.get(own.comm, ())) == self._count


SOURCES = ("environment", "exec", "communicator", "scheduler", "title", "arguments", "module")


class ModuleState(NamedTuple):
    """The ranks that Python modules of a process contain. ``coordinator``: "HOST:PORT" where the job's ranks meet, or
    empty.
    """

    ranks: Ranks
    coordinator: str = ""


class Ranking:
    """The evidence for the ranks of processes. Not thread-safe."""

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

    def run(self, peers: Mapping[ProcessKey, Facts]) -> RunEvidence:
        """Returns the evidence about a run. ``peers``: all trainers of the run on this node, including dead ones."""
        return RunEvidence(peers, self._communicators)

    def ranks(self, facts: Facts, run: RunEvidence | None, *, one_node: bool) -> Ranks | None:
        """Returns the ranks of a trainer with their source; None if no evidence names them.

        ``run``: the evidence about the trainer's run, None while the run is unknown. ``one_node``: the job has no
        trainers on other nodes.
        """
        named = ranks_of(facts.environ, facts.current)
        if named is not None and named.certain:
            return named
        run = run if run is not None else self.run({})
        seen = run.communicators.ranks_of(facts.key, one_node=one_node)
        if named is not None and not run.distinct:
            named = None
        # A Slurm step may run several training jobs, each with communicators of its own. A communicator that is smaller
        # than the scheduler's world size does not count.
        if seen is not None and (named is None or seen.world_size >= named.world_size):
            return seen._replace(source="communicator")
        if named is None and (place := run.by_place(facts, one_node)) is not None:
            return place
        state = self._modules.get(facts.key)
        return named or (state.ranks._replace(source="module") if state is not None else None)


class RunEvidence:
    """The combined evidence of the trainers of a run, valid until something new is noted. Each trainer is examined
    once, however many trainers are ranked.
    """

    def __init__(self, peers: Mapping[ProcessKey, Facts], spanning: SpanningCommunicators) -> None:
        self._peers, self._spanning = peers, spanning
        self._places: dict[str, tuple[bool, Grid | None]] = {}

    @cached_property
    def communicators(self) -> RunCommunicators:
        return self._spanning.of_run(self._peers)

    @cached_property
    def distinct(self) -> bool:
        """Whether all trainers have different ranks in the scheduler's variables. Trainers with equal ranks inherited
        them from the process that the scheduler started.
        """
        ranks = [named.rank for facts in self._peers.values() if (named := ranks_of(facts.environ)) is not None]
        return len(ranks) == len(set(ranks)) == len(self._peers)

    def by_place(self, facts: Facts, one_node: bool) -> Ranks | None:
        """Returns the ranks of a trainer according to the titles or arguments of the run's trainers, or None."""
        for source, place_of in _PLACES:
            own = place_of(facts.cmdline)
            if own is None or (own.kind == "local_rank" and not one_node):
                continue
            if own.size is not None:
                return Ranks(own.coordinates[0], own.size, source=source)
            complete, grid = self._grid(source, place_of)
            if complete and grid is not None and (ranks := grid.rank_of(own)):
                return ranks._replace(source=source)
        return None

    def _grid(self, source: str, place_of: Callable[[tuple[str, ...]], Place | None]) -> tuple[bool, Grid | None]:
        """Returns whether all trainers of the run have a place, and the grid of these places."""
        if source not in self._places:
            places = [place for peer in self._peers.values() if (place := place_of(peer.cmdline)) is not None]
            self._places[source] = len(places) == len(self._peers), grid_of(places)
        return self._places[source]


_PLACES: tuple[tuple[str, Callable[[tuple[str, ...]], Place | None]], ...] = (
    ("title", place_in_title),
    ("arguments", place_in_arguments),
)
