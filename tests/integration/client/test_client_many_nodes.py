"""Queries of many simulated nodes: everybody counts once, and who is dead, silent or breaks off is named."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from long import LONG
from ports import free_port
from simulator.cast import Cast
from simulator.running import Simulation, simulated

from probing.api.text import time_text
from probing.client.cluster import Cluster
from probing.client.main import main
from probing.client.wire import many

SQL = "SELECT op, count(*) AS n, count(DISTINCT node) AS nodes FROM comm.ops GROUP BY op ORDER BY op"
NODES = 120 if LONG else 40


@pytest.fixture(scope="module")
def simulation() -> Iterator[Simulation]:
    """Of 40 nodes one is silent, one refuses, one is slow once, and one breaks calls off."""
    cast = Cast(NODES, free_port(), dead_of=40, refusing_of=40, slow_of=40, slow_s=60.0, losing_of=40, clock_s=5.0)
    with simulated(cast) as running:
        yield running


def _rows(nodes: int) -> list[dict[str, object]]:
    return [{"op": op, "n": 10 * nodes, "nodes": nodes} for op in ("all_reduce", "broadcast")]


def test_many_nodes_are_asked_at_once_and_the_silent_ones_are_named(simulation: Simulation) -> None:
    cast, bad = simulation.cast, 2 * NODES // 40
    with Cluster(nodes=cast.addresses, timeout=6) as cluster:
        # Twice: the second question finds open connections.
        for _ in range(2):
            rows = cluster.query(SQL).to_pylist()
            outcome = cluster.outcomes[-1]
            failed = {failure.address: failure.reason for failure in outcome.failed}
            silent = [cast.address(number) for number in range(NODES) if cast.dead(number)]
            refusing = [cast.address(number) for number in range(NODES) if cast.refuses(number)]
            assert set(failed) == {*silent, *refusing}, failed
            assert rows == _rows(NODES - bad)
            assert all("no connection in time" in failed[address] for address in silent)
            assert len(outcome.answered) == len({answered.node for answered in outcome.answered}) == NODES - bad


def test_clocks_are_measured_with_each_answer(
    simulation: Simulation, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cast, report = simulation.cast, tmp_path / "report.json"
    addresses = [cast.address(number) for number in (10, 11, 20)]
    assert main(["query", SQL, "--nodes", ",".join(addresses), "--report", str(report), "-f", "json"]) == 0
    found = {entry["address"]: entry for entry in json.loads(report.read_text())["answered"]}
    for number, ahead_s in ((10, 0.0), (11, 0.5), (20, 5.0)):
        clock = found[cast.address(number)]
        assert abs(clock["clock_offset_ns"] - ahead_s * 1e9) <= clock["clock_error_ns"]
    # On a busy machine it is measured with an error.
    ahead = time_text(found[cast.address(20)]["clock_offset_ns"])
    assert f"warning: the clock of sim-000020 is {ahead} ahead: its times are off by that\n" in capsys.readouterr().err


def test_by_a_tree_nobody_is_lost_or_counted_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    # The first nodes, two or three, ask the others; the first of all breaks off in the middle.
    monkeypatch.setattr(many, "TREE_FROM", 100)
    cast = Cast(270 if LONG else 140, free_port(), breaking_of=10, refusing_of=135)
    refusing = {cast.address(number) for number in range(cast.count) if cast.refuses(number)}
    # Nobody is silent: only a machine that stands still for minutes makes nodes in the middle seem so.
    with simulated(cast), Cluster(nodes=cast.addresses, timeout=900) as cluster:
        rows = cluster.query(SQL).to_pylist()
        outcome = cluster.outcomes[-1]
        failed = {failure.address: failure.reason for failure in outcome.failed}
        assert failed.keys() == refusing, failed
        assert rows == _rows(cast.count - len(refusing))
        reasons = {f.address: f.reason for f in outcome.detours}
        assert reasons.pop(cast.address(0)) == "the connection was lost"
        # On a busy machine a node refuses a call of one in the middle, and is asked directly.
        assert all(reason.endswith("did not pass on all answers") for reason in reasons.values())
        assert {"address": cast.address(0), "reason": "the connection was lost"} in outcome.report()["detours"]
        # Several statements, and an error that is the same everywhere.
        tables = cluster.query_all({"one": "SELECT count(*) AS n FROM comm.ops", "two": "SELECT 1 AS x"})
        assert tables["one"].to_pylist() == [{"n": 20 * (cast.count - len(refusing))}]


def test_by_a_tree_a_silent_node_is_named_and_the_others_count_once(monkeypatch: pytest.MonkeyPatch) -> None:
    # The silent node takes all of the time, so that others are late as well on a busy machine: who is, is named.
    monkeypatch.setattr(many, "TREE_FROM", 20)
    cast = Cast(40, free_port(), dead_of=40)
    dead = {cast.address(number) for number in range(cast.count) if cast.dead(number)}
    with simulated(cast), Cluster(nodes=cast.addresses, timeout=6) as cluster:
        rows = cluster.query(SQL).to_pylist()
        outcome = cluster.outcomes[-1]
        answered, failed = ([found.address for found in kind] for kind in (outcome.answered, outcome.failed))
        assert rows == _rows(len(answered))
        assert sorted(answered + failed) == sorted(cast.addresses)
        assert dead <= set(failed)


def test_a_dead_node_in_the_middle_is_named_and_the_others_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(many, "TREE_FROM", 20)
    cast = Cast(40, free_port(), refusing_of=3)
    with simulated(cast), Cluster(nodes=cast.addresses, timeout=900) as cluster:
        assert cluster.query(SQL).to_pylist() == _rows(26)
        outcome = cluster.outcomes[-1]
        assert [f.address for f in outcome.detours] == [cast.address(0)]
        assert {f.address for f in outcome.failed} == {cast.address(number) for number in range(0, 40, 3)}
