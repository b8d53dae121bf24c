"""The rank table of a group, against the rule's tables and a second implementation; and the ranks' environment."""

from __future__ import annotations

import ast
import importlib.util
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from group_records import spec_of
from hypothesis import given, settings
from hypothesis import strategies as st
from long import examples

from probing.diagnosis.ranks import Worker
from probing.groups.spec import GIVEN, Spec, checked, environment, table

# A launcher passes its own variables on, these among them. torchrun has defaults for two; the third, with an option.
_PASSED_ON = frozenset(("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "TORCH_NCCL_ASYNC_ERROR_HANDLING"))
_AGENT = "distributed/elastic/agent/server/local_elastic_agent.py"


class Place(NamedTuple):
    worker: str
    rank: int
    local_rank: int
    node_rank: int
    world_size: int
    master: str


def by_the_rule(workers: Sequence[str], master: str, world_size: int | None, excluded: Sequence[str]) -> list[Place]:
    """The master's node first, the other nodes in alphabetical order, the workers of a node by number; RANK counts
    through, LOCAL_RANK from 0 on each node, NODE_RANK by node. A second implementation, by sorting only.
    """
    split = [(*worker.rsplit("-", 1), worker) for worker in workers]
    kept = sorted((node, int(number), worker) for node, number, worker in split if node not in excluded)
    nodes = sorted({node for node, _, _ in kept})
    first = master if master in nodes else master.rsplit("-", 1)[0]
    first = first if first in nodes else nodes[0]
    nodes.sort(key=lambda node: node != first)
    kept.sort(key=lambda entry: nodes.index(entry[0]))
    size = min(len(kept), world_size or len(kept))
    seen: list[str] = []
    places = []
    for rank, (node, _, worker) in enumerate(kept[:size]):
        places.append(Place(worker, rank, seen.count(node), nodes.index(node), size, first))
        seen.append(node)
    return places


def places(ranks: Sequence[Worker]) -> list[Place]:
    return [Place(r.worker, r.rank, r.local_rank, r.node_rank, r.world_size, r.master_addr) for r in ranks]


@st.composite
def tables(draw: st.DrawFn) -> tuple[Spec, list[str]]:
    name = st.from_regex(r"[a-z][a-z0-9]{0,3}(-[a-z0-9]{1,2})?", fullmatch=True)
    nodes = draw(st.lists(name, min_size=1, max_size=9, unique=True))
    workers = []
    for node in nodes:
        numbers = draw(st.lists(st.integers(0, 200), min_size=1, max_size=11, unique=True))
        workers += [f"{node}-{number}" for number in numbers]
    workers = draw(st.permutations(workers))
    size = draw(st.none() | st.integers(1, len(workers)))
    excluded = draw(st.lists(st.sampled_from(nodes), max_size=len(nodes) - 1, unique=True))
    master = draw(st.sampled_from(nodes) | st.sampled_from(workers))
    return spec_of(workers=tuple(workers), master=master, world_size=size), excluded


def test_a_worker_of_each_of_four_nodes() -> None:
    spec = spec_of(workers=("gn40-0", "gn7-0", "gn39-0", "gn6-0"), master="gn6-0")
    assert places(table(spec)) == [
        Place("gn6-0", 0, 0, 0, 4, "gn6"),
        Place("gn39-0", 1, 0, 1, 4, "gn6"),
        Place("gn40-0", 2, 0, 2, 4, "gn6"),
        Place("gn7-0", 3, 0, 3, 4, "gn6"),
    ]


def test_two_workers_of_each_of_two_nodes() -> None:
    spec = spec_of(workers=("gn7-1", "gn6-1", "gn7-0", "gn6-0"), master="gn6-1")
    assert places(table(spec)) == [
        Place("gn6-0", 0, 0, 0, 4, "gn6"),
        Place("gn6-1", 1, 1, 0, 4, "gn6"),
        Place("gn7-0", 2, 0, 1, 4, "gn6"),
        Place("gn7-1", 3, 1, 1, 4, "gn6"),
    ]


def test_workers_of_a_node_are_in_the_order_of_their_numbers() -> None:
    spec = spec_of(workers=("gn6-10", "gn6-9", "gn6-100"), master="gn6")
    assert [rank.worker for rank in table(spec)] == ["gn6-9", "gn6-10", "gn6-100"]


# At least the twenty tables that the rule is tried with.
@settings(max_examples=max(20, examples(1000)))
@given(tables())
def test_ranks_follow_the_rule(example: tuple[Spec, list[str]]) -> None:
    spec, excluded = example
    checked(spec)
    assert places(table(spec, excluded)) == by_the_rule(spec.workers, spec.master, spec.world_size, excluded)


@settings(max_examples=examples(200))
@given(tables())
def test_the_environment_of_each_rank_agrees_with_the_table(example: tuple[Spec, list[str]]) -> None:
    spec, excluded = example
    ranks = table(spec, excluded, address="fd00::6", port=29511)
    nodes: dict[str, list[Worker]] = {}
    for rank in ranks:
        nodes.setdefault(rank.node, []).append(rank)
    for rank in ranks:
        given_to = environment(spec, ranks, rank, 7, 2)
        assert given_to.keys() == GIVEN - {"PROBING_SAVE_PIDS"}
        assert given_to["RANK"] == given_to["ROLE_RANK"] == str(rank.rank)
        assert given_to["LOCAL_RANK"] == str(nodes[rank.node].index(rank))
        assert given_to["NODE_RANK"] == given_to["GROUP_RANK"] == str(list(nodes).index(rank.node))
        assert given_to["WORLD_SIZE"] == given_to["ROLE_WORLD_SIZE"] == str(len(ranks))
        assert given_to["LOCAL_WORLD_SIZE"] == str(len(nodes[rank.node]))
        assert given_to["GROUP_WORLD_SIZE"] == str(len(nodes))
        assert (given_to["MASTER_ADDR"], given_to["MASTER_PORT"]) == ("fd00::6", "29511")
        assert (given_to["PROBING_GROUP"], given_to["TORCHELASTIC_RESTART_COUNT"]) == ("llama/7", "2")


def test_the_launcher_sets_the_variables_that_torchrun_sets() -> None:
    # Without importing torch, which takes seconds.
    torch = importlib.util.find_spec("torch")
    assert torch is not None
    [place] = torch.submodule_search_locations or ()
    agent = ast.parse((Path(place) / _AGENT).read_text())
    dicts = [
        statement.value
        for statement in ast.walk(agent)
        if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == "worker_env"
    ]
    names = {ast.literal_eval(key) for value in dicts if isinstance(value, ast.Dict) for key in value.keys if key}
    names |= set(re.findall(r"worker_env\['([A-Z_]+)'\] = ", ast.unparse(agent)))
    assert {"RANK", "LOCAL_RANK", "MASTER_PORT"} <= names
    assert names - GIVEN == _PASSED_ON


def test_the_ranks_store_is_that_of_rank_0() -> None:
    # A launcher that was started by torchrun has the store of that torchrun in its own environment.
    [rank] = table(spec_of(workers=("gn6-0",)))
    given_to = environment(spec_of(workers=("gn6-0",)), [rank], rank, 1, 0)
    assert given_to["TORCHELASTIC_USE_AGENT_STORE"] == "False"


def test_variables_of_the_specification_are_passed_on() -> None:
    spec = spec_of(workers=("gn6-0",), env={"LR": "0.1", "NOTE": "a\nb"})
    [rank] = table(spec)
    given_to = environment(spec, [rank], rank, 1, 0)
    assert (given_to["LR"], given_to["NOTE"]) == ("0.1", "a\nb")
