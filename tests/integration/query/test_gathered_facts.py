"""Facts of jobs from real rows: the statements of the gatherer through the gate and a worker."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pytest
from query_helpers import NOW_NS, T0, Machine, logical, operations

from probing.api.errors import NotFound, PeerError, QueryTimeout
from probing.daemon.diagnose.gather.gatherer import Gatherer
from probing.daemon.query.answer import Item
from probing.daemon.stack_wire import ProcessStacks
from probing.diagnosis.facts import Exit, Facts, Frame, Member, Process, Rank, Series, Step
from probing.diagnosis.facts_file import from_json, to_json

S = 1_000_000_000
START = 10_000_000
IN_FIT = [{"func": "fit", "file": "train.py", "lineno": 7}]
IN_LOAD = [{"func": "load", "file": "data.py", "lineno": 12}, *IN_FIT]


def who(rank: int = 0, /, **more: Any) -> dict[str, Any]:
    """The identity of rank 0 or 1 as tables have it."""
    own = {"node": "n0", "ts": T0, "job": "j", "run": "0", "pid": 100 + rank, "start_ns": START, "rank": rank}
    return {**own, **more}


def process(rank: int = 0, /, **more: Any) -> dict[str, Any]:
    return who(rank, **{"local_rank": rank, "world_size": 2, "role": "trainer", "state": "running", **more})


class Node:
    """The collector of a node: live rows as the test gives them; its processes cannot be read."""

    def __init__(self, machine: Machine) -> None:
        self.files = machine.files

    def live(self, table: str, timeout: float) -> bytes:
        return self.files.live(table, timeout)

    def status(self, timeout: float) -> Mapping[str, Any]:
        del timeout
        return {"started_ns": T0 - 7 * S}

    def stacks(
        self, pids: Sequence[int], job: str, timeout: float, *, native: bool = False, with_locals: bool = False
    ) -> tuple[list[ProcessStacks], list[dict[str, Any]]]:
        raise PeerError("the collector does not answer")

    def conditions(self, pids: Sequence[int], job: str, timeout: float) -> Mapping[str, Any]:
        raise PeerError("the collector does not answer")

    def variables(self, pids: Sequence[int], job: str, names: Sequence[str], timeout: float) -> Mapping[str, Any]:
        raise PeerError("the collector does not answer")


@pytest.fixture
def gatherer(machine: Machine) -> Gatherer:
    set_live(machine, [process(0), process(1)])
    return Gatherer("n0", machine.engine, Node(machine), now_ns=lambda: NOW_NS)


def set_live(
    machine: Machine,
    processes: list[dict[str, Any]],
    inflight: Sequence[dict[str, Any]] = (),
    progress: Sequence[dict[str, Any]] = (),
) -> None:
    machine.files.live_rows |= {
        "process.processes": logical("process.processes", processes),
        "comm.inflight": logical("comm.inflight", inflight),
        "comm.progress": logical("comm.progress", progress),
        "gpu.devices": logical("gpu.devices", []),
        "rdma.qps": logical("rdma.qps", []),
        "net.sockets": logical("net.sockets", []),
        "process.envs": logical(
            "process.envs", [who(0, name="MASTER_PORT", value="29500"), who(0, name="HOME", value="/")]
        ),
    }


def only(found: list[Facts]) -> Facts:
    [facts] = found
    assert from_json(to_json(facts)) == facts or any(
        math.isnan(value) for rank in facts.ranks for series in rank.series for value in series.values
    )
    return facts


def light(gatherer: Gatherer, job: str = "j") -> Facts:
    return only(gatherer.facts(job, deep=False, timeout=60))


def test_the_last_operations_of_each_rank_and_communicator_are_there(machine: Machine, gatherer: Gatherer) -> None:
    # GIVEN 97 ended operations of rank 0, 13 of rank 1, and one in flight that has ended since
    machine.files.segment("comm.ops", [*operations(97), *operations(13, rank=1)])
    inflight = who(0, ts=T0 + 97_000_000, comm="default_pg", seq=97, op="all_reduce", age_ns=1_000_000, tid=100)
    ended = {**inflight, "seq": 96, "ts": T0 + 96_000_000}
    set_live(machine, [process(0), process(1)], [{**inflight, "state": "started"}, {**ended, "state": "started"}])
    facts = light(gatherer)
    first, second = facts.ranks
    assert [one.seq for one in first.done] == list(range(33, 97))
    assert [one.seq for one in second.done] == list(range(13))
    assert [(one.seq, one.t_call_ns) for one in first.open] == [(97, T0 + 97_000_000)]
    one = first.done[-1]
    assert (one.op, one.dtype, one.count, one.bytes, one.state) == ("all_reduce", "float32", 1000, 4000, "done")
    assert (one.t_call_ns, one.t_done_ns) == (T0 + 96_000_000, T0 + 96_000_000 + 97_000)
    # THEN what the rows show of communicators and progress is there as well
    assert [(p.comm, p.seq, p.calls) for p in first.progress] == [("default_pg", 97, 65)]
    [comm] = facts.communicators
    assert (comm.comm, comm.size, comm.members) == ("default_pg", 2, (Member(0, 0), Member(1, 1)))
    assert facts.nodes[0].advanced_ns == T0 + 97_000_000
    assert (facts.world_size, facts.nodes[0].watching_since_ns) == (2, T0 - 7 * S)


def test_progress_bounds_the_rows_that_are_read(machine: Machine, gatherer: Gatherer) -> None:
    """With short gaps between operations only the last seconds before the stall are read."""
    old, new = (
        operations(2),
        [{**row, "ts": row["ts"] + 50 * S, "seq": 1000 + n} for n, row in enumerate(operations(3))],
    )
    machine.files.segment("comm.ops", [*old, *new])
    counted = who(
        comm="default_pg",
        comm_rank=0,
        comm_size=2,
        backend="gloo",
        seq=1002,
        op="all_reduce",
        calls=1003,
        last_call=T0 + 50 * S,
        last_done=T0 + 50 * S,
        longest_gap_ns=1_000_000,
        attached=T0 + 3,
    )
    set_live(machine, [process(0)], progress=[counted])
    facts = light(gatherer)
    [rank] = facts.ranks
    assert [one.seq for one in rank.done] == [1000, 1001, 1002]
    [progress] = rank.progress
    assert (progress.seq, progress.calls, progress.last_call_ns) == (1002, 1003, T0 + 50 * S + 2_000_000)
    assert (facts.usual_gap_ns, rank.seen_from_ns) == (1_000_000, T0 + 3)


def test_steps_values_and_lines_are_there(machine: Machine, gatherer: Gatherer) -> None:
    files = machine.files
    steps = [who(r, ts=T0 + n * S, step=n, duration_ns=7 + n, comm_ns=3, ops=1) for r in (0, 1) for n in range(13)]
    files.segment("train.steps", steps)
    loss = [who(0, ts=T0 + n, name="loss", number=math.nan if n == 5 else n / 2) for n in range(6)]
    files.segment("python.variables", [*loss, who(0, name="model", number=None)])
    files.segment("process.memory", [who(0, ts=T0 + n, role="trainer", rss_bytes=1000 + n) for n in range(3)])
    allocated = [(T0, 1, 100), (T0 + 60 * S, 2, 50), (T0 + 120 * S, 1, 300)]
    files.segment(
        "cuda.memory", [who(0, ts=t, kind="device", size_class=1, stack=s, live_bytes=b) for t, s, b in allocated]
    )
    files.segment("process.logs", [who(1, ts=T0 + n, line=f"line {n}") for n in range(7)])
    facts = only(gatherer.facts("j", timeout=60))
    first, second = facts.ranks
    assert first.steps[-1] == Step(12, T0 + 12 * S, 19, 3, None)
    assert facts.step_history == tuple((T0 + n * S + 7 + n, 7 + n) for n in range(13))
    assert not [one for one in facts.missing if one.kind == "history"]
    by = {series.name: series for series in first.series}
    assert by["rss_bytes"] == Series("rss_bytes", (T0, T0 + 1, T0 + 2), (1000.0, 1001.0, 1002.0))
    assert by["device_bytes"].values == (150.0, 150.0, 350.0)
    assert by["loss"].values[:5] == (0.0, 0.5, 1.0, 1.5, 2.0)
    assert math.isnan(by["loss"].values[5])
    assert second.logs == tuple(f"line {n}" for n in range(2, 7))
    assert first.env == (("MASTER_PORT", "29500"),)


def test_samples_show_the_stacks_now_and_before_and_since_when(machine: Machine, gatherer: Gatherer) -> None:
    def sample(second: int, stack: int, duration: int) -> dict[str, Any]:
        return who(ts=T0 + second * S, tid=100, stack_id=stack, on_cpu=stack == 1, count=1, duration_ns=duration)

    machine.files.segment("python.samples", [sample(1, 1, 3), sample(2, 2, 1), sample(40, 2, 7), sample(45, 2, 5)])
    stacks = [
        {"node": "n0", "ts": T0, "stack_id": n, "complete": True, "frames": f} for n, f in ((1, IN_FIT), (2, IN_LOAD))
    ]
    machine.files.segment("python.stacks", stacks)
    facts = light(gatherer)
    rank = facts.ranks[0]
    load, fit = Frame("load", "data.py", 12), Frame("fit", "train.py", 7)
    assert [(one.frames, one.share, one.on_cpu) for one in rank.samples] == [((load, fit), 1.0, False)]
    assert [(one.frames, one.share) for one in rank.past_samples] == [((fit,), 0.75), ((load, fit), 0.25)]


def test_what_was_lost_is_named(machine: Machine, gatherer: Gatherer) -> None:
    def loss(stage: str, pid: int | None, count: int | None) -> dict[str, Any]:
        return {
            "node": "n0",
            "ts": T0,
            "source": "gloo",
            "table_name": "comm.ops",
            "stage": stage,
            "pid": pid,
            "reason": "the ring was full",
            "ts_from": T0 - 5,
            "ts_to": NOW_NS - S,
            "count": count,
        }

    machine.files.segment(
        "probing.losses", [loss("attach", 101, None), loss("ring", 100, 13), loss("ring", None, None)]
    )
    facts = light(gatherer)
    assert [(rank.lost, rank.seen_from_ns) for rank in facts.ranks] == [(14, None), (1, NOW_NS - S)]
    assert {one.text for one in facts.missing if one.kind == "operations"} == {
        "13 operations of pid 100 were lost: the ring was full",
        "some operations were lost: the ring was full",
    }


def events(*rows: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        who(event="identified", **{"role": "trainer", "detail": '{"ppid": 50, "world_size": 2}', **row}) for row in rows
    ]


def test_a_job_that_ended_is_known_from_its_events(machine: Machine, gatherer: Gatherer) -> None:
    both = [{"rank": r, "pid": 100 + r, "ts": T0 + r} for r in (0, 1)]
    ends = [
        who(r, event="exit", role="trainer", ts=T0 + 7 + r, exit_code=None if r else 1, signal=9 if r else None)
        for r in (0, 1)
    ]
    worker = [{"role": "data_loader", "rank": None, "pid": 200, "detail": '{"ppid": 101}', "ts": T0 + 2}]
    died = who(1, rank=None, pid=200, event="exit", role="data_loader", ts=T0 + 5, signal=11)
    machine.files.segment("process.events", [*events(*both, *worker), *ends, died])
    machine.files.segment("comm.ops", operations(5))
    set_live(machine, [])
    facts = light(gatherer)
    first, second = facts.ranks
    assert (first.exit, first.state, first.world_size) == (Exit(T0 + 7, 1), "exited", 2)
    assert second.exit == Exit(T0 + 8, signal=9)
    assert [one.seq for one in first.done] == list(range(5))
    assert [(one.pid, one.role, one.exit) for one in second.helpers] == [(200, "data_loader", Exit(T0 + 5, signal=11))]
    # AND it is among the jobs that failed lately
    assert [one.job for one in gatherer.facts(deep=False, timeout=60)] == ["j"]


def test_several_jobs_are_gathered_beside_each_other(machine: Machine, gatherer: Gatherer) -> None:
    names = [f"job {n}" for n in range(7)]
    set_live(machine, [process(0, job=name, pid=100 + n) for n, name in enumerate(names)])
    found = gatherer.facts(deep=False, timeout=60)
    assert [(one.job, [rank.pid for rank in one.ranks]) for one in found] == [
        (name, [100 + n]) for n, name in enumerate(names)
    ]
    assert gatherer.facts(run="none", deep=False, timeout=60) == []


def test_an_elastic_restart_gives_facts_of_both_runs(machine: Machine, gatherer: Gatherer) -> None:
    failed = [*events({"rank": 0, "pid": 90, "run": "0"}), who(pid=90, event="exit", role="trainer", exit_code=1)]
    done = [
        *events({"rank": 0, "pid": 80, "run": "old"}),
        who(pid=80, run="old", event="exit", role="trainer", exit_code=0),
    ]
    machine.files.segment("process.events", [*failed, *done])
    set_live(machine, [process(0, run="1"), process(1, run="1")])
    found = gatherer.facts("j", timeout=60)
    assert [(facts.run, [rank.pid for rank in facts.ranks]) for facts in found] == [("1", [100, 101]), ("0", [90])]
    [one] = gatherer.facts("j", run="old", deep=False, timeout=60)
    assert one.run == "old"
    with pytest.raises(NotFound, match="no run 'none'"):
        gatherer.facts("j", run="none", deep=False, timeout=60)


def test_a_rank_without_environment_is_placed_by_its_largest_communicator(machine: Machine, gatherer: Gatherer) -> None:
    rows = [{**row, "rank": None, "comm_size": 5, "comm_rank": 3} for row in operations(2)]
    machine.files.segment("comm.ops", rows)
    set_live(machine, [process(0, rank=None, local_rank=None, world_size=None), process(1, rank=None, role="launcher")])
    facts = light(gatherer)
    assert [(rank.rank, rank.world_size, len(rank.done)) for rank in facts.ranks] == [(3, 5, 2)]
    assert facts.communicators[0].members == (Member(3, 3),)
    assert facts.processes == (Process("n0", 101, START, "launcher", "running"),)


def test_a_process_group_that_is_made_again_has_its_new_size(machine: Machine, gatherer: Gatherer) -> None:
    group = {"comm": "default_pg", "backend": "gloo", "rank": 0, "state": "active"}
    rows = [who(0, ts=T0 + n, **group, size=size) for n, size in enumerate((5, 2, None))]
    machine.files.segment("comm.communicators", rows)
    [comm] = light(gatherer).communicators
    assert (comm.comm, comm.size) == ("default_pg", 2)


def test_an_error_is_read_however_many_lines_follow_it(machine: Machine, gatherer: Gatherer) -> None:
    first, error = "Traceback (most recent call last):", "data.ShardCorrupt: shard 17"
    lines = [(f"NCCL WARN {n}", "NCCL WARN") for n in range(30)]
    lines[3:3] = [(first, first), (error, first)]
    rows = [who(1, ts=T0 + n, line=line, kind=kind) for n, (line, kind) in enumerate(lines)]
    machine.files.segment("process.logs", rows)
    second = only(gatherer.facts("j", timeout=60)).ranks[1]
    assert second.logs == (first, error, *(f"NCCL WARN {n}" for n in range(25, 30)))


def test_what_cannot_be_read_is_missing(machine: Machine, gatherer: Gatherer) -> None:
    del machine.files.live_rows["comm.progress"]
    facts = only(gatherer.facts("j", timeout=60))
    assert [type(rank) for rank in facts.ranks] == [Rank, Rank]
    texts = [one.text for one in facts.missing]
    assert "comm.progress cannot be read: no live table comm.progress" in texts
    assert "no stacks of job j: the collector does not answer" in texts
    assert "no condition of job j: the collector does not answer" in texts


def test_a_job_that_nobody_knows_is_not_found(gatherer: Gatherer) -> None:
    with pytest.raises(NotFound, match="no job") as e:
        gatherer.facts("it's", deep=False, timeout=60)
    assert "probingctl ps" in e.value.hint


def test_a_job_is_not_called_unknown_where_processes_cannot_be_read(machine: Machine, gatherer: Gatherer) -> None:
    del machine.files.live_rows["process.processes"]
    with pytest.raises(QueryTimeout, match=r"process\.processes cannot be read"):
        gatherer.facts("j", deep=False, timeout=60)


def test_names_of_jobs_are_no_sql(machine: Machine, gatherer: Gatherer) -> None:
    name = "j' OR 1=1 --"
    set_live(machine, [process(0, job=name)])
    machine.files.segment("comm.ops", operations(3))
    assert light(gatherer, name).ranks[0].done == ()
    assert not [one for one in light(gatherer, name).missing if one.kind == "history"]


def test_a_job_that_cannot_be_read_hides_no_other_one(machine: Machine) -> None:
    class Late:
        """The engine, whose time is over when it comes to the job that has ended."""

        def run_all(
            self, statements: Sequence[str], *, timeout: float, max_bytes: int, rows_only: bool
        ) -> Iterable[Item]:
            if any("job = 'ended'" in sql for sql in statements):
                raise QueryTimeout("the deadline has passed")
            return machine.engine.run_all(statements, timeout=timeout, max_bytes=max_bytes, rows_only=rows_only)

    set_live(machine, [process(0), process(1)])
    killed = {**process(0, job="ended", ts=NOW_NS - S), "event": "exit", "signal": 9}
    machine.files.segment("process.events", [killed])
    found = Gatherer("n0", Late(), Node(machine), now_ns=lambda: NOW_NS).facts(deep=False, timeout=60)
    assert [facts.job for facts in found] == ["j", "ended"]
    assert found[1].ranks == ()
    assert "the processes of job 'ended' cannot be read" in found[1].missing[-1].text
