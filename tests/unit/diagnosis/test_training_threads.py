"""The thread that trains, where a daemon came too late to see it issue anything."""

from __future__ import annotations

from dataclasses import replace

import pytest
from diagnosis_cases import facts, history, in_collective, rank, thread

from probing.diagnosis.facts import Condition, Facts, Rank, Thread
from probing.diagnosis.ladder import diagnose
from probing.diagnosis.training_threads import with_training_threads

QUEUE = "/usr/lib/python3.11/queue.py"
IDLE = thread(f"get {QUEUE}:171", "main_loop run.py:7")
TRAINS = {"main": False, "name": "TrainingThread(train_fn)"}


def trains(inner: Thread, number: int) -> Thread:
    frames = (*inner.frames, *thread("train_fn run.py:23", "run /usr/lib/python3.11/threading.py:5").frames)
    return replace(inner, **TRAINS, tid=100 + number, frames=frames)


def job(stuck: Thread, *, main: Thread = IDLE, number: int = 5) -> Facts:
    """Three ranks; the training threads of the first two wait in a collective, that of the last is ``stuck``."""
    wait = Condition(state="S", syscall="futex", wchan="futex_do_wait", cpu_ns=0, asleep_since_ns=1)
    threads = [trains(in_collective(), number), trains(in_collective(), number), trains(stuck, number)]
    return facts(*(rank(n, threads=(main, one), condition=wait, pid=100) for n, one in enumerate(threads)))


def main_of(one: Rank) -> Thread:
    (found,) = [thread for thread in one.threads if thread.main]
    assert one.threads[0] is found
    return found


SLEEPS = replace(thread("download run.py:40"), syscall="clock_nanosleep", state="sleeping")


def test_the_threads_that_wait_in_a_collective_train_and_so_does_the_one_like_them() -> None:
    found = with_training_threads(job(SLEEPS))
    assert [main_of(one).name for one in found.ranks] == ["TrainingThread(train_fn)"] * 3
    condition = found.ranks[2].condition
    assert condition
    assert (condition.state, condition.syscall, condition.wchan) == ("S", "clock_nanosleep", None)
    assert (condition.cpu_ns, condition.asleep_since_ns) == (None, None)


def test_the_rank_is_named_with_what_its_training_thread_does() -> None:
    (finding,) = diagnose(job(SLEEPS)).findings
    assert [culprit.rank for culprit in finding.culprits] == [2]
    assert "sleeps in download" in finding.culprits[0].why


def test_a_thread_that_waits_within_backward_trains() -> None:
    backward = thread("_engine_run_backward /site-packages/torch/autograd/graph.py:824")
    whole = job(SLEEPS)
    ranks = [replace(one, threads=(IDLE, trains(backward, 5))) for one in whole.ranks[:2]]
    found = with_training_threads(replace(whole, ranks=(*ranks, whole.ranks[2])))
    assert [main_of(one).tid for one in found.ranks] == [105] * 3


@pytest.mark.parametrize(
    "main",
    [
        in_collective(),
        thread("step train.py:9"),
        thread("poll /site-packages/zmq/poll.py:9", "serve run.py:1"),
    ],
)
def test_a_main_thread_that_does_something_itself_trains(main: Thread) -> None:
    whole = job(SLEEPS, main=main)
    assert with_training_threads(whole).ranks == whole.ranks


def test_a_main_thread_without_python_does_not_train() -> None:
    assert [main_of(one).tid for one in with_training_threads(job(SLEEPS, main=thread())).ranks] == [105] * 3


def test_where_no_thread_waits_in_a_collective_nothing_is_concluded() -> None:
    whole = facts(*(rank(n, threads=(IDLE, trains(SLEEPS, 5)), pid=100) for n in range(2)))
    assert with_training_threads(whole) is whole


def test_of_two_threads_alike_none_is_taken() -> None:
    whole = job(SLEEPS)
    twins = replace(whole.ranks[2], threads=(*whole.ranks[2].threads, trains(SLEEPS, 9)))
    found = with_training_threads(replace(whole, ranks=(*whole.ranks[:2], twins)))
    assert main_of(found.ranks[2]) == IDLE


API = "/site-packages/torch/distributed/rpc/api.py"
SERVES = f"forward run.py:17|_run_function {API.replace('api', 'internal')}:209"


def served(*frames: str) -> Facts:
    """Rank 0 waits for the answer of an RPC, and rank 1 for the end of the job while a thread of it has ``frames``."""
    asks = thread(f"rpc_sync {API}:842", "train run.py:24")
    waits = thread("wait /usr/lib/python3.11/threading.py:320", f"_all_gather {API}:257", f"shutdown {API}:382")
    wait = Condition(state="S", syscall="futex", wchan="futex_do_wait", cpu_ns=0, asleep_since_ns=1)
    others = [replace(thread(*frames), tid=107, main=False, state="sleeping", syscall="clock_nanosleep")]
    done = history(6, ago=70)
    return facts(
        rank(0, *done, threads=(asks,), condition=wait, pid=100),
        rank(1, *done, threads=(waits, *(others if frames else ())), condition=wait, pid=100),
    )


def test_the_rank_that_serves_a_request_is_named() -> None:
    (finding,) = diagnose(served(*SERVES.split("|"))).findings
    assert [culprit.rank for culprit in finding.culprits] == [1]
    assert "sleeps in forward, run.py:17" in finding.culprits[0].why


def test_without_a_request_nobody_is_named_alone() -> None:
    (finding,) = diagnose(served()).findings
    assert [culprit.rank for culprit in finding.culprits] == [0, 1]
    assert "waits for the answer of an RPC" in finding.culprits[0].why
    assert "serves RPCs until all ranks have ended theirs" in finding.culprits[1].why
