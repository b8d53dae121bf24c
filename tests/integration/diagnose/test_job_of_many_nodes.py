"""The facts of a job of many nodes: the coordinator calls all of them at the same time."""

from __future__ import annotations

import time
from collections.abc import Callable

from ports import free_port
from simulator.cast import Cast
from simulator.coordinating import coordinator
from simulator.hung_job import EACH, HUNG, RUN, culprit_of
from simulator.running import simulated

from probing.diagnosis.facts import Facts
from probing.diagnosis.ladder import diagnose

NODES = 251


def test_all_nodes_of_a_large_job_are_heard(until: Callable[..., object]) -> None:
    # Each answer takes half a second: in turns, not even a third of the nodes would answer in time.
    cast = Cast(NODES, free_port(), jobs_ns=time.time_ns(), delay_s=0.5)
    with simulated(cast), coordinator(cast) as jobs:
        found: list[Facts] = []

        def heard() -> bool:
            # The simulation makes the facts of a node when they are first asked for.
            found[:] = jobs.facts(HUNG, run=RUN, deep=True, timeout=5)
            return not [gap for gap in found[0].missing if gap.kind == "node"]

        until(heard, what="the facts of all nodes")
    [facts] = found
    culprit = culprit_of(NODES)
    assert len(facts.ranks) == facts.world_size == NODES * EACH
    [blamed] = [finding for finding in diagnose(facts).findings if finding.severity == "error"]
    assert [(one.rank, one.node) for one in blamed.culprits] == [(culprit, Cast.name(culprit // EACH))]
    assert blamed.confidence >= 0.9
