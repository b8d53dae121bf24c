"""Facts of a real job that hangs: operations, stacks and conditions of its ranks, from a real daemon."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

from e2e_support import JOBS, Daemon
from long import long
from ports import free_port
from waiting import asking, until

from probing.api.errors import NotFound
from probing.client.cluster import Cluster
from probing.daemon.diagnose.gather.readings import APART_S
from probing.diagnosis.facts import Facts, Rank
from probing.diagnosis.facts_file import RANK_BYTES, from_json, size_of, to_json

STEPS = 23
Launch = Callable[..., Any]


def facts_of(daemon: Daemon, job: str) -> Facts | None:
    try:
        with asking(), Cluster(daemon.target) as cluster:
            [(_, found)] = cluster.facts(job)
    except NotFound:
        return None
    [data] = found
    facts = from_json(data)
    assert from_json(to_json(facts)) == facts
    assert all(size_of(rank) < RANK_BYTES for rank in facts.ranks)
    return facts


def hung(facts: Facts | None) -> Facts | None:
    """``facts`` if rank 0 waits in the operation that rank 1 does not call, and the processes were read."""
    if facts is None or len(facts.ranks) != 2 or not all(rank.threads for rank in facts.ranks):
        return None
    # What is in flight is read before the stacks.
    if not (facts.ranks[0].open or facts.ranks[0].seen_from_ns):
        return None
    waits = any(frame.func == "all_reduce" for frame in facts.ranks[0].threads[0].frames)
    return facts if waits and asleep(facts.ranks[1]) else None


def asleep(rank: Rank) -> bool:
    return rank.condition is not None and rank.condition.syscall == "clock_nanosleep" and not rank.threads[0].moving


@long
def test_the_facts_of_a_job_that_hangs(make_daemon: Callable[..., Daemon], torchrun_job: Launch) -> None:
    daemon = make_daemon("n1", "--store.sync-interval-s", "1").start()
    port = free_port()
    torchrun_job(JOBS / "stops.py", STEPS, "sleep", port=port)
    job = f"n1/127.0.0.1:{port}"
    facts = until(lambda: hung(facts_of(daemon, job)), what="the facts of the hang")
    first, second = facts.ranks
    assert (facts.job, facts.world_size, [node.node for node in facts.nodes]) == (job, 2, ["n1"])
    # The operations: all of rank 1 ended, rank 0 waits in one more.
    assert [one.op for one in second.done][-STEPS:] == ["all_reduce"] * STEPS
    assert second.open == ()
    [waits] = first.open
    assert (waits.op, waits.count, waits.dtype, waits.seq) == ("all_reduce", 1013, "float32", second.done[-1].seq + 1)
    assert [(p.comm, p.seq) for p in first.progress] == [(waits.comm, waits.seq)]
    [comm] = facts.communicators
    assert [(m.comm_rank, m.rank) for m in comm.members] == [(0, 0), (1, 1)]
    # The stacks: rank 0 is in torch.distributed, with the values of its call; native frames below.
    main = first.threads[0]
    names = {name for frame in main.frames if frame.func == "all_reduce" for name, _ in frame.values}
    assert {"tensor", "op", "group"} <= names
    assert any(frame.native and "c10d" in frame.func for frame in main.frames), main
    assert second.threads[0].main
    assert [frame.func for frame in second.threads[0].frames if not frame.native] == ["main", "<module>"]
    # The kernel's view.
    assert first.condition is not None
    assert second.condition is not None
    assert second.condition.syscall == "clock_nanosleep"
    assert second.condition.state == "S"
    assert (second.condition.interval_ns or 0) >= APART_S * 1e9
    assert second.condition.asleep_since_ns is not None
    assert second.condition.asleep_since_ns < facts.taken_ns
    assert ("WORLD_SIZE", "2") in first.env
    assert [process.role for process in facts.processes] == ["launcher"]
    assert {one.kind for one in facts.missing} <= {"stacks"}, facts.missing
    # A daemon that starts now has only the processes to look at, and says so.
    late = make_daemon("n2")
    began = time.monotonic()
    late.start()
    other = job.replace("n1/", "n2/")
    seen = until(lambda: hung(facts_of(late, other)), what="the facts of a late daemon")
    print(f"late facts after {time.monotonic() - began:.1f} s")
    assert [rank.done for rank in seen.ranks] == [(), ()]
    assert all(rank.seen_from_ns is not None and rank.seen_from_ns > facts.taken_ns for rank in seen.ranks)
    assert seen.ranks[1].condition is not None
    assert (seen.ranks[1].condition.asleep_since_ns or 0) < seen.ranks[1].seen_from_ns
    # After its death the rank is still there, with how it ended.
    os.kill(second.pid, signal.SIGKILL)
    ended = until(lambda: _ended(facts_of(daemon, job), 1), what="the end of rank 1")
    assert ended.exit is not None
    assert (ended.exit.signal, ended.state, len(ended.done)) == (9, "exited", len(second.done))


def _ended(facts: Facts | None, number: int) -> Rank | None:
    found = [rank for rank in (facts.ranks if facts else ()) if rank.rank == number and rank.exit is not None]
    return found[0] if found else None
