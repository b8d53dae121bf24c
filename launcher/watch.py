"""Watches the ranks here, and all processes of their generations. The processes are listed when something may have
changed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from probing.launcher.census import Census, Member, Owner
from probing.launcher.children import Child, Children
from probing.launcher.held import Held
from probing.launcher.processes import Clock, Stat
from probing.launcher.starting import adopt_unrecorded
from probing.launcher.state import Found

__all__ = ("Watch",)

_SECOND_NS, _NEVER_NS = 1_000_000_000, 1 << 62
# While processes are being ended, /proc is read again and again. If a reading took t, the next reading begins 10 t or
# 50 ms after the start of that reading, whichever is later, so that the readings take at most a tenth of a CPU.
_LOOK_SHARE, _LEAST_LOOK_NS = 10, 50_000_000


class Watch:
    """The processes of all groups. ``due``: whether the processes must be listed again. ``problem``: why they cannot
    be listed, or empty.

    The argument ``found``: the value of the attribute ``found`` in the previous launcher.
    """

    def __init__(self, node: str, children: Children, clock: Clock, found: Iterable[Found] = ()) -> None:
        here = {(p.pid, p.start_ns): Owner(p.group, p.generation) for p in found if p.boot_id == clock.boot_id}
        self._census, self._children, self._clock = Census(node, here), children, clock
        self._members: dict[Owner, list[Member]] = {}
        self._next_ns = 0
        self.due, self.problem = True, ""

    def due_ns(self, groups: Collection[Held]) -> int:
        """Returns when ``look`` is due, in ns since boot."""
        if self.due and not self.problem:
            return 0
        pending = any(held.ending or held.cleared < held.history.generation for held in groups)
        return self._next_ns if self.due or pending else _NEVER_NS

    def look(self, groups: Collection[Held]) -> bool:
        """Lists the processes, and records ranks that are not recorded; returns whether there were such ranks."""
        begun_ns = self._clock.boot_ns()
        leaders = [leader for held in groups for leader in held.leaders]
        try:
            self._members = self._census.look(leaders)
            if any(held.cleared < held.history.generation and not self.older(held) for held in groups):
                # A process that forked and ended during the listing may have hidden its child.
                self._members = self._census.look(leaders)
            adopted = [self._adopt(held) for held in groups]
        except OSError as e:
            self.due, self.problem = True, f"the processes of this machine cannot be listed: {e.strerror}"
            self._next_ns = begun_ns + _SECOND_NS
            return False
        self.due, self.problem = False, ""
        took_ns = self._clock.boot_ns() - begun_ns
        self._next_ns = begun_ns + max(_LEAST_LOOK_NS, took_ns * _LOOK_SHARE)
        return any(adopted)

    @property
    def found(self) -> list[Found]:
        """The processes whose generation only this launcher remembers, because their environment does not name it."""
        return [Found(self._clock.boot_id, *process, *owner) for process, owner in self._census.unmarked.items()]

    def notice_orphans(self) -> None:
        """Makes ``look`` due if this process has children that ``look`` has not seen."""
        self.due |= self._census.has_new_orphans()

    def members(self, held: Held, generation: int) -> Sequence[Member]:
        """Returns the processes of a generation, as of the last listing."""
        return self._members.get(Owner(held.history.name, generation), ())

    def older(self, held: Held, below: int = 0) -> list[Stat]:
        """Returns the processes of a group that are to be ended: of generations below ``below`` or ``held.below``."""
        below, name = max(below, held.below), held.history.name
        owners = [owner for owner in self._members if owner.group == name and owner.generation < below]
        return [member.stat for owner in owners for member in self._members[owner]]

    def ranks(self, held: Held) -> list[Child]:
        """Returns the ranks of a group that run."""
        return [child for child in self._children if child.run in held.history.runs]

    def _adopt(self, held: Held) -> bool:
        held.looked = held.history.generation
        adopted = False
        for member in self.members(held, held.looked):
            if member.rank is not None:
                adopted |= adopt_unrecorded(held, member.stat, member.rank, self._children, self._clock)
        return adopted
