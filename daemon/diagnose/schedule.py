"""Decides when the daemon looks at a job, that is, gathers its facts and diagnoses them: when the job stalls, and then
less and less often; when a rank ends; and now and then while the job advances.

A review, a look at a job that advances, costs tenths of a second of CPU; measuring the job's pace costs nothing.
Whatever slows a job down changes its pace. So reviews become rarer while the pace stays, and come soon after it
changes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from probing.daemon.backoff import doubled
from probing.daemon.diagnose.gate import JobNow

__all__ = ("Look", "Reviews", "Schedule")

_SECOND_NS = 1_000_000_000
# The maximum pause between looks at a stalled job, s. Pauses double from 1 s up to this maximum, because a job may
# stand still for days.
_LONGEST_S = 60.0
# The minimum pause while all open findings have stacks, s: a look costs most of a second of CPU, which other jobs need.
_EXPLAINED_S = 8.0
_DOUBLINGS = 6
# The pauses after the first _RIPE_LOOKS looks at a stall are cut, so that the next look follows _RIPE_S seconds after a
# wait has become long enough to judge.
_RIPE_LOOKS = 8
_RIPE_S = 0.2
# The time between the first two looks at a job that is older than the daemon, s: the second look confirms the first.
_SECOND_LOOK_S = 1.5
_LEAST_PAUSE_S = 0.1
# The two looks at a death follow this long after the death, s. Ranks that die because of it then have time to end.
_AFTER_DEATH_S = (0.5, 2.5)
# The first _DEATH_LOOKS looks at deaths come without an extra pause. Then the pause doubles before each further look
# while ranks live, because a job may start and end processes all the time. The count starts again when no rank has
# ended for _CALM_S seconds.
_DEATH_LOOKS, _CALM_S = 8, 60.0
# A look that reads stacks twice takes a second. After a look that takes longer than _SLOW_S, no look follows for _REST
# times as long. The first _URGENT_LOOKS looks at a stall, and looks at a death, follow nevertheless, because on a busy
# machine all looks are slow.
_SLOW_S = 3.0
_REST = 4
_URGENT_LOOKS = 3
# After the first _FULL_LOOKS looks at a stall the next looks only compare where the ranks stand. A full look, which may
# show another cause by then, such as an error of the hardware, follows every _FULL_S seconds.
_FULL_LOOKS, _FULL_S = 3, 300.0


@dataclass(frozen=True, slots=True)
class Look:
    """A look to make. ``why``: ``stall``, ``late`` (the job may have stalled before the daemon started), ``death`` or
    ``review``. ``deep``: the look reads stacks.
    """

    why: str
    deep: bool


class Schedule:
    """Plans the looks at one run of a job. ``now`` is on a monotonic clock, s."""

    def __init__(
        self,
        job: JobNow,
        now: float,
        *,
        stall_s: float,
        review_s: float,
        late: bool,
        phase_limits: Mapping[str, float] = MappingProxyType({}),
    ) -> None:
        """Makes the schedule of a job. ``late``: the job existed before the watch, so it may have stalled long ago.
        ``phase_limits``: how long each phase that a label can name may last, s."""
        self.job = job
        self.late = late or job.late
        self.slow = False
        self._stall_ns = round(stall_s * _SECOND_NS)
        self._phase_limits = phase_limits
        self._seen_ns = job.now_ns
        self._known_ns: int | None = None
        self._updated = now
        # Looks since the job last advanced, and the looks among them that were for a stall.
        self._looks = self._stall_looks = 0
        self._next_look = now
        self._reviews = Reviews(now, review_s)
        # The number of looks at deaths, the time of the last of them, and when a rank was last seen to have ended.
        self._death_looks, self._death_looked, self._died = 0, now, now
        self._deaths = _after_death(now) if job.failed else []
        self._not_before = now
        # The time of the last full look, and whether another full look would show nothing new.
        self._full_at, self._settled = now, False

    @property
    def stalled(self) -> bool:
        """Whether the job has not advanced for ``stall_s``, or for twice its longest usual pause if that is longer, and
        every phase that a rank is in has exceeded its limit."""
        return self._until_stall_s <= 0

    @property
    def looked_at(self) -> bool:
        """Whether this stall was looked at before."""
        return self._looks > 0

    @property
    def over(self) -> bool:
        """Whether all ranks have ended, and the looks after their death are done."""
        return not self.job.living and not self._deaths

    def update(self, job: JobNow, now: float) -> bool:
        """Stores the newest state of the job. Returns whether the job has advanced since the last state."""
        before = self.job
        if job.newest_ns is None:
            # A new collector has seen no operation yet, so the time of the last operation is taken from the earlier
            # state.
            self.known_to_advance(before.newest_ns)
        if job.usual_gap_ns is None:
            job = replace(job, usual_gap_ns=before.usual_gap_ns)
        self.job, self._updated = job, now
        if job.phases != before.phases and self._looks:
            # The label may excuse the hang that a look found.
            self._reviews.by(max(now, self._full_at + _EXPLAINED_S))
        if job.failed > before.failed or (job.ended > before.ended and job.living):
            self._deaths = self._looks_at_death(now)
        advanced = job.calls > before.calls
        if advanced:
            self.late = False
            self._looks = self._stall_looks = 0
            self._settled = False
            self._reviews.advanced(now, job.calls)
        elif job.late and not before.late and job.newest_ns is None:
            self.late, self._next_look = True, now
        return advanced

    def known_to_advance(self, utc_ns: int | None) -> None:
        """Stores the time of an operation that ``comm.progress`` lacks because an earlier daemon saw it."""
        if utc_ns is not None and utc_ns < self.job.now_ns:
            self._known_ns = max(utc_ns, self._known_ns or 0)

    def due(self) -> tuple[float, Look] | None:
        """Returns the time of the next look, and the look; None: the job needs no look."""
        times = [(at, Look("death", deep=True)) for at in self._deaths[:1]]
        if self.job.living and not self.job.alone:
            stall = self._updated + self._until_stall_s
            times.append((max(stall, self._next_look) if self._stall_looks else stall, Look("stall", deep=True)))
            if self.late and not self.stalled:
                times.append((self._next_look, Look("late", deep=True)))
        if self.job.living and not self.stalled:
            times.append((self._reviews.next, Look("review", deep=False)))
        if not times:
            return None
        at, look = min(times, key=lambda one: one[0])
        looks = {"stall": self._stall_looks, "late": self._looks, "death": 0}
        urgent = looks.get(look.why, _URGENT_LOOKS) < _URGENT_LOOKS
        return at if urgent else max(at, self._not_before), look

    def notes_standing(self, look: Look) -> bool:
        """Returns whether ``look`` has to read where the ranks stand, for a comparison by this or the next look. The
        first looks at a stall skip this reading."""
        return look.why == "stall" and self._stall_looks >= _FULL_LOOKS - 1

    def may_compare(self, look: Look, now: float) -> bool:
        """Returns whether ``look`` may end without gathering facts if the ranks stand where they stood at the last
        look.
        """
        known = self._settled and self._stall_looks >= _FULL_LOOKS
        return known and look.why == "stall" and now < self._full_at + _FULL_S

    def looked(
        self,
        look: Look,
        now: float,
        took: float,
        *,
        doubtful: bool,
        found: bool,
        explained: bool = False,
        settled: bool = False,
        ripens_s: float | None = None,
        compared: bool = False,
    ) -> None:
        """Plans the next look. ``took``: seconds of this look; ``doubtful``: a second look has to confirm its findings;
        ``found``: a finding is open; ``explained``: all open findings have their stacks; ``settled``: another look
        would show nothing new; ``ripens_s``: the time until a wait that was too short to judge is long enough;
        ``compared``: no facts were gathered, since the ranks stood where they stood before."""
        if not compared:
            self._full_at = now
            self._settled = settled and not doubtful and ripens_s is None
        self.slow = took > _SLOW_S
        self._not_before = now + (took * _REST if self.slow else 0.0)
        if look.why == "death":
            self._deaths = self._deaths[1:]
            self._death_looks += 1
            self._death_looked = now
        elif look.why == "review":
            self._reviews.reviewed(now, doubtful=doubtful, found=found)
        elif look.why == "late" and not self._looks:
            self._looks, self._next_look = 1, now + max(_SECOND_LOOK_S - took, _LEAST_PAUSE_S)
        else:
            self._looks += 1
            self._stall_looks += look.why == "stall"
            doublings = min((self._stall_looks or self._looks) - 1, _DOUBLINGS)
            pause = max(2.0**doublings, _EXPLAINED_S if explained and not doubtful else 0.0)
            if ripens_s is not None and not explained and self._looks <= _RIPE_LOOKS:
                # A rank began to wait after the job had become quiet, so its wait is still too short to judge. The next
                # look comes as soon as the wait is long enough.
                pause = min(pause, max(ripens_s - took, 0.0) + _RIPE_S)
            if ripens_s is not None and ripens_s > _LONGEST_S:
                # No wait becomes a stall before ``ripens_s``, because a rank of another node is in a phase.
                pause = _LONGEST_S
            self._next_look = now + min(pause, _LONGEST_S)

    def _looks_at_death(self, now: float) -> list[float]:
        """Returns the times of the looks that follow the end of a rank."""
        if now - self._died >= _CALM_S:
            self._death_looks = 0
        self._died = now
        more = self._death_looks - _DEATH_LOOKS
        pause = doubled(1.0, more, _LONGEST_S) if more >= 0 and self.job.living else 0.0
        return _after_death(max(now, self._death_looked + pause))

    @property
    def _until_stall_s(self) -> float:
        """Returns the time from the last update until the job counts as stalled, s."""
        now = self.job.now_ns
        quiet = now - (self.job.newest_ns or self._known_ns or self._seen_ns)
        # A phase that begins in the future is ignored: it was noted before the clock was set back.
        phases = (
            since - now + self._phase_limits.get(name, 0.0) * _SECOND_NS
            for name, since in self.job.phases
            if since <= now + _SECOND_NS
        )
        return max(self._stall_ns - quiet, 2 * (self.job.usual_gap_ns or 0) - quiet, *phases) / _SECOND_NS


def _after_death(now: float) -> list[float]:
    return [now + pause for pause in _AFTER_DEATH_S]


# The time between two reviews doubles, up to _MOST times ``review_s``.
_MOST = 5
# The longest time from a review to the review that has to confirm it, s.
_CONFIRM_S = 10.0
# A window over which the pace is measured has at least this many calls, and lasts at least this long, s, or a quarter
# of ``review_s`` if that is shorter. The pace has changed if it differs by a quarter in two consecutive windows.
_WINDOW_CALLS = 20
_WINDOW_S = 15.0
_CHANGE = 1.25


class Reviews:
    """Plans the reviews of a job that advances. ``next``: when the next review is due. Times are on a monotonic clock,
    s.
    """

    def __init__(self, now: float, review_s: float) -> None:
        self.next = now + review_s
        self._review_s = review_s
        self._pause = review_s
        self._last = now
        self._begin: tuple[float, int] | None = None
        self._pace: float | None = None
        self._changed = False

    def reviewed(self, now: float, *, doubtful: bool, found: bool) -> None:
        """Plans the next review. ``doubtful``: it has to confirm the last review; ``found``: a finding is open."""
        self._last = now
        if doubtful:
            self.next = now + min(self._review_s, _CONFIRM_S)
        else:
            self._pause = self._review_s if found else min(2 * self._pause, _MOST * self._review_s)
            self.next = now + self._pause

    def by(self, time: float) -> None:
        """Plans the next review for ``time`` at the latest."""
        self.next = min(self.next, time)

    def advanced(self, now: float, calls: int) -> None:
        """Measures the pace. ``calls``: the number of operations that the job has called so far."""
        if self._begin is None or calls < self._begin[1]:
            self._begin = now, calls
            return
        seconds, count = now - self._begin[0], calls - self._begin[1]
        if seconds < min(_WINDOW_S, self._review_s / 4) or count < _WINDOW_CALLS:
            return
        self._begin = now, calls
        self._compare(now, count / seconds)

    def _compare(self, now: float, pace: float) -> None:
        if self._pace is None:
            self._pace = pace
        changed = not self._pace / _CHANGE <= pace <= self._pace * _CHANGE
        if changed and self._changed:
            self._pace, changed = pace, False
            self._pause = self._review_s
            self.by(max(now, self._last + self._review_s))
        self._changed = changed
