"""Queries of many simulated nodes: everybody counts once, and who is dead, silent or breaks off is named."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from ports import free_port
from simulator.cast import Cast
from simulator.running import Simulation, simulated

from probing.client.cluster import Cluster

SQL = "SELECT op, count(*) AS n, count(DISTINCT node) AS nodes FROM comm.ops GROUP BY op ORDER BY op"
NODES = 120


@pytest.fixture(scope="module")
def simulation() -> Iterator[Simulation]:
    """Of 40 nodes one is silent, one refuses, one is slow once, and one breaks calls off."""
    cast = Cast(
        NODES, free_port(), dead_of=40, refusing_of=40, slow_of=40, slow_s=60.0, losing_of=40, clock_s=5.0
    )  # fmt: skip
    with simulated(cast) as running:
        yield running


def _rows(nodes: int) -> list[dict[str, object]]:
    return [{"op": op, "n": 10 * nodes, "nodes": nodes} for op in ("all_reduce", "broadcast")]


def test_many_nodes_are_asked_at_once_and_the_silent_ones_are_named(simulation: Simulation) -> None:
    cast = simulation.cast
    with Cluster(nodes=cast.addresses, timeout=8) as cluster:
        # Twice: the second question finds open connections.
        for _ in range(2):
            assert cluster.query(SQL).to_pylist() == _rows(NODES - 6)
            outcome = cluster.outcomes[-1]
            failed = {failure.address: failure.reason for failure in outcome.failed}
            silent = [cast.address(number) for number in range(NODES) if cast.dead(number)]
            refusing = [cast.address(number) for number in range(NODES) if cast.refuses(number)]
            assert set(failed) == {*silent, *refusing}
            assert all("no connection within" in failed[address] for address in silent)
            # The simulation accepts and resets, as it has one listener for all.
            assert len(outcome.answered) == len({answered.node for answered in outcome.answered}) == NODES - 6
