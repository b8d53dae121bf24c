"""The watch: when it looks, what it opens and closes, and that nothing of one job disturbs another."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from watch_support import MAIN, SECOND, START, Job, Scene, T, finding

from probing.api.errors import NotFound, PeerError, QueryTimeout, UsageError
from probing.daemon.diagnose.gate import JobNow
from probing.daemon.diagnose.schedule import Look, Reviews, Schedule
from probing.diagnosis.facts import Missing
from probing.diagnosis.rules.idle import IDLE
from probing.diagnosis.verdict import NOTE, WARNING, Culprit, Finding, StackOf

IDLES = Finding(IDLE, NOTE, 0.8, "idle", (Culprit(1, "n1", 101, "waits for requests", "idle"),))


def hangs(since: float, until: float = 1e9) -> Callable[[float, bool], Sequence[Finding]]:
    return lambda now, deep: [finding("not_joined", 1)] if deep and since <= now < until else []


def test_a_job_that_advances_gets_only_reviews_and_ever_less_of_them() -> None:
    scene = Scene(Job(begins=10), review_s=60.0).run(1400)
    times = [round(at) for at, _, _ in scene.looks]
    assert times[0] == 70
    assert [round((then - before) / 10) for before, then in pairwise(times)] == [12, 24, 30, 30, 30]
    assert not any(deep for _, _, deep in scene.looks)
    assert scene.rows == []


def test_a_change_of_pace_brings_the_next_review() -> None:
    reviews = Reviews(0.0, 60.0)
    for _ in range(4):
        reviews.reviewed(100.0, doubtful=False, found=False)
    assert reviews.next == 400
    calls = 0
    for second in range(100, 300):
        calls += 10 if second < 200 else 7
        reviews.advanced(float(second), calls)
        if second < 215:
            assert reviews.next == 400
    assert 200 < reviews.next < 260


def test_a_review_in_vain_is_not_repeated_for_one_odd_window() -> None:
    reviews = Reviews(0.0, 60.0)
    reviews.reviewed(100.0, doubtful=False, found=False)
    before, calls = reviews.next, 0
    for second in range(100, 220):
        calls += 2 if 150 < second < 160 else 10
        reviews.advanced(float(second), calls)
    assert reviews.next == before


def test_a_stall_is_found_after_w_and_closed_when_the_job_goes_on() -> None:
    scene = Scene(Job(begins=10, stops=30, resumes=95, finds=hangs(30, 95))).run(100)
    assert scene.looks[0][2]
    (name, state, opened), (_, closed, at) = scene.states()
    assert (name, state, closed) == ("not_joined", "open", "closed")
    assert 40 <= opened <= 41.5
    assert 95 <= at <= 96.5
    assert [row["finding_id"] for row in scene.hooked] == [scene.rows[0]["finding_id"]]


def test_a_clock_that_is_set_does_not_close_a_finding() -> None:
    job = Job(begins=10, stops=30, finds=hangs(30), clock_set=lambda now: 3.0 if now > 45 else 0.0)
    scene = Scene(job).run(100)
    assert [state for _, state, _ in scene.states()] == ["open"]


def test_looks_at_a_stall_become_rare() -> None:
    scene = Scene(Job(begins=10, stops=30), review_s=600.0).run(600)
    times = [at for at, _, _ in scene.looks]
    # Each takes 1.2 s.
    pauses = [round(then - before - 1.2) for before, then in pairwise(times)]
    assert pauses == [1, 2, 4, 8, 16, 32, *[60] * (len(pauses) - 6)]
    assert len(pauses) > 10


def test_a_finding_with_stacks_is_looked_at_less() -> None:
    scene = Scene(Job(begins=10, stops=30, finds=hangs(30))).run(300)
    pauses = [round(then - before - 1.2) for (before, *_), (then, *_) in pairwise(scene.looks)]
    assert pauses[:6] == [8, 8, 8, 8, 16, 32]


@pytest.mark.parametrize("finds", [lambda _now, _deep: (IDLES,), hangs(30)])
def test_a_stall_in_which_no_rank_moves_is_looked_at_in_full_every_five_minutes(
    finds: Callable[[float, bool], Sequence[Finding]],
) -> None:
    scene = Scene(Job(begins=10, stops=30, finds=finds, stands=lambda _: "line 7"), review_s=9e9).run(1500)
    stalls = [at for at, *_ in scene.looks if at > 35]
    pauses = [then - before for before, then in pairwise(stalls)]
    assert max(pauses[:2]) < 10
    assert len(pauses[2:]) == 4
    assert all(300 < pause < 365 for pause in pauses[2:])
    # Between them it was compared, as often as it would have been looked at.
    assert len(scene.compared) > len(stalls) + 15
    # WHEN a rank moves
    scene.jobs[0].stands = lambda _: "line 8"
    scene.run(1565)
    # THEN the next look is in full
    assert len(scene.looks) == len(stalls) + 1


@pytest.mark.parametrize("found", [[finding("not_joined", 1, stacks=())], []])
def test_a_stall_that_is_not_explained_is_looked_at_in_full(found: list[Finding]) -> None:
    """Also where nothing is found: a rank that is busy elsewhere is named after a minute."""
    job = Job(begins=10, stops=30, finds=lambda _now, _deep: found, stands=lambda _: "line 7")
    scene = Scene(job, review_s=9e9).run(300)
    # The first two are not delayed by it.
    assert len(scene.compared) + 2 == len(scene.looks) > 7


def test_a_job_may_rest_for_days() -> None:
    now = JobNow("j", "r", 10**18, None, None, 2, 0, 0, late=False, world_size=2, calls=0)
    schedule = Schedule(now, 0.0, stall_s=10, review_s=1e9, late=False)
    for minute in range(3000):
        schedule.looked(Look("stall", deep=True), minute * 60.0, 1.0, doubtful=False, found=True)
    due = schedule.due()
    assert due is not None
    assert due[0] == 2999 * 60 + 60


def test_a_job_in_a_phase_is_no_stall_until_the_limit_of_the_phase() -> None:
    at, second = 10**18, 10**9
    quiet = JobNow("j", "r", at, at - 11 * second, None, 2, 0, 0, late=False, world_size=2, calls=7)

    def stalled(job: JobNow) -> bool:
        limits = {"eval": 30.0, "checkpoint": 60.0}
        schedule = Schedule(job, 0.0, stall_s=10, review_s=1e9, late=False, phase_limits=limits)
        schedule.update(job, 0.0)
        return schedule.stalled

    assert stalled(quiet)
    assert not stalled(replace(quiet, phases=(("eval", at - 12 * second),)))
    assert stalled(replace(quiet, phases=(("eval", at - 30 * second),)))
    assert not stalled(replace(quiet, phases=(("eval", at - 30 * second), ("checkpoint", at - 59 * second))))
    assert stalled(replace(quiet, phases=(("warming", at - 1),)))
    # The usual pause of the job counts as before.
    assert not stalled(replace(quiet, usual_gap_ns=6 * second, phases=(("eval", at - 31 * second),)))


def test_a_label_closes_the_hang_that_it_excuses_until_its_limit() -> None:
    hang, note = finding("not_joined", 1), finding("phase", severity=NOTE)
    job = Job(
        begins=10, stops=30, resumes=295, finds=lambda now, _: [] if now > 295 else [note if 50 < now < 180 else hang]
    )
    scene = Scene(job).run(300)
    states = [(state, at) for name, state, at in scene.states() if name == "not_joined"]
    assert [state for state, _ in states] == ["open", "closed", "open", "closed"]
    assert states[1][1] < 180 < states[2][1]
    # Those who were paged about it are paged again.
    assert [row["verdict"] for row in scene.hooked].count("not_joined") == 2


def test_a_label_that_excuses_a_hang_is_looked_at_within_seconds() -> None:
    job = JobNow("j", "r", 10**18, None, None, 2, 0, 0, late=False, world_size=2, calls=0)
    schedule = Schedule(job, 0.0, stall_s=10, review_s=300, late=False, phase_limits={"eval": 3600.0})
    now = replace(job, now_ns=job.now_ns + 20 * 10**9)
    schedule.update(now, 20.0)
    schedule.looked(Look("stall", deep=True), 20.0, 0.5, doubtful=False, found=True)
    # WHEN its owner labels it, again and again
    for second in range(21, 26):
        schedule.update(replace(now, phases=(("eval", now.now_ns + second),)), second)
    # THEN the next look comes once, and no sooner than after other hangs that are explained
    assert schedule.due() == (28.0, Look("review", deep=False))
    schedule.looked(Look("review", deep=False), 28.0, 0.5, doubtful=False, found=False)
    due = schedule.due()
    assert due is not None
    assert due[0] > 300


def test_a_look_comes_when_a_wait_is_long_enough() -> None:
    # The job is quiet since it began, and a rank waits since a while after that.
    job = JobNow("j", "r", 10**18, None, None, 2, 0, 0, late=False, world_size=2, calls=0)
    schedule = Schedule(job, 0.0, stall_s=10, review_s=1e9, late=False)
    schedule.update(replace(job, now_ns=job.now_ns + 10 * 10**9), 10.0)

    def next_look(now: float, **found: Any) -> float:
        schedule.looked(Look("stall", deep=True), now, 0.5, doubtful=False, **found)
        due = schedule.due()
        assert due is not None
        return round(due[0] - now, 3)

    assert next_look(10.5, found=False, ripens_s=5.9) == 1
    assert next_look(12.0, found=False, ripens_s=4.4) == 2
    assert next_look(14.5, found=False, ripens_s=1.9) == 1.6
    # Where stacks explain the stall nothing is urgent.
    assert next_look(16.5, found=True, explained=True, ripens_s=1.9) == 8


def test_long_steps_are_no_stall() -> None:
    scene = Scene(Job(begins=10, step=25.0, gap=25.0), review_s=1000.0).run(500)
    assert scene.looks == []


def test_a_finding_that_the_job_outlives_closes_with_it() -> None:
    scene = Scene(Job(begins=10, stops=30, ends={0: (60, 9), 1: (60, 9)}, finds=hangs(30, 59))).run(80)
    assert [state for _, state, _ in scene.states()] == ["open", "closed"]


def test_what_two_looks_do_not_confirm_is_closed() -> None:
    scene = Scene(Job(begins=10, stops=30, finds=hangs(30, 45))).run(100)
    assert [state for _, state, _ in scene.states()] == ["open", "closed"]
    assert scene.watch.state().detail == "1 job, 0 open findings"


@pytest.mark.parametrize("moving", [None, True])
def test_a_culprit_that_was_not_seen_twice_in_one_place_needs_a_second_look(moving: bool | None) -> None:
    def found(until: float) -> Callable[[float, bool], Sequence[Finding]]:
        stack = StackOf(1, "n1", 101, "culprit", replace(MAIN, moving=moving))
        hang = finding("not_joined", 1, stacks=(stack,))
        return lambda now, deep: [hang] if deep and 30 <= now < until else []

    # It went on before the second look.
    assert Scene(Job(begins=10, stops=30, finds=found(42))).run(60).rows == []
    ((_, state, opened),) = Scene(Job(begins=10, stops=30, finds=found(1e9))).run(60).states()
    assert state == "open"
    assert 41.5 < opened < 45


def test_a_rank_that_fails_is_looked_at_in_a_second() -> None:
    died = finding("rank_died", 1, group="death")
    scene = Scene(Job(begins=10, ends={1: (30, 9), 0: (31, 15)}, finds=lambda now, _: [died] if now > 30 else [])).run(
        50
    )
    (_, state, opened), (_, closed, _) = scene.states()
    assert (state, closed) == ("open", "closed")
    assert opened < 32.5


@pytest.mark.parametrize("read_at", [32.5, 1e9])
def test_a_death_waits_for_the_second_look_if_the_first_did_not_read_the_culprit(read_at: float) -> None:
    """The second look stores the finding, also if the culprit could not be read again."""
    read = finding("rank_died", 1, group="death")
    unread = replace(read, culprits=(replace(read.culprits[0], activity="unknown"),), sentence="it may do anything")

    def found(now: float, _deep: bool) -> list[Finding]:
        return [] if now <= 30 else [read if now > read_at else unread]

    scene = Scene(Job(begins=10, ends={0: (30, 9)}, finds=found)).run(40)
    assert [row["sentence"] for row in scene.rows] == [read.sentence if read_at < 40 else unread.sentence]
    ((_, state, opened),) = scene.states()
    assert state == "open"
    assert 32 < opened < 35


def test_a_job_whose_processes_end_all_the_time_is_looked_at_less_and_less_often() -> None:
    scene = Scene(Job(begins=10, ranks=402, ends={r: (20 + r, None) for r in range(1, 401)})).run(430)
    deep = [at for at, _, deep in scene.looks if deep]
    assert 8 <= len(deep) <= 24
    # The looks at a death after some time of calm, and when the last ranks end, come at once.
    scene.jobs[0].ends[401] = (500, 9)
    scene.run(520)
    assert next(at for at, _, deep in scene.looks if deep and at > 499) < 502
    ended = Scene(Job(begins=10, ranks=302, ends={r: (20 + min(r, 300), 9) for r in range(302)})).run(340)
    assert next(at for at, _, deep in ended.looks if deep and at > 319) < 322


def test_a_hang_stays_the_same_finding_when_another_operation_is_known_to_wait_longest() -> None:
    # A node with the rank that waits longest answers every other time.
    about = ("pp 3 recv", "tp 21 all_reduce")

    def found(now: float, _deep: bool) -> list[Finding]:
        victims = (0, 2) if now > 70 else (0,)
        hang = finding("not_joined", 1, about=about[int(now) % 2], since_ns=START + 30 * SECOND, victims=victims)
        return [hang] if 30 < now < 100 else []

    scene = Scene(Job(begins=10, stops=30, resumes=100, finds=found)).run(120)
    assert [(verdict, state) for verdict, state, _ in scene.states()] == [
        ("not_joined", "open"),
        ("not_joined", "open"),
        ("not_joined", "closed"),
    ]
    assert len({(row["finding_id"], row["about"]) for row in scene.rows}) == 1
    assert [row["victims"] for row in scene.rows] == ["0", "0,2", "0,2"]
    assert len(scene.hooked) == 1


def test_a_hang_that_began_after_another_of_the_same_ranks_is_another_finding() -> None:
    def found(now: float, _deep: bool) -> list[Finding]:
        begun = 30 if now < 60 else 58
        hang = finding("not_joined", 1, about=f"0 {begun} all_reduce", since_ns=START + begun * SECOND)
        return [hang] if 30 < now < 100 else []

    scene = Scene(Job(begins=10, stops=30, resumes=100, finds=found)).run(120)
    assert len({row["finding_id"] for row in scene.rows}) == 2
    assert len(scene.hooked) == 2


def test_a_normal_end_is_no_failure() -> None:
    scene = Scene(Job(begins=10, ends={0: (30, None), 1: (30, None)})).run(60)
    assert scene.looks == []


def test_a_job_that_stalled_before_the_daemon_came_is_named_in_seconds() -> None:
    scene = Scene(Job(begins=10, stops=30, seen_from=100, stored=False, finds=hangs(30)), at=100).run(110)
    (_, state, opened), *_ = scene.states()
    assert state == "open"
    assert opened <= 103
    assert [round(at - 100, 1) for at, _, _ in scene.looks[:2]] == [0.0, 1.5]


def test_one_look_at_a_job_that_may_just_compute_opens_nothing() -> None:
    # Nothing was seen of it before the daemon came; it goes on a second later.
    job = Job(begins=10, stops=99, resumes=101, seen_from=100, stored=False, finds=hangs(99, 101))
    scene = Scene(job, at=100).run(150)
    assert len(scene.looks) >= 1
    assert scene.rows == []


def test_w_counts_from_the_last_operation_also_when_a_daemon_before_saw_it() -> None:
    # Found only once W is over, as rules do.
    scene = Scene(Job(begins=10, stops=94, seen_from=100, finds=hangs(104)), at=100).run(120)
    assert 104 <= scene.states()[0][2] <= 105.5


def test_after_a_restart_a_finding_keeps_its_name_and_hooks_stay_silent() -> None:
    job = Job(begins=10, stops=30, finds=hangs(30))
    first = Scene(job).run(60)
    job.seen_from = 62
    second = Scene(job, before=first.rows[-1:], at=62).run(90)
    assert first.hooked
    assert not second.hooked
    ids = {row["finding_id"] for row in (*first.rows, *second.rows)}
    opened = {row["opened"] for row in (*first.rows, *second.rows)}
    assert (len(ids), len(opened)) == (1, 1)
    job.resumes = 95
    assert second.run(100).states()[-1][:2] == ("not_joined", "closed")


def test_findings_of_jobs_that_are_gone_close_after_a_restart() -> None:
    first = Scene(Job(begins=10, stops=30, finds=hangs(30))).run(60)
    second = Scene(before=first.rows[-1:], at=62).run(90)
    assert [state for _, state, _ in second.states()] == ["closed"]


def test_a_job_that_is_found_late_after_a_restart_fires_no_hook_again() -> None:
    first = Scene(Job(begins=10, stops=30, finds=hangs(30))).run(60)
    job = Job(begins=80, seen_from=62, stops=80, finds=hangs(80))
    second = Scene(job, before=first.rows[-1:], at=62).run(140)
    assert [state for _, state, _ in second.states()][:2] == ["closed", "open"]
    assert first.rows[-1]["finding_id"] == second.rows[1]["finding_id"]
    assert not second.hooked


def test_a_warning_of_a_review_needs_a_second_look_and_fires_once() -> None:
    slow = finding("slow_rank", 1, group="slow", severity=WARNING)
    scene = Scene(Job(begins=10, finds=lambda now, _: [slow] if now < 200 else [])).run(400)
    assert scene.states()[0][:2] == ("slow_rank", "open")
    assert 79 <= scene.states()[0][2] <= 82
    assert scene.states()[-1][:2] == ("slow_rank", "closed")
    assert len(scene.hooked) == 1
    # The look that confirms it compares the processes with those of the review; the reason is looked at again after.
    assert scene.read == [(scene.looks[0][0] + 0.1, "j")]
    assert [deep for at, _, deep in scene.looks if at < 200] == [False, True, True]


def test_a_finding_that_comes_back_does_not_fire_again() -> None:
    def finds(now: float, _: bool) -> list[Finding]:
        return [] if 200 < now < 400 else [finding("slow_rank", 1, group="slow", severity=WARNING)]

    scene = Scene(Job(begins=10, finds=finds)).run(1500)
    assert [state for _, state, _ in scene.states()] == ["open", "closed", "open"]
    assert len(scene.hooked) == 1


def test_a_note_of_a_review_is_looked_at_closely_once() -> None:
    scene = Scene(Job(begins=10, finds=lambda *_: [finding("note", severity=NOTE)])).run(260)
    assert [deep for _, _, deep in scene.looks] == [False, True, False, True]
    assert (scene.rows, scene.hooked) == ([], [])


def test_notes_are_no_findings() -> None:
    scene = Scene(Job(begins=10, stops=30, finds=lambda *_: [finding("note", severity=NOTE)])).run(60)
    assert (scene.rows, scene.hooked) == ([], [])


def test_an_idle_server_that_cannot_be_read_is_no_culprit() -> None:
    def unread() -> Finding:
        return finding("not_joined", 1, culprits=(Culprit(1, "n1", 101, "", "unknown"),))

    job = Job(begins=10, stops=30, finds=lambda now, _deep: [IDLES if now < 60 else unread()] if now > 30 else [])
    scene = Scene(job).run(300)
    assert scene.rows == []
    # WHEN it is known to do something else
    job.finds = lambda _now, _deep: [finding("not_joined", 1)]
    scene.run(500)
    assert [row["verdict"] for row in scene.rows] == ["not_joined"]
    # AND a rank that cannot be read, and was not idle, is named
    scene = Scene(Job(begins=10, stops=30, finds=lambda now, _deep: [unread()] if now > 30 else [])).run(300)
    assert [row["verdict"] for row in scene.rows] == ["not_joined"]


# A percent is what `diagnose` prints.
@pytest.mark.parametrize("before", [0.5, 0.89])
def test_a_change_is_stored_once_in_ten_seconds(before: float) -> None:
    def finds(now: float, _: bool) -> list[Finding]:
        return [finding("not_joined", 1, confidence=before if now < 42 else 0.9)] if now > 30 else []

    scene = Scene(Job(begins=10, stops=30, finds=finds)).run(100)
    assert [row["confidence"] for row in scene.rows] == [before, 0.9]
    assert len({row["opened"] for row in scene.rows}) == 1


def test_what_a_culprit_does_stays_when_it_cannot_be_read_again() -> None:
    known = finding("not_joined", 1)
    blind = replace(known, culprits=(replace(known.culprits[0], why="cannot be seen", activity="unknown"),))
    other = replace(known, culprits=(replace(known.culprits[0], why="reads", activity="io"),))

    def finds(now: float, _: bool) -> list[Finding]:
        return [] if now <= 30 else [known if now < 45 else blind if now < 70 else other]

    scene = Scene(Job(begins=10, stops=30, finds=finds)).run(150)
    assert [json.loads(row["culprits"])[0]["activity"] for row in scene.rows] == ["sleeping", "io"]


def test_stacks_are_stored_once_they_are_there_and_stay() -> None:
    def finds(now: float, _: bool) -> list[Finding]:
        return [finding("not_joined", 1, **({} if 45 < now < 50 else {"stacks": ()}))] if now > 30 else []

    scene = Scene(Job(begins=10, stops=30, finds=finds)).run(100)
    # What is found without a stack of the rank has to be found again.
    assert scene.states()[0][2] > scene.looks[1][0] > scene.looks[0][0] + 1
    assert ["culprit" in row["stacks"] for row in scene.rows] == [False, True]


def test_a_stack_of_a_victim_that_comes_later_is_stored() -> None:
    whole = finding("not_joined", 1)

    def finds(now: float, _: bool) -> list[Finding]:
        return [whole if 43 < now < 50 else replace(whole, stacks=whole.stacks[:1])] if now > 30 else []

    scene = Scene(Job(begins=10, stops=30, finds=finds)).run(100)
    assert ["victim" in row["stacks"] for row in scene.rows] == [False, True]
    assert scene.rows[1]["finding_id"] == scene.rows[0]["finding_id"]


def test_a_look_that_got_no_stacks_keeps_those_of_an_earlier_look() -> None:
    whole = finding("not_joined", 1, confidence=0.5)

    def finds(now: float, _: bool) -> list[Finding]:
        return [whole if now < 50 else replace(whole, confidence=0.9, stacks=())] if now > 30 else []

    scene = Scene(Job(begins=10, stops=30, finds=finds)).run(150)
    assert [(row["confidence"], "culprit" in row["stacks"]) for row in scene.rows] == [(0.5, True), (0.9, True)]


def test_a_slow_job_holds_up_no_other() -> None:
    jobs = [Job("slow", begins=10, stops=20, takes=5.0), Job("quick", begins=10, stops=24, finds=hangs(24))]
    scene = Scene(*jobs).run(120)
    assert scene.states()[0][2] <= 34 + 6
    slow = [at for at, job, _ in scene.looks if job == "slow"]
    assert all(then - before >= 25 for before, then in pairwise(slow[3:]))


def test_a_stall_of_a_job_whose_review_was_slow_is_looked_at_in_time() -> None:
    finds = hangs(30)
    job = Job(begins=10, stops=30, takes=3.0, finds=lambda now, deep: finds(now, deep) if now > 45 else [])
    scene = Scene(job, stall_s=10.0, review_s=5.0).run(80)
    assert scene.states()[0][2] <= 52


def test_more_jobs_than_can_be_watched_are_counted() -> None:
    scene = Scene(*(Job(f"j{n}", begins=10) for n in range(67))).run(20)
    assert scene.watch.state().state == "degraded"
    assert "3 jobs are not watched" in scene.watch.state().reason


def test_jobs_that_ended_and_single_processes_make_room_for_others() -> None:
    ended = [Job(f"e{n}", begins=10, ends={0: (12, None), 1: (12, None)}) for n in range(32)]
    alone = [Job(f"a{n}", begins=11, ranks=1, first=1e9) for n in range(32)]
    late = [Job(f"j{n}", begins=20, stops=30, finds=hangs(30)) for n in range(40)]
    scene = Scene(*ended, *alone, *late).run(35)
    assert scene.watch.state().state == "running"
    assert scene.watch.state().detail == "64 jobs, 0 open findings"
    assert {row["job"] for row in scene.run(200).rows} == {job.name for job in late}


@pytest.mark.parametrize("finds", [lambda _now, _deep: (), hangs(30)])
def test_a_user_with_many_jobs_keeps_no_job_of_another_from_the_watch(
    finds: Callable[[float, bool], Sequence[Finding]],
) -> None:
    many = [Job(f"s{n:03}", begins=10, stops=30, finds=finds, owner=65534) for n in range(97)]
    victim = Job("victim", begins=50, stops=60, finds=hangs(60), owner=1000)
    scene = Scene(*many, victim).run(100)
    opened = [at for row, (_, _, at) in zip(scene.rows, scene.states(), strict=True) if row["job"] == "victim"]
    # In time: three looks of 1.2 s each may have begun before.
    assert opened
    assert 70 <= opened[0] <= 77
    assert "victim" in [row["job"] for row in scene.hooked]
    # What is left out is reported by owner.
    assert "34 jobs are not watched, 34 of uid 65534" in scene.watch.state().reason


def test_the_watch_is_shared_by_the_owners_who_want_it() -> None:
    owners = {1000: 50, 1001: 50, 1002: 5}
    jobs = [Job(f"{owner}-{n}", begins=10 + n, owner=owner) for owner, count in owners.items() for n in range(count)]
    scene = Scene(*jobs).run(70)
    watched = Counter(job.owner for job in jobs if scene.watch.watches(job.name, job.run))
    assert watched[1002] == 5
    assert sorted((watched[1000], watched[1001])) == [29, 30]
    # Who has a fair share keeps it: a job is not dropped for one that would be dropped next.
    before = {job.name for job in jobs if scene.watch.watches(job.name, job.run)}
    scene.run(90)
    assert before == {job.name for job in jobs if scene.watch.watches(job.name, job.run)}


def test_a_job_with_a_finding_is_the_last_to_be_dropped() -> None:
    hung = Job("hung", begins=10, stops=20, finds=hangs(20), owner=65534)
    late = [Job(f"s{n:03}", begins=40, owner=65534) for n in range(63)]
    others = [Job(f"v{n}", begins=60, owner=1000) for n in range(20)]
    scene = Scene(*late, *others, hung).run(80)
    assert [row["state"] for row in scene.rows if row["job"] == "hung"] == ["open"]
    assert scene.watch.watches("hung", "r")
    assert all(scene.watch.watches(job.name, "r") for job in others)


def test_a_collector_that_is_replaced_closes_no_finding() -> None:
    scene = Scene(Job(begins=10, stops=30, gap=2.0, finds=hangs(30))).run(60)
    jobs, scene.jobs = scene.jobs, []
    scene.run(75)
    scene.jobs = jobs
    # It has seen no operation of the job.
    jobs[0].seen_from = 75
    assert [state for _, state, _ in scene.run(120).states()] == ["open"]
    assert len(scene.hooked) == 1
    # A job that it does not know after half a minute is gone.
    scene.jobs = []
    assert [state for _, state, _ in scene.run(160).states()] == ["open", "closed"]


def test_the_usual_pause_outlives_the_collector_that_measured_it() -> None:
    job = Job(begins=10, step=25.0, gap=25.0)
    scene = Scene(job, review_s=1000.0).run(160)
    job.seen_from, job.gap = 161, None
    assert scene.run(184).looks == []


def test_a_rank_that_fails_before_the_first_poll_is_looked_at() -> None:
    scene = Scene(Job(begins=10, ends={1: (10, 9)})).run(14)
    assert len(scene.looks) == 2


def test_a_job_that_failed_before_the_first_poll_is_looked_at_unless_a_watch_before_knew_it() -> None:
    died = finding("rank_died", 1, group="death")
    job = Job(begins=1, ends={0: (9, 15), 1: (8, 9)}, finds=lambda *_: [died])
    first = Scene(job, at=10).run(60)
    assert [state for _, state, _ in first.states()] == ["open", "closed"]
    assert len(first.hooked) == 1
    for before in first.rows:
        assert Scene(job, before=[before], at=62).run(90).looks == []
    # Nothing had failed, or long ago.
    assert Scene(Job(begins=1, ends={0: (9, None), 1: (8, None)}), at=10).run(60).looks == []
    late = Scene(at=10).run(20)
    late.jobs = [job]
    assert late.run(60).looks == []


def test_a_gather_that_fails_is_named_and_tried_again() -> None:
    scene = Scene(Job(begins=10, stops=30, finds=hangs(30)))
    scene.fails["facts"] = ZeroDivisionError("x")
    scene.run(45)
    assert scene.watch.state().state == "degraded"
    assert "ZeroDivisionError" in scene.watch.state().reason
    del scene.fails["facts"]
    scene.run(60)
    assert scene.watch.state().state == "running"
    assert scene.states()[0][1] == "open"


def test_jobs_that_could_not_be_looked_at_are_one_problem_with_its_time() -> None:
    jobs = [Job(name=f"job{n}", begins=10, stops=30, finds=hangs(30)) for n in range(12)]
    scene = Scene(*jobs)
    scene.fails["facts"] = QueryTimeout("the stored rows cannot be read: no worker was free")
    scene.run(200)
    reason = scene.watch.state().reason
    failed = [at for at, _, _ in scene.looks]
    since = time.strftime("%Y-%m-%d %H:%M:%SZ", time.gmtime(START / SECOND + min(failed)))
    assert reason == f"12 jobs were not looked at since {since}: the stored rows cannot be read: no worker was free"
    del scene.fails["facts"]
    scene.run(400)
    assert (scene.watch.state().state, scene.watch.state().reason) == ("running", "")
    one = Scene(jobs[0])
    one.fails["facts"] = QueryTimeout("late")
    assert one.run(60).watch.state().reason.startswith("job job0 was not looked at since 20")


@pytest.mark.parametrize(
    "gap", [Missing("history", "the steps cannot be read: the query did not end in time"), Missing("rule", "x failed")]
)
def test_what_could_not_be_read_closes_no_finding(gap: Missing) -> None:
    def slow(now: float, deep: bool) -> list[Finding]:
        return [] if now > 400 else [finding("slow_rank", 1, group="slow", severity="warning")]

    scene = Scene(Job(finds=slow), review_s=20.0).run(390)
    assert [state for _, state, _ in scene.states()] == ["open"]
    # The node is busy: looks show nothing, since rows do not come.
    scene.missing = (gap,)
    scene.run(1500)
    assert [state for _, state, _ in scene.states()] == ["open"]
    scene.missing = (Missing("size", "some samples were left out"),)
    scene.run(2500)
    assert [state for _, state, _ in scene.states()] == ["open", "closed"]


def test_a_job_that_is_unknown_is_no_problem() -> None:
    scene = Scene(Job(begins=10, stops=30, finds=hangs(30)))
    scene.fails["facts"] = NotFound("gone")
    assert scene.run(45).watch.state().state == "running"


def test_without_the_collector_nothing_is_lost() -> None:
    scene = Scene(Job(begins=10, stops=30, finds=hangs(30)))
    scene.run(35)
    scene.fails["record"] = PeerError("gone")
    scene.run(60)
    assert scene.rows == []
    assert "storing findings" in scene.watch.state().reason
    del scene.fails["record"]
    scene.run(62)
    assert scene.states()[0][1] == "open"


def test_a_row_that_cannot_be_sent_does_not_block_others() -> None:
    scene = Scene(Job(begins=10, stops=30, resumes=60, finds=hangs(30, 60)))
    scene.fails["record"] = TypeError("no JSON")
    scene.run(50)
    assert scene.watch.state().lost == 1


def test_a_row_that_is_refused_does_not_block_others() -> None:
    scene = Scene(Job(begins=10, stops=30, resumes=60, finds=hangs(30, 60)))
    scene.fails["record"] = UsageError("no")
    scene.run(50)
    assert scene.watch.state().lost == 1
    del scene.fails["record"]
    scene.run(70)
    assert [state for _, state, _ in scene.states()] == ["closed"]


def test_findings_of_before_are_read_before_any_look() -> None:
    scene = Scene(Job(begins=10, stops=30, seen_from=100, finds=hangs(30)), at=100)
    scene.fails["findings"] = PeerError("not yet")
    scene.watch.step()
    assert scene.looks == []
    del scene.fails["findings"]
    scene.run(105)
    assert scene.looks


def test_a_restart_of_a_job_is_another_run() -> None:
    jobs = [
        Job(run="r1", begins=10, stops=30, ends={0: (50, 9), 1: (50, 9)}, finds=hangs(30, 50)),
        Job(run="r2", begins=52, stops=70, finds=hangs(70)),
    ]
    scene = Scene(*jobs).run(100)
    assert [(row["run"], row["state"]) for row in scene.rows] == [("r1", "open"), ("r1", "closed"), ("r2", "open")]
    assert len(scene.hooked) == 2


def test_a_usual_pause_of_a_minute_is_no_stall() -> None:
    scene = Scene(Job(begins=10, stops=30, resumes=110, gap=60.0), review_s=1000.0).run(200)
    assert scene.looks == []


class _Beside(Scene):
    """Looks that take until ``end``."""

    def begin(self, call: Callable[[], T], /) -> Future[T]:
        outcome: Future[T] = Future()
        self.begun = [*getattr(self, "begun", []), (call, outcome)]
        return outcome

    def end(self, number: int) -> None:
        call, outcome = self.begun[number]
        outcome.set_result(call())


def test_three_jobs_are_looked_at_at_a_time() -> None:
    scene = _Beside(*(Job(name, begins=10, stops=20, finds=hangs(20)) for name in "abcd")).run(32)
    # Nobody waits for a look that does not end, but for a place.
    assert len(scene.begun) == 3
    scene.end(1)
    scene.run(36)
    assert (len(scene.begun), [row["job"] for row in scene.rows]) == (4, ["b"])
    # What a look shows of a job that is gone meanwhile is not recorded.
    gather, outcome = scene.begun[0]
    facts = gather()
    scene.jobs = [job for job in scene.jobs if job.name != "a"]
    scene.run(80)
    outcome.set_result(facts)
    scene.run(81)
    assert "a" not in {row["job"] for row in scene.rows}


def test_looks_that_do_not_end_leave_a_place_for_another_owner() -> None:
    many = [Job(f"s{n}", begins=10, stops=20, finds=hangs(20), owner=65534) for n in range(5)]
    victim = Job("victim", begins=10, stops=40, finds=hangs(40), owner=1000)
    scene = _Beside(*many, victim).run(60)
    assert len(scene.begun) == 3
    scene.end(2)
    scene.run(62)
    assert [row["job"] for row in scene.rows] == ["victim"]


def test_a_new_stall_is_looked_at_before_others_again() -> None:
    old = [Job(f"old{n}", begins=10, stops=20, finds=hangs(20), takes=4.0) for n in range(7)]
    scene = Scene(*old, Job("new", begins=10, stops=50, finds=hangs(50))).run(100)
    # It waits for one look at most, of 4 s.
    assert next(at for at, job, deep in scene.looks if job == "new" and deep) <= 60 + 4 + 1


def test_a_job_that_another_node_leads_is_not_looked_at_until_that_node_is_gone() -> None:
    scene = Scene(Job(begins=10, stops=30, finds=hangs(30)))
    scene.leading = False
    scene.run(60)
    assert scene.held == {("j", "r"): True}
    assert scene.looks == []
    scene.leading = True
    scene.run(63)
    # The stall was followed all the time.
    assert scene.looks[0][2]
    assert [state for _, state, _ in scene.states()] == ["open"]
    assert [row["found_by"] for row in scene.shared] == ["n1"]


def test_who_takes_over_knows_the_findings_of_the_node_before() -> None:
    leader = Scene(Job(begins=10, stops=30, resumes=95, finds=hangs(30, 95))).run(50)
    other = Scene(Job(begins=10, stops=30, resumes=95, finds=hangs(30, 95)))
    other.leading = False
    other.run(50)
    for row in leader.shared:
        other.watch.take(row)
    other.leading = True
    other.run(100)
    assert other.hooked == []
    assert {row["finding_id"] for row in other.rows} == {row["finding_id"] for row in leader.rows}
    assert other.rows[-1]["state"] == "closed"


def test_what_the_leader_closed_is_closed_here() -> None:
    leader = Scene(Job(begins=10, stops=30, resumes=95, finds=hangs(30, 95))).run(100)
    other = Scene(Job(begins=10, stops=30, resumes=95, finds=hangs(30, 95)))
    other.leading = False
    other.run(96)
    assert other.rows == []
    for row in leader.shared:
        other.watch.take(row)
    other.run(98)
    assert [row["state"] for row in other.rows] == [row["state"] for row in leader.rows]
    assert "0 open findings" in other.watch.state().detail
    assert other.watch.watches("j", "r")
    assert not other.watch.watches("j", "other")


def test_rows_about_a_job_without_ranks_here_are_dropped() -> None:
    leader = Scene(Job(begins=10, stops=30, finds=hangs(30))).run(50)
    other = Scene().run(20)
    other.watch.take(leader.shared[0])
    other.run(30)
    assert other.rows == []


def test_a_finding_names_the_nodes_that_did_not_answer() -> None:
    scene = Scene(Job(begins=10, stops=30, finds=hangs(30)))
    scene.missing = (Missing("node", "node n3 did not answer: it is failed", node="n3"), Missing("clock", "x"))
    scene.run(50)
    assert json.loads(scene.rows[0]["missing"]) == ["node n3 did not answer: it is failed"]


@pytest.mark.parametrize(("silent_s", "named"), [(50, ["not_joined"]), (500, ["not_joined", "rank_unreachable"])])
def test_a_late_answer_of_the_culprits_node_is_no_other_culprit(silent_s: int, named: list[str]) -> None:
    def finds(now: float, _deep: bool) -> list[Finding]:
        if now < 30 or now > 700:
            return []
        return [finding("rank_unreachable", 1, 3)] if scene.missing else [finding("not_joined", 1)]

    scene = Scene(Job(begins=10, stops=30, resumes=700, finds=finds), review_s=20.0)
    scene.run(60)
    scene.missing = (Missing("node", "node n1 did not answer: no answer within 1.0 s", node="n1"),)
    scene.run(60 + silent_s)
    scene.missing = ()
    scene.run(650)
    # The rank that was named stays so, also where its node is silent for long.
    states = [(verdict, state) for verdict, state, _ in scene.states()]
    assert next(verdict for verdict, state in states if state == "open") == "not_joined"
    assert list(dict.fromkeys(verdict for verdict, _ in states)) == named
    assert ("not_joined", "closed") not in states
    scene.run(800)
    assert ("not_joined", "closed") in [(verdict, state) for verdict, state, _ in scene.states()]


def test_memory_that_will_end_needs_no_second_look_with_its_limit() -> None:
    # Without the limit it is a note.
    grows = lambda now, deep: [finding("memory_growth", 1, group="memory", severity=WARNING if deep else NOTE)]  # noqa: E731
    scene = Scene(Job(begins=10, finds=grows), review_s=3.0).run(60)
    assert [deep for _, _, deep in scene.looks][:2] == [False, True]
    ((name, state, opened),) = scene.states()
    assert (name, state) == ("memory_growth", "open")
    assert opened == pytest.approx(scene.looks[1][0] + 1.2, abs=0.1)


def test_findings_about_hardware_take_no_place_of_a_hang() -> None:
    hot = [finding("gpu_slow", about=f"gpu {number}", group="hardware", severity=WARNING) for number in range(80)]
    job = Job(begins=10, stops=200, finds=lambda now, deep: [*hot, *hangs(210)(now, deep)])
    scene = Scene(job, review_s=60.0).run(260)
    opened = Counter(row["verdict"] for row in scene.rows if row["state"] == "open")
    assert opened == {"gpu_slow": 64, "not_joined": 1}
    assert {row["verdict"] for row in scene.hooked} == {"gpu_slow", "not_joined"}


def test_findings_without_room_bring_no_more_deep_looks() -> None:
    def deep_looks(count: int) -> int:
        hot = [
            finding("gpu_slow", about=f"gpu {number}", group="hardware", severity=WARNING) for number in range(count)
        ]
        scene = Scene(Job(begins=10, finds=lambda _now, _deep: hot), review_s=60.0).run(1200)
        return sum(deep for _, _, deep in scene.looks)

    assert deep_looks(80) == deep_looks(64)
