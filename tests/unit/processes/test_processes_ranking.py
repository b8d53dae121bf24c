"""Which evidence names a rank, in its order, and that no rank is lost or lent."""

from __future__ import annotations

import json

import pytest

from probing.daemon.processes.facts import Facts
from probing.daemon.processes.identity import Ranks
from probing.daemon.processes.ranking import Membership, ModuleState
from probing.daemon.processes.registry import Process, Registry
from probing.daemon.processes.rows import detail_of, process_from_detail
from probing.daemon.source import ProcessKey

TORCH = frozenset({"torch", "python"})
SPAWN = ("python3", "-c", "from multiprocessing.spawn import spawn_main; spawn_main(5)", "--multiprocessing-fork")
RANK3 = {"RANK": "3", "WORLD_SIZE": "8", "MASTER_ADDR": "a", "MASTER_PORT": "1"}
STEP = {"SLURM_JOB_ID": "4711", "SLURM_STEP_ID": "0", "SLURM_NTASKS": "8", "SLURM_PROCID": "5"}


def process(pid: int, *above: Facts, now: dict[str, str] | None = None, **more: object) -> Facts:
    """Facts of a process; ``now``: the variables of its memory, None where that is not read."""
    ancestors = tuple((a.pid, a.start_ns, a.program) for a in above)
    environ = {**more.pop("environ", {}), **(now or {})}  # type: ignore[dict-item]
    more = {"exe": "/usr/bin/python3.11", "cmdline": ("python3", "train.py"), "libraries": TORCH, **more}
    return Facts(pid, pid, environ=environ, current=frozenset(now or ()), ancestors=ancestors, **more)  # type: ignore[arg-type]


def known(registry: Registry, pid: int) -> Process:
    found = registry.get(ProcessKey(pid, pid))
    assert found
    return found


def rank_of(registry: Registry, pid: int) -> tuple[int | None, str | None]:
    ranks = known(registry, pid).ranks
    assert known(registry, pid).identity.rank == (ranks.rank if ranks else None)
    return (ranks.rank, ranks.source) if ranks else (None, None)


def test_memory_goes_before_the_environment_at_exec() -> None:
    registry = Registry("n1", "boot")
    registry.update([process(2, environ=RANK3), process(3, environ=RANK3, now={"RANK": "4"})])
    assert (rank_of(registry, 2), rank_of(registry, 3)) == ((3, "exec"), (4, "environment"))


@pytest.mark.parametrize("now", [None, {}])
def test_a_title_over_the_environment_takes_nothing_away(now: dict[str, str] | None) -> None:
    registry = Registry("n1", "boot")
    registry.update([process(2, environ=RANK3, now=RANK3)])
    assert registry.update([process(2, cmdline=("my trainer",), now=now)]) == []
    assert rank_of(registry, 2) == (3, "environment")
    assert known(registry, 2).identity.job == "a:1"


def test_a_rank_that_is_set_while_it_runs_is_taken() -> None:
    registry = Registry("n1", "boot")
    registry.update([process(2, environ={"RAY_JOB_ID": "01000000"}, cmdline=("ray::IDLE",))])
    assert rank_of(registry, 2) == (None, None)
    changed = registry.update([process(2, cmdline=("ray::RayTrainWorker.execute",), now=RANK3)])
    assert [(p.identity.rank, p.identity.job) for p in changed] == [(3, "01000000")]


def test_another_program_takes_nothing_over() -> None:
    registry = Registry("n1", "boot")
    registry.update([process(2, environ=RANK3)])
    registry.note_module(ProcessKey(2, 2), ModuleState(Ranks(1, 2)))
    registry.replaced(ProcessKey(2, 2))
    # Until it is read again nothing else is known.
    registry.update([process(9)])
    assert rank_of(registry, 2) == (3, "exec")
    registry.update([process(2)])
    assert rank_of(registry, 2) == (None, None)
    assert known(registry, 2).identity.job == "pid:2"


def test_the_next_daemon_knows_what_a_title_hides() -> None:
    before, after = Registry("n1", "boot"), Registry("n1", "boot")
    before.update([process(2, environ=RANK3)])
    stored = process_from_detail(2, 2, json.dumps(json.loads(detail_of(known(before, 2), "boot"))), "boot")
    assert stored
    after.restore(*stored, ended=False)
    after.update([process(2, cmdline=("my trainer",))])
    assert rank_of(after, 2) == (3, "exec")
    assert known(after, 2).identity == known(before, 2).identity
    # But not those of another program, which it became meanwhile.
    after = Registry("n1", "boot")
    after.restore(*stored, ended=False)
    after.update([process(2, exe="/opt/bin/python3.12")])
    assert known(after, 2).identity.job == "pid:2"


def test_variables_of_a_scheduler_that_all_inherit_name_nobody() -> None:
    registry = Registry("n1", "boot")
    parent = process(1, environ=STEP)
    children = [
        process(pid, parent, environ=STEP, cmdline=SPAWN, threads=frozenset({"pt_gloo_runloop"})) for pid in (2, 3)
    ]
    registry.update([parent, *children])
    assert [rank_of(registry, pid) for pid in (2, 3)] == [(None, None)] * 2
    for pid in (2, 3):
        registry.note_membership(ProcessKey(pid, pid), Membership("0", "default_pg", "gloo", pid ^ 1, 4))
    assert [rank_of(registry, pid) for pid in (2, 3)] == [(3, "communicator"), (2, "communicator")]


def test_a_scheduler_that_named_each_one_goes_before_a_smaller_communicator() -> None:
    registry = Registry("n1", "boot")
    registry.update([process(pid, environ={**STEP, "SLURM_PROCID": str(pid)}) for pid in (4, 5)])
    assert rank_of(registry, 5) == (5, "scheduler")
    registry.note_membership(ProcessKey(5, 5), Membership("0", "default_pg", "gloo", 1, 2))
    assert rank_of(registry, 5) == (5, "scheduler")
    registry.note_membership(ProcessKey(5, 5), Membership("1", "default_pg", "gloo", 6, 8))
    assert rank_of(registry, 5) == (6, "communicator")


def engine(*titles: str, above: str = "VLLM::EngineCore") -> list[Facts]:
    parent = process(1, cmdline=(above,), libraries=frozenset({"python"}))
    return [parent, *(process(pid, parent, cmdline=(title,)) for pid, title in enumerate(titles, 2))]


def test_the_workers_of_an_engine_are_a_job_and_their_titles_rank_them() -> None:
    registry = Registry("n1", "boot")
    registry.update(engine("VLLM::Worker_PP1_TP0", "VLLM::Worker_PP0_TP0", "VLLM::Worker_PP1_TP1"))
    assert {rank_of(registry, pid) for pid in (2, 3, 4)} == {(None, None)}
    registry.update(engine("VLLM::Worker_PP1_TP0", "VLLM::Worker_PP0_TP0", "VLLM::Worker_PP1_TP1", "VLLM::Worker_TP1"))
    assert [rank_of(registry, pid) for pid in (2, 3, 4, 5)] == [(n, "title") for n in (2, 0, 3, 1)]
    assert {p.identity.job for p in registry.live()} == {"pid:1"}
    assert known(registry, 1).identity.role == "launcher"
    # A worker that dies or is started again does not move the others.
    registry.end(ProcessKey(5, 5))
    assert [rank_of(registry, pid) for pid in (2, 3, 4)] == [(n, "title") for n in (2, 0, 3)]


def test_an_engine_with_a_framework_and_a_group_of_its_own_is_no_rank() -> None:
    parent, *workers = engine("VLLM::Worker_TP0", "VLLM::Worker_TP1", above="VLLM::EngineCore_DP0")
    parent = process(1, cmdline=parent.cmdline, threads=frozenset({"pt_gloo_runloop"}))
    registry = Registry("n1", "boot")
    registry.update([parent, *workers])
    assert [known(registry, pid).identity.role for pid in (1, 2, 3)] == ["launcher", "trainer", "trainer"]
    # Without workers it trains, or serves, itself.
    registry = Registry("n1", "boot")
    registry.update([parent])
    assert [p.identity.role for p in registry.live()] == ["trainer"]


@pytest.mark.parametrize(
    ("address", "numbers", "expected"),
    [("127.0.0.1", (1, 0), [1, 0]), ("127.0.0.1", (2, 1), [None, None]), ("10.0.0.1", (1, 0), [None, None])],
)
def test_local_ranks_in_arguments_count_on_one_node(
    address: str, numbers: tuple[int, int], expected: list[int | None]
) -> None:
    registry, environ = Registry("n1", "boot"), {"MASTER_ADDR": address, "MASTER_PORT": "1"}
    parent = process(1, cmdline=("python3", "-m", "torch.distributed.launch", "train.py"))
    lines = [("python3", "train.py", f"--local_rank={number}") for number in numbers]
    registry.update(
        [parent, *(process(p, parent, cmdline=w, environ=environ) for p, w in zip((2, 3), lines, strict=True))]
    )
    assert [known(registry, pid).identity.rank for pid in (2, 3)] == expected
    assert [known(registry, pid).identity.local_rank for pid in (2, 3)] == expected


def test_modules_name_rank_and_job_where_nothing_else_does() -> None:
    registry = Registry("n1", "boot")
    registry.update([process(pid, libraries=frozenset({"jax", "python"})) for pid in (2, 3)])
    assert {p.identity.job for p in registry.live()} == {"pid:2", "pid:3"}
    for pid in (2, 3):
        registry.note_module(ProcessKey(pid, pid), ModuleState(Ranks(pid - 2, 2), "127.0.0.1:1234"))
    assert [rank_of(registry, pid) for pid in (2, 3)] == [(0, "module"), (1, "module")]
    assert {(p.identity.job, p.job_source) for p in registry.live()} == {("n1/127.0.0.1:1234", "master")}
    assert len({p.identity.run for p in registry.live()}) == 1
    # They are looked at again, and their modules are not.
    assert registry.update([process(2, libraries=frozenset({"jax", "python"}))]) == []


def test_a_better_source_takes_over_and_a_worse_one_does_not() -> None:
    registry = Registry("n1", "boot")
    registry.update([process(2, cmdline=("rank 3/8",))])
    assert rank_of(registry, 2) == (3, "title")
    registry.note_module(ProcessKey(2, 2), ModuleState(Ranks(1, 8)))
    assert rank_of(registry, 2) == (3, "title")
    registry.note_membership(ProcessKey(2, 2), Membership("0", "default_pg", "gloo", 4, 8))
    assert rank_of(registry, 2) == (4, "communicator")
    registry.update([process(2, cmdline=("rank 3/8",), now=RANK3)])
    assert rank_of(registry, 2) == (3, "environment")


def test_a_rank_that_rank_0_started_is_of_its_run() -> None:
    registry = Registry("n1", "boot")
    master, group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}, frozenset({"pt_gloo_runloop"})
    first = process(1, now=master, threads=group)
    # It is no rank before it has joined.
    registry.update([first, process(2, first, environ=master)])
    assert known(registry, 2).identity.role != "trainer"
    registry.update([process(2, first, environ=master, threads=group)])
    assert [known(registry, pid).identity.role for pid in (1, 2)] == ["trainer"] * 2
    assert len({(p.identity.job, p.identity.run) for p in registry.live()}) == 1
    for rank in (0, 1):
        key = ProcessKey(rank + 1, rank + 1)
        registry.note_membership(key, Membership("0", "default_pg", "gloo", rank, 2))
    assert [rank_of(registry, pid) for pid in (1, 2)] == [(0, "communicator"), (1, "communicator")]
