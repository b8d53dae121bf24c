"""The wait-for graph: ranks wait for other ranks, through operations that the awaited ranks have not joined.

The nodes of the graph are ranks and operations. Edges lead from a rank to the operation in which it waits, and from an
operation to the ranks that have not joined it. So ten thousand ranks in one operation need about ten thousand edges,
not a hundred million.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from probing.diagnosis.waits import Wait

__all__ = ("Edge", "Pending", "WaitGraph")

# Cycles are searched from at most this many ranks of a component. Any rank will do: each rank of a component lies on a
# cycle.
_MOST_STARTS = 32


@dataclass(frozen=True, slots=True)
class Edge:
    """An edge: ``waiter`` waits in operation ``op``, number ``seq``, of ``comm`` for ``awaited``."""

    waiter: int
    awaited: int
    comm: str | None
    seq: int | None
    op: str | None


@dataclass(frozen=True, slots=True, eq=False)
class Pending:
    """An operation in which ``waiters`` wait for ``awaited``, the ranks that have not joined it.

    ``unknown``: the ranks for which it is unknown whether they have joined. ``unidentified``: the number of members
    whose ranks are unknown. ``age_ns``: the time since the first call of the operation; None if unknown.
    """

    comm: str | None
    seq: int | None
    op: str | None
    waiters: tuple[int, ...]
    awaited: frozenset[int] = frozenset()
    unknown: frozenset[int] = frozenset()
    unidentified: int = 0
    age_ns: int | None = None

    @property
    def doubtful(self) -> bool:
        """Whether it is unknown for some members whether they have joined."""
        return bool(self.unknown or self.unidentified)

    def edge(self, waiter: int, awaited: int) -> Edge:
        return Edge(waiter, awaited, self.comm, self.seq, self.op)


@dataclass(frozen=True)
class WaitGraph:
    """The wait-for graph. ``waits`` maps each waiting rank to its wait. Each of these ranks is among the ``waiters`` of
    one of ``operations``.
    """

    waits: Mapping[int, Wait]
    operations: Sequence[Pending] = ()

    @cached_property
    def pending(self) -> Mapping[int, Pending]:
        """The operation in which each rank waits."""
        return {rank: one for one in self.operations for rank in one.waiters}

    def pending_of(self, ranks: Iterable[int]) -> list[Pending]:
        """Returns the operations in which ``ranks`` wait, each once."""
        return list(dict.fromkeys(self.pending[rank] for rank in ranks if rank in self.pending))

    def awaiting(self, ranks: Iterable[int]) -> list[Pending]:
        """Returns the operations that ``ranks`` have not joined, each once."""
        return list(dict.fromkeys(one for rank in ranks for one in self._lacking.get(rank, ())))

    @cached_property
    def _lacking(self) -> Mapping[int, Sequence[Pending]]:
        found: dict[int, list[Pending]] = {}
        for one in self.operations:
            for rank in one.awaited:
                found.setdefault(rank, []).append(one)
        return found

    @cached_property
    def sinks(self) -> frozenset[int]:
        """The ranks for which others wait and that wait for no rank themselves."""
        return frozenset(rank for rank in self._lacking if self._is_free(rank))

    def _is_free(self, rank: int) -> bool:
        wait = self.waits.get(rank)
        return wait is None or not (wait.firm or self.pending[rank].awaited or self.pending[rank].doubtful)

    def victims(self, ranks: Iterable[int]) -> tuple[int, ...]:
        """Returns the ranks that wait for one of ``ranks``, directly or through others, sorted."""
        start = set(ranks)
        reached, todo, seen = set(start), list(start), set[Pending]()
        while todo:
            for one in self._lacking.get(todo.pop(), ()):
                if one not in seen:
                    seen.add(one)
                    todo += [rank for rank in one.waiters if rank not in reached]
                    reached.update(one.waiters)
        return tuple(sorted(reached - start))

    def components(self) -> list[tuple[int, ...]]:
        """Returns the sets of ranks that wait for each other (strongly connected components), each sorted."""
        parts = _components(self.pending, self._next)
        components = (tuple(sorted(node for node in part if isinstance(node, int))) for part in parts)
        return [component for component in components if len(component) > 1]

    def _next(self, node: int | Pending) -> Iterable[int | Pending]:
        if isinstance(node, Pending):
            return node.awaited
        return (self.pending[node],) if node in self.pending else ()

    def cycle(self, component: Iterable[int]) -> list[Edge]:
        """Returns the shortest cycle of edges within ``component`` that leads through one of its lowest ranks."""
        inside = set(component)
        found: list[Edge] = []
        for start in sorted(inside)[:_MOST_STARTS]:
            cycle = self._cycle_from(start, inside)
            if cycle and (not found or len(cycle) < len(found)):
                found = cycle
            if len(found) == 2:
                break
        return found

    def _cycle_from(self, start: int, inside: set[int]) -> list[Edge]:
        back: dict[int, Edge] = {}
        seen, todo = set[Pending](), [start]
        for rank in todo:
            one = self.pending[rank]
            if one in seen:
                continue
            seen.add(one)
            for awaited in sorted(one.awaited & inside):
                if awaited == start:
                    return [*reversed(list(_path(back, rank))), one.edge(rank, start)]
                if awaited not in back:
                    back[awaited] = one.edge(rank, awaited)
                    todo.append(awaited)
        return []


def _path(back: Mapping[int, Edge], rank: int) -> Iterator[Edge]:
    """Yields the edges of the path to ``rank``, the last edge first."""
    while rank in back:
        yield back[rank]
        rank = back[rank].waiter


_Node = int | Pending


def _components(roots: Iterable[_Node], following: Callable[[_Node], Iterable[_Node]]) -> list[list[_Node]]:
    # Tarjan's algorithm, without recursion.
    index: dict[_Node, int] = {}
    low: dict[_Node, int] = {}
    stack: list[_Node] = []
    on_stack: set[_Node] = set()
    found: list[list[_Node]] = []
    work: list[tuple[_Node, Iterator[_Node]]] = []

    def enter(node: _Node) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        on_stack.add(node)
        work.append((node, iter(following(node))))

    for root in roots:
        if root not in index:
            enter(root)
        while work:
            node, targets = work[-1]
            for target in targets:
                if target not in index:
                    enter(target)
                    break
                if target in on_stack:
                    low[node] = min(low[node], index[target])
            else:
                work.pop()
                if work:
                    low[work[-1][0]] = min(low[work[-1][0]], low[node])
                if low[node] == index[node]:
                    part = [stack.pop()]
                    while part[-1] != node:
                        part.append(stack.pop())
                    on_stack.difference_update(part)
                    found.append(part)
    return found
