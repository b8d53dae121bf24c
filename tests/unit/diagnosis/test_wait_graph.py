"""The wait-for graph: sinks, cycles and victims."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from probing.diagnosis.wait_graph import Pending, WaitGraph
from probing.diagnosis.waits import Wait


def graph(edges: dict[int, set[int]]) -> WaitGraph:
    waits = {rank: Wait("0", 1, "all_reduce", 0) for rank in edges}
    return WaitGraph(waits, [Pending("0", 1, "all_reduce", (r,), frozenset(others)) for r, others in edges.items()])


GRAPHS = st.dictionaries(st.integers(0, 9), st.sets(st.integers(0, 9), max_size=4), max_size=9).map(
    lambda edges: {rank: others - {rank} for rank, others in edges.items()}
)


def reachable(edges: dict[int, set[int]], start: int) -> set[int]:
    found: set[int] = set()
    todo = [start]
    while todo:
        for other in edges.get(todo.pop(), ()):
            if other not in found:
                found.add(other)
                todo.append(other)
    return found


def test_a_chain_ends_at_the_rank_that_waits_for_nobody() -> None:
    found = graph({0: {1}, 1: {2}, 3: {2}})
    assert set(found.sinks) == {2}
    assert found.victims([2]) == (0, 1, 3)
    assert found.components() == []


def test_the_shortest_cycle_is_shown() -> None:
    found = graph({0: {1}, 1: {2, 3}, 2: {0}, 3: {1}})
    assert found.components() == [(0, 1, 2, 3)]
    assert [(e.waiter, e.awaited) for e in found.cycle((0, 1, 2, 3))] == [(1, 3), (3, 1)]


def test_a_rank_that_waits_for_an_operation_that_all_have_joined_is_no_end() -> None:
    assert graph({0: {1}, 1: set()}).sinks == frozenset()


@given(GRAPHS)
def test_no_end_waits(edges: dict[int, set[int]]) -> None:
    found = graph(edges)
    assert set(found.sinks) == {other for others in edges.values() for other in others} - edges.keys()


@given(GRAPHS)
def test_victims_are_those_from_whom_the_ranks_can_be_reached(edges: dict[int, set[int]]) -> None:
    found = graph(edges)
    for rank in range(10):
        assert set(found.victims([rank])) == {r for r in edges if rank in reachable(edges, r)} - {rank}


@given(GRAPHS)
def test_a_component_is_a_set_of_ranks_that_reach_each_other(edges: dict[int, set[int]]) -> None:
    found = graph(edges)
    components = found.components()
    together = {
        frozenset(o for o in range(10) if o in reachable(edges, r) and r in reachable(edges, o)) | {r}
        for r in edges
        if r in reachable(edges, r)
    }
    assert {frozenset(component) for component in components} == together
    for component in components:
        cycle = found.cycle(component)
        assert [edge.awaited for edge in cycle] == [*(edge.waiter for edge in cycle[1:]), cycle[0].waiter]
