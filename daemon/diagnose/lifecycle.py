"""Follows the findings of one run of a job: when each opens, changes and closes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from probing.api.tables.schema import Row
from probing.daemon.diagnose.finding_row import culprit_ranks, finding_id, finding_row
from probing.diagnosis.rules.absent import UNREACHABLE
from probing.diagnosis.rules.idle import IDLE
from probing.diagnosis.rules.phase import PHASE
from probing.diagnosis.verdict import NOTE, Finding

__all__ = ("Event", "JobFindings", "LookResult")

_HANG, _SLOW, _DEATH, _MEMORY, _HARDWARE = "hang", "slow", "death", "memory", "hardware"
# A finding closes after this many consecutive looks that do not show it.
_MISSES = 2
# The minimum time between two rows of a finding that changes, ns.
_CHANGE_NS = 10_000_000_000
# The maximum numbers of open findings that are followed: of this node, of all other nodes, and of one other node.
# Findings about hardware are counted separately: a thousand nodes may have many of them, and they must not displace a
# hang.
_MAX_OPEN = 64
_MAX_OF_OTHERS, _MAX_OF_NODE = 64, 16
_MAX_KNOWN = 4096
# How long a node must be silent, ns, before its ranks count as unreachable while an open hang names one of its ranks.
_SILENT_NS = 60_000_000_000
_CULPRIT, _VICTIM = "culprit", "victim"
# The value of ``verdict.Culprit.activity`` for an unknown activity.
_UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class LookResult:
    """The findings of one look at a job. ``stalled``: the job counted as stalled. ``deep``: stacks were read.
    ``now_ns``: UTC. ``unread``: rows could not be read, or a rule failed, so findings that this look does not show may
    still be true. ``beside``: another node diagnoses the job, too, and follows its own findings. ``silent``: the nodes
    that did not answer."""

    findings: tuple[Finding, ...]
    stalled: bool
    deep: bool
    now_ns: int
    unread: bool = False
    beside: bool = False
    silent: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Event:
    """A row to store. ``new``: the finding opens for the first time, so hooks get it."""

    row: Mapping[str, Any]
    new: bool = False


@dataclass(slots=True)
class _Open:
    """An open finding. ``stalled``: it opened while the job stood still, so it closes when the job advances. ``roles``:
    the roles of the stacks in the row. ``activities``: the activities of the culprits, by pid. ``misses``: the number
    of consecutive looks that did not show it. ``finder``: the other node that reported it; empty: this node."""

    row: Row
    group: str
    stalled: bool
    roles: frozenset[str] = frozenset()
    activities: Mapping[int, str] = field(default_factory=dict)
    shown: object = None
    misses: int = 0
    stored_ns: int = 0
    finder: str = ""

    @property
    def nodes(self) -> frozenset[str]:
        """The nodes of the culprits."""
        return frozenset(filter(None, str(self.row.get("nodes") or "").split(",")))


class JobFindings:
    """The findings of one run on ``node``. Each method but ``restore`` returns the rows to store."""

    def __init__(self, job: str, run: str, node: str = "") -> None:
        self._job = job
        self._run = run
        self._node = node
        self._open: dict[str, _Open] = {}
        self._known: set[str] = set()
        self._doubtful: set[str] = set()
        self._noted = False
        # The pids of the ranks that waited for requests in the last look that showed an idle server; empty after the
        # job has advanced.
        self._idle: frozenset[int] = frozenset()
        self._sees_idle = False
        # The time since which each silent node has not answered, UTC ns.
        self._silent_since: dict[str, int] = {}

    @property
    def open(self) -> int:
        """The number of open findings."""
        return len(self._open)

    @property
    def doubtful(self) -> bool:
        """Whether the next look has to be deep, to confirm findings of the last look."""
        return bool(self._doubtful) or self._noted

    @property
    def needs_deep(self) -> bool:
        """Whether a finding is open that only stacks and conditions can refute or explain."""
        return any(one.group in (_HANG, _SLOW) for one in self._open.values())

    @property
    def explained(self) -> bool:
        """Whether findings are open, and each has its stacks, so that the next look can wait."""
        # Findings about hardware have no stacks.
        own = [one.roles for one in self._open.values() if one.group != _HARDWARE]
        return bool(own) and all(_CULPRIT in roles and _VICTIM in roles for roles in own)

    @property
    def settled(self) -> bool:
        """Whether another look would show nothing new: open findings are explained, or the last look showed an idle
        server.

        False if no finding is open and no server is idle: a later look may name a rank that has been busy for long
        enough.
        """
        return self.explained or (self._sees_idle and not self._open)

    def restore(self, row: Mapping[str, Any], group: str) -> bool:
        """Opens or closes a finding according to its newest row, which an earlier daemon or another node stored.
        Returns whether the row counts.

        Other nodes cannot change a finding of this node. A finding of another node may be changed by that node, or by a
        node that comes before this one, which may diagnose the job in its place.
        """
        name, finder = str(row["finding_id"]), str(row.get("found_by") or "")
        finder = "" if finder == self._node else finder
        open_one = self._open.get(name)
        if finder and open_one is not None and not self._may_change(finder, open_one):
            return False
        if row["state"] == "open" and open_one is None and not self._has_room(finder, group):
            return False
        if (not finder or finder < self._node) and len(self._known) < _MAX_KNOWN:
            # This node or a node before it has started the hook of the finding. Rows of later nodes do not count.
            self._known.add(name)
        if row["state"] != "open":
            self._open.pop(name, None)
        else:
            own = {column: value for column, value in row.items() if column not in ("node", "ts")}
            self._open[name] = _Open(own, group, stalled=group == _HANG, finder=finder)
        return True

    def _may_change(self, finder: str, one: _Open) -> bool:
        return bool(one.finder) and (one.finder == finder or finder < self._node)

    def _has_room(self, finder: str, group: str) -> bool:
        finders = [one.finder for one in self._open.values() if (one.group == _HARDWARE) == (group == _HARDWARE)]
        if not finder:
            return finders.count("") < _MAX_OPEN
        return len(finders) - finders.count("") < _MAX_OF_OTHERS and finders.count(finder) < _MAX_OF_NODE

    def follow(self, look: LookResult) -> list[Event]:
        """Opens, changes and closes findings according to the findings of a look."""
        found = self._named(f for f in look.findings if f.severity != NOTE)
        idle = {c.pid for f in look.findings if f.verdict is IDLE for c in f.culprits}
        self._sees_idle = bool(idle)
        self._silent_since = {node: self._silent_since.get(node, look.now_ns) for node in look.silent}
        if idle:
            self._idle = frozenset(idle)
        others = {name for name, one in self._open.items() if look.beside and one.finder}
        events = [event for name, f in found.items() if name not in others for event in self._found(name, f, look)]
        # A finding beyond the limit of open findings needs no second look: that look could not open it either.
        new = {name: f for name, f in found.items() if name not in self._open}
        self._doubtful = {name for name, f in new.items() if self._has_room("", f.verdict.group)}
        # A look without stacks may report as a note what a look with stacks reports as a finding.
        self._noted = not look.deep and any(f.severity == NOTE and f.verdict.group != _HARDWARE for f in look.findings)
        for name in [name for name in self._open if name not in found and name not in others]:
            events += self._missed(name, look)
        return events

    def advanced(self, now_ns: int) -> list[Event]:
        """Closes the findings that explained why the job stood still: the job goes on."""
        self._idle = frozenset()
        return self._close((name for name, one in self._open.items() if one.stalled), now_ns)

    def ended(self, now_ns: int) -> list[Event]:
        """Closes all findings: the job has ended."""
        return self._close(self._open, now_ns)

    def _named(self, findings: Iterable[Finding]) -> dict[str, Finding]:
        """Returns the findings by id. A hang that continues an open hang keeps the id of the open hang."""
        found = {finding_id(self._job, self._run, finding): finding for finding in findings}
        for name, finding in [item for item in found.items() if item[0] not in self._open]:
            earlier = next(
                (other for other in self._open if other not in found and self._continues(finding, other)), ""
            )
            if earlier:
                found[earlier] = found.pop(name)
        return found

    def _continues(self, finding: Finding, name: str) -> bool:
        """Returns whether ``finding`` blames the same ranks as the open hang ``name`` of this node, and its wait began
        before that hang was opened.

        The operation may differ: the longest wait that is known depends on the nodes that answered.
        """
        one = self._open[name]
        if one.group != _HANG or one.finder or not finding.culprits or finding.since_ns is None:
            return False
        same = (one.row["verdict"], one.row["ranks"]) == (finding.verdict.id, culprit_ranks(finding))
        return same and finding.since_ns <= one.row["opened"]

    def _found(self, name: str, finding: Finding, look: LookResult) -> list[Event]:
        group, now = finding.verdict.group, look.now_ns
        stalled = look.stalled and group == _HANG
        one = self._open.get(name)
        if one is None:
            activities = _activities(finding)
            if activities and all(pid in self._idle and what == _UNKNOWN for pid, what in activities.items()):
                return []  # idle servers in an earlier look; their stacks could not be read in this look
            if finding.verdict.id == UNREACHABLE.id and self._names_silent(finding, now):
                return []
            if not self._has_room("", group) or not self._sure(name, finding, look):
                return []
            row = finding_row(self._job, self._run, finding, now)
            self._open[name] = _Open(
                row, group, stalled, _roles(finding), _activities(finding), _shown(finding), stored_ns=now
            )
            new = name not in self._known
            self._known.add(name)
            return [Event(row, new)]
        one.misses = 0
        one.stalled |= stalled
        if _sees_less(finding, one.activities):
            return []
        kept = {"finding_id": name, "about": one.row["about"]}
        row = {**finding_row(self._job, self._run, finding, one.row["opened"]), **kept}
        more_stacks = _roles(finding) > one.roles
        if not more_stacks and (_shown(finding) == one.shown or now - one.stored_ns < _CHANGE_NS):
            return []
        if _roles(finding) >= one.roles:
            one.roles = _roles(finding)
        else:
            # A busy machine gave fewer stacks, or the processes are gone: the stacks of an earlier look are kept.
            row["stacks"] = one.row["stacks"]
        one.shown, one.stored_ns, one.row, one.finder = _shown(finding), now, row, ""
        one.activities = _activities(finding)
        # Another node may already have stored a row of this finding. That row started no hook here, so this row still
        # counts as new.
        new = name not in self._known
        self._known.add(name)
        return [Event(row, new)]

    def _sure(self, name: str, finding: Finding, look: LookResult) -> bool:
        """Returns whether a finding can be opened without a second look. It can if the last look showed it, too.
        Otherwise it depends on the group: a death needs the activity of all its culprits; any other finding needs a
        stalled job. A deep look suffices for memory, because it has many readings. A hang also needs a culprit whose
        stack did not move, because the blamed ranks may advance again."""
        group = finding.verdict.group
        if look.beside and name not in self._doubtful:
            # The node that diagnoses the job may be about to report the same finding.
            return False
        if name in self._doubtful or (group == _MEMORY and look.deep):
            return True
        if group == _DEATH:
            return _UNKNOWN not in _activities(finding).values()
        settled = any(stack.role == _CULPRIT and stack.thread.moving is False for stack in finding.stacks)
        return look.stalled and (group != _HANG or settled)

    def _names_silent(self, finding: Finding, now_ns: int) -> bool:
        """Returns whether ``finding`` blames a node that has been silent for less than 60 s, and an open hang names a
        rank of the same node. Such a finding is not opened: the node may only be late to answer.
        """
        late = {c.node for c in finding.culprits if now_ns - self._silent_since.get(c.node, 0) < _SILENT_NS}
        return any(late & one.nodes for one in self._open.values() if one.group == _HANG)

    def _missed(self, name: str, look: LookResult) -> list[Event]:
        one = self._open[name]
        if one.group == _HANG and one.nodes & look.silent:
            return []  # the node that could refute the hang did not answer
        if one.group == _HANG and any(finding.verdict.id == PHASE.id for finding in look.findings):
            # A label excuses the hang. Hooks get the hang again if it is still there once the limit of the phase has
            # passed.
            self._known.discard(name)
            return self._close([name], look.now_ns)
        # Only a look with stacks can refute a hang. Any look can refute a death. Other findings can be refuted only
        # while the job is not stalled.
        refuted = look.deep if one.group == _HANG else one.group == _DEATH or not look.stalled
        one.misses += refuted and not look.unread
        return self._close([name], look.now_ns) if one.misses >= _MISSES else []

    def _close(self, names: Iterable[str], now_ns: int) -> list[Event]:
        closed = [self._open.pop(name).row for name in list(names)]
        return [Event({**row, "state": "closed", "closed": now_ns}) for row in closed]


def _roles(finding: Finding) -> frozenset[str]:
    return frozenset(stack.role for stack in finding.stacks)


def _activities(finding: Finding) -> dict[int, str]:
    return {culprit.pid: culprit.activity for culprit in finding.culprits}


def _sees_less(finding: Finding, before: Mapping[int, str]) -> bool:
    """Returns whether the activity of a culprit was known before, and could not be read this time. This happens on a
    busy machine, or if the process hangs in the kernel. The earlier explanation is then kept."""
    return any(before.get(pid, _UNKNOWN) != _UNKNOWN for pid, now in _activities(finding).items() if now == _UNKNOWN)


def _shown(finding: Finding) -> object:
    """Returns the values of ``finding`` whose change makes a new row. The sentence is not among them, because the
    seconds in it change all the time.
    """
    death = finding.verdict.group == _DEATH
    culprits = tuple((c.rank, c.pid, c.activity, c.why if death else "") for c in finding.culprits)
    return finding.severity, round(finding.confidence, 2), finding.victims, culprits
