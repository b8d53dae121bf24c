"""Decides which rank a trainer is, from everything that is known of it and of the other trainers of its run.

The order of the evidence, the first that names a rank counts: RANK and WORLD_SIZE as libc's ``environ`` has them now
(``environment``), or as they were at exec (``exec``); the communicator that spans the job (``communicator``); variables
of Slurm and MPI (``scheduler``), if they differ for all trainers, as any spawned process inherits them; the process's
title (``title``) and its arguments (``arguments``); the state of Python modules (``module``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from probing.daemon.processes.facts import Facts
from probing.daemon.processes.identity import Ranks, ranks_of
from probing.daemon.processes.spanning import Membership, SpanningCommunicators
from probing.daemon.processes.titles import Place, place_in_arguments, place_in_title, rank_in_grid
from probing.daemon.source import ProcessKey

__all__ = ("SOURCES", "ModuleState", "Ranking")

SOURCES = ("environment", "exec", "communicator", "scheduler", "title", "arguments", "module")


class ModuleState(NamedTuple):
    """What Python modules of a process say: ``coordinator`` is the "HOST:PORT" where its ranks meet, or empty."""

    ranks: Ranks
    coordinator: str = ""


class Ranking:
    """Not safe for two threads at once."""

    def __init__(self) -> None:
        self._communicators = SpanningCommunicators()
        self._modules: dict[ProcessKey, ModuleState] = {}

    def note_membership(self, key: ProcessKey, membership: Membership) -> bool:
        """Registers a communicator of a process; returns whether it is new."""
        return self._communicators.note(key, membership)

    def note_module(self, key: ProcessKey, state: ModuleState) -> bool:
        """Registers what modules of a process say; returns whether it is new."""
        changed = self._modules.get(key) != state
        self._modules[key] = state
        return changed

    def forget(self, key: ProcessKey) -> None:
        """Drops a process, or the program that it ran."""
        self._communicators.forget(key)
        self._modules.pop(key, None)

    def ranks(self, facts: Facts, peers: Mapping[ProcessKey, Facts], *, one_node: bool) -> Ranks | None:
        """Returns the ranks of a trainer with their source; None: nothing names them.

        ``peers``: the trainers of its run on this node, itself and dead ones included; empty while the run is not
        known. ``one_node``: the job has no others.
        """
        named = ranks_of(facts.environ, facts.current)
        if named is not None and named.certain:
            return named
        seen = self._communicators.ranks_of(facts.key, peers, one_node=one_node)
        if named is not None and not _distinct(peers):
            named = None
        # In a step with several trainings each one has communicators of its own.
        if seen is not None and (named is None or seen.world_size >= named.world_size):
            return seen._replace(source="communicator")
        if named is None and (place := _by_place(facts, peers, one_node)) is not None:
            return place
        state = self._modules.get(facts.key)
        return named or (state.ranks._replace(source="module") if state is not None else None)


def _distinct(peers: Mapping[ProcessKey, Facts]) -> bool:
    """Whether a scheduler named each trainer apart: what several have is inherited from the process it started."""
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
