"""Ranks by communicators: which one has the whole job, and what the registry makes of it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from probing.daemon.processes import ranking
from probing.daemon.processes.facts import Facts
from probing.daemon.processes.ranking import Membership, SpanningCommunicators
from probing.daemon.processes.registry import Registry
from probing.daemon.processes.rows import detail_of, process_from_detail
from probing.daemon.source import ProcessKey

SPAWN = ("python3", "-c", "from multiprocessing.spawn import spawn_main; spawn_main(5)", "--multiprocessing-fork")
KEYS = [ProcessKey(pid, pid) for pid in range(4)]


def world(
    rank: int, size: int = 4, backend: str = "gloo", name: str | None = "default_pg", comm: str = "0"
) -> Membership:
    return Membership(comm, name, backend, rank, size)


def ranks(spanning: SpanningCommunicators, *, one_node: bool = True) -> list[int | None]:
    found = (spanning.ranks_of(key, KEYS, one_node=one_node) for key in KEYS)
    return [known.rank if known else None for known in found]


def noted(*memberships: tuple[int, Membership]) -> SpanningCommunicators:
    spanning = SpanningCommunicators()
    for process, membership in memberships:
        assert spanning.note(KEYS[process], membership)
    return spanning


def test_the_group_of_the_whole_job_has_its_name() -> None:
    assert ranks(noted((0, world(3)), (2, world(1)))) == [3, None, 1, None]
    # It has ranks on other nodes.
    assert ranks(noted((0, world(7, 8))), one_node=False) == [7, None, None, None]


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_a_group_smaller_than_the_job_is_not_it(backend: str) -> None:
    # NCCL's pairs for send and receive have the name of their group.
    assert ranks(noted((2, world(0, 2, backend)), (3, world(1, 2, backend)))) == [None] * 4


def test_a_group_of_all_trainers_of_a_node_is_it_if_the_job_has_no_other_node() -> None:
    members = [(n, world(n ^ 1, name=None, backend="nccl", comm="ab")) for n in range(4)]
    assert ranks(noted(*members)) == [1, 0, 3, 2]
    assert ranks(noted(*members), one_node=False) == [None] * 4
    assert ranks(noted(*members[:2])) == [None] * 4


def test_the_rank_that_is_left_belongs_to_the_process_that_is_left() -> None:
    # One rank has not called anything yet: the others wait for it.
    members = [(n, world((n + 1) % 4)) for n in range(3)]
    assert ranks(noted(*members)) == [1, 2, 3, 0]
    assert ranks(noted(*members), one_node=False) == [1, 2, 3, None]
    assert ranks(noted(*members[:2])) == [1, 2, None, None]


def test_two_processes_of_one_rank_prove_that_it_is_another_job() -> None:
    assert ranks(noted((0, world(3)), (2, world(3)))) == [None] * 4


def test_the_largest_counts() -> None:
    assert ranks(noted((0, world(1, 4)), (0, world(5, 8, comm="1")))) == [5, None, None, None]


def test_what_makes_no_sense_is_not_noted() -> None:
    spanning = SpanningCommunicators()
    assert not any(spanning.note(KEYS[0], m) for m in (world(4), world(-1), world(0, 1 << 30)))
    assert not spanning
    assert spanning.note(KEYS[0], world(1))
    assert not spanning.note(KEYS[0], world(1))
    # A process that invents communicators does not fill our memory.
    assert sum(spanning.note(KEYS[0], world(1, comm=f"x{n}")) for n in range(1000)) == 63
    spanning.forget(KEYS[0])
    assert not spanning


def process(pid: int, *above: Facts, **more: object) -> Facts:
    ancestors = tuple((a.pid, a.start_ns, a.program) for a in above)
    known = {"exe": "/usr/bin/python3", "cmdline": ("python3", "train.py"), "libraries": frozenset({"python", "torch"})}
    return Facts(pid, pid, 1, 0, ancestors=ancestors, **{**known, **more})  # type: ignore[arg-type]


def test_a_process_with_several_ranks_has_none_of_them() -> None:
    spanning = noted((0, world(0)), (1, world(2)))
    assert spanning.note(KEYS[0], world(1))
    # Both are reported again and again.
    assert not any(spanning.note(KEYS[0], world(rank)) for rank in (0, 1, 0))
    assert ranks(spanning) == [None, 2, None, None]
    spanning.forget(KEYS[0])
    assert spanning.note(KEYS[0], world(1))
    # Nor do those that it has several ranks in fill our memory.
    doubled = [spanning.note(KEYS[0], world(rank, comm=f"x{n}")) for n in range(1000) for rank in (0, 1)]
    assert sum(doubled) == 2 * 63


def spawned(registry: Registry) -> list[Facts]:
    parent = process(1)
    children = [process(p, parent, cmdline=SPAWN, threads=frozenset({"pt_gloo_runloop"})) for p in (2, 3)]
    registry.update([parent, *children])
    return children


def test_ranks_of_mp_spawn_come_from_their_group() -> None:
    registry = Registry("n1", "boot")
    children = spawned(registry)
    assert [p.identity.rank for p in registry.live()] == [None] * 3
    changed = registry.note_membership(children[0].key, world(1, 2))
    # The other one has the rank that is left.
    assert [(p.key, p.identity.rank, p.identity.world_size) for p in changed] == [
        (children[0].key, 1, 2),
        (children[1].key, 0, 2),
    ]
    assert registry.note_membership(children[1].key, world(0, 2)) == []
    who = [registry.get(child.key) for child in children]
    assert [(p.identity.rank, p.identity.job) for p in who if p] == [(1, "pid:1"), (0, "pid:1")]
    # The launcher has no rank, whatever group it seems to be in.
    assert registry.note_membership(ProcessKey(1, 1), world(0, 2)) == []
    # A rank that ended keeps its number, and so do the others.
    registry.end(children[0].key)
    assert [p.identity.rank for p in registry.live() if p.identity.role == "trainer"] == [0]


def test_a_communicator_that_was_seen_before_its_process_counts() -> None:
    registry = Registry("n1", "boot")
    registry.note_membership(ProcessKey(2, 2), world(1, 2))
    spawned(registry)
    found = registry.get(ProcessKey(2, 2))
    assert found
    assert found.identity.rank == 1


def test_the_environment_goes_before_a_communicator() -> None:
    registry = Registry("n1", "boot")
    registry.update([process(2, environ={"RANK": "5", "WORLD_SIZE": "8", "MASTER_ADDR": "a", "MASTER_PORT": "1"})])
    assert registry.note_membership(ProcessKey(2, 2), world(1, 2)) == []


def test_the_next_daemon_knows_the_rank() -> None:
    before = Registry("n1", "boot")
    children = spawned(before)
    before.note_membership(children[0].key, world(1, 2))
    known = before.get(children[0].key)
    assert known
    stored = process_from_detail(*children[0].key, json.dumps(json.loads(detail_of(known, "boot"))), "boot")
    assert stored
    after = Registry("n1", "boot")
    after.restore(*stored, ended=False)
    spawned(after)
    found = after.get(children[0].key)
    assert found
    assert (found.identity.rank, found.identity.world_size) == (1, 2)
    # Another process of the run is seen, and it keeps it.
    after.update([process(9, process(1), cmdline=SPAWN, threads=frozenset({"pt_gloo_runloop"}))])
    found = after.get(children[0].key)
    assert found
    assert found.identity.rank == 1


@pytest.mark.parametrize("count", [20, 40])
def test_what_concerns_all_ranks_is_looked_at_once(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    looked: Counter[str] = Counter()

    def counted(name: str, of: Callable[..., Any]) -> Callable[..., Any]:
        def call(*values: Any, **named: Any) -> Any:
            looked[name] += 1
            return of(*values, **named)

        return call

    monkeypatch.setattr(SpanningCommunicators, "of_run", counted("runs", SpanningCommunicators.of_run))
    monkeypatch.setattr(ranking, "ranks_of", counted("environments", ranking.ranks_of))
    registry = Registry("n1", "boot")
    slurm = {"SLURM_JOB_ID": "5", "SLURM_STEP_ID": "0", "SLURM_NTASKS": str(count)}
    keys = []
    for rank in range(count):
        found = process(10 + rank, environ={**slurm, "SLURM_PROCID": str(rank)})
        keys.append(found.key)
        registry.update([found])
    looked.clear()
    registry.note_memberships([(key, world(rank, count)) for rank, key in enumerate(keys)])
    assert [p.identity.rank for p in registry.live()] == list(range(count))
    assert looked["runs"] <= 2
    # In each of two passes: that of the rank itself, and that of each rank for all together.
    assert looked["environments"] <= 4 * count
