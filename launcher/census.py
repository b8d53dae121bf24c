"""Finds all processes of each generation of each group on this machine.

A process belongs to a generation if its environment says so (PROBING_GROUP, PROBING_WORKER), if it is in the session of
a rank or descends from a rank, or if an earlier call of ``look`` found that it belongs to the generation. A process
that none of these rules finds, for example because it cleared its environment, becomes a child of the launcher when its
parent ends, because the launcher is a subreaper. Such a process counts as a process of the group that runs here, if
only one group runs here.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from probing.groups.spec import node_of
from probing.launcher.processes import Stat, mark_of, stats

__all__ = ("Census", "Leader", "Member", "Owner", "set_subreaper")

# include/uapi/linux/prctl.h
_PR_SET_CHILD_SUBREAPER = 36


class Owner(NamedTuple):
    """A generation of a group."""

    group: str
    generation: int


class Leader(NamedTuple):
    """The first process of a rank: the leader of its session."""

    owner: Owner
    pid: int
    start_ns: int


class Member(NamedTuple):
    """A living process of a generation. ``rank``: RANK in its environment."""

    stat: Stat
    rank: int | None


def set_subreaper(wanted: bool) -> bool:
    """Sets whether orphaned descendants of this process become its children. Returns whether the kernel allows it."""
    return int(ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, int(wanted), 0, 0, 0)) == 0


class Census:
    """Finds which processes of ``node`` belong to which generation, and remembers what it found.

    On one machine there may be several nodes, each with a launcher: PROBING_WORKER says to which node a process
    belongs. ``unmarked``: the generations of processes whose environment does not name them, by pid and start.
    """

    def __init__(self, node: str, found: Mapping[tuple[int, int], Owner]) -> None:
        """``found``: the value of ``unmarked`` in the previous launcher."""
        self._node = node
        self._owners = dict(found)
        self.unmarked = dict(found)
        self._sessions: dict[int, Owner] = {}
        self._children_seen: set[int] = set()

    def look(self, leaders: Iterable[Leader]) -> dict[Owner, list[Member]]:
        """Returns the living processes of each generation. ``leaders``: the leaders of ranks that run, or have run.

        Raises OSError if the processes cannot be read.
        """
        found = stats()
        me = os.getpid()
        alive = {pid: stat for pid, stat in found.items() if stat.alive and pid != me}
        owners = {pid: owner for pid, stat in alive.items() if (owner := self._owners.get((pid, stat.start_ns)))}
        ranks = self._marked(alive, owners)
        sessions = self._add_leaders(alive, owners, leaders)
        for pid in alive:
            _inherit(pid, alive, owners, sessions)
        self._add_orphans(alive, owners, me)
        self._owners = {(pid, alive[pid].start_ns): owner for pid, owner in owners.items()}
        self.unmarked = {(pid, alive[pid].start_ns): owner for pid, owner in owners.items() if pid not in ranks}
        members: dict[Owner, list[Member]] = {}
        for pid, owner in owners.items():
            members.setdefault(owner, []).append(Member(alive[pid], ranks.get(pid)))
        return members

    def _marked(self, alive: Mapping[int, Stat], owners: dict[int, Owner]) -> dict[int, int | None]:
        ranks = {}
        for pid in alive:
            if (mark := mark_of(pid)) is not None and node_of(mark.worker) in ("", self._node):
                owners[pid] = Owner(mark.group, mark.generation)
                ranks[pid] = mark.rank
        return ranks

    def _add_leaders(
        self, alive: Mapping[int, Stat], owners: dict[int, Owner], leaders: Iterable[Leader]
    ) -> dict[int, Owner]:
        sessions = {}
        self._sessions = {}
        for leader in leaders:
            self._sessions[leader.pid] = leader.owner
            if (stat := alive.get(leader.pid)) and stat.start_ns == leader.start_ns:
                owners[leader.pid] = sessions[leader.pid] = leader.owner
        return sessions

    def has_new_orphans(self) -> bool:
        """Returns whether this process has children that ``look`` did not see."""
        return not self._children_seen.issuperset(_children())

    def _add_orphans(self, alive: Mapping[int, Stat], owners: dict[int, Owner], me: int) -> None:
        ours = {owner.group for owner in self._sessions.values()}
        groups = {owner for owner in owners.values() if owner.group in ours} or set(self._sessions.values())
        only = max(groups) if len({owner.group for owner in groups}) == 1 else None
        self._children_seen = {pid for pid, stat in alive.items() if stat.parent == me}
        for pid in self._children_seen.difference(owners):
            owner = self._sessions.get(alive[pid].session) or only
            if owner is not None:
                owners[pid] = owner
                for other in alive:
                    _inherit(other, alive, owners, {})


def _inherit(pid: int, alive: Mapping[int, Stat], owners: dict[int, Owner], sessions: Mapping[int, Owner]) -> None:
    """Finds the owner of the process ``pid``, or else of its nearest ancestor with an owner. The owner of a process's
    session counts as the owner of the process. Gives this owner to ``pid`` and the processes in between.
    """
    line = []
    owner = None
    while pid in alive and owner is None and pid not in line:
        line.append(pid)
        owner = owners.get(pid) or sessions.get(alive[pid].session)
        pid = alive[pid].parent
    if owner is not None:
        for member in line:
            owners.setdefault(member, owner)


def _children() -> set[int]:
    # A kernel without CONFIG_PROC_CHILDREN lacks these files. Orphans are then seen by the next call of ``look``.
    found: set[int] = set()
    for path in Path("/proc/self/task").glob("*/children"):
        with suppress(OSError):
            found.update(map(int, path.read_bytes().split()))
    return found
